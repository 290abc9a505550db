#include "tests/testing/stream_rules.h"

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <set>

#include "tests/testing/private_streams.h"

namespace testing_support {
namespace {

bool is_on_compute_stream(const LogEntry& entry) { return entry.stream.id == 0; }
bool is_product(const LogEntry& entry) {
  return entry.kind == Logged::launch && entry.name.find("mm") != std::string::npos;
}
bool is_copy_in(const LogEntry& entry) {
  return entry.kind == Logged::launch && entry.label.starts_with("FSDP::all_gather_copy_in");
}

/// First members of groups, and collectives that are by themselves.
std::vector<size_t> collectives_of(const StreamLog& log, std::pair<size_t, size_t> step, const std::string& name) {
  std::vector<size_t> found;
  bool in_group = false, has_one = false;
  for (size_t i = step.first; i < step.second; ++i) {
    if (log[i].kind == Logged::group_start) {
      in_group = true;
      has_one = false;
    }
    if (log[i].kind == Logged::group_end) in_group = false;
    if (log[i].kind != Logged::collective || log[i].name != name || (in_group && has_one)) continue;
    has_one = true;
    found.push_back(i);
  }
  return found;
}

/// Launches of the step that read shards from the host's pinned memory, and those that write gradients to it.
struct HostCopies {
  std::vector<size_t> shards, gradients;
};
HostCopies host_copies_of(const StreamLog& log, int64_t step) {
  const auto [begin, end] = step_of(log, step);
  HostCopies found;
  std::set<uint64_t> pinned;
  const auto touches_pinned = [&](const std::vector<ByteRange>& ranges) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const auto& range) { return pinned.contains(range.block); });
  };
  for (size_t i = 0; i < end; ++i) {
    if (log[i].kind == Logged::allocate && log[i].pinned) pinned.insert(log[i].block);
    if (log[i].kind != Logged::launch || i < begin) continue;
    if (touches_pinned(log[i].reads)) found.shards.push_back(i);
    // What ranks say of themselves in a gather goes to the host, too, to be compared.
    const bool compares = log[i].label.starts_with("FSDP::all_gather_copy_out");
    if (touches_pinned(log[i].writes) && !compares) found.gradients.push_back(i);
  }
  return found;
}

/// Products on the compute stream that run at the same time as collective `index` where streams and host allow it.
int64_t concurrent_products(const HappensBefore& check, const StreamLog& log, size_t index, const std::string& label) {
  int64_t count = 0;
  for (size_t i = 0; i < log.size(); ++i) {
    if (!is_product(log[i]) || !is_on_compute_stream(log[i]) || (!label.empty() && log[i].label != label)) continue;
    count += !check.is_ordered(i, index) && !check.is_ordered(index, i);
  }
  return count;
}

int priority_of(const StreamName& stream) {
  return recorded::priority(
      c10::Stream(c10::Stream::UNSAFE,
                  c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(stream.device)), stream.id));
}

}  // namespace

std::pair<size_t, size_t> step_of(const StreamLog& log, int64_t step) {
  const auto begins = std::find_if(log.begin(), log.end(), [&](const LogEntry& entry) {
    return entry.kind == Logged::note && entry.name == kStep + std::to_string(step);
  });
  const auto ends = std::find_if(
      begins, log.end(), [](const LogEntry& entry) { return entry.kind == Logged::note && entry.name == kSteadyEnds; });
  TORCH_CHECK(begins != log.end() && ends != log.end(), "no step ", step);
  return {begins - log.begin(), ends - log.begin()};
}

std::string wrong_streams(const StepSetting& setting, const StreamLog& log, int64_t number) {
  if (!setting.shards) return {};
  const auto step = step_of(log, number);
  const auto gathers = collectives_of(log, step, "all_gather"), scatters = collectives_of(log, step, "reduce_scatter");
  std::string wrong;
  const auto expect = [&](bool holds, const std::string& otherwise) {
    if (!holds) wrong += otherwise + '\n';
  };
  expect(gathers.size() >= 5, std::to_string(gathers.size()) + " gathers, expected 5 or more");
  expect(scatters.size() == setting.scatters,
         std::to_string(scatters.size()) + " reductions, expected " + std::to_string(setting.scatters));
  std::set<StreamName> gather, reduce, all_reduce;
  for (size_t i = step.first; i < step.second; ++i) {
    if (log[i].kind != Logged::collective) continue;
    if (log[i].name == "all_gather") gather.insert(log[i].stream);
    if (log[i].name == "reduce_scatter") reduce.insert(log[i].stream);
    // A clipped norm is a matter of the compute stream.
    if (log[i].name == "all_reduce" && !setting.clips) all_reduce.insert(log[i].stream);
  }
  if (gathers.empty()) return wrong;
  std::set<StreamName> all{{log[gathers[0]].stream.device, 0}};
  const auto expect_streams = [&](const char* what, const std::set<StreamName>& streams, size_t expected) {
    expect(streams.size() == expected, std::string(what) + " run on " + std::to_string(streams.size()) +
                                           " streams, expected " + std::to_string(expected));
    for (const auto& stream : streams) {
      expect(all.insert(stream).second, to_string(stream) + " of " + what + " is another's, too");
      expect(priority_of(stream) < 0, to_string(stream) + " of " + what + " has no high priority");
    }
  };
  expect_streams("gathers", gather, 1);
  expect_streams("reductions", reduce, 1);
  expect_streams("all-reduces", all_reduce, setting.replicates ? 1 : 0);
  int64_t copies = 0;
  for (size_t i = step.first; i < step.second; ++i) {
    if (!is_copy_in(log[i])) continue;
    ++copies;
    expect(gather.contains(log[i].stream), to_string(log, i) + ", expected the stream of gathers");
  }
  expect(copies > 0 || !(setting.casts || setting.offloads), "no shard is copied for its gather");
  const auto host = host_copies_of(log, number);
  for (auto i : host.shards) expect(is_copy_in(log[i]), to_string(log, i) + ", expected a copy for a gather");
  for (auto i : host.gradients) {
    expect(reduce.contains(log[i].stream), to_string(log, i) + ", expected the stream of reductions");
  }
  expect(host.gradients.empty() != setting.offloads,
         std::to_string(host.gradients.size()) + " copies of gradients to the host");
  return wrong;
}

void expect_overlap(const StreamLog& log, const HappensBefore& check, int64_t number) {
  const auto step = step_of(log, number);
  const auto gathers = collectives_of(log, step, "all_gather"), scatters = collectives_of(log, step, "reduce_scatter");
  std::map<std::string, size_t> forward;  // the first gather of each unit
  for (auto i : gathers) forward.try_emplace(log[i].label, i);
  for (int64_t block = 1; block < 4; ++block) {
    const auto gather = forward.find("FSDP::all_gather (blocks." + std::to_string(block) + ")");
    ASSERT_NE(gather, forward.end());
    EXPECT_GE(concurrent_products(check, log, gather->second, "forward blocks." + std::to_string(block - 1)), 1)
        << "gather of block " << block;
  }
  // In backward every gather but the first, and every reduction but the last two.
  std::vector<size_t> in_backward;
  for (auto i : gathers) {
    if (forward.at(log[i].label) != i) in_backward.push_back(i);
  }
  for (size_t i = 1; i < in_backward.size(); ++i) {
    EXPECT_GE(concurrent_products(check, log, in_backward[i], ""), 1) << to_string(log, in_backward[i]);
  }
  for (size_t i = 0; i + 2 < scatters.size(); ++i) {
    EXPECT_GE(concurrent_products(check, log, scatters[i], ""), 1) << to_string(log, scatters[i]);
  }
}

void expect_copies_overlap(const StreamLog& log, const HappensBefore& check, int64_t step) {
  const auto copies = host_copies_of(log, step);
  const auto expect_concurrent = [&](const std::vector<size_t>& among, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      EXPECT_GE(concurrent_products(check, log, among[i], ""), 1) << to_string(log, among[i]);
    }
  };
  // A weight and a bias of 5 units, read in forward, and of 4 of them once more in backward: all but the first unit's.
  ASSERT_EQ(copies.shards.size(), 18u);
  expect_concurrent(copies.shards, 2, 18);
  // A unit's gradients set out when the next unit has computed its own: all but those of the last two.
  ASSERT_EQ(copies.gradients.size(), 10u);
  expect_concurrent(copies.gradients, 0, 6);
}

// ---- mistakes, planted into what was recorded ----

// Operators of the recorded device run at once, so a run in which an order is forgotten has the same log but for it.

namespace {

StreamLog without(StreamLog log, size_t index) {
  log.erase(log.begin() + static_cast<std::ptrdiff_t>(index));
  return log;
}

/// The entry moves to right behind `after`.
StreamLog moved(StreamLog log, size_t index, size_t after) {
  const LogEntry entry = log[index];
  log.erase(log.begin() + static_cast<std::ptrdiff_t>(index));
  log.insert(log.begin() + static_cast<std::ptrdiff_t>(after < index ? after + 1 : after), entry);
  return log;
}

bool finds(const StreamLog& log) { return !HappensBefore(log).violations().empty(); }

void expect_every_needed_wait_found(const StreamLog& log, int64_t number) {
  const HappensBefore check(log);
  const auto step = step_of(log, number);
  int64_t needed = 0, found = 0, redundant = 0;
  std::string missed;
  for (const auto& wait : check.waits()) {
    if (wait.entry < step.first || wait.entry >= step.second) continue;
    if (!wait.needed) {
      ++redundant;
      continue;
    }
    ++needed;
    if (finds(without(log, wait.entry))) {
      ++found;
    } else {
      missed += to_string(log, wait.entry > 8 ? wait.entry - 8 : 0, wait.entry + 4) + "--\n";
    }
  }
  std::cout << "waits of a step: " << needed << " order something, " << found << " are found when dropped, "
            << redundant << " order nothing new\n";
  EXPECT_GT(needed, 10);
  EXPECT_EQ(missed, "");
}

void expect_every_early_release_found(const StreamLog& log, int64_t number) {
  const auto step = step_of(log, number);
  std::map<uint64_t, StreamName> homes;
  std::map<uint64_t, size_t> elsewhere;  // the last launch on another stream than the home
  int64_t tried = 0;
  std::string missed;
  for (size_t i = 0; i < step.second; ++i) {
    const auto& entry = log[i];
    if (entry.kind == Logged::allocate && !entry.pinned) homes[entry.block] = entry.stream;
    if (entry.kind == Logged::launch || entry.kind == Logged::collective) {
      for (const auto* ranges : {&entry.reads, &entry.writes}) {
        for (const auto& range : *ranges) {
          const auto home = homes.find(range.block);
          if (home != homes.end() && home->second != entry.stream) elsewhere[range.block] = i;
        }
      }
    }
    const auto last = elsewhere.find(entry.block);
    if (entry.kind != Logged::release || i < step.first || last == elsewhere.end()) continue;
    ++tried;
    // Before the members of a group run there is nothing to overtake.
    size_t after = last->second;
    while (log[after].kind == Logged::collective && log[after + 1].call.communicator == log[after].call.communicator) {
      ++after;
    }
    if (!finds(moved(log, i, after))) missed += to_string(log, i) + " to behind " + to_string(log, after) + '\n';
  }
  EXPECT_GT(tried, 5);
  EXPECT_EQ(missed, "");
}

void expect_every_lost_bracket_found(const StreamLog& log, int64_t number) {
  const auto step = step_of(log, number);
  int64_t groups = 0;
  for (size_t i = step.first; i < step.second; ++i) {
    if (log[i].kind == Logged::group_start) {
      EXPECT_TRUE(finds(without(log, i))) << to_string(log, i);
    }
    if (log[i].kind != Logged::group_end) continue;
    ++groups;
    EXPECT_TRUE(finds(without(log, i))) << to_string(log, i);
    // Swapped with what follows it on its stream: the event that everybody waits for.
    size_t next = i + 1;
    while (log[next].stream != log[i].stream || log[next].kind == Logged::allocate) ++next;
    EXPECT_TRUE(finds(moved(log, i, next))) << to_string(log, i) << " behind " << to_string(log, next);
  }
  EXPECT_GT(groups, 5);
}

/// Another stream, number of elements, dtype or root, for each collective and copy of the step in turn: the checker,
/// the rules above or the comparison with a rank that does it right object.
void expect_every_wrong_call_found(const StepSetting& setting, const StreamLog& log, int64_t number) {
  const auto step = step_of(log, number);
  const auto right = collective_sequence(log);
  StreamLog wrong = log;
  int64_t planted = 0;
  std::string missed;
  const auto plant = [&](size_t index, const char* what, const auto& change) {
    change(wrong[index]);
    ++planted;
    if (compare_collectives({collective_sequence(wrong), right}).empty() &&
        wrong_streams(setting, wrong, number).empty() && !finds(wrong)) {
      missed += std::string(what) + " for " + to_string(log, index) + '\n';
    }
    wrong[index] = log[index];
  };
  std::set<StreamName> streams;
  for (size_t i = step.first; i < step.second; ++i) {
    if (log[i].kind == Logged::collective) streams.insert({log[i].stream, {log[i].stream.device, 0}});
  }
  for (size_t i = 0; i < step.second; ++i) {
    const bool is_collective = log[i].kind == Logged::collective;
    if (is_collective && log[i].call.root >= 0) plant(i, "another root", [](LogEntry& entry) { ++entry.call.root; });
    if (i < step.first || !(is_collective || is_copy_in(log[i]))) continue;
    for (const auto& stream : streams) {
      if (stream == log[i].stream) continue;
      plant(i, "another stream", [&](LogEntry& entry) { entry.stream = stream; });
    }
    if (!is_collective) continue;
    plant(i, "one element more", [](LogEntry& entry) { ++entry.call.count; });
    plant(i, "another dtype", [](LogEntry& entry) { entry.call.dtype = "Half"; });
  }
  std::cout << "wrong calls of a step: " << planted << '\n';
  EXPECT_GT(planted, 20);
  EXPECT_EQ(missed, "");
}

}  // namespace

void expect_every_mistake_found(const StepSetting& setting, const StreamLog& all, int64_t step) {
  const StreamLog log(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(step_of(all, step + 1).second));
  ASSERT_FALSE(finds(log));
  ASSERT_EQ(wrong_streams(setting, log, step), "");
  expect_every_needed_wait_found(log, step);
  if (!setting.shards) return;
  expect_every_early_release_found(log, step);
  expect_every_lost_bracket_found(log, step);
  expect_every_wrong_call_found(setting, log, step);
}

// ---- groups ----

std::string wrong_groups(const std::vector<GroupCall>& calls) {
  std::string wrong;
  bool is_open = false;
  const GroupCall* first = nullptr;  // of the open group
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto& call = calls[i];
    const auto add = [&](const std::string& what) { wrong += "call " + std::to_string(i) + ": " + what + '\n'; };
    switch (call.kind) {
      case GroupCall::start:
        if (is_open) add("a group starts inside another one");
        is_open = true;
        first = nullptr;
        break;
      case GroupCall::end:
        if (!is_open) add("a group ends that was not started");
        is_open = false;
        break;
      case GroupCall::member:
        if (!is_open) break;
        if (first == nullptr) first = &call;
        if (call.subject != first->subject || call.operation != first->operation) {
          add(call.operation + " of " + call.subject + " in the group of " + first->operation + " of " +
              first->subject);
        }
        break;
    }
  }
  if (is_open) wrong += "the last group never ends\n";
  return wrong;
}

}  // namespace testing_support

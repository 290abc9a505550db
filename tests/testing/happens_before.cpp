#include "tests/testing/happens_before.h"

#include <algorithm>

namespace testing_support {

// ---- clocks ----

size_t Clocks::line_of(const StreamName& stream) {
  const auto [at, is_new] = lines_.try_emplace(stream, now_.size());
  if (is_new) now_.emplace_back();
  return at->second;
}

void Clocks::join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool Clocks::covers(const Clock& later, const Clock& earlier) {
  for (size_t i = 0; i < earlier.size(); ++i) {
    if (tick(later, i) < earlier[i]) return false;
  }
  return true;
}

// Whatever is given to a stream comes after all that the host has done and knows.
Clocks::Clock& Clocks::enter(const StreamName& stream) {
  const auto line = line_of(stream);
  join(now_[line], now_[kHost]);
  if (now_[line].size() <= line) now_[line].resize(line + 1);
  return now_[line];
}

Clocks::Stamp Clocks::launch(const StreamName& stream) {
  auto& clock = enter(stream);
  const auto line = line_of(stream);
  ++clock[line];
  return {line, clock[line], clock};
}

Clocks::Stamp Clocks::host_access() {
  auto& clock = now_[kHost];
  if (clock.empty()) clock.resize(1);
  ++clock[kHost];
  return {kHost, clock[kHost], clock};
}

void Clocks::record(const StreamName& stream, uint64_t event) { events_[event] = enter(stream); }

const Clocks::Clock* Clocks::recorded(uint64_t event) const {
  const auto found = events_.find(event);
  return found == events_.end() ? nullptr : &found->second;
}

// A position of its own: memory that is handed out behind the wait is not that of before.
bool Clocks::wait(const StreamName& stream, uint64_t event) {
  auto& clock = enter(stream);
  const auto& other = *recorded(event);
  const bool adds = !covers(clock, other);
  join(clock, other);
  ++clock[line_of(stream)];
  return adds;
}

void Clocks::host_wait_device(int device) {
  for (const auto& [stream, line] : lines_) {
    if (stream.device == device) join(now_[kHost], now_[line]);
  }
}

// ---- the rules ----

const char* to_string(Rule rule) {
  switch (rule) {
    case Rule::race:
      return "race";
    case Rule::early_use:
      return "early use";
    case Rule::early_release:
      return "early release";
    case Rule::use_after_release:
      return "use after release";
    case Rule::unrecorded_event:
      return "unrecorded event";
    case Rule::group:
      return "group";
    case Rule::host_wait:
      return "host wait";
    case Rule::record_stream:
      return "record_stream";
  }
  return "?";
}

HappensBefore::HappensBefore(const StreamLog& log) : log_(log) {
  for (size_t i = 0; i < log_.size(); ++i) step(i);
  for (const auto& [communicator, group] : groups_) {
    add(Rule::group, group.start, group.start, "the group of " + communicator + " never ends");
  }
}

std::string HappensBefore::report() const {
  constexpr size_t most = 8;
  std::string text;
  for (size_t i = 0; i < std::min(violations_.size(), most); ++i) text += violations_[i].text + '\n';
  if (violations_.size() > most) text += "and " + std::to_string(violations_.size() - most) + " more\n";
  return text;
}

bool HappensBefore::is_ordered(size_t first, size_t second) const {
  const auto& stamp = stamps_.at(first);
  return first != second && Clocks::tick(stamps_.at(second).clock, stamp.line) >= stamp.tick;
}

void HappensBefore::add(Rule rule, size_t first, size_t second, const std::string& why) {
  constexpr size_t most = 100;
  if (violations_.size() >= most) return;
  for (const auto& known : violations_) {
    if (known.rule == rule && known.first == first && known.second == second) return;
  }
  std::string text = std::string("[") + to_string(rule) + "] " + to_string(log_, first);
  if (second != first) text += " / " + to_string(log_, second);
  violations_.push_back({rule, first, second, text + ": " + why});
}

void HappensBefore::step(size_t index) {
  const LogEntry& entry = log_[index];
  const auto known = clocks_.host();
  check_between(index);
  switch (entry.kind) {
    case Logged::allocate: {
      Block& block = blocks_[entry.block];
      block = Block();
      block.allocated = index;
      if (entry.pinned) break;
      block.home = clocks_.line_of(entry.stream);
      block.home_tick = Clocks::tick(clocks_.at(entry.stream), block.home);
      break;
    }
    case Logged::release:
      release(index);
      break;
    case Logged::launch:
      unanswered_.clear();
      touch(index, clocks_.launch(entry.stream));
      break;
    case Logged::collective: {
      unanswered_.clear();
      const auto group = groups_.find(entry.call.communicator);
      if (group != groups_.end()) {
        join_group(index, group->second);
      } else {
        touch(index, clocks_.launch(entry.stream));
      }
      break;
    }
    case Logged::group_start:
      if (!groups_.try_emplace(entry.call.communicator, Group{index, {}}).second) {
        add(Rule::group, groups_[entry.call.communicator].start, index, "groups do not nest; the first is still open");
      }
      break;
    case Logged::group_end:
      end_group(index);
      break;
    case Logged::record:
      clocks_.record(entry.stream, entry.event);
      break;
    case Logged::wait:
      if (clocks_.recorded(entry.event) == nullptr) {
        add(Rule::unrecorded_event, index, index, "the event was never recorded, so the wait orders nothing");
      } else {
        waits_.push_back({index, clocks_.wait(entry.stream, entry.event)});
      }
      break;
    case Logged::host_wait_event:
      if (const auto* clock = clocks_.recorded(entry.event)) {
        clocks_.host_wait(*clock);
      } else {
        add(Rule::unrecorded_event, index, index, "the event was never recorded, so the wait orders nothing");
      }
      break;
    case Logged::host_wait_stream:
      clocks_.host_wait(clocks_.at(entry.stream));
      break;
    case Logged::host_wait_device:
      clocks_.host_wait_device(entry.stream.device);
      break;
    case Logged::query:
      query(index);
      break;
    case Logged::host_access:
      touch(index, clocks_.host_access());
      break;
    case Logged::record_stream:
      add(Rule::record_stream, index, index, "lifetimes are kept by events, not by the allocator");
      break;
    case Logged::note:
      if (entry.name == kSteadyBegins) steady_ = index;
      if (entry.name == kSteadyEnds) steady_.reset();
      break;
  }
  const bool waits = entry.kind == Logged::host_wait_event || entry.kind == Logged::host_wait_stream ||
                     entry.kind == Logged::host_wait_device;
  if (waits && steady_ && !Clocks::covers(known, clocks_.host())) {
    add(Rule::host_wait, *steady_, index, "no wait of the host belongs into a steady step");
  }
}

// A host that asks again and has done nothing in the meantime is waiting.
void HappensBefore::query(size_t index) {
  const LogEntry& entry = log_[index];
  const auto* clock = clocks_.recorded(entry.event);
  if (clock == nullptr || Clocks::covers(clocks_.host(), *clock)) return;
  const auto [first, is_new] = unanswered_.try_emplace({entry.thread, entry.event}, index);
  if (!is_new && steady_) {
    add(Rule::host_wait, first->second, index, "the host asks again without having given the device anything to do");
  }
  if (entry.answer) clocks_.host_wait(*clock);
}

void HappensBefore::touch(size_t index, Clocks::Stamp stamp) {
  for (const auto& range : log_[index].reads) touch(index, stamp, range, /*writes=*/false);
  for (const auto& range : log_[index].writes) touch(index, stamp, range, /*writes=*/true);
  stamps_[index] = std::move(stamp);
}

void HappensBefore::touch(size_t index, const Clocks::Stamp& stamp, const ByteRange& range, bool writes) {
  if (range.begin == range.end) return;
  if (range.block == 0) {
    add(Rule::use_after_release, index, index, "it touches memory that is no block's, or no longer");
    return;
  }
  Block& block = blocks_[range.block];
  if (block.released) {
    add(Rule::use_after_release, *block.released, index, "the block is released before it is used");
    return;
  }
  if (block.home != Clocks::kHost && stamp.line != block.home &&
      Clocks::tick(stamp.clock, block.home) < block.home_tick) {
    add(Rule::early_use, *block.allocated, index,
        "the block may be one that its home stream has still to finish with; wait for an event that is recorded there "
        "after the allocation");
  }
  for (const Access& former : block.accesses) {
    if (!(former.writes || writes) || !former.range.overlaps(range) || former.entry == index) continue;
    if (Clocks::tick(stamp.clock, former.line) >= former.tick) continue;
    add(Rule::race, former.entry, index,
        std::string("the first ") + (former.writes ? "writes" : "reads") + " and the second " +
            (writes ? "writes" : "reads") + " block " + std::to_string(range.block) + ", and nothing makes " +
            (stamp.line == Clocks::kHost ? "the host" : "the second's stream") + " wait for the first");
  }
  // What comes after this access and after no former one is caught by this one alone.
  std::erase_if(block.accesses, [&](const Access& former) {
    return range.covers(former.range) && (writes || !former.writes) && former.entry != index &&
           (writes || former.line == stamp.line) && Clocks::tick(stamp.clock, former.line) >= former.tick;
  });
  block.accesses.push_back({range, writes, stamp.line, stamp.tick, index});
}

// What the home stream does from here on may find itself in this memory.
void HappensBefore::release(size_t index) {
  const auto found = blocks_.find(log_[index].block);
  if (found == blocks_.end()) return;  // older than the log
  Block& block = found->second;
  if (block.released) {
    add(Rule::use_after_release, *block.released, index, "it is released twice");
    return;
  }
  block.released = index;
  if (block.home == Clocks::kHost) return;
  const StreamName& home = log_[*block.allocated].stream;
  for (const Access& access : block.accesses) {
    const bool known = Clocks::tick(clocks_.at(home), access.line) >= access.tick ||
                       Clocks::tick(clocks_.host(), access.line) >= access.tick;
    if (access.line == block.home || access.line == Clocks::kHost || known) continue;
    add(Rule::early_release, access.entry, index,
        "the memory goes back to " + to_string(home) + ", which has not waited for the stream that uses it");
  }
  block.accesses.clear();
}

// ---- groups ----

void HappensBefore::check_between(size_t index) {
  const LogEntry& entry = log_[index];
  if (entry.name == "backend") return;  // its own events
  for (const auto& [communicator, group] : groups_) {
    const LogEntry& start = log_[group.start];
    if (start.thread != entry.thread) continue;
    switch (entry.kind) {
      case Logged::launch:
      case Logged::record:
      case Logged::wait:
        if (entry.stream != start.stream) break;
        [[fallthrough]];
      case Logged::host_wait_event:
      case Logged::host_wait_stream:
      case Logged::host_wait_device:
        add(Rule::group, group.start, index, "it stands inside a group, whose members start only when it ends");
        break;
      case Logged::collective:
      case Logged::group_start:
        if (entry.call.communicator != communicator) {
          add(Rule::group, group.start, index, "it is another communicator's, inside a group");
        }
        break;
      default:
        break;
    }
  }
}

void HappensBefore::join_group(size_t index, Group& group) {
  const LogEntry& entry = log_[index];
  for (const size_t member : group.members) {
    const LogEntry& other = log_[member];
    const auto meets = [](const std::vector<ByteRange>& some, const std::vector<ByteRange>& others) {
      return std::any_of(some.begin(), some.end(), [&](const ByteRange& range) {
        return std::any_of(others.begin(), others.end(), [&](const ByteRange& one) { return one.overlaps(range); });
      });
    };
    if (meets(entry.writes, other.writes) || meets(entry.writes, other.reads) || meets(entry.reads, other.writes)) {
      add(Rule::race, member, index, "members of one group run at once, and these two touch the same bytes");
    }
  }
  if (!group.members.empty()) {
    const LogEntry& first = log_[group.members.front()];
    if (first.name != entry.name) add(Rule::group, group.members.front(), index, "a group has collectives of one kind");
    if (first.call.dtype != entry.call.dtype) add(Rule::group, group.members.front(), index, "a group has one dtype");
    if (first.stream != entry.stream) add(Rule::group, group.members.front(), index, "a group runs on one stream");
  }
  group.members.push_back(index);
}

void HappensBefore::end_group(size_t index) {
  const auto found = groups_.find(log_[index].call.communicator);
  if (found == groups_.end()) {
    add(Rule::group, index, index, "no group is open");
    return;
  }
  const Group group = std::move(found->second);
  groups_.erase(found);
  if (group.members.empty()) add(Rule::group, group.start, index, "the group is empty");
  for (const size_t member : group.members) touch(member, clocks_.launch(log_[member].stream));
}

// ---- ranks ----

CollectiveSequence collective_sequence(const StreamLog& log) {
  CollectiveSequence sequence;
  for (const LogEntry& entry : log) {
    const auto& call = entry.call;
    if (entry.kind == Logged::collective) {
      std::string text = entry.name + " of " + std::to_string(call.count) + ' ' + call.dtype;
      if (!call.op.empty()) text += ", " + call.op;
      if (call.root >= 0) text += ", root " + std::to_string(call.root);
      sequence.emplace_back(call.communicator, text);
    } else if (entry.kind == Logged::group_start || entry.kind == Logged::group_end) {
      sequence.emplace_back(call.communicator, to_string(entry.kind));
    } else if (entry.kind == Logged::note && !call.communicator.empty()) {
      sequence.emplace_back(call.communicator, "its making");
    }
  }
  return sequence;
}

std::string compare_collectives(const std::vector<CollectiveSequence>& ranks) {
  struct Calls {
    size_t rank;
    std::vector<std::string> calls;
  };
  std::map<std::string, std::vector<Calls>> communicators;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [communicator, call] : ranks[rank]) {
      auto& members = communicators[communicator];
      if (members.empty() || members.back().rank != rank) members.push_back({rank, {}});
      members.back().calls.push_back(call);
    }
  }
  for (const auto& [communicator, members] : communicators) {
    const Calls& one = members.front();
    for (const Calls& other : members) {
      for (size_t i = 0; i < std::max(one.calls.size(), other.calls.size()); ++i) {
        const auto text = [&](const Calls& calls) { return i < calls.calls.size() ? calls.calls[i] : "nothing more"; };
        if (text(one) == text(other)) continue;
        return "collective " + std::to_string(i) + " of " + communicator + ": rank " + std::to_string(one.rank) +
               " does " + text(one) + ", rank " + std::to_string(other.rank) + " does " + text(other);
      }
    }
  }
  return {};
}

}  // namespace testing_support

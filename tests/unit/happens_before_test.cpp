// The checker of stream order, on logs written by hand with one mistake each, and on those of small programs on the
// recorded device.
#include "tests/testing/happens_before.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/testing/private_device.h"
#include "tests/testing/private_streams.h"
#include "tests/testing/stream_log.h"

namespace {

using namespace testing_support;
using ::testing::HasSubstr;

// ---- logs by hand ----

constexpr StreamName kC{0, 0}, kG{0, 1}, kR{0, 2};

LogEntry allocate(uint64_t block, StreamName home = kC) {
  return {.kind = Logged::allocate, .stream = home, .block = block, .bytes = 64};
}
LogEntry pinned(uint64_t block) { return {.kind = Logged::allocate, .block = block, .bytes = 64, .pinned = true}; }
LogEntry release(uint64_t block) { return {.kind = Logged::release, .block = block}; }
LogEntry launch(const char* name, StreamName stream, std::vector<ByteRange> reads, std::vector<ByteRange> writes) {
  return {
      .kind = Logged::launch, .name = name, .stream = stream, .reads = std::move(reads), .writes = std::move(writes)};
}
LogEntry record(uint64_t event, StreamName stream) {
  return {.kind = Logged::record, .stream = stream, .event = event};
}
LogEntry wait(uint64_t event, StreamName stream) { return {.kind = Logged::wait, .stream = stream, .event = event}; }
LogEntry host_wait(uint64_t event) { return {.kind = Logged::host_wait_event, .event = event}; }
LogEntry host_reads(ByteRange range) { return {.kind = Logged::host_access, .name = "host", .reads = {range}}; }
LogEntry host_writes(ByteRange range) { return {.kind = Logged::host_access, .name = "host", .writes = {range}}; }
LogEntry note(const char* text) { return {.kind = Logged::note, .name = text}; }
LogEntry group_start(const char* communicator = "w") {
  return {.kind = Logged::group_start, .stream = kG, .call = {.communicator = communicator}};
}
LogEntry group_end(const char* communicator = "w") {
  return {.kind = Logged::group_end, .stream = kG, .call = {.communicator = communicator}};
}
LogEntry collective(const char* name, ByteRange reads, ByteRange writes, const char* dtype = "Float",
                    const char* communicator = "w") {
  return {.kind = Logged::collective,
          .name = name,
          .stream = kG,
          .reads = {reads},
          .writes = {writes},
          .call = {.communicator = communicator, .dtype = dtype, .count = 16}};
}
constexpr ByteRange kAll1{1, 0, 64}, kAll2{2, 0, 64}, kAll3{3, 0, 64};

void expect_clean(const StreamLog& log) { EXPECT_EQ(HappensBefore(log).report(), ""); }

/// Exactly one violation, of this rule, between these entries.
void expect_violation(const StreamLog& log, Rule rule, size_t first, size_t second) {
  const HappensBefore check(log);
  ASSERT_EQ(check.violations().size(), 1u) << check.report() << to_string(log, 0, log.size());
  const auto& found = check.violations().front();
  EXPECT_STREQ(to_string(found.rule), to_string(rule)) << found.text;
  EXPECT_EQ(found.first, first) << found.text;
  EXPECT_EQ(found.second, second) << found.text;
}

StreamLog without(StreamLog log, size_t index) {
  log.erase(log.begin() + static_cast<std::ptrdiff_t>(index));
  return log;
}

TEST(Races, AWaitBehindTheEventOrdersAndItsLackIsNamed) {
  const StreamLog log{allocate(1), launch("fill", kC, {}, {kAll1}), record(1, kC), wait(1, kG),
                      launch("copy", kG, {kAll1}, {})};
  expect_clean(log);
  expect_violation(without(log, 3), Rule::race, 1, 3);
  const auto missing = without(log, 3);
  const HappensBefore check(missing);
  EXPECT_EQ(check.violations()[0].text,
            "[race] 1 launch \"fill\" on npu:0 stream 0, writes 1[0,64) / 3 launch \"copy\" on npu:0 stream 1, reads "
            "1[0,64): the first writes and the second reads block 1, and nothing makes the second's stream wait for "
            "the first");
}

TEST(Races, AWriteAfterAReadNeedsOrderAsWell) {
  const StreamLog log{allocate(1), launch("read", kC, {kAll1}, {}), record(1, kC), wait(1, kG),
                      launch("write", kG, {}, {kAll1})};
  expect_clean(log);
  expect_violation(without(log, 3), Rule::race, 1, 3);
}

TEST(Races, ReadsAndOtherBytesDoNotConflict) {
  expect_clean({launch("read", kC, {kAll1}, {}), launch("read", kG, {kAll1}, {}), launch("left", kC, {}, {{2, 0, 32}}),
                launch("right", kG, {}, {{2, 32, 64}}), launch("other", kG, {}, {kAll3})});
  expect_violation({launch("left", kC, {}, {{2, 0, 33}}), launch("right", kG, {}, {{2, 32, 64}})}, Rule::race, 0, 1);
}

TEST(Races, AnEventCoversWhatCameBeforeItsRecordingOnly) {
  // The second recording covers the launch, the first does not.
  const StreamLog log{record(1, kC), launch("fill", kC, {}, {kAll1}), record(2, kC), wait(2, kG),
                      launch("copy", kG, {kAll1}, {})};
  expect_clean(log);
  auto older = log;
  older[3].event = 1;
  expect_violation(older, Rule::race, 1, 4);
}

TEST(Races, OrderGoesThroughOtherStreamsAndTheHost) {
  expect_clean({launch("fill", kC, {}, {kAll1}), record(1, kC), wait(1, kG), record(2, kG), wait(2, kR),
                launch("copy", kR, {kAll1}, {})});
  expect_clean({launch("fill", kC, {}, {kAll1}), record(1, kC), host_wait(1), launch("copy", kR, {kAll1}, {})});
  expect_clean({launch("fill", kC, {}, {kAll1}),
                {.kind = Logged::host_wait_stream, .stream = kC},
                launch("copy", kR, {kAll1}, {})});
  expect_clean({launch("fill", kC, {}, {kAll1}), {.kind = Logged::host_wait_device}, launch("copy", kR, {kAll1}, {})});
  const auto queried = [](bool answer) {
    return StreamLog{launch("fill", kC, {}, {kAll1}),
                     record(1, kC),
                     {.kind = Logged::query, .event = 1, .answer = answer},
                     launch("copy", kR, {kAll1}, {})};
  };
  expect_clean(queried(true));
  expect_violation(queried(false), Rule::race, 0, 3);
}

TEST(Races, AnEarlierAccessIsNotForgottenForALaterOne) {
  // The write on C is ordered before the read on G, not before that on R.
  const StreamLog log{launch("fill", kC, {}, {kAll1}), record(1, kC), wait(1, kG), launch("copy", kG, {kAll1}, {}),
                      launch("late", kR, {kAll1}, {})};
  expect_violation(log, Rule::race, 0, 4);
  // A part that was written again still leaves the rest.
  expect_violation(
      {launch("fill", kC, {}, {kAll1}), launch("again", kC, {}, {{1, 0, 32}}), launch("late", kR, {{1, 40, 48}}, {})},
      Rule::race, 0, 2);
}

TEST(Races, TheHostReadsAndWritesPinnedMemoryOnlyWhenTheCopyHasEnded) {
  const StreamLog read{pinned(1), launch("copy", kG, {}, {kAll1}), record(1, kG), host_wait(1), host_reads(kAll1)};
  expect_clean(read);
  expect_violation(without(read, 3), Rule::race, 1, 3);
  const StreamLog write{pinned(1),     host_writes(kAll1), launch("copy", kG, {kAll1}, {}),
                        record(1, kG), host_wait(1),       host_writes(kAll1)};
  expect_clean(write);
  expect_violation(without(write, 4), Rule::race, 2, 4);
  expect_clean({pinned(1), launch("copy", kG, {}, {kAll1}), release(1)});  // its allocator remembers the stream
}

TEST(Memory, IsUsedElsewhereOnlyBehindThePositionOfItsAllocation) {
  const StreamLog log{launch("before", kC, {}, {kAll2}), allocate(1), record(1, kC), wait(1, kG),
                      launch("gather", kG, {}, {kAll1})};
  expect_clean(log);
  expect_violation(without(log, 3), Rule::early_use, 1, 3);
  // An event from before the allocation: what the home stream did in between may still be using the memory.
  expect_violation(
      {record(1, kC), launch("before", kC, {}, {kAll2}), allocate(1), wait(1, kG), launch("gather", kG, {}, {kAll1})},
      Rule::early_use, 2, 4);
  // A wait of the home stream is a position, too: memory handed out behind it is other memory.
  expect_violation({launch("other", kR, {}, {kAll3}), record(1, kC), record(2, kR), wait(2, kC), allocate(1),
                    wait(1, kG), launch("gather", kG, {}, {kAll1})},
                   Rule::early_use, 4, 6);
}

TEST(Memory, GoesBackOnlyWhenItsHomeHasWaitedForTheOthers) {
  const StreamLog log{allocate(1),   record(1, kC), wait(1, kG), launch("gather", kG, {}, {kAll1}),
                      record(2, kG), wait(2, kC),   release(1)};
  expect_clean(log);
  expect_violation(without(log, 5), Rule::early_release, 3, 5);
  auto swapped = log;
  std::swap(swapped[5], swapped[6]);
  expect_violation(swapped, Rule::early_release, 3, 5);
  auto by_host = log;
  by_host[5] = host_wait(2);
  expect_clean(by_host);
}

TEST(Memory, IsNotUsedOnceReleased) {
  const StreamLog log{allocate(1), launch("fill", kC, {}, {kAll1}), launch("read", kC, {kAll1}, {}), release(1)};
  expect_clean(log);
  auto swapped = log;
  std::swap(swapped[2], swapped[3]);
  expect_violation(swapped, Rule::use_after_release, 2, 3);
  expect_violation({launch("read", kC, {{0, 0, 8}}, {})}, Rule::use_after_release, 0, 0);
  expect_violation({allocate(1), release(1), release(1)}, Rule::use_after_release, 1, 2);
}

TEST(Events, AWaitForOneThatWasNeverRecordedOrdersNothing) {
  expect_clean({record(1, kC), wait(1, kG)});
  expect_violation({wait(1, kG), record(1, kC)}, Rule::unrecorded_event, 0, 0);
  expect_violation({host_wait(1)}, Rule::unrecorded_event, 0, 0);
}

TEST(Events, WaitsThatOrderNothingNewAreTold) {
  const StreamLog log{launch("fill", kC, {}, {kAll1}), record(1, kC), wait(1, kG), wait(1, kG),
                      launch("copy", kG, {kAll1}, {})};
  const HappensBefore check(log);
  ASSERT_EQ(check.waits().size(), 2u);
  EXPECT_EQ(check.waits()[0].entry, 2u);
  EXPECT_TRUE(check.waits()[0].needed);
  EXPECT_FALSE(check.waits()[1].needed);
  EXPECT_TRUE(check.is_ordered(0, 4));
  EXPECT_FALSE(check.is_ordered(4, 0));
}

TEST(Groups, StartAndEndPairAroundMembersOfOneKindAndDtype) {
  const auto gather = [](ByteRange reads, ByteRange writes) { return collective("all_gather", reads, writes); };
  const ByteRange a{1, 0, 16}, b{1, 16, 32};
  const StreamLog log{group_start(),
                      gather(a, kAll2),
                      gather(b, kAll3),
                      group_end(),
                      record(1, kG),
                      wait(1, kC),
                      launch("use", kC, {kAll2, kAll3}, {})};
  expect_clean(log);
  expect_violation({group_start(), group_start(), gather(a, kAll2), group_end()}, Rule::group, 0, 1);
  expect_violation({group_start(), gather(a, kAll2)}, Rule::group, 0, 0);
  expect_violation({gather(a, kAll2), group_end()}, Rule::group, 1, 1);
  expect_violation({group_start(), group_end()}, Rule::group, 0, 1);
  expect_violation({group_start(), gather(a, kAll2), collective("broadcast", b, kAll3), group_end()}, Rule::group, 1,
                   2);
  expect_violation({group_start(), gather(a, kAll2), collective("all_gather", b, kAll3, "Half"), group_end()},
                   Rule::group, 1, 2);
  expect_violation({group_start(), gather(a, kAll2), launch("copy", kG, {a}, {}), group_end()}, Rule::group, 0, 2);
  expect_violation({group_start(), gather(a, kAll2), {.kind = Logged::host_wait_stream, .stream = kR}, group_end()},
                   Rule::group, 0, 2);
  expect_violation({group_start(), collective("all_gather", b, kAll3, "Float", "other"), gather(a, kAll2), group_end()},
                   Rule::group, 0, 1);
  auto elsewhere = gather(b, kAll3);
  elsewhere.stream = kR;
  expect_violation({group_start(), gather(a, kAll2), elsewhere, group_end()}, Rule::group, 1, 2);
  // What another stream or another thread does in the meantime is no part of it.
  auto other_thread = launch("copy", kG, {a}, {});
  other_thread.thread = 1;
  expect_clean({group_start(), gather(a, kAll2), other_thread, launch("mm", kC, {b}, {}), group_end()});
}

TEST(Groups, MembersRunAtOnceAndStartAtTheEnd) {
  const ByteRange a{1, 0, 16}, b{1, 16, 32};
  expect_violation({group_start(), collective("all_gather", a, kAll2), collective("all_gather", b, kAll2), group_end()},
                   Rule::race, 1, 2);
  // An event recorded before the end does not cover the members: twice wrong.
  const StreamLog log{group_start(), collective("all_gather", a, kAll2), record(1, kG), group_end(),
                      wait(1, kC),   launch("use", kC, {kAll2}, {})};
  const HappensBefore check(log);
  ASSERT_EQ(check.violations().size(), 2u) << check.report();
  EXPECT_EQ(check.violations()[0].rule, Rule::group);
  EXPECT_EQ(check.violations()[1].rule, Rule::race);
}

TEST(Steady, NoWaitOfTheHostStandsInASteadyStep) {
  const LogEntry item{.kind = Logged::host_wait_stream, .name = "aten::item", .stream = kC};
  expect_clean({item, note(kSteadyBegins), launch("mm", kC, {}, {kAll1}), note(kSteadyEnds), item});
  expect_violation({note(kSteadyBegins), launch("mm", kC, {}, {kAll1}), item, note(kSteadyEnds)}, Rule::host_wait, 0,
                   2);
  expect_violation({note(kSteadyBegins), launch("mm", kC, {}, {kAll1}), record(1, kC), host_wait(1)}, Rule::host_wait,
                   0, 3);
  // What the host knows to have ended, it does not wait for.
  expect_clean({note(kSteadyBegins),
                launch("mm", kC, {}, {kAll1}),
                record(1, kC),
                {.kind = Logged::query, .event = 1, .answer = true},
                host_wait(1)});
}

TEST(Steady, AskingAgainAndAgainIsAWaitOfTheHost) {
  const auto query = [](uint64_t event, bool answer) {
    return LogEntry{.kind = Logged::query, .event = event, .answer = answer};
  };
  const auto mm = launch("mm", kC, {}, {kAll1});
  const StreamLog log{note(kSteadyBegins), mm, record(1, kC), query(1, false), query(1, true), note(kSteadyEnds)};
  expect_violation(log, Rule::host_wait, 3, 4);
  auto never = log;
  never[4].answer = false;
  expect_violation(never, Rule::host_wait, 3, 4);
  // What is no work does not make it better: memory, events, other streams that wait.
  auto with_others = log;
  with_others.insert(with_others.begin() + 4, {allocate(2), record(2, kC), wait(2, kG), release(2)});
  expect_violation(with_others, Rule::host_wait, 3, 8);
  auto worked = log;
  worked.insert(worked.begin() + 4, mm);
  expect_clean(worked);
  worked[4] = collective("all_reduce", kAll3, kAll3);
  expect_clean(worked);
  // One look, looks at several, looks at what has ended, and looks outside of a steady step.
  expect_clean(without(log, 4));
  expect_clean({note(kSteadyBegins), mm, record(1, kC), record(2, kC), query(1, false), query(2, false)});
  expect_clean({note(kSteadyBegins), mm, record(1, kC), query(1, true), query(1, true)});
  expect_clean({note(kSteadyBegins), mm, note(kSteadyEnds), record(1, kC), query(1, false), query(1, false)});
}

TEST(Steady, TheAllocatorWatchesNoStream) {
  expect_violation({allocate(1), {.kind = Logged::record_stream, .stream = kG, .block = 1}}, Rule::record_stream, 1, 1);
}

TEST(Ranks, DoTheSameInTheSameOrder) {
  const StreamLog one{{.kind = Logged::note, .call = {.communicator = "w"}},
                      group_start(),
                      collective("all_gather", kAll1, kAll2),
                      group_end(),
                      collective("all_reduce", kAll1, kAll1)};
  const auto same = collective_sequence(one);
  EXPECT_EQ(compare_collectives({same, same, same}), "");
  const auto expect_difference = [&](const StreamLog& other, const char* text) {
    EXPECT_THAT(compare_collectives({same, same, collective_sequence(other)}), HasSubstr(text));
  };
  auto other = one;
  other[2].call.count = 17;
  expect_difference(other, "collective 2 of w: rank 0 does all_gather of 16 Float, rank 2 does all_gather of 17 Float");
  other = one;
  other[2].call.dtype = "Half";
  expect_difference(other, "all_gather of 16 Half");
  other = one;
  other[4].call.op = "max";
  expect_difference(other, "rank 2 does all_reduce of 16 Float, max");
  other = one;
  other[4].call.root = 1;
  expect_difference(other, "rank 2 does all_reduce of 16 Float, root 1");
  other = one;
  other[4].name = "broadcast";
  expect_difference(other, "collective 4 of w: rank 0 does all_reduce of 16 Float, rank 2 does broadcast of 16 Float");
  expect_difference(without(one, 4), "rank 0 does all_reduce of 16 Float, rank 2 does nothing more");
  expect_difference(without(without(one, 3), 1), "rank 0 does group_start, rank 2 does all_gather");
  expect_difference({one[0]}, "rank 2 does nothing more");
  // Other communicators are others' business.
  EXPECT_EQ(compare_collectives({same, collective_sequence({collective("all_reduce", kAll1, kAll1, "Half", "v")})}),
            "");
}

TEST(Bytes, OfViewsAreThoseTheyTouch) {
  const auto text = [](const std::vector<ByteRange>& ranges) {
    std::string all;
    for (auto& range : ranges) all += "[" + std::to_string(range.begin) + "," + std::to_string(range.end) + ")";
    return all;
  };
  EXPECT_EQ(text(byte_ranges(1, 8, {3, 4}, {4, 1}, 4)), "[8,56)");
  EXPECT_EQ(text(byte_ranges(1, 8, {4, 3}, {1, 4}, 4)), "[8,56)");          // transposed
  EXPECT_EQ(text(byte_ranges(1, 0, {2, 3}, {10, 1}, 4)), "[0,12)[40,52)");  // columns of wider rows
  EXPECT_EQ(text(byte_ranges(1, 0, {2, 2, 1}, {20, 10, 1}, 1)), "[0,1)[10,11)[20,21)[30,31)");
  EXPECT_EQ(text(byte_ranges(1, 0, {5, 2}, {0, 1}, 2)), "[0,4)");  // expanded
  EXPECT_EQ(text(byte_ranges(1, 4, {}, {}, 4)), "[4,8)");
  EXPECT_EQ(text(byte_ranges(1, 4, {0, 3}, {3, 1}, 4)), "");
  EXPECT_EQ(text(byte_ranges(1, 0, {1000}, {2}, 1)), "[0,1999)");  // too many stretches
}

// ---- small programs on the device ----

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

class Recorded : public ::testing::Environment {
 public:
  void SetUp() override {
    register_private_device(PrivateStreams::recorded);
    recorded::watch_operators();
  }
};
[[maybe_unused]] const auto* const registered = ::testing::AddGlobalTestEnvironment(new Recorded);

class Program : public ::testing::Test {
 protected:
  Program() : begin_(recorded::log_size()), C(guard_.getDefaultStream(kDevice)), G(guard_.getNewStream(kDevice, -1)) {}
  ~Program() override {
    recorded::set_query_policy(nullptr);
    recorded::drop_wait(-1);
    recorded::resume();
  }

  StreamLog log() const {
    auto all = recorded::log();
    return {all.begin() + static_cast<std::ptrdiff_t>(begin_), all.end()};
  }
  void expect_order() const {
    const auto entries = log();
    EXPECT_EQ(HappensBefore(entries).report(), "") << to_string(entries, 0, entries.size());
  }
  /// One violation of this rule, between operators of these names.
  void expect_found(Rule rule, const std::string& first, const std::string& second) const {
    const auto entries = log();
    const HappensBefore check(entries);
    ASSERT_EQ(check.violations().size(), 1u) << check.report() << to_string(entries, 0, entries.size());
    const auto& found = check.violations().front();
    EXPECT_EQ(found.rule, rule) << found.text;
    EXPECT_EQ(entries[found.first].name, first) << found.text;
    EXPECT_EQ(entries[found.second].name, second) << found.text;
  }
  /// The last launch of that name.
  LogEntry launched(const std::string& name) const {
    LogEntry found;
    for (const auto& entry : log()) {
      if (entry.kind == Logged::launch && entry.name == name) found = entry;
    }
    EXPECT_EQ(found.name, name);
    return found;
  }
  int64_t host_waits() const {
    int64_t count = 0;
    for (const auto& entry : log()) {
      count += entry.kind == Logged::host_wait_stream || entry.kind == Logged::host_wait_event;
    }
    return count;
  }
  static void let_wait(const c10::Stream& waiting, const c10::Stream& first) {
    c10::Event event(kType);
    event.record(first);
    event.block(waiting);
  }
  static torch::Tensor ones(int64_t count = 4) { return torch::ones({count}, kDevice); }

  size_t begin_;
  c10::impl::VirtualGuardImpl guard_{kType};
  c10::Stream C, G;
};

TEST_F(Program, StreamsAreEachThreadsOwn) {
  EXPECT_EQ(guard_.getStream(kDevice), C);
  EXPECT_EQ(recorded::priority(G), -1);
  EXPECT_NE(G, guard_.getNewStream(kDevice));
  EXPECT_EQ(recorded::priority(guard_.getStreamFromGlobalPool(kDevice, true)), -1);
  {
    const c10::StreamGuard on(G);
    EXPECT_EQ(guard_.getStream(kDevice), G);
    EXPECT_EQ(guard_.getStream(c10::Device(kType, 1)).id(), 0);
    std::thread([&] { EXPECT_EQ(guard_.getStream(kDevice), C); }).join();
    ones();
  }
  EXPECT_EQ(guard_.getStream(kDevice), C);
  EXPECT_EQ(launched("aten::fill_").stream.id, G.id());
}

TEST_F(Program, OperatorsReadAndWriteWhatTheirSchemasSay) {
  auto x = ones(), y = ones(), out = torch::empty({4}, kDevice);
  const auto block = [](const std::vector<ByteRange>& ranges, size_t i) { return ranges.at(i).block; };
  x.add_(y);
  const auto add = launched("aten::add");
  ASSERT_EQ(add.reads.size(), 2u);
  ASSERT_EQ(add.writes.size(), 1u);
  const auto x_block = block(add.writes, 0), y_block = block(add.reads, 1);
  EXPECT_EQ(block(add.reads, 0), x_block);
  EXPECT_NE(x_block, y_block);
  at::mul_out(out, x, y);
  const auto mul = launched("aten::mul");
  EXPECT_EQ(block(mul.reads, 0), x_block);
  EXPECT_EQ(block(mul.reads, 1), y_block);
  ASSERT_EQ(mul.writes.size(), 1u);
  EXPECT_NE(block(mul.writes, 0), x_block);
  const auto cat = torch::cat({x.narrow(0, 1, 2), y});
  const auto entry = launched("aten::cat");
  ASSERT_EQ(entry.reads.size(), 2u);
  EXPECT_EQ(entry.reads[0].begin, 4u);
  EXPECT_EQ(entry.reads[0].end, 12u);
  ASSERT_EQ(entry.writes.size(), 1u);
  EXPECT_EQ(entry.writes[0].end, 24u);
  std::vector<torch::Tensor> targets{x, y}, sources{torch::zeros({4}, kDevice), torch::zeros({4}, kDevice)};
  torch::_foreach_copy_(targets, sources);
  EXPECT_EQ(block(launched("aten::copy_").writes, 0), y_block);
  EXPECT_EQ(host_waits(), 0);
  expect_order();
}

TEST_F(Program, AMissingWaitIsFound) {
  {
    const auto x = ones();
    torch::Tensor y;
    {
      const c10::StreamGuard on(G);
      y = x.neg();
      EXPECT_EQ(y.device(), kDevice);
    }
    guard_.synchronizeStream(G);
  }
  // Two ways to say it: G is not behind the fill, and not behind the memory's allocation.
  const auto entries = log();
  const HappensBefore check(entries);
  ASSERT_EQ(check.violations().size(), 1u) << check.report();
  EXPECT_EQ(check.violations()[0].rule, Rule::race);
  EXPECT_THAT(check.report(), HasSubstr("aten::fill_"));
  EXPECT_THAT(check.report(), HasSubstr("aten::neg"));
}

TEST_F(Program, WaitingMakesItRight) {
  auto x = ones();
  torch::Tensor y;
  let_wait(G, C);
  {
    const c10::StreamGuard on(G);
    y = x.neg();
  }
  let_wait(C, G);
  EXPECT_EQ((x + y).sum().item<float>(), 0);
  // Home is G: it has to wait for C before its memory goes.
  let_wait(G, C);
  y.reset();
  x.reset();
  expect_order();
}

TEST_F(Program, TheNthWaitCanBeDropped) {
  recorded::drop_wait(1);
  auto x = ones();
  let_wait(G, C);
  {
    const c10::StreamGuard on(G);
    x.neg_();
  }
  let_wait(C, G);  // dropped
  let_wait(G, C);
  x.add_(1);
  expect_found(Rule::race, "aten::neg", "aten::add");
}

TEST_F(Program, MemoryThatGoesTooEarlyIsFound) {
  auto x = ones();
  let_wait(G, C);
  {
    const c10::StreamGuard on(G);
    x.neg_();
  }
  x.reset();
  expect_found(Rule::early_release, "aten::neg", "");
}

TEST_F(Program, MemoryThatIsUsedBeforeItsAllocationIsFound) {
  auto before = ones();
  c10::Event event(kType);
  event.record(C);
  before.add_(1);
  auto x = torch::empty({4}, kDevice);
  event.block(G);
  {
    const c10::StreamGuard on(G);
    x.fill_(3);
  }
  let_wait(C, G);
  expect_found(Rule::early_use, "", "aten::fill_");
}

TEST_F(Program, ResizingMovesToAnotherBlock) {
  auto x = ones(4);
  x.resize_({100});
  const auto entry = launched("aten::resize_");
  EXPECT_NE(entry.reads.at(0).block, entry.writes.at(0).block);
  EXPECT_EQ(x[3].item<float>(), 1);
  expect_order();
}

TEST_F(Program, TheHostSeesACopyToPinnedMemoryOnlyWhenItHasEnded) {
  const auto x = ones();
  auto host = torch::empty({4}, torch::TensorOptions().pinned_memory(true));
  EXPECT_TRUE(host.is_pinned());
  EXPECT_FALSE(torch::empty({4}).is_pinned());
  host.copy_(x, /*non_blocking=*/true);
  c10::Event event(kType);
  event.record(C);
  EXPECT_NE(host.const_data_ptr<float>()[0], 1) << "garbage so far";
  EXPECT_FALSE(event.query());
  EXPECT_EQ(host_waits(), 0);
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_EQ(host_waits(), 1);
  EXPECT_EQ(host.const_data_ptr<float>()[0], 1);
  EXPECT_EQ(host.sum().item<float>(), 4);
  expect_order();
}

TEST_F(Program, AHostThatReadsTooEarlyIsFound) {
  const auto x = ones();
  auto host = torch::empty({4}, torch::TensorOptions().pinned_memory(true));
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_NE(host.sum().item<float>(), 4);
  expect_found(Rule::race, "aten::copy_", "aten::sum");
}

TEST_F(Program, AHostThatWritesTooEarlyIsFound) {
  auto host = torch::ones({4}, torch::TensorOptions().pinned_memory(true));
  const auto x = torch::empty({4}, kDevice);
  x.copy_(host, /*non_blocking=*/true);
  host.zero_();
  const auto entries = log();
  const HappensBefore check(entries);
  ASSERT_EQ(check.violations().size(), 1u) << check.report() << to_string(entries, 0, entries.size());
  EXPECT_THAT(check.report(), HasSubstr("aten::copy_"));
  EXPECT_THAT(check.report(), HasSubstr("host_access"));
}

TEST_F(Program, TheDeviceReadsFromPinnedMemoryInStreamOrder) {
  auto host = torch::empty({4}, torch::TensorOptions().pinned_memory(true));
  host.copy_(ones(), /*non_blocking=*/true);
  auto back = torch::empty({4}, kDevice);
  back.copy_(host, /*non_blocking=*/true);
  EXPECT_EQ(host_waits(), 0);
  EXPECT_EQ(back.sum().item<float>(), 4);
  expect_order();
}

TEST_F(Program, WhatMakesTheHostWaitIsLogged) {
  const auto x = ones();
  const auto expect_wait = [&](const char* what, const std::function<void()>& call) {
    const auto before = host_waits();
    call();
    EXPECT_EQ(host_waits() - before, 1) << what;
  };
  expect_wait("item", [&] { x[0].item<float>(); });
  expect_wait("cpu", [&] { x.cpu(); });
  expect_wait("equal", [&] { torch::equal(x, x); });
  expect_wait("nonzero", [&] { x.nonzero(); });
  expect_wait("to the device", [&] { torch::zeros({2}).to(kDevice); });
  expect_wait("from ordinary memory", [&] { torch::zeros({2}).to(kDevice, torch::kFloat, /*non_blocking=*/true); });
  expect_wait("converted", [&] {
    torch::zeros({2}, torch::TensorOptions(torch::kDouble).pinned_memory(true)).to(kDevice, torch::kFloat, true);
  });
  expect_wait("stream", [&] { guard_.synchronizeStream(C); });
  const auto before = host_waits();
  torch::zeros({2}, torch::TensorOptions().pinned_memory(true)).to(kDevice, torch::kFloat, /*non_blocking=*/true);
  x.add(2).mul_(x).sum().sqrt_();
  EXPECT_EQ(host_waits(), before);
}

TEST_F(Program, AQueryIsAnsweredByPolicyOnly) {
  ones();
  c10::Event event(kType);
  EXPECT_TRUE(event.query());  // never recorded
  event.record(C);
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(event.query());
  recorded::set_query_policy([](int64_t nth) { return nth >= 7; });
  EXPECT_FALSE(event.query());
  EXPECT_TRUE(event.query());
  recorded::set_query_policy(nullptr);
  EXPECT_TRUE(event.query()) << "the host knows now";
}

TEST_F(Program, AStalledStreamNeverEndsAndTheHostIsToldInsteadOfHanging) {
  ones();
  c10::Event before(kType), after(kType), behind(kType);
  before.record(G);
  recorded::stall(G);
  {
    const c10::StreamGuard on(G);
    ones();
  }
  after.record(G);
  let_wait(C, G);
  behind.record(C);
  recorded::set_query_policy([](int64_t) { return true; });
  EXPECT_TRUE(before.query());
  EXPECT_FALSE(after.query());
  EXPECT_FALSE(behind.query());
  EXPECT_TRUE(recorded::is_stalled(C));
  EXPECT_THROW(after.synchronize(), c10::Error);
  EXPECT_THROW(guard_.synchronizeStream(C), c10::Error);
  EXPECT_THROW(guard_.synchronizeDevice(0), c10::Error);
  recorded::resume();
  EXPECT_TRUE(after.query());
}

TEST_F(Program, BackwardRunsOnTheStreamsOfTheForward) {
  auto x = ones().set_requires_grad(true);
  let_wait(G, C);
  torch::Tensor loss;
  {
    const c10::StreamGuard on(G);
    loss = x.sigmoid().sum();
    loss.backward();
  }
  EXPECT_EQ(launched("aten::sigmoid_backward").stream.id, G.id());
  let_wait(C, G);
  EXPECT_EQ(x.grad().numel(), 4);
  const auto entries = log();
  EXPECT_EQ(HappensBefore(entries).report(), "") << to_string(entries, 0, entries.size());
}

TEST_F(Program, LabelsNest) {
  {
    const LogLabel outer("forward");
    const LogLabel inner("block");
    ones();
  }
  EXPECT_EQ(launched("aten::fill_").label, "block");
  ones();
  EXPECT_EQ(launched("aten::fill_").label, "");
}

}  // namespace

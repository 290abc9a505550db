// Traces of sharded training: which ranges a step has on the host and on a device whose backward has threads of its
// own, and what hsdp_train records.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/blocks.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/on_device.h"
#include "tests/testing/process.h"
#include "tests/testing/scratch_folder.h"
#include "tests/testing/train_program.h"

namespace {

namespace fs = std::filesystem;
using namespace testing_support;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Json = nlohmann::json;
using Strings = std::vector<std::string>;
using Counts = std::map<std::string, int>;

const std::string kStep = "ProfilerStep#2";

/// A named range of the host in a trace, in microseconds.
struct Range {
  std::string name, thread;
  double begin, end;

  bool holds(const Range& other) const {
    return thread == other.thread && begin <= other.begin && other.end <= end && this != &other;
  }
};

/// Those whose names have a prefix, by their begin.
std::vector<Range> ranges_of(const Json& trace, const std::string& prefix = "") {
  std::vector<Range> ranges;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.value("cat", "") != "user_annotation" || event.value("ph", "") != "X") continue;
    const std::string name = event.at("name");
    if (!name.starts_with(prefix)) continue;
    const double begin = event.at("ts"), duration = event.at("dur");
    ranges.push_back({name, event.at("tid").dump(), begin, begin + duration});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
  return ranges;
}

Json read_json(const std::string& path) { return Json::parse(read_bytes(path)); }

/// A line each, which gtest shows differences of.
std::string lines_of(const Counts& counts) {
  std::string lines;
  for (const auto& [name, count] : counts) lines += std::to_string(count) + " " + name + "\n";
  return lines;
}

Counts counts_of(const std::vector<Range>& ranges) {
  Counts counts;
  for (const auto& range : ranges) ++counts[range.name];
  return counts;
}

/// The trace of a second step: three blocks, each a unit, and a root that holds the head.
Json traced_step(RankContext& context) {
  hsdp::FullyShardOptions options;
  options.units = hsdp::each("blocks.*");
  auto net = hsdp::meta_init([] { return Blocks(3); });
  auto model = hsdp::fully_shard(net, options);
  const auto device = context.environment().device();
  model.materialize(device);
  const auto x = torch::ones({2, 5}, torch::TensorOptions(device)).set_requires_grad(true);
  const auto step = [&] {
    const auto y = model->forward(x);
    y.square().mean().backward();
  };
  step();
  const auto path = context.directory() + "/rank" + std::to_string(context.rank()) + ".json";
  hsdp::Trace trace(path);
  trace.start();
  {
    const hsdp::NamedRange range(kStep);
    step();
  }
  trace.save();
  step();
  return read_json(path);
}

/// What a step has of each range, with one rank or with several.
Counts expected_counts(bool alone) {
  Counts counts{{"FSDP::pre_forward", 1},
                {"FSDP::all_gather_copy_in", 1},
                {"FSDP::pre_backward", 1},
                {"FSDP::post_backward_reshard", 1},
                {"FSDP::post_backward_reduce", 1},
                {"FSDP::post_backward_accumulate", 1},
                {"FSDP::root_post_backward_callback", 1}};
  for (const char* block : {" (blocks.0)", " (blocks.1)", " (blocks.2)"}) {
    for (const char* once : {"pre_forward", "post_forward", "pre_backward", "post_backward_reshard",
                             "post_backward_reduce", "post_backward_accumulate"}) {
      counts[std::string("FSDP::") + once + block] = 1;
    }
    // Freed after forward, and gathered again.
    counts[std::string("FSDP::all_gather_copy_in") + block] = 2;
    if (alone) continue;
    counts[std::string("FSDP::all_gather") + block] = 2;
    counts[std::string("FSDP::all_gather_copy_out") + block] = 2;
  }
  if (alone) return counts;
  counts["FSDP::all_gather"] = counts["FSDP::all_gather_copy_out"] = 1;
  for (const char* ahead : {"blocks.1", "blocks.2", "root"})
    counts[std::string("FSDP::forward_prefetch for ") + ahead] = 1;
  for (const char* ahead : {"blocks.2", "blocks.1", "blocks.0"})
    counts[std::string("FSDP::backward_prefetch for ") + ahead] = 1;
  return counts;
}

/// Expects that each range of this name lies in one of the others.
void expect_inside(const std::vector<Range>& ranges, const std::string& inner, const Strings& outer) {
  for (const auto& range : ranges) {
    if (range.name != inner) continue;
    EXPECT_TRUE(std::any_of(ranges.begin(), ranges.end(),
                            [&](const Range& other) {
                              return std::find(outer.begin(), outer.end(), other.name) != outer.end() &&
                                     other.holds(range);
                            }))
        << inner << " is not in " << ::testing::PrintToString(outer);
  }
}

void expect_nesting(const std::vector<Range>& ranges) {
  for (const char* unit : {"blocks.0", "blocks.1", "blocks.2"}) {
    const std::string of = std::string(" (") + unit + ")", ahead = std::string("_prefetch for ") + unit;
    const Strings gathering{"FSDP::pre_forward" + of, "FSDP::pre_backward" + of, "FSDP::forward" + ahead,
                            "FSDP::backward" + ahead};
    expect_inside(ranges, "FSDP::all_gather" + of, gathering);
    expect_inside(ranges, "FSDP::all_gather_copy_in" + of, gathering);
    expect_inside(ranges, "FSDP::all_gather_copy_out" + of, {"FSDP::pre_forward" + of, "FSDP::pre_backward" + of});
  }
  expect_inside(ranges, "FSDP::forward_prefetch for blocks.1", {"FSDP::pre_forward (blocks.0)"});
  expect_inside(ranges, "FSDP::backward_prefetch for blocks.1", {"FSDP::pre_backward (blocks.2)"});
}

TEST(Trace, HoldsTheRangesOfEachUnit) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    run_ranks(ranks, [](RankContext& context) {
      const auto trace = traced_step(context);
      EXPECT_EQ(trace.at("distributedInfo"), (Json{{"backend", context.environment().backend()},
                                                   {"rank", context.rank()},
                                                   {"world_size", context.world_size()}}));
      const auto ranges = ranges_of(trace, "FSDP::");
      EXPECT_EQ(lines_of(counts_of(ranges)), lines_of(expected_counts(context.world_size() == 1)));
      expect_nesting(ranges);
      const auto steps = ranges_of(trace, kStep);
      ASSERT_EQ(steps.size(), 1u);
      for (const auto& range : ranges) EXPECT_TRUE(steps[0].holds(range)) << range.name;
    });
  }
}

TEST(Trace, HoldsWhatThreadsOfAutogradDo) {
  RunOptions run;
  run.make_environment = false;
  run_ranks(
      2,
      [](RankContext& context) {
        PrivateDeviceRegistered().SetUp();
        auto store = c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", context.world_size());
        context.set_environment(hsdp::init_from(std::move(store), context.rank(), context.world_size()));
        ASSERT_FALSE(context.environment().device().is_cpu());
        const auto trace = traced_step(context);
        const auto ranges = ranges_of(trace, "FSDP::");
        EXPECT_EQ(lines_of(counts_of(ranges)), lines_of(expected_counts(false)));
        expect_nesting(ranges);
        // Backward of a device has a thread of its own.
        const auto caller = ranges_of(trace, kStep).at(0).thread;
        for (const auto& range : ranges_of(trace, "FSDP::pre_forward")) EXPECT_EQ(range.thread, caller) << range.name;
        for (const auto& range : ranges_of(trace, "FSDP::pre_backward ("))
          EXPECT_NE(range.thread, caller) << range.name;
      },
      run);
}

// ---- hsdp_train ----

class HsdpTrainProfile : public TrainProgramTest {
 protected:
  /// Files below a folder, by their names from there.
  Strings files(const std::string& name) const {
    Strings found;
    if (!fs::exists(folder_ / name)) return found;
    for (const auto& entry : fs::recursive_directory_iterator(folder_ / name)) {
      if (entry.is_regular_file()) found.push_back(entry.path().lexically_relative(folder_ / name).string());
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  Json trace(const std::string& name) const { return read_json((folder_ / name).string()); }
};

TEST_F(HsdpTrainProfile, TracesTheStepsThatAreAskedFor) {
  const auto plain = run(2, with_settings({"metrics.folder=plain"}));
  expect_success(plain);
  EXPECT_THAT(lines_with("profile: ", plain[0].out), IsEmpty());
  const auto results =
      run(2, with_settings({"profile.trace_folder=traces", "profile.trace_first_step=2", "profile.trace_steps=3"}));
  expect_success(results);
  EXPECT_THAT(files("traces"), ElementsAre("iteration_2/rank0_trace.json", "iteration_2/rank1_trace.json"));
  EXPECT_THAT(lines_with("profile: ", results[0].out),
              ElementsAre("profile: trace up to step 4 in traces/iteration_2/rank0_trace.json"));
  EXPECT_EQ(results[1].out, "");
  // Recording changes no number.
  EXPECT_EQ(losses("run"), losses("plain"));
  for (const int rank : {0, 1}) {
    const auto json = trace("traces/iteration_2/rank" + std::to_string(rank) + "_trace.json");
    EXPECT_EQ(json.at("distributedInfo"), (Json{{"backend", "gloo"}, {"rank", rank}, {"world_size", 2}}));
    EXPECT_THAT(
        counts_of(ranges_of(json, "ProfilerStep")),
        ElementsAre(std::pair("ProfilerStep#2", 1), std::pair("ProfilerStep#3", 1), std::pair("ProfilerStep#4", 1)));
    // The root is gathered once a step, the blocks in backward as well.
    const auto gathers = counts_of(ranges_of(json, "FSDP::all_gather "));
    EXPECT_THAT(gathers, ElementsAre(std::pair("FSDP::all_gather (model.layers.0)", 6),
                                     std::pair("FSDP::all_gather (model.layers.1)", 6)));
    for (const auto& range : ranges_of(json, "FSDP::")) {
      EXPECT_TRUE(std::ranges::any_of(ranges_of(json, "ProfilerStep"), [&](const Range& step) {
        return step.holds(range);
      })) << range.name;
    }
    EXPECT_EQ(json.dump().find("Input Dims"), std::string::npos);
    EXPECT_EQ(json.dump().find("[memory]"), std::string::npos);
  }
}

TEST_F(HsdpTrainProfile, TracesOnTheRanksAndWithTheDetailsThatAreAskedFor) {
  const auto results =
      run(2, with_settings({"profile.trace_folder=traces", "profile.trace_first_step=1", "profile.trace_ranks=[1]",
                            "profile.record_shapes=true", "profile.profile_memory=true"}));
  expect_success(results);
  EXPECT_THAT(files("traces"), ElementsAre("iteration_1/rank1_trace.json"));
  const auto text = read_text(folder_ / "traces/iteration_1/rank1_trace.json");
  EXPECT_THAT(text, HasSubstr("Input Dims"));
  EXPECT_THAT(text, HasSubstr("[memory]"));
  EXPECT_EQ(ranges_of(Json::parse(text), "ProfilerStep").size(), 1u);
}

TEST_F(HsdpTrainProfile, SaysWhenTheStepsWereTrainedBefore) {
  expect_success(run(1, with_settings({"checkpoint.folder=kept", "checkpoint.every=0", "training.steps=4"})));
  const auto settings = Strings{"checkpoint.folder=kept", "profile.trace_folder=traces", "profile.trace_first_step=4",
                                "profile.trace_steps=2"};
  const auto resumed = run(1, with_settings(settings));
  expect_success(resumed);
  EXPECT_THAT(lines_with("profile: ", resumed[0].out),
              ElementsAre("profile: trace up to step 5 in traces/iteration_4/rank0_trace.json",
                          "profile: steps 4 to 5 were not all trained here"));
  EXPECT_EQ(ranges_of(trace("traces/iteration_4/rank0_trace.json"), "ProfilerStep").size(), 1u);
}

TEST_F(HsdpTrainProfile, GoesOnWhereTheDiskIsFull) {
  auto options = program(with_settings({"profile.trace_folder=traces", "profile.trace_first_step=2"}));
  options.command.insert(options.command.begin(), {"bash", "-c", "trap '' XFSZ; ulimit -f 16; exec \"$@\"", "bash"});
  const auto result = run_process(options);
  EXPECT_EQ(result.exit_code, 0) << to_string(result);
  EXPECT_THAT(result.err, HasSubstr("[trace] traces/iteration_2/rank0_trace.json cannot be written"));
  EXPECT_THAT(result.err, HasSubstr("; training goes on\n"));
  EXPECT_EQ(losses("run").size(), 6u);
  EXPECT_THAT(files("traces"), IsEmpty());
}

TEST_F(HsdpTrainProfile, RefusesWhatCannotBeRecordedBeforeItTrains) {
  write_text(folder_ / "file", "text");
  const auto expect_refusal = [&](int ranks, const Strings& settings, const std::string& message) {
    const auto results = run(ranks, with_settings(settings));
    for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << to_string(result);
    EXPECT_EQ(count_of(message, all_output(results)), 1) << all_output(results);
    EXPECT_FALSE(fs::exists(folder_ / "run")) << message;
  };
  expect_refusal(2, {"profile.trace_folder=traces", "profile.trace_ranks=[0, 2]"},
                 "[profile] trace_ranks has 2, expected ranks below 2, the number that was launched");
  expect_refusal(1, {"profile.trace_folder=file"}, "[trace] file/iteration_3 cannot be made: Not a directory");
  expect_refusal(1, {"profile.memory_snapshot_folder=memory"},
                 "[memory snapshot] of cpu, expected a device whose allocator keeps a history");
}

}  // namespace

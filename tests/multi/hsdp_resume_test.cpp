// The training program stopped and started again: by the same command, a signal or a kill, on other ranks, from named
// checkpoints and weights. What it then computes is compared with a run that never stopped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "apps/checkpoint_report.h"
#include "tests/testing/process.h"
#include "tests/testing/train_program.h"

namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace testing_support;

using Settings = std::vector<std::string>;

Settings operator+(Settings settings, const Settings& more) {
  settings.insert(settings.end(), more.begin(), more.end());
  return settings;
}

class HsdpResume : public TrainProgramTest {
 protected:
  /// Settings of a run that writes metrics and checkpoints below the folder `name`.
  static Settings into(const std::string& name, const Settings& more = {}) {
    return Settings{"metrics.folder=" + name, "checkpoint.folder=" + name + "/kept"} + more;
  }

  std::vector<ProcessResult> train(int count, const Settings& settings) {
    const auto results = run(count, with_settings(settings));
    expect_success(results);
    return results;
  }

  /// What hsdp_checkpoint says of two checkpoints below the folder: the empty text if they are equal.
  std::string diff(const std::string& a, const std::string& b) const {
    std::ostringstream out;
    return apps::diff((folder_ / a).string(), (folder_ / b).string(), out) ? "" : out.str();
  }

  std::set<std::string> names_in(const std::string& name) const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_ / name)) {
      if (entry.path().filename() != ".lock") names.insert(entry.path().filename().string());
    }
    return names;
  }

  /// A run's metrics from a step on, without times and memory, and without the collectives, because the first step of a
  /// process compares replicas as well.
  std::vector<nlohmann::json> numbers(const std::string& run, int after = 0) const {
    std::vector<nlohmann::json> all;
    for (auto line : metrics(run)) {
      for (const char* key : {"seconds", "tokens_per_second", "peak_memory_bytes", "collectives"}) line.erase(key);
      if (line.at("step") > after) all.push_back(std::move(line));
    }
    return all;
  }

  /// Starts ranks that train without end, and returns once a few steps are done.
  std::vector<Process> start_endless(int count, const Settings& settings) {
    std::vector<Process> started;
    for (const auto& options :
         ranks(count, [&](int) { return with_settings(settings + Settings{"training.steps=1000000"}); })) {
      started.emplace_back(options);
    }
    wait_for("step ", 3, started[0]);
    return started;
  }

  static void wait_for(const std::string& text, int times, const Process& process) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(240);
    while (count_of(text, process.out()) < times) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("not said: " + process.out());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  static std::vector<ProcessResult> wait(std::vector<Process>& processes) {
    std::vector<ProcessResult> results;
    for (auto& process : processes) results.push_back(process.wait());
    return results;
  }
};

/// The number after "stopped by a signal after step ".
int stopped_after(const ProcessResult& result) {
  const std::string words = "checkpoint: stopped by a signal after step ";
  const auto at = result.out.find(words);
  if (at == std::string::npos) throw std::runtime_error("not stopped: " + to_string(result));
  return std::stoi(result.out.substr(at + words.size()));
}

// ---- the same command again ----

struct Mode {
  std::string name;
  int ranks;
  Settings settings;
};

std::ostream& operator<<(std::ostream& out, const Mode& mode) { return out << mode.name; }

class HsdpResumeMode : public HsdpResume, public ::testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(
    All, HsdpResumeMode,
    ::testing::Values(
        Mode{"AdamW", 2, {}}, Mode{"FusedAdamW", 2, {"optimizer.name=fused_adamw"}},
        Mode{"Groups", 2, {R"(optimizer.no_decay=["**norm**"])", "optimizer.weight_decay=1"}},
        Mode{"Bfloat16", 2, {"mixed_precision.param_dtype=bfloat16", "mixed_precision.reduce_dtype=float32"}},
        // The scale falls at first, and rises in the step after the resumed one.
        Mode{"HalfWithAGradientScaler",
             2,
             {"mixed_precision.param_dtype=float16", "grad_scaler.scale=5e5", "grad_scaler.growth_interval=2"}},
        Mode{"Hybrid", 4, {"parallelism.replicate=2", "training.global_batch_size=8"}},
        Mode{"Async", 2, {"checkpoint.async=true"}}),
    [](const auto& which) { return which.param.name; });
INSTANTIATE_TEST_SUITE_P(
    Nightly, HsdpResumeMode,
    ::testing::Values(Mode{"Alone", 1, {}},
                      Mode{"SgdWithMomentum", 2, {"optimizer.name=sgd", "optimizer.momentum=0.9"}},
                      Mode{"FusedSgdWithMomentum", 2, {"optimizer.name=fused_sgd", "optimizer.momentum=0.9"}},
                      Mode{"SgdWithoutState", 2, {"optimizer.name=sgd"}},
                      Mode{"Accumulation", 2, {"training.gradient_accumulation=3"}},
                      Mode{"Tied", 2, {"model.tie_embeddings=true"}},
                      Mode{"ActivationCheckpoint", 2, {"training.activation_checkpoint=full"}},
                      Mode{"Offload", 2, {"offload.to_host=true"}}),
    [](const auto& which) { return which.param.name; });

TEST_P(HsdpResumeMode, GoesOnAsIfItHadNotStopped) {
  const Mode& mode = GetParam();
  const auto settings = into("run", mode.settings + Settings{"training.steps=7", "checkpoint.every=3",
                                                             "lr_schedule.warmup_steps=2", "training.sample_bytes=8"});
  const auto first = train(mode.ranks, settings);
  EXPECT_EQ(names_in("run/kept"), (std::set<std::string>{"step-3", "step-6", "step-7"}));
  EXPECT_EQ(lines_with("checkpoint: saved run/kept/step-", first[0].out).size(), 3u) << first[0].out;
  const auto expected = numbers("run");
  ASSERT_EQ(expected.size(), 7u);
  EXPECT_NE(diff("run/kept/step-6", "run/kept/step-7"), "");

  // As a kill after step 3 would have left it.
  fs::rename(folder_ / "run/kept/step-7", folder_ / "expected");
  fs::remove_all(folder_ / "run/kept/step-6");
  const auto second = train(mode.ranks, settings);
  EXPECT_EQ(lines_with("checkpoint: resumed", second[0].out),
            std::vector<std::string>{"checkpoint: resumed at step 3 from run/kept/step-3"});
  EXPECT_EQ(lines_with("step ", second[0].out).size(), 4u) << second[0].out;
  EXPECT_THAT(second[0].out, HasSubstr("run folder: run, after 3 lines of metrics\n"));
  EXPECT_EQ(numbers("run"), expected);
  EXPECT_EQ(diff("run/kept/step-7", "expected"), "");
  const auto sample = [](const ProcessResult& result) { return result.out.substr(result.out.find("sample:\n")); };
  EXPECT_EQ(sample(second[0]), sample(first[0]));
  double seconds = 0.0;
  for (const auto& line : metrics("run")) {
    EXPECT_GT(line.at("seconds").get<double>(), seconds) << line;
    EXPECT_GT(line.at("tokens_per_second").get<double>(), 0.0) << line;
    seconds = line.at("seconds");
  }
}

TEST_F(HsdpResume, SavingChangesNoNumber) {
  train(2, {"metrics.folder=plain"});
  train(2, into("kept", {"checkpoint.every=1"}));
  train(2, into("async", {"checkpoint.every=1", "checkpoint.async=true"}));
  ASSERT_EQ(numbers("plain").size(), 6u);
  EXPECT_EQ(numbers("kept"), numbers("plain"));
  EXPECT_EQ(numbers("async"), numbers("plain"));
  for (const char* step : {"step-1", "step-6"}) {
    EXPECT_EQ(diff("kept/kept/" + std::string(step), "async/kept/" + std::string(step)), "");
  }
}

TEST_F(HsdpResume, ARunThatIsDoneOnlySamplesAgain) {
  const auto settings = into("run", {"training.sample_bytes=8"});
  const auto first = train(2, settings);
  const auto lines = read_text(folder_ / "run/metrics.jsonl");
  const auto second = train(2, settings);
  EXPECT_THAT(second[0].out, AllOf(HasSubstr("checkpoint: resumed at step 6 from run/kept/step-6\n"),
                                   HasSubstr("training: nothing to do, training.steps is 6 and step 6 is done\n"),
                                   HasSubstr(first[0].out.substr(first[0].out.find("sample:\n"))),
                                   Not(HasSubstr("checkpoint: saved"))));
  EXPECT_EQ(read_text(folder_ / "run/metrics.jsonl"), lines);
  // More steps are added to it; with a constant rate they are those of a longer run.
  train(2, into("long", {"training.steps=8", "lr_schedule.decay=constant"}));
  train(2, into("short", {"lr_schedule.decay=constant"}));
  train(2, into("short", {"training.steps=8", "lr_schedule.decay=constant"}));
  EXPECT_EQ(numbers("short"), numbers("long"));
  EXPECT_EQ(diff("short/kept/step-8", "long/kept/step-8"), "");
}

// What a former run has logged every ten steps ends before the step that was saved last.
TEST_F(HsdpResume, StepsThatAreNotLoggedCountAsWell) {
  const Settings more = {"training.steps=9", "metrics.log_every=4", "checkpoint.every=6", "lr_schedule.decay=constant"};
  train(2, into("run", more));
  const auto expected = numbers("run");
  ASSERT_EQ(expected.size(), 4u);  // steps 1, 4, 8 and 9
  fs::remove_all(folder_ / "run/kept/step-9");
  const auto again = train(2, into("run", more));
  EXPECT_THAT(again[0].out, HasSubstr("resumed at step 6"));
  EXPECT_EQ(numbers("run"), expected);
}

// ---- other ranks ----

TEST_F(HsdpResume, OnOtherRanksTheSameBatchesFollow) {
  const Settings more = {"training.global_batch_size=12", "checkpoint.every=3"};
  train(2, into("run", more));
  const auto expected = numbers("run", 3);
  ASSERT_EQ(expected.size(), 3u);
  for (const auto& [ranks, name, others] : {std::tuple{1, "one", Settings{}}, std::tuple{3, "three", Settings{}},
                                            std::tuple{4, "hybrid", Settings{"parallelism.replicate=2"}}}) {
    SCOPED_TRACE(name);
    const auto results = train(ranks, into(name, more + Settings{"checkpoint.load=run/kept/step-3"} + others));
    EXPECT_THAT(results[0].out,
                HasSubstr("resumed at step 3 from run/kept/step-3, which another number of ranks wrote\n"));
    const auto found = numbers(name);
    ASSERT_EQ(found.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      const double loss = expected[i].at("loss");
      EXPECT_NEAR(found[i].at("loss"), loss, 1e-5 * loss) << "step " << i + 4;
      EXPECT_EQ(found[i].at("step"), expected[i].at("step"));
      EXPECT_EQ(found[i].at("tokens"), expected[i].at("tokens"));
      EXPECT_EQ(found[i].at("lr"), expected[i].at("lr"));
    }
  }
}

// ---- signals and kills ----

struct Stop {
  std::string name;
  int signal;
  Settings settings;
};

std::ostream& operator<<(std::ostream& out, const Stop& stop) { return out << stop.name; }

class HsdpResumeStop : public HsdpResume, public ::testing::WithParamInterface<Stop> {};
INSTANTIATE_TEST_SUITE_P(All, HsdpResumeStop,
                         ::testing::Values(Stop{"Usr1", SIGUSR1, {"checkpoint.every=0"}},
                                           Stop{"TermAsync", SIGTERM, {"checkpoint.every=2", "checkpoint.async=true"}}),
                         [](const auto& which) { return which.param.name; });
INSTANTIATE_TEST_SUITE_P(Nightly, HsdpResumeStop, ::testing::Values(Stop{"Term", SIGTERM, {"checkpoint.every=2"}}),
                         [](const auto& which) { return which.param.name; });

TEST_P(HsdpResumeStop, ASignalToOneRankSavesAndEndsAll) {
  const Settings more = GetParam().settings + Settings{"lr_schedule.decay=constant", "optimizer.lr=0.001"};
  auto started = start_endless(2, into("run", more + Settings{"training.sample_bytes=8"}));
  for (int i = 0; i < 20; ++i) started[1].signal(GetParam().signal);
  const auto results = wait(started);
  expect_success(results);
  const int step = stopped_after(results[0]);
  const auto kept = "run/kept/step-" + std::to_string(step);
  EXPECT_EQ(lines_with("checkpoint: saved " + kept, results[0].out).size(), 1u) << results[0].out;
  EXPECT_THAT(results[0].out, Not(HasSubstr("sample:")));
  EXPECT_EQ(int(metrics("run").size()), step);

  const auto steps = "training.steps=" + std::to_string(step + 3);
  const auto again = train(2, into("run", more + Settings{steps}));
  EXPECT_THAT(again[0].out, HasSubstr("checkpoint: resumed at step " + std::to_string(step) + " from " + kept + "\n"));
  train(2, into("whole", more + Settings{steps}));
  EXPECT_EQ(numbers("run"), numbers("whole"));
  const auto last = "/kept/step-" + std::to_string(step + 3);
  EXPECT_EQ(diff("run" + last, "whole" + last), "");
}

/// Whether a process has a handler for SIGTERM.
bool handles_sigterm(pid_t process) {
  std::ifstream status("/proc/" + std::to_string(process) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigCgt:")) return (std::stoull(line.substr(7), nullptr, 16) >> (SIGTERM - 1)) & 1;
  }
  return false;
}

TEST_F(HsdpResume, ASignalBeforeTheFirstStepTrainsNone) {
  // Rank 0 waits for rank 1, which starts after the signal.
  const auto stop_early = [&] {
    const auto patient = into("run", Settings{"comm.timeout_seconds=200"});
    const auto options = ranks(2, [&](int) { return with_settings(patient); });
    std::vector<Process> started;
    started.emplace_back(options[0]);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(240);
    while (!handles_sigterm(started[0].id())) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("no handler");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (int i = 0; i < 5; ++i) started[0].signal(SIGTERM);
    started.emplace_back(options[1]);
    const auto results = wait(started);
    expect_success(results);
    return results;
  };
  const auto first = stop_early();
  EXPECT_EQ(stopped_after(first[0]), 0);
  EXPECT_EQ(lines_with("step ", first[0].out).size(), 0u);
  EXPECT_EQ(lines_with("checkpoint: saved run/kept/step-0", first[0].out).size(), 1u);
  EXPECT_EQ(names_in("run/kept"), std::set<std::string>{"step-0"});
  // That step is there already.
  const auto second = stop_early();
  EXPECT_EQ(stopped_after(second[0]), 0);
  EXPECT_THAT(second[0].out, AllOf(HasSubstr("checkpoint: resumed at step 0"), Not(HasSubstr("checkpoint: saved"))));

  train(2, into("run"));
  train(2, into("whole"));
  EXPECT_EQ(numbers("run"), numbers("whole"));
  EXPECT_EQ(diff("run/kept/step-6", "whole/kept/step-6"), "");
}

TEST_F(HsdpResume, WithoutAFolderASignalEndsAtOnce) {
  auto started = start_endless(1, {});
  started[0].signal(SIGTERM);
  EXPECT_EQ(started[0].wait().signal, SIGTERM);
}

TEST_F(HsdpResume, AKilledRunGoesOnFromItsNewestCheckpoint) {
  for (const char* async : {"false", "true"}) {
    SCOPED_TRACE(async);
    const std::string name = std::string("async_") + async;
    const Settings more = {"training.steps=60", "checkpoint.every=10", "checkpoint.keep_latest=3",
                           std::string("checkpoint.async=") + async};
    std::vector<Process> started;
    for (const auto& options : ranks(2, [&](int) { return with_settings(into(name, more)); })) {
      started.emplace_back(options);
    }
    wait_for("checkpoint: saved", 2, started[0]);
    for (auto& process : started) process.signal(SIGKILL);
    wait(started);
    const auto again = train(2, into(name, more));
    EXPECT_EQ(lines_with("checkpoint: resumed at step ", again[0].out).size(), 1u) << again[0].out;
    EXPECT_EQ(names_in(name + "/kept"), (std::set<std::string>{"step-40", "step-50", "step-60"}));
    if (name == "async_false") train(2, into("whole", more));
    EXPECT_EQ(numbers(name), numbers("whole"));
    EXPECT_EQ(diff(name + "/kept", "whole/kept"), "");
  }
}

// The step after the one that is being written in the background is refused.
TEST_F(HsdpResume, ALossThatIsNotFiniteLosesNoCheckpoint) {
  const auto results =
      run(2, with_settings(into("run", {"optimizer.lr=1e30", "checkpoint.every=1", "checkpoint.async=true"})));
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << describe(results);
  EXPECT_EQ(count_of("[training] step 2: loss is ", all_output(results)), 1) << describe(results);
  EXPECT_EQ(names_in("run/kept"), std::set<std::string>{"step-1"});
  std::ostringstream out;
  EXPECT_NO_THROW(apps::verify((folder_ / "run/kept/step-1").string(), out));
}

TEST_F(HsdpResume, TwoRunsDoNotShareAFolder) {
  auto started = start_endless(1, into("run"));
  const auto second = run(2, with_settings({"metrics.folder=other", "checkpoint.folder=run/kept"}));
  for (const auto& result : second) EXPECT_EQ(result.exit_code, 2) << describe(second);
  EXPECT_THAT(second[0].err, AllOf(HasSubstr("run/kept"), HasSubstr(std::to_string(started[0].id()))));
  EXPECT_EQ(count_of("run/kept", all_output(second)), 1) << describe(second);
  EXPECT_FALSE(fs::exists(folder_ / "other"));
  started[0].signal(SIGTERM);
  expect_success({started[0].wait()});
}

// ---- what to go on from ----

TEST_F(HsdpResume, NoneWantsAFolderWithoutCheckpoints) {
  const auto settings = into("run", {"checkpoint.load=none", "checkpoint.every=4"});
  EXPECT_THAT(train(2, settings)[0].out, Not(HasSubstr("resumed")));
  const auto lines = read_text(folder_ / "run/metrics.jsonl");
  const auto results = run(2, with_settings(settings));
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << describe(results);
  EXPECT_EQ(count_of("[checkpoint] load is none and run/kept holds step-4, step-6, expected a folder without "
                     "checkpoints, since new ones would replace them; set checkpoint.load to auto to go on from "
                     "step-6, or another checkpoint.folder\n",
                     all_output(results)),
            1)
      << describe(results);
  EXPECT_EQ(read_text(folder_ / "run/metrics.jsonl"), lines);
  EXPECT_EQ(names_in("run/kept"), (std::set<std::string>{"step-4", "step-6"}));
}

TEST_F(HsdpResume, ANamedStepSetsLaterOnesAside) {
  train(2, into("run", {"checkpoint.every=2"}));
  const auto expected = numbers("run");
  const auto again = train(2, into("run", {"checkpoint.every=2", "checkpoint.load=step-2"}));
  EXPECT_THAT(again[0].out, AllOf(HasSubstr("checkpoint: resumed at step 2 from run/kept/step-2\n"),
                                  HasSubstr("checkpoint: moved step-4, step-6 to run/kept/after-step-2\n")));
  EXPECT_EQ(names_in("run/kept"), (std::set<std::string>{"after-step-2", "step-2", "step-4", "step-6"}));
  EXPECT_EQ(names_in("run/kept/after-step-2"), (std::set<std::string>{"step-4", "step-6"}));
  EXPECT_EQ(diff("run/kept/step-6", "run/kept/after-step-2/step-6"), "");
  EXPECT_EQ(numbers("run"), expected);
  // The same by its path, however that is spelled; what was set aside before stays.
  const auto by_path = train(2, into("run", {"checkpoint.load=./run//kept/step-2"}));
  EXPECT_THAT(by_path[0].out, HasSubstr("moved step-4, step-6 to run/kept/after-step-2-2\n"));
  EXPECT_EQ(names_in("run/kept/after-step-2"), (std::set<std::string>{"step-4", "step-6"}));

  const auto missing = run(2, with_settings(into("run", {"checkpoint.load=step-5"})));
  for (const auto& result : missing) EXPECT_EQ(result.exit_code, 2) << describe(missing);
  EXPECT_EQ(
      count_of("[checkpoint] run/kept has no complete step-5, expected one of step-2, step-6\n", all_output(missing)),
      1)
      << describe(missing);
  EXPECT_EQ(numbers("run"), expected);
}

TEST_F(HsdpResume, APathIsForAFolderWithoutCheckpoints) {
  train(2, into("from", {"training.steps=4", "lr_schedule.decay=constant"}));
  train(2, into("whole", {"lr_schedule.decay=constant"}));
  for (const char* path : {"from/kept", "from/kept/step-4"}) {
    const auto settings = into("to", {"lr_schedule.decay=constant", std::string("checkpoint.load=") + path});
    EXPECT_THAT(train(2, settings)[0].out, HasSubstr("checkpoint: resumed at step 4 from from/kept/step-4\n"));
    EXPECT_EQ(diff("to/kept", "whole/kept"), "");
    EXPECT_EQ(numbers("to", 4), numbers("whole", 4));
    // The same command again goes on with its own.
    EXPECT_THAT(train(2, settings)[0].out, HasSubstr("checkpoint: resumed at step 6 from to/kept/step-6\n"));
    fs::remove_all(folder_ / "to");
  }
  // Without a folder nothing is saved.
  const auto unsaved = train(2, {"lr_schedule.decay=constant", "checkpoint.load=from/kept/step-4"});
  EXPECT_EQ(numbers("run"), numbers("whole", 4));
  EXPECT_THAT(unsaved[0].out, Not(HasSubstr("saved")));
  EXPECT_EQ(names_in("from/kept"), std::set<std::string>{"step-4"});
}

TEST_F(HsdpResume, OtherDataAreRefused) {
  train(1, into("run"));
  write_text(folder_ / "longer.bin", read_text(folder_ / "text.bin") + "and slept.");
  struct Other {
    Settings settings;
    std::string expected;
  };
  for (const auto& [settings, expected] :
       {Other{{"training.seed=2"}, "training.seed 1 there and 2 here"},
        Other{{"data.path=longer.bin"}, "data.tokens 9600 there and 9610 here"},
        Other{{"training.global_batch_size=4", "training.sequence_length=16"},
              "training.global_batch_size 6 there and 4 here, training.sequence_length 32 there and 16 here"},
        Other{{"data.format=uint16"},
              "data.format bytes there and uint16 here, data.tokens 9600 there and 4800 here"}}) {
    const auto results = run(2, with_settings(into("run", settings)));
    for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << describe(results);
    EXPECT_EQ(count_of("[checkpoint] run/kept/step-6 was trained on other data or in another order: " + expected +
                           ", expected the same; to begin anew with its weights, set checkpoint.weights to it and "
                           "checkpoint.folder to a folder without checkpoints\n",
                       all_output(results)),
              1)
        << describe(results);
  }
  EXPECT_EQ(metrics("run").size(), 6u);
}

TEST_F(HsdpResume, WhatCannotBeLoadedIsToldOnceAndChangesNothing) {
  train(1, into("run"));
  for (const char* name : {"cut", "renamed"}) fs::create_directory(folder_ / name);
  fs::copy(folder_ / "run/kept/step-6", folder_ / "cut/step-6", fs::copy_options::recursive);
  fs::remove(folder_ / "cut/step-6/manifest.json");
  fs::copy(folder_ / "run/kept/step-6", folder_ / "renamed/step-9", fs::copy_options::recursive);
  const auto lines = read_text(folder_ / "run/metrics.jsonl");
  struct Bad {
    Settings settings;
    std::vector<std::string> expected;
  };
  for (const auto& [settings, expected] :
       {Bad{{"checkpoint.folder=none", "checkpoint.load=cut/step-6"}, {"cut/step-6", "manifest.json"}},
        Bad{{"checkpoint.folder=none", "checkpoint.load=absent"}, {"absent"}},
        Bad{{"checkpoint.folder=none", "checkpoint.load=text.bin"}, {"text.bin"}},
        Bad{{"checkpoint.folder=renamed"}, {"renamed/step-9 is of step 6, expected step-6 as its name"}},
        Bad{{"checkpoint.folder=text.bin"}, {"text.bin is a file"}},
        Bad{{"checkpoint.folder=new", "checkpoint.weights=absent.pt"}, {"absent.pt"}},
        Bad{{"model.hidden_size=32"}, {"run/kept/step-6", "expected"}},
        Bad{{"optimizer.name=sgd"}, {"AdamW", "SGD"}}}) {
    SCOPED_TRACE(c10::Join(" ", settings));
    const auto results = run(2, with_settings(into("run", settings)));
    for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << describe(results);
    for (const auto& part : expected) EXPECT_THAT(results[0].err, HasSubstr(part));
    EXPECT_EQ(results[1].err, "") << describe(results);
    EXPECT_EQ(count_of("frame #", all_output(results)), 0) << describe(results);
    EXPECT_EQ(read_text(folder_ / "run/metrics.jsonl"), lines);
  }
  EXPECT_EQ(names_in("run/kept"), std::set<std::string>{"step-6"});
}

TEST_F(HsdpResume, WeightsBeginARunThatHasNoCheckpoint) {
  train(2, into("from"));
  std::ostringstream out;
  apps::consolidate((folder_ / "from/kept").string(), (folder_ / "whole").string(), {}, out);
  const double fresh = losses("from").front();
  for (const std::string weights : {"whole", "whole/model.safetensors", "from/kept/step-6"}) {
    SCOPED_TRACE(weights);
    fs::remove_all(folder_ / "to");
    const auto settings = into("to", {"training.seed=2", "checkpoint.weights=" + weights});
    const auto results = train(2, settings);
    EXPECT_THAT(results[0].out,
                AllOf(HasSubstr("checkpoint: began with the weights in " + weights + "\n"), Not(HasSubstr("resumed"))));
    EXPECT_EQ(losses("to").size(), 6u);
    EXPECT_LT(losses("to").front(), 0.99 * fresh);
    // It has a checkpoint now.
    EXPECT_THAT(train(2, settings)[0].out, AllOf(HasSubstr("resumed at step 6"), Not(HasSubstr("began"))));
  }
}

TEST_F(HsdpResume, TheLatestAndEveryFewAreKept) {
  train(2,
        into("run", {"training.steps=9", "checkpoint.every=1", "checkpoint.keep_latest=2", "checkpoint.keep_every=3"}));
  EXPECT_EQ(names_in("run/kept"), (std::set<std::string>{"step-3", "step-6", "step-8", "step-9"}));
}

}  // namespace

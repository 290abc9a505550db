// The training program as a user starts it: alone, on several ranks, under torchrun, and with mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/process.h"
#include "tests/testing/train_program.h"

namespace hsdp_train_test {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using namespace testing_support;

/// What rank 0 says on stderr once the two ranks have met.
const std::string kMet = "hsdp: 2 ranks from torchrun, gloo, cpu\n";

class HsdpTrain : public TrainProgramTest {};

TEST_F(HsdpTrain, TrainsAloneAndOnSeveralRanksAlike) {
  const int steps = 30;
  std::vector<nlohmann::json> alone;
  for (const int count : {1, 2, 3}) {
    SCOPED_TRACE(std::to_string(count) + " ranks");
    const std::string name = "run" + std::to_string(count);
    const Arguments arguments = {"--config",          "config.yaml", "--set",
                                 "training.steps=30", "--set",       "metrics.folder=" + name};
    const auto results = count == 1 ? std::vector{run_process(program(arguments))} : run(count, arguments);
    expect_success(results);
    const auto objects = metrics(name);
    ASSERT_EQ(int(objects.size()), steps) << describe(results);
    for (int i = 0; i < steps; ++i) {
      EXPECT_EQ(objects[i].at("step"), i + 1);
      for (const char* key : {"loss", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes"}) {
        ASSERT_TRUE(objects[i].at(key).is_number()) << key;
        EXPECT_GT(objects[i].at(key).get<double>(), 0) << key;
      }
      EXPECT_TRUE(objects[i].at("peak_memory_bytes").is_number_integer());
      EXPECT_EQ(objects[i].at("tokens"), (i + 1) * 6 * 32);
      EXPECT_EQ(objects[i].at("ranks"), count);
    }
    // A text of a few words, repeated.
    EXPECT_NEAR(objects.front().at("loss"), std::log(256.0), 0.1);
    EXPECT_LT(objects.back().at("loss"), 3.5);

    EXPECT_EQ(int(lines_with("step ", results[0].out).size()), steps) << results[0].out;
    EXPECT_EQ(lines_with("model: ", results[0].out),
              std::vector<std::string>{"model: 13392 parameters on mesh(cpu, shard=" + std::to_string(count) + ")"});
    EXPECT_EQ(lines_with("sample", results[0].out).size(), 0u);
    EXPECT_EQ(results[0].err, count == 1 ? "hsdp: 1 rank, alone, cpu\n"
                                         : "hsdp: " + std::to_string(count) + " ranks from torchrun, gloo, cpu\n");
    for (int rank = 1; rank < count; ++rank) EXPECT_EQ(results[rank].out + results[rank].err, "") << "rank " << rank;

    if (count == 1) alone = objects;
    for (int i = 0; i < 5; ++i) {
      const double loss = alone[i].at("loss"), norm = alone[i].at("grad_norm");
      EXPECT_NEAR(objects[i].at("loss"), loss, 1e-5 * loss) << "step " << i + 1;
      EXPECT_NEAR(objects[i].at("grad_norm"), norm, 1e-4 * norm) << "step " << i + 1;
      EXPECT_EQ(objects[i].at("lr"), alone[i].at("lr"));
    }
  }
}

TEST_F(HsdpTrain, MetricsHoldTheCollectivesOfTheirStepAlone) {
  // Parameters of the root (embedding, head, norm), which is gathered once a step, and of the blocks, gathered twice.
  const int root = 2 * 256 * 16 + 16, blocks = 13392 - root;
  const int signatures = 2 * 4 * 8;  // of two ranks, beside each gather
  const nlohmann::json sharded = {{"all_gathers", 1 + 2 * 2},
                                  {"reduce_scatters", 3},
                                  {"all_reduces", 1},  // of the norm
                                  {"broadcasts", 0},
                                  {"all_gather_bytes", 4 * (root + 2 * blocks) + 5 * signatures},
                                  {"reduce_scatter_bytes", 4 * 13392},
                                  {"all_reduce_bytes", 84}};
  nlohmann::json alone;
  for (const auto& [key, value] : sharded.items()) alone[key] = 0;
  for (const auto& [count, expected] : {std::pair{1, alone}, {2, sharded}}) {
    // Saving and steps that are not logged leave no trace.
    expect_success(run(count, with_settings({"metrics.log_every=2", "checkpoint.folder=kept" + std::to_string(count),
                                             "checkpoint.every=1"})));
    const auto objects = metrics("run");
    ASSERT_EQ(objects.size(), 4u);
    for (const auto& object : objects) EXPECT_EQ(object.at("collectives"), expected) << object.at("step");
  }
}

TEST_F(HsdpTrain, MemoryIsCountedInTensorsWhereItIsWished) {
  const auto peaks_of = [&](const std::string& count) {
    expect_success(
        run(2, with_settings({"metrics.count_memory=" + count, "training.sequence_length=16", "training.steps=24"})));
    std::vector<int64_t> peaks;
    for (const auto& object : metrics("run")) peaks.push_back(object.at("peak_memory_bytes"));
    return peaks;
  };
  const auto counted = peaks_of("true"), resident = peaks_of("false");
  const int64_t shards = 13392 / 2 * 4;
  for (const auto peak : counted) {
    EXPECT_GT(peak, 4 * shards) << "weights, gradients and two moments";
    EXPECT_LT(peak, 60 * shards);
  }
  // A buffer that the group's own thread still holds is a tenth.
  EXPECT_LT(double(counted.back()), 1.5 * double(counted[2])) << "what a step needs does not add up";
  EXPECT_GT(resident.front(), 20 * counted.front()) << "a process is more than its tensors";
}

TEST_F(HsdpTrain, TellsTheVersionsOfWhatItIsMadeOf) {
  const auto result = run_process(program({"--version"}));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, ::testing::MatchesRegex("hsdp 0\\.1\\.0\ntorch 2\\.11\\.[0-9]+\ngloo yes\n"
                                                  "nccl (none|[0-9]+\\.[0-9.]+)\ncuda (none|[0-9]+\\.[0-9]+)\n"));
}

TEST_F(HsdpTrain, ResolvedConfigurationRunsAgainToTheSameLosses) {
  const auto first = run(2, {"--config", "config.yaml", "--set", "optimizer.lr=0.02", "--set", "training.seed=5",
                             "--set", "metrics.folder=first"});
  expect_success(first);
  const std::string config = (folder_ / "first" / "config.yaml").string();
  const auto again = run(2, {"--config", config, "--set", "metrics.folder=again"});
  expect_success(again);
  ASSERT_EQ(losses("first").size(), 6u);
  EXPECT_EQ(losses("again"), losses("first"));
  EXPECT_EQ(read_text(folder_ / "again" / "config.yaml"),
            replaced(read_text(config), "folder: \"first\"", "folder: \"again\""));
}

TEST_F(HsdpTrain, SetLaysValuesOverTheFileAndTheLastOneWins) {
  const auto results =
      run(2, {"--config", "config.yaml", "--set", "optimizer.lr=0.5", "--set", "optimizer.lr=0.25", "--set",
              "lr_schedule.decay=constant", "--set", "training.steps=10", "--set", "metrics.log_every=4"});
  expect_success(results);
  std::vector<int> steps;
  for (const auto& object : metrics("run")) {
    steps.push_back(object.at("step"));
    EXPECT_EQ(object.at("lr"), 0.25);
  }
  // The first and the last step are always logged.
  EXPECT_EQ(steps, (std::vector<int>{1, 4, 8, 10}));
  EXPECT_EQ(lines_with("step ", results[0].out).size(), 4u) << results[0].out;
  const std::string resolved = read_text(folder_ / "run" / "config.yaml");
  for (const char* line :
       {"  lr: 0.25\n", "  decay: constant\n", "  steps: 10\n", "  log_every: 4\n", "  beta1: 0.9\n"}) {
    EXPECT_EQ(count_of(line, resolved), 1) << line << resolved;
  }
}

TEST_F(HsdpTrain, FusedOptimizersAndGroupsTrainAsTheStockOnes) {
  const std::string no_decay = R"(optimizer.no_decay=["**norm**", "model.layers.0.*.*.weight"])";
  const auto train = [&](const std::string& name, bool groups, const std::string& folder) {
    Arguments arguments = {"--config", "config.yaml",
                           "--set",    "optimizer.name=" + name,
                           "--set",    "optimizer.weight_decay=2",
                           "--set",    "optimizer.momentum=0.5",
                           "--set",    "metrics.folder=" + folder};
    if (groups) arguments.insert(arguments.end(), {"--set", no_decay});
    expect_success(run(2, arguments));
    return losses(folder);
  };
  for (const std::string name : {"adamw", "sgd"}) {
    const auto stock = train(name, true, name), fused = train("fused_" + name, true, "fused_" + name);
    ASSERT_EQ(stock.size(), 6u);
    ASSERT_EQ(fused.size(), 6u);
    for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(fused[i], stock[i], 1e-4 * stock[i]) << name << " at " << i;
    const auto without_groups = train(name, false, name + "_decayed");
    EXPECT_EQ(without_groups.front(), stock.front());
    EXPECT_GT(std::abs(without_groups.back() - stock.back()), 1e-3) << name;
  }
}

// ---- modes ----

/// A way to train that gives the numbers of the sharded run in float32, to rounding.
struct Mode {
  std::string name;
  int ranks;
  /// A configuration that comes with the project, its model and data replaced; none: that of this file.
  std::string config;
  std::vector<std::string> overrides;
  std::string mesh;
  double tolerance = 1e-5;
};

std::ostream& operator<<(std::ostream& out, const Mode& mode) { return out << mode.name; }

class HsdpTrainMode : public HsdpTrain, public ::testing::WithParamInterface<Mode> {};
INSTANTIATE_TEST_SUITE_P(
    All, HsdpTrainMode,
    ::testing::Values(
        Mode{"DataParallel", 2, "data_parallel.yaml", {}, "replicate=2, shard=1"},
        Mode{"Hybrid", 4, "hybrid.yaml", {}, "replicate=2, shard=2"},
        Mode{"MixedPrecision", 2, "mixed_precision.yaml", {}, "shard=2", 1e-2},
        Mode{"HybridInMixedPrecision",
             4,
             "mixed_precision.yaml",
             {"parallelism.replicate=2"},
             "replicate=2, shard=2",
             1e-2},
        Mode{"HalfWithAGradientScaler",
             2,
             "",
             {"mixed_precision.param_dtype=float16", "optimizer.name=fused_adamw"},
             "shard=2",
             1e-2},
        Mode{"KeptAfterForward", 2, "", {"parallelism.reshard_after_forward=false"}, "shard=2"},
        Mode{"GatheredWhenRead", 2, "", {"parallelism.prefetch=false"}, "shard=2"},
        Mode{"KeptAmongNeighbours", 4, "", {"parallelism.reshard_after_forward=2"}, "shard=4"},
        Mode{"Accumulation", 2, "", {"training.gradient_accumulation=4"}, "shard=2"},
        Mode{"AccumulationInTheHybrid", 4, "hybrid.yaml", {"training.gradient_accumulation=2"}, "replicate=2, shard=2"},
        Mode{"ActivationCheckpoint", 2, "", {"training.activation_checkpoint=full"}, "shard=2"},
        Mode{"OneBlockCheckpointed", 2, "", {R"(training.activation_checkpoint=["model.layers.1"])"}, "shard=2"},
        Mode{"Offload", 2, "", {"offload.to_host=true"}, "shard=2"}),
    [](const auto& which) { return which.param.name; });

TEST_P(HsdpTrainMode, TrainsAsTheShardedRunInFloatDoes) {
  const Mode& mode = GetParam();
  const auto train = [&](const std::string& config, int ranks, std::vector<std::string> overrides,
                         const std::string& folder, const std::string& mesh) {
    const std::vector<std::string> small = {"model.hidden_size=16",
                                            "model.intermediate_size=32",
                                            "model.n_layers=2",
                                            "model.n_heads=2",
                                            "model.max_sequence_length=32",
                                            "data.path=text.bin",
                                            "training.steps=6",
                                            "training.global_batch_size=8",
                                            "training.sequence_length=32",
                                            "optimizer.lr=0.01",
                                            "comm.backend=gloo",
                                            "metrics.log_every=1",
                                            "optimizer.beta2=0.95",
                                            "optimizer.weight_decay=0.1",
                                            "lr_schedule.warmup_steps=2",
                                            "lr_schedule.min_lr_factor=0.1"};
    overrides.insert(overrides.begin(), small.begin(), small.end());
    overrides.push_back("metrics.folder=" + folder);
    Arguments arguments = {"--config", config};
    for (const auto& each : overrides) arguments.insert(arguments.end(), {"--set", each});
    const auto results = run(ranks, arguments);
    expect_success(results);
    EXPECT_THAT(results[0].out, HasSubstr("parameters on mesh(cpu, " + mesh + ")\n"));
    return metrics(folder);
  };
  // The same for all modes.
  static const auto plain = train("config.yaml", 2, {}, "plain", "shard=2");
  const auto config = mode.config.empty() ? "config.yaml" : std::string(HSDP_SOURCE_DIR "/configs/") + mode.config;
  const auto trained = train(config, mode.ranks, mode.overrides, "mode", mode.mesh);
  ASSERT_EQ(plain.size(), 6u);
  ASSERT_EQ(trained.size(), 6u);
  bool differs = false;
  for (size_t i = 0; i < 6; ++i) {
    const double loss = plain[i].at("loss"), norm = plain[i].at("grad_norm");
    EXPECT_NEAR(trained[i].at("loss"), loss, mode.tolerance * loss) << "step " << i + 1;
    EXPECT_NEAR(trained[i].at("grad_norm"), norm, 10 * mode.tolerance * norm) << "step " << i + 1;
    EXPECT_EQ(trained[i].at("tokens"), (i + 1) * 8 * 32);
    differs = differs || std::abs(trained[i].at("loss").get<double>() - loss) > 1e-5 * loss;
  }
  EXPECT_LT(plain.back().at("loss").get<double>(), 0.97 * plain.front().at("loss").get<double>());
  // Sixteen bits leave traces.
  EXPECT_EQ(differs, mode.tolerance > 1e-5);
}

// A scale that no gradient bears: steps are skipped and the scale falls until one is taken.
TEST_F(HsdpTrain, AGradientScalerSkipsStepsUntilItsScaleFits) {
  const Arguments arguments = {"--config", "config.yaml",           "--set", "mixed_precision.param_dtype=float16",
                               "--set",    "grad_scaler.scale=1e9", "--set", "training.steps=25"};
  const auto results = run(2, arguments);
  expect_success(results);
  const auto objects = metrics("run");
  ASSERT_EQ(objects.size(), 25u);
  EXPECT_TRUE(objects.front().at("grad_norm").is_null());
  EXPECT_TRUE(objects.back().at("grad_norm").is_number());
  EXPECT_NEAR(objects[1].at("loss"), objects[0].at("loss"), 0.2);
  EXPECT_LT(objects.back().at("loss").get<double>(), 0.97 * objects.front().at("loss").get<double>());
}

TEST_F(HsdpTrain, APatternThatFitsNoParameterIsToldOnce) {
  const auto results = run(2, {"--config", "config.yaml", "--set", R"(optimizer.no_decay=["**.bais"])"});
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << describe(results);
  EXPECT_EQ(count_of("[parameter_groups] pattern \"**.bais\" fits no parameter, expected at least one; those that "
                     "require grad are \"model.embed_tokens.weight\", ",
                     all_output(results)),
            1)
      << describe(results);
}

TEST_F(HsdpTrain, PrintsATextSampleOnce) {
  const auto results =
      run(2, {"--config", "config.yaml", "--set", "training.sample_bytes=20", "--set", "training.sample_prompt=the "});
  expect_success(results);
  EXPECT_EQ(count_of("sample:\nthe ", all_output(results)), 1) << describe(results);
  const std::string text = results[0].out.substr(results[0].out.find("sample:\n") + 8);
  EXPECT_EQ(text.size(), 4 + 20 + 1u) << text;
}

TEST_F(HsdpTrain, RunsUnderTorchrun) {
  const std::string python = std::string(HSDP_SOURCE_DIR) + "/.venv/bin/python";
  if (!fs::exists(python)) GTEST_SKIP() << python << " is not there: torchrun comes with its torch; run tools/setup.sh";
  const auto under_torchrun = [&](const Arguments& arguments) {
    ProcessOptions options = program(arguments);
    const Arguments launcher = {
        python, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node", "2"};
    options.command.insert(options.command.begin(), launcher.begin(), launcher.end());
    options.environment["TMPDIR"] = folder_.path();  // it leaves empty folders for logs there
    return run_process(options);
  };
  const auto trained = under_torchrun({"--config", "config.yaml"});
  expect_success({trained});
  EXPECT_EQ(metrics("run").size(), 6u);
  EXPECT_EQ(lines_with("step ", trained.out).size(), 6u) << trained.out;
  EXPECT_EQ(count_of(kMet, trained.err), 1) << trained.err;

  const auto refused = under_torchrun({"--config", "config.yaml", "--set", "parallelism.shard=4"});
  EXPECT_EQ(refused.exit_code, 1) << to_string(refused);
  const std::string message = "[parallelism] replicate 1 x shard 4 = 4 ranks, launched with 2; ";
  EXPECT_EQ(lines_with(message, refused.err).size(), 1u) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("exitcode  : 2"));
}

// ---- the user's mistakes ----

/// A mistake, and what the program says about it to two ranks.
struct Mistake {
  std::string name;
  /// Makes the mistake in the folder and returns the arguments of a rank.
  std::function<Arguments(const TrainFolder&, int rank)> make;
  /// All lines of stderr after the greeting, or how the only one starts if `expected_end` is given; {folder} stands for
  /// the folder.
  std::string expected;
  std::string expected_end = {};
  /// The rank that says it.
  int teller = 0;
  /// Found while training, so that a run folder is there.
  bool trains = false;
};

std::ostream& operator<<(std::ostream& out, const Mistake& mistake) { return out << mistake.name; }

/// The configuration with one part of its text replaced.
auto edited(const std::string& from, const std::string& to) {
  return [=](const TrainFolder& folder, int) -> Arguments {
    write_text(folder / "config.yaml", replaced(kTrainConfig, from, to));
    return {"--config", "config.yaml"};
  };
}

auto with_set(const std::vector<std::string>& settings) {
  return [=](const TrainFolder&, int) { return with_settings(settings); };
}

/// 1000 tokens of two bytes are promised, and 1 byte is missing.
Arguments with_short_token_file(const TrainFolder& folder, int) {
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = 1000;
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  write_text(folder / "tokens.bin", bytes + std::string(1999, '\0'));
  return {"--config", "config.yaml", "--set", "data.path=tokens.bin", "--set", "data.format=llmc"};
}

const std::vector<Mistake> kMistakes = {
    {"UnknownKey", edited("steps: 6", "stpes: 6"),
     "[config] config.yaml:12:3: training.stpes: unknown key; did you mean training.steps?"},
    {"UnknownSection", edited("optimizer:", "optimiser:"),
     "[config] config.yaml:16:1: optimiser: unknown section; did you mean optimizer?"},
    {"DuplicateKey", edited("  seed: 1\n", "  seed: 1\n  steps: 7\n"),
     "[config] config.yaml:16:3: training.steps: duplicate key, first given at config.yaml:12:3"},
    {"MistypedKey", edited("steps: 6", "steps: many"),
     "[config] config.yaml:12:10: training.steps: expected int, got 'many'"},
    {"TwoProblemsAreTwoLines", edited("steps: 6\n  global_batch_size: 6", "steps: 6.5\n  global_batch_size: [6]"),
     "[config] config.yaml:13:22: training.global_batch_size: expected int, got a list\n"
     "[config] config.yaml:12:10: training.steps: expected int, got '6.5'"},
    {"NotYaml", edited("model:", "model: ["),
     "[config] config.yaml:3:14: not valid YAML: end of sequence flow not found"},
    {"MissingKey", edited("  lr: 0.01\n", "  name: sgd\n"),
     "[config] config.yaml: optimizer.lr: missing, expected a value"},
    {"MissingConfigFile",
     [](const TrainFolder&, int) {
       return Arguments{"--config", "absent.yaml"};
     },
     "[config] absent.yaml cannot be opened: No such file or directory, expected a YAML file"},
    {"MissingDataFile", with_set({"data.path=absent.bin"}),
     "[data] absent.bin: cannot be opened: No such file or directory, expected a token file; data.path is relative to "
     "{folder}; tools/prepare_data.py writes data/quickstart.bin"},
    {"MissingDataFileOnOneRank",
     [](const TrainFolder& folder, int rank) {
       return with_set({rank == 1 ? "data.path=absent.bin" : "data.path=text.bin"})(folder, rank);
     },
     "[rank 1] [data] absent.bin: cannot be opened: No such file or directory, expected a token file; data.path is "
     "relative to {folder}; tools/prepare_data.py writes data/quickstart.bin",
     {},
     1},
    {"TokenFileOfWrongSize", with_short_token_file,
     "[data] tokens.bin: has 3023 bytes and its header says 1000 tokens, expected 3024 bytes; the file may be cut "
     "short"},
    {"ShardThatDoesNotFitTheWorld", with_set({"parallelism.shard=4"}),
     "[parallelism] replicate 1 x shard 4 = 4 ranks, launched with 2; launch that many or set parallelism.shard to "
     "auto"},
    {"ReplicasThatDoNotFitTheWorld", with_set({"parallelism.replicate=3"}),
     "[parallelism] replicate 3 x shard 1 = 3 ranks, launched with 2; launch a multiple of parallelism.replicate"},
    {"ReshardAmongMoreRanksThanThereAre", with_set({"parallelism.reshard_after_forward=3"}),
     "[reshard_after_forward] group of 3 ranks on a shard axis of 2, expected a number that divides it; true frees "
     "everything"},
    {"ActivationCheckpointOfNoBlock", with_set({R"(training.activation_checkpoint=["model.layer.*"])"}),
     "[fully_shard] activation_checkpoint each(\"model.layer.*\") matches none of the submodules, expected at least "
     "one "
     "that is a unit"},
    {"MicroBatchesThatDoNotFitTheBatch", with_set({"training.gradient_accumulation=2"}),
     "[data] global_batch_size 6 over 2 ranks, expected a multiple of the ranks times training.gradient_accumulation "
     "2"},
    {"BatchThatRanksDoNotDivide", with_set({"training.global_batch_size=5"}),
     "[data] global_batch_size 5 over 2 ranks, expected a multiple of the ranks"},
    {"TokenBeyondTheVocabulary", with_set({"model.vocab_size=100"}), "[data] text.bin: token ",
     ", expected tokens below model.vocab_size 100; data.format or model.vocab_size does not fit the file", 0, true},
    {"MetricsFolderThatIsAFile", with_set({"metrics.folder=text.bin"}),
     "[metrics] text.bin cannot be made a folder: Not a directory, expected a folder to write to; set metrics.folder"},
    {"SetWithoutAValue", with_set({"steps"}), "[config] --set: 'steps', expected section.key=value"},
    {"SetOfAnUnknownKey", with_set({"training.stpes=3"}),
     "[config] --set: training.stpes: unknown key; did you mean training.steps?"},
    {"RanksWithDifferentSettings",
     [](const TrainFolder& folder, int rank) {
       return with_set({rank == 1 ? "training.steps=7" : "training.steps=8"})(folder, rank);
     },
     "[config] the ranks differ in training.steps (8 on rank 0), expected the same on all; give every rank the same "
     "file and the same --set"},
    {"RanksWithDifferentCheckpointFolders",
     [](const TrainFolder& folder, int rank) {
       return with_set({rank == 1 ? "checkpoint.folder=kept" : "checkpoint.folder=./kept"})(folder, rank);
     },
     "[config] the ranks differ in checkpoint.folder (\"./kept\" on rank 0), expected the same on all; give every rank "
     "the same file and the same --set"},
};

class HsdpTrainMistake : public HsdpTrain, public ::testing::WithParamInterface<Mistake> {};
INSTANTIATE_TEST_SUITE_P(All, HsdpTrainMistake, ::testing::ValuesIn(kMistakes),
                         [](const auto& which) { return which.param.name; });

TEST_P(HsdpTrainMistake, IsToldOnceAndEndsAllRanks) {
  const Mistake& mistake = GetParam();
  const auto results = run_processes(ranks(2, [&](int rank) { return mistake.make(folder_, rank); }));
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << describe(results);
  std::string expected = mistake.expected;
  if (count_of("{folder}", expected)) expected = replaced(expected, "{folder}", folder_.path());
  const auto& teller = results[mistake.teller];
  if (mistake.expected_end.empty()) {
    EXPECT_EQ(teller.err, (mistake.teller == 0 ? kMet : "") + expected + "\n");
  } else {
    EXPECT_THAT(teller.err, ::testing::StartsWith(kMet + expected));
    EXPECT_THAT(teller.err, ::testing::EndsWith(mistake.expected_end + "\n"));
    EXPECT_EQ(count_of("\n", teller.err), 2) << teller.err;
  }
  EXPECT_EQ(count_of(expected, all_output(results)), 1) << describe(results);
  EXPECT_EQ(count_of("frame #", all_output(results)), 0) << describe(results);
  const auto& other = results[1 - mistake.teller];
  EXPECT_EQ(other.err, mistake.teller == 0 ? "" : kMet);
  EXPECT_EQ((results[0].out + results[1].out).empty(), !mistake.trains) << describe(results);
  EXPECT_EQ(fs::exists(folder_ / "run" / "metrics.jsonl"), mistake.trains);
}

TEST_F(HsdpTrain, MistakesInTheCommandLineAreToldOnce) {
  const auto results = run(2, {"--confg", "config.yaml"});
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << describe(results);
  EXPECT_THAT(results[0].err, HasSubstr("; hsdp_train --help lists the options\n"));
  EXPECT_EQ(count_of("[command line] ", all_output(results)), 1) << describe(results);
  const auto help = run(2, {"--help"});
  expect_success(help);
  EXPECT_EQ(count_of("section.key=value", all_output(help)), 1) << describe(help);
}

TEST_F(HsdpTrain, MistakesAreToldAlikeWhenAlone) {
  const auto result = run_process(program({"--config", "config.yaml", "--set", "model.n_heads=3"}));
  EXPECT_EQ(result.exit_code, 2) << to_string(result);
  EXPECT_EQ(lines_with("[config] ", result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("n_heads"));
  EXPECT_EQ(count_of("frame #", result.err), 0);
}

// The first step of so large a size makes values that the next forward cannot bear.
TEST_F(HsdpTrain, StopsBeforeTheStepWhenTheLossIsNotFinite) {
  for (const char* optimizer : {"adamw", "sgd"}) {
    SCOPED_TRACE(optimizer);
    const auto results = run(2, {"--config", "config.yaml", "--set", "optimizer.lr=1e30", "--set",
                                 std::string("optimizer.name=") + optimizer, "--set", "training.sample_bytes=5"});
    for (const auto& result : results) EXPECT_EQ(result.exit_code, 2) << describe(results);
    EXPECT_EQ(count_of("[training] step 2: loss is ", all_output(results)), 1) << describe(results);
    EXPECT_EQ(results[1].out + results[1].err, "");
    EXPECT_THAT(results[0].err, HasSubstr("expected finite numbers; stopped before the optimizer's step; "));
    EXPECT_EQ(count_of("frame #", all_output(results)), 0);
    EXPECT_EQ(count_of("sample:", all_output(results)), 0);
    // The step that is refused is logged as well: it shows what happened.
    const auto objects = metrics("run");
    ASSERT_EQ(objects.size(), 2u) << results[0].out;
    EXPECT_TRUE(objects[0].at("loss").is_number());
    EXPECT_TRUE(objects[1].at("loss").is_null() || objects[1].at("grad_norm").is_null()) << objects[1];
  }
}

// libtorch's own errors carry a trace of the C++ stack: a request for more memory than any machine can address.
TEST_F(HsdpTrain, ShowsAStackTraceOnlyWhenAsked) {
  ProcessOptions options = program({"--config", "config.yaml", "--set", "model.vocab_size=10000000000000"});
  // Under the address sanitizer such a request would otherwise end the program.
  const char* sanitizer = std::getenv("ASAN_OPTIONS");
  options.environment["ASAN_OPTIONS"] = std::string(sanitizer ? sanitizer : "") + ":allocator_may_return_null=1";
  const auto quiet = run_process(options);
  EXPECT_EQ(quiet.exit_code, 1) << to_string(quiet);
  EXPECT_EQ(count_of("you tried to allocate 640000000000000 bytes", quiet.err), 1) << quiet.err;
  EXPECT_EQ(count_of("frame #", quiet.err), 0) << quiet.err;
  options.environment["TORCH_SHOW_CPP_STACKTRACES"] = "1";
  const auto asked = run_process(options);
  EXPECT_EQ(asked.exit_code, 1) << to_string(asked);
  EXPECT_EQ(count_of("you tried to allocate 640000000000000 bytes", asked.err), 1) << asked.err;
  EXPECT_GT(count_of("frame #", asked.err), 0) << asked.err;
}

// ---- ranks that fail ----

class HsdpTrainFailure : public HsdpTrain {
 protected:
  /// Starts two ranks that train without end, and returns once a few steps are done.
  std::vector<Process> start_endless(int timeout_seconds) {
    std::vector<Process> started;
    for (const auto& options : ranks(2, [&](int) {
           return with_set({"training.steps=1000000", "metrics.log_every=1",
                            "comm.timeout_seconds=" + std::to_string(timeout_seconds)})(folder_, 0);
         })) {
      started.emplace_back(options);
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(240);
    while (count_of("step ", started[0].out()) < 3) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("no steps: " + started[0].out());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return started;
  }

  static void expect_names_the_operation(const ProcessResult& result, const std::string& timeout) {
    EXPECT_EQ(result.exit_code, 1) << to_string(result);
    // The operation in brackets, then the unit or the purpose.
    EXPECT_THAT(result.err,
                ::testing::ContainsRegex("\n\\[(all_gather|reduce_scatter|all_reduce)\\] "
                                         "(root|model\\.layers\\.[01]|loss|norm|clip_grad_norm_|peak_memory_bytes), "
                                         "[0-9,]+ bytes over gloo group \"shard\" "));
    EXPECT_EQ(count_of("(rank 0 of 2) failed after ", result.err), 1) << result.err;
    EXPECT_EQ(count_of("(timeout " + timeout + "): ", result.err), 1) << result.err;
    EXPECT_EQ(count_of("every rank must call it\n", result.err), 1) << result.err;
    EXPECT_EQ(count_of("\n", result.err), 2) << result.err;
    EXPECT_EQ(count_of("frame #", result.err), 0) << result.err;
  }
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST_F(HsdpTrainFailure, AKilledRankEndsTheOtherAtOnce) {
  constexpr int kTimeout = 200;
  auto started = start_endless(kTimeout);
  const auto start = std::chrono::steady_clock::now();
  started[1].signal(SIGKILL);
  const auto result = started[0].wait();
  EXPECT_LT(seconds_since(start), kTimeout);
  expect_names_the_operation(result, "200 s");
  EXPECT_EQ(started[1].wait().signal, SIGKILL);
}

TEST_F(HsdpTrainFailure, AStalledRankEndsTheOtherAtTheTimeout) {
  auto started = start_endless(10);
  const auto start = std::chrono::steady_clock::now();
  started[1].signal(SIGSTOP);
  const auto result = started[0].wait();
  EXPECT_GT(seconds_since(start), 9);
  expect_names_the_operation(result, "10 s");
  // Woken, it finds itself alone.
  started[1].signal(SIGCONT);
  const auto woken = started[1].wait();
  EXPECT_EQ(woken.exit_code, 1) << to_string(woken);
  EXPECT_EQ(count_of("every rank must call it\n", woken.err), 1) << woken.err;
}

TEST_F(HsdpTrainFailure, ARankThatNeverStartsIsMissedAtTheTimeout) {
  const auto result = run_process(ranks(2, [&](int) { return with_set({"comm.timeout_seconds=2"})(folder_, 0); })[0]);
  EXPECT_EQ(result.exit_code, 1) << to_string(result);
  EXPECT_THAT(result.err, ::testing::StartsWith("[init] the store at 127.0.0.1:"));
  EXPECT_THAT(result.err, HasSubstr(" failed on rank 0 of 2 (timeout 2 s): "));
  EXPECT_EQ(count_of("\n", result.err), 1) << result.err;
  EXPECT_EQ(count_of("frame #", result.err), 0) << result.err;
}

}  // namespace hsdp_train_test

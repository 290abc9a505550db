// The benchmark programs end well in every mode and say what the pages promise; the peers time the same models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "tests/testing/process.h"
#include "tests/testing/scratch_folder.h"

namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using namespace testing_support;
using Json = nlohmann::json;

const std::vector<std::string> kTiny = {"--width", "16",         "--layers", "2",       "--batch",
                                        "1",       "--sequence", "8",        "--steps", "2"};

ProcessResult run_bench(std::vector<std::string> arguments) {
  std::vector<std::string> command{HSDP_BINARY_DIR "/tools/bench/hsdp_bench"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  command.insert(command.end(), kTiny.begin(), kTiny.end());
  return run_process({.command = command});
}

/// The one line of a run.
Json line_of(const ProcessResult& result) {
  EXPECT_EQ(result.exit_code, 0) << to_string(result);
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1) << result.out;
  return Json::parse(result.out, nullptr, /*allow_exceptions=*/false);
}

// Embeddings of 256 tokens and 8 positions, two blocks, final norm and head, of width 16.
constexpr int64_t kBlock = 4 * 16 + (3 + 1 + 4 + 4) * 16 * 16 + (3 + 1 + 4 + 1) * 16;
constexpr int64_t parameters_with(int64_t vocabulary) {
  return (vocabulary + 8) * 16 + 2 * kBlock + 2 * 16 + 16 * vocabulary;
}
constexpr int64_t kParameters = parameters_with(256);
// Of the sizes that have a name.
constexpr int64_t kNamedVocabulary = 50304;

TEST(Bench, ShardedOverTwoRanks) {
  const auto line = line_of(run_bench({"hsdp", "--ranks", "2", "--memory"}));
  EXPECT_EQ(line.at("mode"), "hsdp");
  EXPECT_EQ(line.at("ranks"), 2);
  EXPECT_EQ(line.at("parameters"), kParameters);
  EXPECT_EQ(line.at("units"), 3);
  for (const char* key : {"step_ms", "fastest_step_ms", "processor_ms", "tokens_per_second", "peak_rss_mib",
                          "start_rss_mib", "peak_gathered_mib", "two_units_mib"}) {
    EXPECT_GT(line.at(key).get<double>(), 0) << key;
  }
  EXPECT_DOUBLE_EQ(line.at("shard_mib").get<double>(), kParameters * 4 / 2 / 1024.0 / 1024);
  // Parameters, their gradients and two moments.
  EXPECT_GT(line.at("peak_tensor_mib").get<double>(), 4 * line.at("shard_mib").get<double>());
  const auto& collectives = line.at("collectives_a_step");
  // The root's parameters stay from forward to backward.
  EXPECT_EQ(collectives.at("all_gathers"), 5);
  EXPECT_EQ(collectives.at("reduce_scatters"), 3);
  EXPECT_EQ(collectives.at("all_reduces"), 0);
}

TEST(Bench, ReplicatedOverTwoRanks) {
  const auto line = line_of(run_bench({"hsdp-ddp", "--ranks", "2"}));
  EXPECT_EQ(line.at("parameters"), kParameters);
  EXPECT_DOUBLE_EQ(line.at("shard_mib").get<double>(), kParameters * 4 / 1024.0 / 1024);
  const auto& collectives = line.at("collectives_a_step");
  EXPECT_EQ(collectives.at("all_gathers"), 0);
  EXPECT_EQ(collectives.at("reduce_scatters"), 0);
  EXPECT_EQ(collectives.at("all_reduces"), 3);
}

TEST(Bench, UnconnectedCopies) {
  const auto line = line_of(run_bench({"alone", "--ranks", "2", "--memory"}));
  EXPECT_EQ(line.at("parameters"), kParameters);
  EXPECT_GT(line.at("activation_mib").get<double>(), 0);
  EXPECT_FALSE(line.contains("units"));
}

TEST(Bench, ASizeByNameInBf16AndUsefulOperations) {
  const auto line = line_of(run_bench({"hsdp", "--ranks", "2", "--size", "small", "--bf16"}));
  // What the other options say counts.
  EXPECT_EQ(line.at("width"), 16);
  EXPECT_EQ(line.at("sequence"), 8);
  EXPECT_EQ(line.at("vocabulary"), kNamedVocabulary);
  EXPECT_EQ(line.at("parameters"), parameters_with(kNamedVocabulary));
  EXPECT_EQ(line.at("bf16"), true);
  EXPECT_EQ(line.at("device"), "host");
  EXPECT_EQ(line.at("device_name"), "");
  EXPECT_FALSE(line.contains("peak_allocated_mib"));
  // Gathers of two blocks twice and of the root once, in two bytes an element, each with 32 bytes a rank that are
  // compared; reductions in four.
  EXPECT_DOUBLE_EQ(line.at("collectives_a_step").at("reduce_scatter_mib").get<double>() * 1024 * 1024,
                   4.0 * parameters_with(kNamedVocabulary));
  EXPECT_DOUBLE_EQ(line.at("collectives_a_step").at("all_gather_mib").get<double>() * 1024 * 1024,
                   2.0 * (parameters_with(kNamedVocabulary) + 2 * kBlock) + 5 * 2 * 32);
  const int64_t embeddings = (kNamedVocabulary + 8) * 16;
  const double flops = 8.0 * (6.0 * (parameters_with(kNamedVocabulary) - embeddings) + 12.0 * 2 * 16 * 8);
  EXPECT_NEAR(line.at("model_tflops_a_rank").get<double>() * line.at("step_ms").get<double>() * 1e9, flops,
              1e-6 * flops);
}

TEST(Bench, Bf16IsForShardedModesAndAGpuHasToBeThere) {
  const auto alone = run_bench({"alone", "--bf16"});
  EXPECT_EQ(alone.exit_code, 1) << to_string(alone);
  EXPECT_THAT(alone.err, HasSubstr("[hsdp_bench] --bf16 with alone, expected a sharded mode"));
  const auto gpu = run_bench({"hsdp", "--device", "cuda"});
  if (gpu.exit_code == 0) return;  // there is one
  EXPECT_EQ(gpu.exit_code, 1) << to_string(gpu);
  EXPECT_THAT(gpu.err, AnyOf(HasSubstr("no visible CUDA devices, expected one device a rank; compute on the host"),
                             HasSubstr("in a build without NCCL")));
}

TEST(Bench, ARankThatFailsEndsAll) {
  const auto result =
      run_process({.command = {HSDP_BINARY_DIR "/tools/bench/hsdp_bench", "hsdp", "--ranks", "2", "--width", "200"}});
  EXPECT_EQ(result.exit_code, 1) << to_string(result);
  EXPECT_THAT(result.err, HasSubstr("rank 0: [hsdp_bench] width 200, expected"));
  EXPECT_EQ(result.out, "");
}

TEST(Bench, UnknownModesAreRefused) {
  const auto result = run_bench({"dpd"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("hsdp-ddp"));
}

// Four layers of 256 features.
const std::vector<std::string> kTinyFiles = {"files", "--megabytes", "1", "--width", "256", "--repeats", "2"};
constexpr int64_t kLayers = 4 * (256 * 256 + 256);

std::vector<std::string> tiny_async() {
  std::vector<std::string> arguments{"async", "--every", "1"};
  arguments.insert(arguments.end(), kTiny.begin(), kTiny.end());
  return arguments;
}

/// In a folder that is empty before and after.
Json checkpoint_line(const std::vector<std::string>& program, const std::vector<std::string>& arguments) {
  const ScratchFolder folder;
  auto command = program;
  command.insert(command.end(), arguments.begin(), arguments.end());
  command.insert(command.end(), {"--folder", folder.path()});
  const auto result = run_process(
      {.command = command, .environment = {{"PYTHONDONTWRITEBYTECODE", "1"}}, .timeout = std::chrono::minutes(3)});
  const auto line = line_of(result);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  return line;
}

const std::vector<std::string> kCheckpointBench = {HSDP_BINARY_DIR "/tools/bench/hsdp_checkpoint_bench"};

void expect_files(const Json& line, std::vector<std::string> timed) {
  EXPECT_EQ(line.at("mode"), "files");
  EXPECT_EQ(line.at("ranks"), 2);
  EXPECT_EQ(line.at("parameters"), kLayers);
  EXPECT_EQ(line.at("bytes"), kLayers * 4);
  for (const auto& key : timed) {
    ASSERT_EQ(line.at(key).size(), 2u) << key;
    for (const double seconds : line.at(key)) EXPECT_GT(seconds, 0) << key;
  }
}

void expect_async(const Json& line) {
  EXPECT_EQ(line.at("mode"), "async");
  EXPECT_EQ(line.at("parameters"), kParameters);
  EXPECT_EQ(line.at("bytes"), kParameters * 12);
  // Of two steps the second begins while the first one's state is being written.
  EXPECT_EQ(line.at("saves"), 2);
  EXPECT_EQ(line.at("overlapping_steps"), 1);
  EXPECT_EQ(line.at("other_steps"), 1);
  for (const char* key : {"overlapping_step_ms", "other_step_ms", "overlapping_to_others", "copy_ms", "copy_to_step"}) {
    EXPECT_GT(line.at(key).get<double>(), 0) << key;
  }
}

TEST(Bench, CheckpointsBesidePlainFiles) {
  for (const bool drops : {false, true}) {
    auto arguments = kTinyFiles;
    if (drops) arguments.push_back("--drop-cache");
    const auto line = checkpoint_line(kCheckpointBench, arguments);
    expect_files(line, {"save_s", "write_s", "load_s", "read_s"});
    for (const auto& [key, part, whole] :
         {std::tuple("save_to_write", "save_s", "write_s"), std::tuple("load_to_read", "load_s", "read_s")}) {
      const auto ratio = [&](size_t i) { return line.at(part)[i].get<double>() / line.at(whole)[i].get<double>(); };
      EXPECT_DOUBLE_EQ(line.at(key).at("least").get<double>(), std::min(ratio(0), ratio(1)));
      EXPECT_DOUBLE_EQ(line.at(key).at("most").get<double>(), std::max(ratio(0), ratio(1)));
      EXPECT_DOUBLE_EQ(line.at(key).at("median").get<double>(), (ratio(0) + ratio(1)) / 2);
    }
  }
}

TEST(Bench, StepsDuringASave) { expect_async(checkpoint_line(kCheckpointBench, tiny_async())); }

TEST(Bench, SavesMustBeRarerThanSteps) {
  auto arguments = tiny_async();
  arguments[2] = "2";
  arguments.insert(arguments.begin(), kCheckpointBench.begin(), kCheckpointBench.end());
  const auto result = run_process({.command = arguments});
  EXPECT_EQ(result.exit_code, 1) << to_string(result);
  EXPECT_THAT(result.err, HasSubstr("--every 2, expected less than --steps 2"));
}

#ifdef HSDP_TORCH_PYTHON
TEST(Bench, ThePeerHasTheSameModel) {
  for (const char* mode : {"fsdp2", "ddp", "alone"}) {
    std::vector<std::string> command{HSDP_TORCH_PYTHON, HSDP_SOURCE_DIR "/tools/bench/peer.py", mode, "--ranks", "2"};
    command.insert(command.end(), kTiny.begin(), kTiny.end());
    const bool by_name = mode == std::string("fsdp2");
    if (by_name) command.insert(command.end(), {"--size", "small", "--bf16"});
    const auto result = run_process(
        {.command = command, .environment = {{"PYTHONDONTWRITEBYTECODE", "1"}}, .timeout = std::chrono::minutes(3)});
    const auto line = line_of(result);
    EXPECT_EQ(line.at("mode"), mode);
    EXPECT_EQ(line.at("bf16"), by_name);
    EXPECT_EQ(line.at("parameters"), by_name ? parameters_with(kNamedVocabulary) : kParameters) << mode;
    for (const char* key :
         {"step_ms", "processor_ms", "tokens_per_second", "peak_rss_mib", "start_rss_mib", "model_tflops_a_rank"}) {
      EXPECT_GT(line.at(key).get<double>(), 0) << mode << " " << key;
    }
  }
}

// What runs on GPUs, with a small model on the host.
TEST(Bench, SizesAreComparedInTheSameSitting) {
  std::vector<std::string> command{HSDP_TORCH_PYTHON, HSDP_SOURCE_DIR "/tools/bench/compare.py"};
  command.insert(command.end(),
                 {"--cases", "size_large", "--rounds", "1", "--steps", "1", "--bench",
                  HSDP_BINARY_DIR "/tools/bench/hsdp_bench", "--python", HSDP_TORCH_PYTHON, "--peak-tflops", "0.5"});
  for (const char* setting : {"width=16", "layers=2", "batch=1", "sequence=8", "vocabulary=256"}) {
    command.insert(command.end(), {"--override", setting});
  }
  const auto line = line_of(run_process(
      {.command = command, .environment = {{"PYTHONDONTWRITEBYTECODE", "1"}}, .timeout = std::chrono::minutes(3)}));
  EXPECT_EQ(line.at("case"), "size_large");
  EXPECT_EQ(line.at("parameters"), kParameters);
  EXPECT_TRUE(line.at("peak_allocated_mib").is_null());
  const auto of = [&](const char* key, const char* side) { return line.at(key).at(side).get<double>(); };
  for (const char* side : {"hsdp", "fsdp2"}) {
    EXPECT_NEAR(of("mfu", side), of("model_tflops_a_rank", side) / 0.5, 1e-3 * of("mfu", side)) << side;
  }
  const double ratio = of("tokens_per_second", "hsdp") / of("tokens_per_second", "fsdp2");
  EXPECT_NEAR(line.at("tokens_to_peer").at("median").get<double>(), ratio, 1e-2 * ratio);
}

TEST(Bench, ThePeerSavesTheSameModels) {
  const std::vector<std::string> peer{HSDP_TORCH_PYTHON, HSDP_SOURCE_DIR "/tools/bench/checkpoint_peer.py"};
  expect_files(checkpoint_line(peer, kTinyFiles), {"save_s", "load_s"});
  expect_async(checkpoint_line(peer, tiny_async()));
}
#endif

}  // namespace

// The benchmark program ends well in every mode and says what the pages promise; the peer times the same model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/process.h"

namespace {

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
constexpr int64_t kParameters = (256 + 8) * 16 + 2 * kBlock + 2 * 16 + 16 * 256;

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

#ifdef HSDP_TORCH_PYTHON
TEST(Bench, ThePeerHasTheSameModel) {
  for (const char* mode : {"fsdp2", "ddp", "alone"}) {
    std::vector<std::string> command{HSDP_TORCH_PYTHON, HSDP_SOURCE_DIR "/tools/bench/peer.py", mode, "--ranks", "2"};
    command.insert(command.end(), kTiny.begin(), kTiny.end());
    const auto line = line_of(run_process({.command = command, .environment = {{"PYTHONDONTWRITEBYTECODE", "1"}}}));
    EXPECT_EQ(line.at("mode"), mode);
    EXPECT_EQ(line.at("parameters"), kParameters) << mode;
    for (const char* key : {"step_ms", "processor_ms", "tokens_per_second", "peak_rss_mib", "start_rss_mib"}) {
      EXPECT_GT(line.at(key).get<double>(), 0) << mode << " " << key;
    }
  }
}
#endif

}  // namespace

#include "apps/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "dtensor/error.h"

namespace apps {
namespace metrics_test {

using ::testing::HasSubstr;

constexpr StepMetrics kStep{.step = 12,
                            .loss = 2.5,
                            .grad_norm = 0.75,
                            .lr = 3e-4,
                            .tokens_per_second = 4096.0,
                            .peak_memory_bytes = int64_t(5) << 30,
                            .tokens = 24576,
                            .seconds = 6.5,
                            .ranks = 3,
                            .collectives = {.all_gathers = 7,
                                            .reduce_scatters = 6,
                                            .all_reduces = 5,
                                            .broadcasts = 4,
                                            .barriers = 3,
                                            .all_gather_bytes = 700,
                                            .reduce_scatter_bytes = 600,
                                            .all_reduce_bytes = 500}};

TEST(Metrics, AJsonLineHoldsEveryValue) {
  const auto line = nlohmann::json::parse(to_json(kStep));
  EXPECT_EQ(line.size(), 10u);
  EXPECT_EQ(line.at("step"), 12);
  EXPECT_EQ(line.at("loss"), 2.5);
  EXPECT_EQ(line.at("grad_norm"), 0.75);
  EXPECT_EQ(line.at("lr"), 3e-4);
  EXPECT_EQ(line.at("tokens_per_second"), 4096.0);
  EXPECT_EQ(line.at("peak_memory_bytes"), int64_t(5) << 30);
  EXPECT_EQ(line.at("tokens"), 24576);
  EXPECT_EQ(line.at("seconds"), 6.5);
  EXPECT_EQ(line.at("ranks"), 3);
  EXPECT_EQ(line.at("collectives"), nlohmann::json::parse(R"({"all_gathers": 7, "reduce_scatters": 6, "all_reduces": 5,
      "broadcasts": 4, "all_gather_bytes": 700, "reduce_scatter_bytes": 600, "all_reduce_bytes": 500})"));
}

TEST(Metrics, DoublesAreWrittenToTheLastBit) {
  StepMetrics metrics = kStep;
  metrics.loss = 0.1 + 0.2;
  EXPECT_EQ(nlohmann::json::parse(to_json(metrics)).at("loss").get<double>(), 0.1 + 0.2);
}

TEST(Metrics, NumbersThatAreNotFiniteAreNull) {
  for (const double value : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    StepMetrics metrics = kStep;
    metrics.loss = value;
    metrics.grad_norm = -value;
    metrics.tokens_per_second = value;
    const auto line = nlohmann::json::parse(to_json(metrics));
    EXPECT_TRUE(line.at("loss").is_null());
    EXPECT_TRUE(line.at("grad_norm").is_null());
    EXPECT_TRUE(line.at("tokens_per_second").is_null());
    EXPECT_EQ(line.at("step"), 12);
  }
}

TEST(Metrics, ConsoleLinesHaveFixedColumns) {
  EXPECT_EQ(
      to_console(kStep, 400),
      "step     12/400 | loss   2.5000 | grad_norm    0.7500 | lr 3.000e-04 |     4096 tok/s |   5120 MiB |     6.5 s");
  StepMetrics metrics = kStep;
  metrics.step = 400;
  metrics.loss = std::nan("");
  metrics.grad_norm = 1234.5;
  EXPECT_EQ(to_console(metrics, 400).size(), to_console(kStep, 400).size());
}

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(::testing::TempDir()) / ("run_folder_" + std::to_string(getpid()));
    std::filesystem::create_directories(root_);
    config_.metrics.folder = (root_ / "a" / "b").string();
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::string content(const std::string& name) const {
    std::ifstream file(std::filesystem::path(config_.metrics.folder) / name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  std::string refusal() const {
    try {
      const RunFolder folder(config_);
    } catch (const dtensor::ValueError& error) {
      return error.what();
    }
    return "accepted";
  }

  std::filesystem::path root_;
  Config config_;
};

TEST_F(RunFolderTest, EveryLineIsInTheFileAtOnce) {
  RunFolder folder(config_);
  EXPECT_FALSE(folder.replaced());
  folder.append(kStep);
  EXPECT_EQ(content("metrics.jsonl"), to_json(kStep) + "\n");
  folder.append(kStep);
  EXPECT_EQ(content("metrics.jsonl"), to_json(kStep) + "\n" + to_json(kStep) + "\n");
}

TEST_F(RunFolderTest, HoldsTheConfiguration) {
  const RunFolder folder(config_);
  EXPECT_THAT(content("config.yaml"), HasSubstr(to_yaml(config_)));
}

TEST_F(RunFolderTest, ANewRunStartsAFreshFileAndSaysSo) {
  { RunFolder(config_).append(kStep); }
  const RunFolder folder(config_);
  EXPECT_TRUE(folder.replaced());
  EXPECT_EQ(content("metrics.jsonl"), "");
}

/// The metrics of a step, a second a step.
StepMetrics at_step(int64_t step) {
  StepMetrics metrics = kStep;
  metrics.step = step;
  metrics.seconds = double(step);
  return metrics;
}

TEST_F(RunFolderTest, ARunThatGoesOnKeepsTheLinesUpToItsStep) {
  {
    RunFolder folder(config_);
    for (const int64_t step : {1, 10, 20, 30}) folder.append(at_step(step));
  }
  const std::string kept = to_json(at_step(1)) + "\n" + to_json(at_step(10)) + "\n" + to_json(at_step(20)) + "\n";
  RunFolder folder(config_, 25);
  EXPECT_EQ(content("metrics.jsonl"), kept);
  EXPECT_EQ(folder.kept_lines(), 3);
  EXPECT_EQ(folder.kept_seconds(), 20.0);
  EXPECT_FALSE(folder.replaced());
  folder.append(at_step(26));
  EXPECT_EQ(content("metrics.jsonl"), kept + to_json(at_step(26)) + "\n");
}

TEST_F(RunFolderTest, WhatAKilledRunLeftCutShortGoes) {
  const auto path = std::filesystem::path(config_.metrics.folder) / "metrics.jsonl";
  const std::string whole = to_json(at_step(1)) + "\n" + to_json(at_step(2)) + "\n", next = to_json(at_step(3));
  const std::vector<std::string> rests = {"",
                                          next,
                                          next.substr(0, next.size() / 2),
                                          "{",
                                          "\n" + next + "\n",
                                          "3\n" + next + "\n",
                                          "{\"step\": 3}\n" + next + "\n",
                                          "{\"seconds\": 3.0}\n",
                                          "{\"step\": \"3\", \"seconds\": 3.0}\n",
                                          "{\"step\": 2, \"seconds\": 2.0}\n" + next + "\n"};
  for (const auto& rest : rests) {
    std::filesystem::create_directories(config_.metrics.folder);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole << rest;
    RunFolder folder(config_, 9);
    EXPECT_EQ(folder.kept_lines(), 2) << rest;
    EXPECT_EQ(folder.kept_seconds(), 2.0) << rest;
    EXPECT_EQ(content("metrics.jsonl"), whole) << rest;
  }
}

TEST_F(RunFolderTest, ARunThatGoesOnWithoutLinesOfItsOwnStartsAFreshFile) {
  { RunFolder(config_).append(at_step(30)); }
  RunFolder folder(config_, 20);
  EXPECT_TRUE(folder.replaced());
  EXPECT_EQ(folder.kept_lines(), 0);
  EXPECT_EQ(folder.kept_seconds(), 0.0);
  EXPECT_EQ(content("metrics.jsonl"), "");
  config_.metrics.folder += "/other";
  EXPECT_FALSE(RunFolder(config_, 20).replaced());
}

TEST_F(RunFolderTest, RefusesAFileInThePlaceOfTheFolder) {
  std::ofstream(root_ / "a") << "x";
  EXPECT_THAT(refusal(), HasSubstr("[metrics] " + config_.metrics.folder + " cannot be made a folder"));
  config_.metrics.folder = (root_ / "a").string();
  EXPECT_THAT(refusal(), HasSubstr("expected a folder to write to; set metrics.folder"));
}

TEST_F(RunFolderTest, RefusesAFolderInThePlaceOfAFile) {
  std::filesystem::create_directories(std::filesystem::path(config_.metrics.folder) / "metrics.jsonl");
  EXPECT_THAT(refusal(), HasSubstr("metrics.jsonl cannot be written: Is a directory"));
}

TEST_F(RunFolderTest, AFullDiskIsAnError) {
  // /dev/full takes no byte; reached through a link in the place of the file.
  std::filesystem::create_directories(config_.metrics.folder);
  std::filesystem::create_symlink("/dev/full", std::filesystem::path(config_.metrics.folder) / "metrics.jsonl");
  RunFolder folder(config_);
  EXPECT_THROW(folder.append(kStep), std::runtime_error);
}

}  // namespace metrics_test
}  // namespace apps

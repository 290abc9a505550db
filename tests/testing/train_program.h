#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/leftovers.h"
#include "tests/testing/process.h"

/// For tests that start the programs as a user does: a folder to start them in, processes as a launcher starts them,
/// and their output taken apart.
namespace testing_support {

using Arguments = std::vector<std::string>;

/// A transformer of 13392 parameters and two blocks, 6 steps of 6 sequences, every step logged to `run`.
extern const char* const kTrainConfig;

/// `--config config.yaml` and a `--set` for each.
Arguments with_settings(const std::vector<std::string>& settings);

std::string read_text(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, const std::string& text);
/// The first `from` replaced, which must be there.
std::string replaced(std::string text, const std::string& from, const std::string& to);
int count_of(const std::string& part, const std::string& text);
std::vector<std::string> lines_with(const std::string& start, const std::string& text);

/// stdout and stderr of all; the same with rank numbers and exit codes, for messages.
std::string all_output(const std::vector<ProcessResult>& results);
std::string describe(const std::vector<ProcessResult>& results);
void expect_success(const std::vector<ProcessResult>& results);

/// A folder with a configuration and a text to train on, from which a program is started.
class TrainFolder {
 public:
  TrainFolder();
  ~TrainFolder();
  TrainFolder(const TrainFolder&) = delete;
  TrainFolder& operator=(const TrainFolder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

/// Checks at the end that no process, port or temporary file is left.
class TrainProgramTest : public ::testing::Test {
 protected:
  void TearDown() override;

  /// A program of apps/ with no launcher's variables set and one thread.
  ProcessOptions program(const Arguments& arguments, const std::string& name = "hsdp_train") const;
  /// One process of hsdp_train a rank, as a launcher would start them; `arguments` may differ from rank to rank.
  std::vector<ProcessOptions> ranks(int count, const std::function<Arguments(int rank)>& arguments);
  std::vector<ProcessResult> run(int count, const Arguments& arguments);

  /// The objects in metrics.jsonl of a run folder, and their losses.
  std::vector<nlohmann::json> metrics(const std::string& run) const;
  std::vector<double> losses(const std::string& run) const;

  TrainFolder folder_;
  Leftovers leftovers_;
  std::vector<int> ports_;
};

}  // namespace testing_support

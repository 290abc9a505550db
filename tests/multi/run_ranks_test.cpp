// The harness itself: a test of ranks that could not fail would be worth nothing.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "tests/testing/multi_process.h"

namespace run_ranks_test {

using ::testing::HasSubstr;
using testing_support::RankContext;
using testing_support::run_ranks;
using testing_support::RunOptions;

RunOptions without_environment() {
  RunOptions options;
  options.make_environment = false;
  return options;
}

TEST(RunRanks, ReportsEveryWayToFail) {
  const auto failure_of = [](const std::function<void(RankContext&)>& body,
                             const RunOptions& options = without_environment()) {
    return testing_support::failures_of_ranks(2, body, options);
  };
  const auto on_rank_1 = [](const std::function<void()>& action) {
    return [action](RankContext& context) {
      if (context.rank() == 1) action();
    };
  };
  EXPECT_EQ(failure_of([](RankContext&) {}), "");
  EXPECT_THAT(failure_of(on_rank_1([] { EXPECT_EQ(1, 2) << "why"; })),
              ::testing::AllOf(HasSubstr("rank 1:"), HasSubstr("why")));
  EXPECT_THAT(failure_of(on_rank_1([] { throw std::runtime_error("broken"); })),
              HasSubstr("threw std::runtime_error: broken"));
  EXPECT_THAT(failure_of(on_rank_1([] { TORCH_CHECK(false, "broken"); })), HasSubstr("threw c10::Error: broken"));
  EXPECT_THAT(failure_of(on_rank_1([] { GTEST_SKIP() << "later"; })), HasSubstr("skipped inside a rank: later"));
  EXPECT_THAT(failure_of(on_rank_1([] { std::raise(SIGKILL); })), HasSubstr("rank 1 died of signal 9"));
  EXPECT_THAT(failure_of(on_rank_1([] { _exit(3); })), HasSubstr("rank 1 ended with status 3"));
  RunOptions killed = without_environment();
  killed.killed = {1};
  EXPECT_THAT(failure_of([](RankContext&) {}, killed), HasSubstr("rank 1 was expected to be killed but ended"));
  RunOptions hasty = without_environment();
  hasty.timeout = std::chrono::seconds(1);
  EXPECT_THAT(failure_of(on_rank_1([] { std::this_thread::sleep_for(std::chrono::seconds(30)); }), hasty),
              HasSubstr("rank 1 did not end within 1 s and was killed"));
}

TEST(RunRanks, LeavesNothingBehind) {
  const std::string note = ::testing::TempDir() + "hsdp_run_ranks_test_" + std::to_string(getpid());
  run_ranks(2, [&](RankContext& context) {
    std::ofstream(context.directory() + "/file_of_rank_" + std::to_string(context.rank())) << "x";
    if (context.rank() == 0) std::ofstream(note) << context.directory();
  });
  std::string directory;
  std::ifstream(note) >> directory;
  std::filesystem::remove(note);
  ASSERT_FALSE(directory.empty());
  EXPECT_FALSE(std::filesystem::exists(directory));
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

}  // namespace run_ranks_test

// The tools by which tests start programs and see what those leave behind.
#include "tests/testing/process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/testing/leftovers.h"

namespace process_test {

using ::testing::HasSubstr;
using testing_support::Leftovers;
using testing_support::Process;
using testing_support::ProcessOptions;
using testing_support::ProcessResult;
using testing_support::run_process;
using testing_support::run_processes;

ProcessOptions shell(const std::string& script) {
  ProcessOptions options;
  options.command = {"sh", "-c", script};
  return options;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(RunProcess, CapturesOutputAndExitCode) {
  const auto result = run_process(shell("echo out; echo err >&2; exit 3"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.signal, 0);
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.err, "err\n");
}

TEST(RunProcess, BearsMoreOutputThanAPipe) {
  const auto result = run_process(shell("head -c 1000000 /dev/zero | tr '\\0' x"));
  EXPECT_EQ(result.out, std::string(1000000, 'x'));
}

TEST(RunProcess, SetsAndRemovesVariablesAndTheFolder) {
  setenv("HSDP_PROCESS_TEST_REMOVED", "1", 1);
  setenv("HSDP_PROCESS_TEST_KEPT", "2", 1);
  auto options = shell("echo ${HSDP_PROCESS_TEST_REMOVED-none} $HSDP_PROCESS_TEST_KEPT $HSDP_PROCESS_TEST_NEW; pwd");
  options.environment = {{"HSDP_PROCESS_TEST_REMOVED", std::nullopt}, {"HSDP_PROCESS_TEST_NEW", "3"}};
  options.folder = "/";
  EXPECT_EQ(run_process(options).out, "none 2 3\n/\n");
}

TEST(RunProcess, TellsSignalsAndProgramsThatAreNotThere) {
  const auto killed = run_process(shell("kill -9 $$"));
  EXPECT_FALSE(killed.exit_code.has_value());
  EXPECT_EQ(killed.signal, SIGKILL);
  ProcessOptions absent;
  absent.command = {"/nowhere/program"};
  const auto result = run_process(absent);
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.err, HasSubstr("/nowhere/program cannot be started: No such file or directory"));
}

TEST(RunProcess, EndsTheGroupAtTheTimeout) {
  const Leftovers leftovers;
  const auto start = std::chrono::steady_clock::now();
  auto polite = shell("sleep 600 & wait"), stubborn = shell("trap '' TERM; echo started; while :; do sleep 0.1; done");
  polite.timeout = stubborn.timeout = std::chrono::seconds(3);  // until the trap is set
  const auto results = run_processes({polite, stubborn});
  EXPECT_TRUE(results[0].timed_out);
  EXPECT_EQ(results[0].signal, SIGTERM);
  EXPECT_TRUE(results[1].timed_out);
  EXPECT_EQ(results[1].signal, SIGKILL);
  EXPECT_EQ(results[1].out, "started\n");
  EXPECT_LT(seconds_since(start), 300) << "what was started in the group was waited for";
  EXPECT_EQ(leftovers.describe(), "");
}

TEST(RunProcess, EndsWhatAProcessLeavesInItsGroup) {
  const Leftovers leftovers;
  EXPECT_EQ(run_process(shell("sleep 60 & exit 0")).exit_code, 0);
  { const Process dropped(shell("sleep 60 & wait")); }
  EXPECT_EQ(leftovers.describe(), "");
}

TEST(LeftoversOfARun, AreNamed) {
  const std::string name = "/hsdp_process_test_" + std::to_string(getpid());
  const Leftovers leftovers;
  EXPECT_EQ(leftovers.describe(), "");

  constexpr std::chrono::seconds patience{1};  // for what stays
  const std::string folder = std::getenv("TMPDIR");
  std::ofstream(folder + "/forgotten") << "x";
  EXPECT_EQ(leftovers.describe(patience), "left behind: " + folder + "/forgotten\n");
  std::filesystem::remove(folder + "/forgotten");

  const int memory = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  ASSERT_GE(memory, 0);
  close(memory);
  EXPECT_EQ(leftovers.describe(patience), "left behind: /dev/shm" + name + "\n");
  shm_unlink(name.c_str());

  // An orphan in a session of its own, where the end of the group does not reach it.
  const auto result = run_process(shell("setsid --wait sh -c 'sleep 60 >/dev/null 2>&1 & echo $!'; :"));
  EXPECT_EQ(leftovers.describe(patience), "a child process still runs\n");
  const pid_t orphan = std::stoi(result.out);
  kill(orphan, SIGKILL);
  waitpid(orphan, nullptr, 0);
  EXPECT_EQ(leftovers.describe(), "");
}

}  // namespace process_test

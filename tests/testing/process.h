#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace testing_support {

/// What to start and how.
struct ProcessOptions {
  /// Program and arguments; the program is a path, or looked up in PATH.
  std::vector<std::string> command;
  /// Laid over this process's environment; no value removes a variable.
  std::map<std::string, std::optional<std::string>> environment = {};
  /// Working directory; empty: this process's.
  std::string folder = {};
  /// Counted from the start. Afterwards the process is ended.
  std::chrono::milliseconds timeout = std::chrono::seconds(300);
};

/// How a process ended and what it said.
struct ProcessResult {
  /// Empty when it died of a signal.
  std::optional<int> exit_code;
  int signal = 0;
  /// It had not ended by itself within the timeout.
  bool timed_out = false;
  std::string out, err;
};

/// For messages: "exit code 2", "signal 9", "timed out", and all output.
std::string to_string(const ProcessResult& result);

/// A program that runs as a process group of its own and dies with this process. The destructor ends the whole group.
/// Throws std::runtime_error when it cannot be started.
class Process {
 public:
  explicit Process(const ProcessOptions& options);
  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;

  pid_t id() const { return id_; }
  /// Sends a signal to the group.
  void signal(int number) const;
  /// What it has written to stdout so far.
  std::string out() const;
  /// Waits for the end. At the timeout the group is asked to end, so that a launcher takes its own children along, and
  /// killed two seconds later. A second call is a mistake.
  ProcessResult wait();

 private:
  /// Reaps the process if it ends before `deadline`.
  bool ended_before(std::chrono::steady_clock::time_point deadline, int& status) const;
  void kill_group();

  pid_t id_ = -1;
  int out_ = -1, err_ = -1;
  std::chrono::steady_clock::time_point deadline_;
};

/// Starts all, then waits for all; results in the order of `options`.
std::vector<ProcessResult> run_processes(const std::vector<ProcessOptions>& options);
ProcessResult run_process(const ProcessOptions& options);

}  // namespace testing_support

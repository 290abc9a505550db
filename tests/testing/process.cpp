#include "tests/testing/process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

extern char** environ;

namespace testing_support {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail_system(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

/// A file in memory: unlike a pipe it never makes the writer wait for a reader.
int make_capture(const char* name) {
  const int file = memfd_create(name, MFD_CLOEXEC);
  if (file < 0) fail_system("memfd_create");
  return file;
}

std::string read_all(int file) {
  std::string text;
  char buffer[4096];
  // By position: the offset belongs to the process that writes.
  for (ssize_t count; (count = pread(file, buffer, sizeof(buffer), off_t(text.size()))) > 0;) {
    text.append(buffer, size_t(count));
  }
  return text;
}

std::vector<std::string> environment_of(const ProcessOptions& options) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable; ++variable) {
    const std::string text = *variable;
    if (!options.environment.contains(text.substr(0, text.find('=')))) variables.push_back(text);
  }
  for (const auto& [name, value] : options.environment) {
    if (value) variables.push_back(name + "=" + *value);
  }
  return variables;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

std::string to_string(const ProcessResult& result) {
  std::string text = result.timed_out   ? "timed out"
                     : result.exit_code ? "exit code " + std::to_string(*result.exit_code)
                                        : "signal " + std::to_string(result.signal);
  return text + "\n--- stdout\n" + result.out + "--- stderr\n" + result.err + "---\n";
}

Process::Process(const ProcessOptions& options) : deadline_(Clock::now() + options.timeout) {
  // Everything that allocates comes before the fork: this process may have threads that hold the allocator's lock.
  std::vector<std::string> command = options.command, environment = environment_of(options);
  const std::vector<char*> arguments = pointers(command), variables = pointers(environment);
  out_ = make_capture("stdout");
  err_ = make_capture("stderr");
  const pid_t parent = getpid();
  std::fflush(nullptr);
  id_ = fork();
  if (id_ < 0) fail_system("fork");
  if (id_ == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    const int nothing = open("/dev/null", O_RDONLY);
    dup2(nothing, STDIN_FILENO);
    dup2(out_, STDOUT_FILENO);
    dup2(err_, STDERR_FILENO);
    if (options.folder.empty() || chdir(options.folder.c_str()) == 0) {
      execvpe(arguments[0], arguments.data(), variables.data());
    }
    dprintf(STDERR_FILENO, "%s cannot be started: %s\n", arguments[0], std::strerror(errno));
    _exit(127);
  }
  setpgid(id_, id_);
}

Process::Process(Process&& other) noexcept
    : id_(std::exchange(other.id_, -1)),
      out_(std::exchange(other.out_, -1)),
      err_(std::exchange(other.err_, -1)),
      deadline_(other.deadline_) {}

Process::~Process() {
  if (id_ > 0) {
    kill_group();
    while (waitpid(id_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (out_ >= 0) close(out_);
  if (err_ >= 0) close(err_);
}

void Process::signal(int number) const { kill(-id_, number); }

std::string Process::out() const { return read_all(out_); }

void Process::kill_group() { kill(-id_, SIGKILL); }

bool Process::ended_before(Clock::time_point deadline, int& status) const {
  while (true) {
    const pid_t ended = waitpid(id_, &status, WNOHANG);
    if (ended == id_) return true;
    if (ended < 0 && errno != EINTR) fail_system("waitpid");
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

ProcessResult Process::wait() {
  int status = 0;
  ProcessResult result;
  if (!ended_before(deadline_, status)) {
    result.timed_out = true;
    signal(SIGTERM);
    if (!ended_before(Clock::now() + std::chrono::seconds(2), status)) {
      kill_group();
      while (waitpid(id_, &status, 0) < 0 && errno == EINTR) {
      }
    }
  }
  // Also what the process has left in its group.
  kill_group();
  id_ = -1;
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  result.out = read_all(out_);
  result.err = read_all(err_);
  return result;
}

std::vector<ProcessResult> run_processes(const std::vector<ProcessOptions>& options) {
  std::vector<Process> processes;
  processes.reserve(options.size());
  for (const auto& each : options) processes.emplace_back(each);
  std::vector<ProcessResult> results;
  for (auto& process : processes) results.push_back(process.wait());
  return results;
}

ProcessResult run_process(const ProcessOptions& options) { return Process(options).wait(); }

}  // namespace testing_support

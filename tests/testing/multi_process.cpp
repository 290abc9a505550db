#include "tests/testing/multi_process.h"

#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

namespace testing_support {

hsdp::Environment& RankContext::environment() {
  TORCH_INTERNAL_ASSERT(environment_, "this run was asked to make no environment");
  return *environment_;
}

void RankContext::tell(const std::string& word) const { std::ofstream(directory_ + "/told-" + word) << word; }

void RankContext::await(const std::string& word) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(4);
  while (!std::filesystem::exists(directory_ + "/told-" + word)) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("no rank has told \"" + word + "\"");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void RankContext::kill_self() {
  std::raise(SIGKILL);
  std::abort();  // not reached
}

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail_system(const char* what) {
  throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

/// A folder under the system's temporary directory for the lifetime of the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "hsdp_test_XXXXXX").string();
    if (!mkdtemp(name.data())) fail_system("mkdtemp");
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A listening socket on one port, or on one that the kernel chose. The server takes the socket itself over, so that
/// nobody can take the port in between.
class Listener {
 public:
  explicit Listener(uint16_t port = 0) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (socket_ < 0) fail_system("socket");
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(socket_, generic, length) || listen(socket_, 128) || getsockname(socket_, generic, &length)) {
      const int error = errno;
      close_socket();
      errno = error;
      fail_system("listen on a free port");
    }
    port_ = ntohs(address.sin_port);
  }
  ~Listener() { close_socket(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  void close_socket() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }
  int release() { return std::exchange(socket_, -1); }
  uint16_t port() const { return port_; }

 private:
  int socket_;
  uint16_t port_ = 0;
};

/// Keeps the failures of assertions made in a child, where the parent's report cannot see them.
class FailureCollector : public ::testing::EmptyTestEventListener {
 public:
  explicit FailureCollector(std::string& text) : text_(text) {}
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.passed()) return;
    if (result.file_name())
      text_ += std::string(result.file_name()) + ":" + std::to_string(result.line_number()) + ": ";
    text_ += std::string(result.skipped() ? "skipped inside a rank: " : "") + result.message() + "\n";
  }

 private:
  std::string& text_;
};

c10::intrusive_ptr<c10d::Store> make_store(const RankContext& context, const RunOptions& options, Listener* listener) {
  if (!listener) {
    return c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", context.world_size());
  }
  c10d::TCPStoreOptions store;
  store.port = listener->port();
  store.numWorkers = context.world_size();
  store.timeout = options.communication_timeout;
  store.isServer = context.rank() == 0;
  if (store.isServer) {
    store.masterListenFd = listener->release();
  } else {
    listener->close_socket();
  }
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store);
}

/// Runs one rank and returns what went wrong, or nothing.
std::string run_body(RankContext& context, const std::function<void(RankContext&)>& body, const RunOptions& options,
                     Listener* listener) {
  std::string failures;
  // The listener lives as long as the process.
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new FailureCollector(failures));
  try {
    at::set_num_threads(1);
    if (options.make_environment) {
      hsdp::InitOptions init;
      init.backend = "gloo";
      init.timeout = options.communication_timeout;
      auto store = make_store(context, options, listener);
      context.set_environment(hsdp::init_from(std::move(store), context.rank(), context.world_size(), init));
    }
    body(context);
    // A rank that has failed leaves at once, so that the others learn of it.
    if (failures.empty() && options.killed.empty()) hsdp::shutdown();
    context.set_environment(std::nullopt);
  } catch (const c10::Error& error) {
    failures +=
        std::string("threw ") + c10::demangle(typeid(error).name()) + ": " + error.what_without_backtrace() + "\n";
  } catch (const std::exception& error) {
    failures += std::string("threw ") + c10::demangle(typeid(error).name()) + ": " + error.what() + "\n";
  } catch (...) {
    failures += "threw something that is no std::exception\n";
  }
  return failures;
}

/// One forked rank as its parent sees it.
struct Child {
  pid_t pid = -1;
  int pipe = -1;
  std::string text;
  int status = 0;
};

void write_all(int file, const std::string& text) {
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = write(file, text.data() + written, text.size() - written);
    if (count < 0 && errno != EINTR) return;
    if (count > 0) written += static_cast<size_t>(count);
  }
}

Child fork_rank(RankContext context, const std::function<void(RankContext&)>& body, const RunOptions& options,
                Listener* listener) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC)) fail_system("pipe2");
  // Buffered output would otherwise be printed once more by every child.
  std::fflush(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) fail_system("fork");
  if (pid == 0) {
    // A group of its own, so that what the rank starts can be ended with it; and no life after the parent's.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    close(ends[0]);
    const std::string failures = run_body(context, body, options, listener);
    std::fflush(nullptr);
    write_all(ends[1], failures);
    _exit(failures.empty() ? 0 : 1);
  }
  setpgid(pid, pid);
  close(ends[1]);
  Child child;
  child.pid = pid;
  child.pipe = ends[0];
  return child;
}

/// Collects texts until every rank has closed its pipe, which it does by ending; false when the deadline came first.
bool read_until(std::vector<Child>& children, Clock::time_point deadline) {
  while (true) {
    std::vector<pollfd> polled;
    std::vector<Child*> open;
    for (Child& child : children) {
      if (child.pipe < 0) continue;
      polled.push_back({child.pipe, POLLIN, 0});
      open.push_back(&child);
    }
    if (open.empty()) return true;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    if (poll(polled.data(), polled.size(), static_cast<int>(left)) < 0 && errno != EINTR) fail_system("poll");
    for (size_t i = 0; i < open.size(); ++i) {
      if (!polled[i].revents) continue;
      char buffer[4096];
      const ssize_t count = read(open[i]->pipe, buffer, sizeof(buffer));
      if (count > 0) {
        open[i]->text.append(buffer, static_cast<size_t>(count));
      } else if (count == 0 || errno != EINTR) {
        close(open[i]->pipe);
        open[i]->pipe = -1;
      }
    }
  }
}

void reap(Child& child) {
  // Also ends what the rank has started itself.
  kill(-child.pid, SIGKILL);
  while (waitpid(child.pid, &child.status, 0) < 0 && errno == EINTR) {
  }
  if (child.pipe >= 0) close(child.pipe);
}

std::string describe_end(int rank, const Child& child, bool straggler, const RunOptions& options) {
  const bool killed = WIFSIGNALED(child.status) && WTERMSIG(child.status) == SIGKILL;
  const std::string name = "rank " + std::to_string(rank);
  if (straggler) {
    return name + " did not end within " + std::to_string(options.timeout.count()) + " s and was killed\n" + child.text;
  }
  if (options.killed.count(rank)) return killed ? "" : name + " was expected to be killed but ended\n" + child.text;
  if (WIFSIGNALED(child.status)) return name + " died of signal " + std::to_string(WTERMSIG(child.status)) + "\n";
  if (WEXITSTATUS(child.status) == 0 && child.text.empty()) return "";
  if (child.text.empty()) return name + " ended with status " + std::to_string(WEXITSTATUS(child.status)) + "\n";
  return name + ":\n" + child.text;
}

}  // namespace

void run_ranks(int world_size, const std::function<void(RankContext&)>& body, const RunOptions& options) {
  const std::string failures = failures_of_ranks(world_size, body, options);
  if (!failures.empty()) ADD_FAILURE() << failures;
}

std::string failures_of_ranks(int world_size, const std::function<void(RankContext&)>& body,
                              const RunOptions& options) {
  const TemporaryDirectory directory;
  std::optional<Listener> listener;
  if (options.store == RunOptions::Store::tcp) listener.emplace();
  std::vector<Child> children;
  std::string failures;
  try {
    for (int rank = 0; rank < world_size; ++rank) {
      children.push_back(
          fork_rank(RankContext(rank, world_size, directory.path()), body, options, listener ? &*listener : nullptr));
    }
    listener.reset();
    read_until(children, Clock::now() + options.timeout);
  } catch (const std::exception& error) {
    failures = std::string("the run itself failed: ") + error.what() + "\n";
  }
  for (int rank = 0; rank < static_cast<int>(children.size()); ++rank) {
    Child& child = children[rank];
    const bool straggler = child.pipe >= 0;
    if (!straggler) {
      // The pipe closes a moment before the process is gone: let it leave by itself, so that its status is its own.
      siginfo_t ended;
      while (waitid(P_PID, child.pid, &ended, WEXITED | WNOWAIT) < 0 && errno == EINTR) {
      }
    }
    reap(child);
    failures += describe_end(rank, child, straggler, options);
  }
  return failures;
}

int free_port() {
  // What the kernel chooses it also gives to any connection of another program before the port is listened on.
  int low = 32768, high = 60999;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> low >> high;
  static std::mt19937 random{std::random_device()()};
  for (int i = 0; i < 200; ++i) {
    // Above those that are computed from a Slurm job's number.
    const int port = std::uniform_int_distribution(25000, 31999)(random);
    if ((low <= port && port <= high) || port == 29400 || port == 29500) continue;
    try {
      return Listener(static_cast<uint16_t>(port)).port();
    } catch (const std::runtime_error&) {
      // Somebody listens there.
    }
  }
  return Listener().port();
}

}  // namespace testing_support

#include "tools/bench/ranks.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "tools/bench/temporary_folder.h"

namespace bench {
namespace {

[[noreturn]] void fail_system(const char* what) {
  throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

int run_rank(int64_t rank, int64_t ranks, const std::string& folder, const std::function<void(const Rank&)>& body) {
  try {
    at::set_num_threads(1);
    body({rank, ranks, c10::make_intrusive<c10d::FileStore>(folder + "/store", static_cast<int>(ranks))});
  } catch (const c10::Error& error) {
    std::cerr << "rank " << rank << ": " << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "rank " << rank << ": " << error.what() << std::endl;
    return 1;
  }
  std::cout.flush();
  return 0;
}

}  // namespace

void Rank::meet(const std::string& name) const {
  if (store->add(name + "/met", 1) == ranks) store->set(name + "/all", std::vector<uint8_t>{1});
  store->wait({name + "/all"});
}

bool run_ranks(int64_t ranks, const std::function<void(const Rank&)>& body) {
  const TemporaryFolder folder(std::filesystem::temp_directory_path());  // for the ranks' store
  std::vector<pid_t> running;
  const pid_t parent = getpid();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) fail_system("fork");
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      _exit(getppid() == parent ? run_rank(rank, ranks, folder.path(), body) : 1);
    }
    running.push_back(pid);
  }
  bool fine = true;
  while (!running.empty()) {
    int status = 0;
    const pid_t ended = wait(&status);
    if (ended < 0 && errno == EINTR) continue;
    if (ended < 0) fail_system("wait");
    std::erase(running, ended);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    fine = false;
    for (const pid_t other : running) kill(other, SIGKILL);
  }
  return fine;
}

}  // namespace bench

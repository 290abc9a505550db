#include "tests/testing/leftovers.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <thread>

namespace testing_support {
namespace {

namespace fs = std::filesystem;

std::set<std::string> entries(const fs::path& folder) {
  std::set<std::string> names;
  std::error_code gone;
  for (const auto& entry : fs::directory_iterator(folder, gone)) names.insert(entry.path().string());
  return names;
}

/// Asks until the answer is empty or the time has passed.
template <class F>
std::string settled(std::chrono::seconds patience, const F& ask) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (true) {
    const std::string answer = ask();
    if (answer.empty() || std::chrono::steady_clock::now() > deadline) return answer;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

/// A child that has not ended, if any. Reaps the orphans that have.
std::string living_child() {
  siginfo_t child{};
  while (waitpid(-1, nullptr, WNOHANG) > 0) {
  }
  // Says only whether there is a child; a living one cannot be waited for.
  if (waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) != 0) return "";
  return "a child process still runs\n";
}

}  // namespace

Leftovers::Leftovers() {
  const char* former = std::getenv("TMPDIR");
  had_tmpdir_ = former != nullptr;
  if (had_tmpdir_) former_tmpdir_ = former;
  folder_ = (fs::temp_directory_path() / "hsdp_leftovers_XXXXXX").string();
  if (!mkdtemp(folder_.data())) throw std::runtime_error("no temporary folder " + folder_);
  setenv("TMPDIR", folder_.c_str(), 1);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  shared_memory_ = entries("/dev/shm");
}

Leftovers::~Leftovers() {
  prctl(PR_SET_CHILD_SUBREAPER, 0);
  if (had_tmpdir_) {
    setenv("TMPDIR", former_tmpdir_.c_str(), 1);
  } else {
    unsetenv("TMPDIR");
  }
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

std::string Leftovers::describe(std::chrono::seconds patience) const {
  return settled(patience, living_child) + settled(patience, [this] {
           std::string text;
           for (const auto& name : entries(folder_)) text += "left behind: " + name + "\n";
           for (const auto& name : entries("/dev/shm")) {
             if (!shared_memory_.contains(name)) text += "left behind: " + name + "\n";
           }
           return text;
         });
}

}  // namespace testing_support

#pragma once

#include <chrono>
#include <set>
#include <string>

namespace testing_support {

/// Notices what a run leaves behind. While it lives, TMPDIR names an empty folder of its own, so that everything made
/// there comes from this run, and orphans of child processes become children of this process. One at a time.
class Leftovers {
 public:
  Leftovers();
  ~Leftovers();
  Leftovers(const Leftovers&) = delete;
  Leftovers& operator=(const Leftovers&) = delete;

  /// A line for living child processes, one for each file in the temporary folder, and one for each that is new in
  /// /dev/shm; empty when there are none. What ends or vanishes by itself within `patience` is not left behind.
  std::string describe(std::chrono::seconds patience = std::chrono::seconds(20)) const;

 private:
  std::string folder_, former_tmpdir_;
  bool had_tmpdir_ = false;
  std::set<std::string> shared_memory_;
};

}  // namespace testing_support

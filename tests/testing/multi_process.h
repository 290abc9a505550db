#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>

#include "hsdp/init.h"

namespace testing_support {

/// What the body of a rank gets to see. One per forked process.
class RankContext {
 public:
  RankContext(int rank, int world_size, std::string directory)
      : rank_(rank), world_size_(world_size), directory_(std::move(directory)) {}

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// A folder that all ranks share; removed when the run is over.
  const std::string& directory() const { return directory_; }
  /// The rank's environment over Gloo. Asserts when the run was asked not to make one.
  hsdp::Environment& environment();
  /// A word among the ranks: await() returns once one of them has told it, and throws std::runtime_error where nobody
  /// has after four minutes, which is less than a run may take.
  void tell(const std::string& word) const;
  void await(const std::string& word) const;
  /// Ends this process the way a crash or the kernel would: without a goodbye to the others.
  [[noreturn]] void kill_self();

  void set_environment(std::optional<hsdp::Environment> environment) { environment_ = std::move(environment); }

 private:
  int rank_, world_size_;
  std::string directory_;
  std::optional<hsdp::Environment> environment_;
};

struct RunOptions {
  /// Until then every rank must have ended; stragglers are killed and reported.
  std::chrono::seconds timeout{300};
  /// How long the environment's collectives wait.
  std::chrono::milliseconds communication_timeout{60000};
  /// Ranks that are expected to die by kill_self(). The others must succeed, and are not synchronised at the end.
  std::set<int> killed = {};
  /// Where ranks meet: a file in directory(), or a TCP store on a free port, served by rank 0.
  enum class Store { file, tcp } store = Store::file;
  /// False leaves it to the body to call hsdp::init().
  bool make_environment = true;
};

/// Forks `world_size` processes and runs `body` in each, with one thread and an hsdp::Environment over Gloo. A rank
/// fails by an exception, by a failed EXPECT_ or ASSERT_, by GTEST_SKIP (which would hide that nothing was tested), or
/// by ending in any other way; every rank's text becomes part of one test failure. Leaves no process, port or file
/// behind.
///
/// Call it before the test process uses autograd or starts threads: a child inherits only the thread that forks.
void run_ranks(int world_size, const std::function<void(RankContext&)>& body, const RunOptions& options = {});

/// The same, but returns the text instead of failing the test: empty when all went well.
std::string failures_of_ranks(int world_size, const std::function<void(RankContext&)>& body,
                              const RunOptions& options = {});

/// A TCP port of this host that was free a moment ago, for addresses that a launcher would hand out.
int free_port();

}  // namespace testing_support

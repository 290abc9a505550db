#pragma once

#include <c10/core/Event.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "dtensor/c10d_work.h"

namespace dtensor {

/// Watches the collectives that a device runs behind the host's back: the host goes on, so that it would never learn of
/// one that does not end. Looks now and then whether the last one that was started a timeout ago has ended. If not,
/// says so once on stderr, because the host may be held up in a call to the device, and lets check() throw. Ending the
/// process, where nothing else helps, is left to the backend's own watchdog.
///
/// Threads: started() and check() from the communicator's caller; the watching thread lives from the first started() to
/// the destructor.
class CollectiveWatch {
 public:
  explicit CollectiveWatch(std::shared_ptr<const Group> group) : group_(std::move(group)) {}
  ~CollectiveWatch();
  CollectiveWatch(const CollectiveWatch&) = delete;
  CollectiveWatch& operator=(const CollectiveWatch&) = delete;

  /// `done` is recorded behind the operation.
  void started(const Operation& operation, std::shared_ptr<const c10::Event> done);
  /// Throws CommunicationError when a collective has not ended within the timeout.
  void check();

 private:
  struct Entry {
    Operation operation;
    std::shared_ptr<const c10::Event> done;
    std::chrono::steady_clock::time_point start;
  };

  void watch();
  void look();

  std::shared_ptr<const Group> group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stops_ = false;
  // The last of each look, so that a few events stand for all: a group's collectives end in order, whatever the stream.
  std::optional<Entry> latest_;
  std::deque<Entry> samples_;
  std::string failure_;
  Operation failed_operation_;
  std::atomic<bool> failed_{false};
  std::thread thread_;
};

}  // namespace dtensor

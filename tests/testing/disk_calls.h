#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

/// Steps between a process and its disk: tests that link disk_calls.cpp see each, and may wait there, fail, or die.
namespace testing_support {

/// Called before each fsync, mkdir, rename, renameat2, unlink and unlinkat of this process, on the calling thread: with
/// its name, the path that it names (empty for fsync), and how many came before since the hook was set. Returns 0, or
/// the number of the error to fail with.
using DiskHook = std::function<int(const std::string& call, const std::string& path, int64_t number)>;

/// An empty one ends it.
void set_disk_hook(DiskHook hook);

/// While it lives, no thread of this process but the one that made it gets anything to the disk: they wait, so that a
/// checkpoint stays unwritten for as long as a test likes.
class HeldDisk {
 public:
  HeldDisk() {
    set_disk_hook([gate = gate_, owner = std::this_thread::get_id()](const std::string&, const std::string&, int64_t) {
      if (std::this_thread::get_id() == owner) return 0;
      std::unique_lock lock(gate->mutex);
      gate->opened.wait(lock, [&] { return gate->is_open; });
      return 0;
    });
  }
  ~HeldDisk() {
    set_disk_hook({});
    release();
  }
  HeldDisk(const HeldDisk&) = delete;
  HeldDisk& operator=(const HeldDisk&) = delete;

  void release() {
    std::lock_guard lock(gate_->mutex);
    gate_->is_open = true;
    gate_->opened.notify_all();
  }

 private:
  struct Gate {
    std::mutex mutex;
    std::condition_variable opened;
    bool is_open = false;
  };
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

}  // namespace testing_support

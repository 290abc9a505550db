#include "dtensor/collective_watch.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iostream>
#include <utility>

#include "dtensor/collective.h"
#include "dtensor/graph_capture.h"

namespace dtensor {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

CollectiveWatch::~CollectiveWatch() {
  {
    std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void CollectiveWatch::started(const Operation& operation, std::shared_ptr<const c10::Event> done) {
  std::lock_guard lock(mutex_);
  latest_ = Entry{operation, std::move(done), steady_clock::now()};
  if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
}

void CollectiveWatch::check() {
  if (!failed_) return;
  std::lock_guard lock(mutex_);
  raise_failure(failed_operation_, failure_);
}

void CollectiveWatch::watch() {
  // An event that this thread is the last to hold is destroyed on the thread's current device.
  c10::impl::VirtualGuardImpl(group_->device->type()).setDevice(*group_->device);
  tolerate_capture(group_->device->type());
  // Often enough to be heard before the backend's own watchdog, which is given some seconds more, ends the process.
  const auto pause = std::clamp<milliseconds>(group_->timeout / 20, milliseconds(20), milliseconds(1000));
  std::unique_lock lock(mutex_);
  while (!stops_ && !failed_) {
    changed_.wait_for(lock, pause, [this] { return stops_; });
    if (!stops_) look();
  }
}

// Under the lock.
void CollectiveWatch::look() {
  if (latest_) samples_.push_back(*std::exchange(latest_, std::nullopt));
  const auto now = steady_clock::now();
  while (!samples_.empty() && now - samples_.front().start > group_->timeout) {
    const Entry entry = std::move(samples_.front());
    samples_.pop_front();
    std::string cause = "it has not ended on the device";
    try {
      if (entry.done->query()) continue;
    } catch (const std::exception& error) {
      cause = backend_message(error);
    }
    failure_ = failure_text(*group_, entry.operation, entry.start, cause);
    failed_operation_ = entry.operation;
    std::cerr << "hsdp: [" << entry.operation.name << "] " << failure_ << std::endl;
    failed_ = true;
    return;
  }
}

}  // namespace dtensor

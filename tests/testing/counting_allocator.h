#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace testing_support {

/// The host's allocator, counting the bytes that are alive. Installed for good by install(), in a process of its own.
class CountingAllocator final : public c10::Allocator {
 public:
  static void install() { c10::SetCPUAllocator(&instance(), /*priority=*/100); }
  static int64_t alive() {
    std::lock_guard lock(instance().mutex_);
    return instance().alive_;
  }
  /// The most that were alive at once since start_peak().
  static int64_t peak() {
    std::lock_guard lock(instance().mutex_);
    return instance().peak_;
  }
  static void start_peak() {
    std::lock_guard lock(instance().mutex_);
    instance().peak_ = instance().alive_;
  }

  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* data = memory.get();
    if (data == nullptr) return memory;
    std::lock_guard lock(mutex_);
    alive_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, alive_);
    memories_.emplace(data, std::pair(std::move(memory), bytes));
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static CountingAllocator& instance() {
    // Leaked: tensors may outlive static destruction.
    static auto* allocator = new CountingAllocator;
    return *allocator;
  }
  static void release(void* data) {
    auto& self = instance();
    std::lock_guard lock(self.mutex_);
    auto found = self.memories_.find(data);
    if (found == self.memories_.end()) return c10::GetDefaultCPUAllocator()->raw_deallocate(data);  // from before
    self.alive_ -= static_cast<int64_t>(found->second.second);
    self.memories_.erase(found);
  }

  std::mutex mutex_;
  int64_t alive_ = 0, peak_ = 0;
  std::unordered_map<void*, std::pair<c10::DataPtr, size_t>> memories_;
};

}  // namespace testing_support

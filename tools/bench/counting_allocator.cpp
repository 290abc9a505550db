#include "tools/bench/counting_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstddef>

namespace bench {
namespace {

std::atomic<int64_t> current{0}, peak{0};

/// Stands before the memory of a tensor, as long as its alignment: some operators want to free by the pointer alone.
constexpr size_t kHeader = 64;

void release(void* data) {
  if (data == nullptr) return;
  auto* start = static_cast<std::byte*>(data) - kHeader;
  current -= *reinterpret_cast<int64_t*>(start);
  c10::free_cpu(start);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    auto* start = static_cast<std::byte*>(c10::alloc_cpu(bytes + kHeader));
    *reinterpret_cast<int64_t*>(start) = static_cast<int64_t>(bytes);
    const auto now = current += static_cast<int64_t>(bytes);
    for (auto former = peak.load(); former < now && !peak.compare_exchange_weak(former, now);) {
    }
    void* data = start + kHeader;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

}  // namespace

void count_tensor_bytes() {
  // Never freed: tensors may outlive static destruction.
  static auto* const allocator = new CountingAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/1);
}

int64_t tensor_bytes() { return current; }
int64_t peak_tensor_bytes() { return peak; }
void reset_peak_tensor_bytes() { peak = current.load(); }

}  // namespace bench

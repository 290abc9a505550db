#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/cuda/memory_snapshot.h>

#include <optional>
#include <utility>

#include "hsdp/launch/device.h"
#include "hsdp/profiling/memory_snapshot.h"

namespace hsdp::memory_snapshot {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

class CudaSource final : public Source {
 public:
  void record_history(size_t max_entries) override {
    // Of everything, with the stacks of C++, as torch.cuda.memory does by default.
    torch::cuda::_record_memory_history("all", "all", "all", max_entries, /*clearHistory=*/true);
  }
  void stop_history() override { torch::cuda::_record_memory_history(std::nullopt, std::nullopt, "all", 1); }
  bool is_recording() override { return allocator::isHistoryEnabled(); }
  std::string snapshot() override { return torch::cuda::_memory_snapshot_pickled(); }
  void observe_out_of_memory(OutOfMemoryObserver observer) override {
    allocator::attachOutOfMemoryObserver(
        [observer = std::move(observer)](int64_t device, size_t requested, size_t /*total*/, size_t /*free*/) {
          observer(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)), requested);
        });
  }
};

}  // namespace

Source* source_of(c10::Device device) {
  if (device.type() != c10::kCUDA || device_count(c10::kCUDA) == 0) return nullptr;
  // Until then there is no allocator to attach an observer to, and it would be lost.
  at::globalContext().lazyInitDevice(c10::kCUDA);
  static CudaSource source;
  return &source;
}

}  // namespace hsdp::memory_snapshot

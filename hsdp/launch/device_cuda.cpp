#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "hsdp/launch/device.h"
#include "hsdp/launch/device_memory.h"

namespace hsdp {

int64_t cuda_device_count() { return c10::cuda::device_count(); }

void set_cuda_device(int64_t index) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(index)); }

int64_t cuda_peak_memory_bytes(c10::Device device) {
  using c10::CachingAllocator::StatType;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].peak;
}

void cuda_reset_peak_memory(c10::Device device) { c10::cuda::CUDACachingAllocator::resetPeakStats(device.index()); }

}  // namespace hsdp

#include "hsdp/launch/device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/resource.h>

#include "hsdp/host.h"

namespace hsdp {
namespace {

// Null where the device's allocator keeps no count, or has not been used yet.
c10::DeviceAllocator* counting_allocator(c10::Device device) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  return allocator != nullptr && allocator->initialized() ? allocator : nullptr;
}

}  // namespace

int64_t device_count(c10::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) return 0;
  return c10::impl::VirtualGuardImpl(type).deviceCount();
}

c10::Device current_device(c10::DeviceType type) { return c10::impl::VirtualGuardImpl(type).getDevice(); }

void set_device(c10::Device device) { c10::impl::VirtualGuardImpl(device.type()).setDevice(device); }

int64_t peak_memory_bytes(c10::Device device) {
  if (device.type() == kHost) {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    // Linux counts in KiB.
    return static_cast<int64_t>(usage.ru_maxrss) * 1024;
  }
  auto* allocator = counting_allocator(device);
  if (allocator == nullptr) return 0;
  using c10::CachingAllocator::StatType;
  return allocator->getDeviceStats(device.index()).allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].peak;
}

void reset_peak_memory(c10::Device device) {
  if (device.type() == kHost) return;
  if (auto* allocator = counting_allocator(device)) allocator->resetPeakStats(device.index());
}

}  // namespace hsdp

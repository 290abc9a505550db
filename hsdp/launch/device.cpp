#include "hsdp/launch/device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/resource.h>

#include "hsdp/host.h"
#include "hsdp/launch/host_memory.h"

namespace hsdp {
namespace {

// Null where the device's allocator keeps no count, or has not been used yet.
c10::DeviceAllocator* counting_allocator(c10::Device device) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  return allocator != nullptr && allocator->initialized() ? allocator : nullptr;
}

c10::CachingAllocator::Stat allocated_bytes(c10::Device device) {
  auto* allocator = counting_allocator(device);
  if (allocator == nullptr) return {};
  using c10::CachingAllocator::StatType;
  return allocator->getDeviceStats(device.index()).allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)];
}

}  // namespace

int64_t device_count(c10::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) return 0;
  return c10::impl::VirtualGuardImpl(type).deviceCount();
}

c10::Device current_device(c10::DeviceType type) { return c10::impl::VirtualGuardImpl(type).getDevice(); }

void set_device(c10::Device device) { c10::impl::VirtualGuardImpl(device.type()).setDevice(device); }

bool can_pin_memory_for(c10::DeviceType device) {
  const auto accelerator = at::getAccelerator();
  if (accelerator != device || device_count(device) == 0) return false;
  try {
    return at::globalContext().getAcceleratorHooksInterface(device).getPinnedMemoryAllocator() != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

int64_t memory_bytes(c10::Device device) {
  if (device.type() == kHost) return host_memory::bytes();
  return allocated_bytes(device).current;
}

int64_t peak_memory_bytes(c10::Device device) {
  if (device.type() != kHost) return allocated_bytes(device).peak;
  if (host_memory::is_counted()) return host_memory::peak_bytes();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  // Linux counts in KiB.
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

void reset_peak_memory(c10::Device device) {
  if (device.type() == kHost) return host_memory::reset_peak();
  if (auto* allocator = counting_allocator(device)) allocator->resetPeakStats(device.index());
}

}  // namespace hsdp

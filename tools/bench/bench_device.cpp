#include "tools/bench/bench_device.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace bench {

void StepTimes::begin() {
  if (device_.is_cpu()) {
    times_.push_back(std::chrono::steady_clock::now());
    return;
  }
  auto& event = events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with a time
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void StepTimes::end() { begin(); }

std::vector<double> StepTimes::milliseconds() const {
  std::vector<double> steps;
  for (size_t i = 0; i + 1 < times_.size(); i += 2) {
    steps.push_back(std::chrono::duration<double, std::milli>(times_[i + 1] - times_[i]).count());
  }
  if (!events_.empty()) events_.back().synchronize();
  for (size_t i = 0; i + 1 < events_.size(); i += 2) steps.push_back(events_[i].elapsedTime(events_[i + 1]));
  return steps;
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

int64_t peak_reserved_bytes(c10::Device device) {
  if (device.is_cpu()) return 0;
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return 0;
  using c10::CachingAllocator::StatType;
  return allocator->getDeviceStats(device.index()).reserved_bytes[static_cast<size_t>(StatType::AGGREGATE)].peak;
}

void allow_tf32() { at::globalContext().setFloat32MatmulPrecision("high"); }

}  // namespace bench

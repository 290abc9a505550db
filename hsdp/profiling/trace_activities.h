#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <set>
#include <vector>

namespace hsdp {

/// Device types whose work Kineto can record and of which this process sees a device.
std::vector<c10::DeviceType> traced_device_types();
/// The words of Kineto for the host and those types.
std::set<torch::profiler::impl::ActivityType> traced_activities();

}  // namespace hsdp

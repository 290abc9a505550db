#include "hsdp/profiling/trace_activities.h"

#include <utility>

#include "hsdp/launch/device.h"

namespace hsdp {
namespace {

using torch::profiler::impl::ActivityType;

// Kineto has no way to ask for this.
constexpr std::pair<c10::DeviceType, ActivityType> kDeviceActivities[] = {
    {c10::DeviceType::CUDA, ActivityType::CUDA},
    {c10::DeviceType::XPU, ActivityType::XPU},
    {c10::DeviceType::HPU, ActivityType::HPU},
    {c10::DeviceType::MTIA, ActivityType::MTIA},
    {c10::DeviceType::PrivateUse1, ActivityType::PrivateUse1},
};

}  // namespace

std::vector<c10::DeviceType> traced_device_types() {
  std::vector<c10::DeviceType> types;
  for (const auto& [type, activity] : kDeviceActivities) {
    if (device_count(type) > 0) types.push_back(type);
  }
  return types;
}

std::set<ActivityType> traced_activities() {
  std::set<ActivityType> activities{ActivityType::CPU};
  for (const auto& [type, activity] : kDeviceActivities) {
    if (device_count(type) > 0) activities.insert(activity);
  }
  return activities;
}

}  // namespace hsdp

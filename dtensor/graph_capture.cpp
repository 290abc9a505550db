#include "dtensor/graph_capture.h"

#include <array>

namespace dtensor {
namespace {

GraphCapture& capture_of(c10::DeviceType type) {
  static std::array<GraphCapture, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> captures;
  return captures.at(static_cast<size_t>(type));
}

}  // namespace

void register_graph_capture(c10::DeviceType type, GraphCapture capture) { capture_of(type) = capture; }

uint64_t current_capture(c10::Device device) {
  const auto& capture = capture_of(device.type());
  return capture.current == nullptr ? 0 : capture.current(device);
}

bool is_capturing(c10::Device device) { return current_capture(device) != 0; }

void tolerate_capture(c10::DeviceType type) {
  const auto& capture = capture_of(type);
  if (capture.tolerate != nullptr) capture.tolerate();
}

}  // namespace dtensor

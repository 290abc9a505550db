#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

/// What the benchmark asks of the device that it trains on.
namespace bench {

/// Times of steps in milliseconds: on the host from begin() to end(); on a device between events on its stream, which
/// never hold the host up.
class StepTimes {
 public:
  explicit StepTimes(c10::Device device) : device_(device) {}
  void begin();
  void end();
  /// Waits for the device.
  std::vector<double> milliseconds() const;

 private:
  c10::Device device_;
  std::vector<std::chrono::steady_clock::time_point> times_;  // begin and end in turn, on the host
  std::vector<c10::Event> events_;                            // the same on a device
};

/// Waits until the device has done all that was queued. Nothing on the host.
void synchronize(c10::Device device);

/// Bytes that the device's allocator has taken from the device, at most since the last reset; 0 where it does not say.
int64_t peak_reserved_bytes(c10::Device device);

/// As its maker calls the device; "" on the host.
std::string device_name(c10::Device device);

/// Lets float matrix products be computed in TF32, as both sides of a comparison do.
void allow_tf32();

}  // namespace bench

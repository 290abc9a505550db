#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace dtensor {

/// How a kind of device records graphs of what is queued on its streams: c10 has no words for it. Null functions mean
/// that it does not.
struct GraphCapture {
  /// Which graph the calling thread's current stream of that device is recording: a number that no other recording of
  /// the process has, 0 for none.
  uint64_t (*current)(c10::Device device) = nullptr;
  /// Called once by a thread that will ask for events while another thread may be recording, which devices forbid.
  void (*tolerate)() = nullptr;
};

/// Once for each type, before it is used.
void register_graph_capture(c10::DeviceType type, GraphCapture capture);

/// Whether work that is queued now on `device` is recorded rather than done: then nothing may be asked of the device,
/// and what the host decides now is what every replay does.
bool is_capturing(c10::Device device);
/// The recording that it goes to; 0 where it is done.
uint64_t current_capture(c10::Device device);
void tolerate_capture(c10::DeviceType type);

}  // namespace dtensor

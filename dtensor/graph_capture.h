#pragma once

#include <c10/core/Device.h>

namespace dtensor {

/// How a kind of device records graphs of what is queued on its streams: c10 has no words for it. Null functions mean
/// that it does not.
struct GraphCapture {
  /// Whether the calling thread's current stream of that device is recording.
  bool (*is_active)(c10::Device device) = nullptr;
  /// Called once by a thread that will ask for events while another thread may be recording, which devices forbid.
  void (*tolerate)() = nullptr;
};

/// Once for each type, before it is used.
void register_graph_capture(c10::DeviceType type, GraphCapture capture);

/// Whether work that is queued now on `device` is recorded rather than done: then nothing may be asked of the device,
/// and what the host decides now is what every replay does.
bool is_capturing(c10::Device device);
void tolerate_capture(c10::DeviceType type);

}  // namespace dtensor

#pragma once

#include <c10/core/Device.h>

#include <cstdint>

/// Devices of any type, asked through what each type registers with libtorch.
namespace hsdp {

/// Number of devices that this process may use; 0 for a type that neither this build nor a loaded library supports.
int64_t device_count(c10::DeviceType type);
/// The current device of the calling thread.
c10::Device current_device(c10::DeviceType type);
/// Makes a device the current one of the calling thread.
void set_device(c10::Device device);

/// Highest number of bytes in use: on the host of the whole process since it started, on a device those of its
/// allocator since the last reset, or 0 where that keeps no count.
int64_t peak_memory_bytes(c10::Device device);
/// Starts a new measurement on a device; the operating system keeps the host's.
void reset_peak_memory(c10::Device device);

}  // namespace hsdp

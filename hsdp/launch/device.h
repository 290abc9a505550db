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

/// Whether memory of the host can be page-locked for a type of device, which makes copies to and from it asynchronous.
/// It is that of the process's accelerator, which a build may know and this machine not have, and which a library from
/// elsewhere need not offer.
bool can_pin_memory_for(c10::DeviceType device);

/// Counts the bytes of tensors on the host from now on, for memory_bytes and peak_memory_bytes. Once in a process,
/// before tensors are made, which would not be counted; a second call does nothing. Page-locked and mapped memory is
/// not counted.
void count_host_memory();

/// Number of bytes in use now: those of the device's allocator, or 0 where nothing counts them, as on the host before
/// count_host_memory().
int64_t memory_bytes(c10::Device device);
/// Highest number of bytes in use since the last reset: those of the device's allocator, or 0 where that keeps no
/// count. On the host before count_host_memory(): the resident size of the whole process since it started.
int64_t peak_memory_bytes(c10::Device device);
/// Starts a new measurement, from what is in use now. The operating system keeps the host's where nothing is counted.
void reset_peak_memory(c10::Device device);

}  // namespace hsdp

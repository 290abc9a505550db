#pragma once

#include <c10/core/Device.h>

#include <cstdint>

/// An accelerator as an out-of-tree library brings it, under the name "npu": devices that libtorch does not know,
/// behind the key PrivateUse1. Its memory is the host's and its operators run there, so results are those of the host
/// bit for bit; what the tests prove is that nothing above asks for anything but what such a library registers.
namespace testing_support {

inline constexpr int64_t kPrivateDevices = 4;

/// Without streams everything is done at once on the only one there is, and a new one is refused: what a library
/// without streams registers. Recorded streams order what they are given as those of a real device do, and a log of it
/// can be checked (private_streams.h); such a device has pinned memory as well.
enum class PrivateStreams { none, recorded };

/// Registers name, guard, hooks, allocator and operators; for the whole process, once.
void register_private_device(PrivateStreams streams = PrivateStreams::none);

/// Bytes in use on one device, and the calls that the fallback has run on the host for it.
int64_t private_bytes(c10::DeviceIndex index);
int64_t private_fallbacks();

}  // namespace testing_support

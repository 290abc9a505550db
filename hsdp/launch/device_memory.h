#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace hsdp {

/// The CUDA side of device.h; asserts in a build without CUDA, where no CUDA device can exist.
int64_t cuda_peak_memory_bytes(c10::Device device);
void cuda_reset_peak_memory(c10::Device device);

}  // namespace hsdp

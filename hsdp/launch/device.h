#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace hsdp {

/// Number of CUDA devices that this process may use; 0 in a build without CUDA and on machines without a GPU.
int64_t cuda_device_count();
/// Makes a CUDA device the current one of the calling thread. Throws NotSupportedError in a build without CUDA.
void set_cuda_device(int64_t index);

/// Highest number of bytes in use since the process started, or on CUDA since the last reset: memory of the allocator
/// on CUDA, resident memory of the process on CPU.
int64_t peak_memory_bytes(c10::Device device);
/// Starts a new measurement on CUDA; the operating system keeps the CPU's.
void reset_peak_memory(c10::Device device);

}  // namespace hsdp

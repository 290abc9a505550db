#include <c10/util/Exception.h>

#include "dtensor/error.h"
#include "hsdp/launch/device.h"
#include "hsdp/launch/device_memory.h"

namespace hsdp {

int64_t cuda_device_count() { return 0; }

void set_cuda_device(int64_t index) {
  dtensor::raise<dtensor::NotSupportedError>("set_cuda_device", "CUDA device ", index,
                                             " in a build without CUDA; build on a machine with a CUDA toolkit");
}

int64_t cuda_peak_memory_bytes(c10::Device device) {
  TORCH_INTERNAL_ASSERT(false, "memory of ", device, " in a build without CUDA");
}

void cuda_reset_peak_memory(c10::Device device) {
  TORCH_INTERNAL_ASSERT(false, "memory of ", device, " in a build without CUDA");
}

}  // namespace hsdp

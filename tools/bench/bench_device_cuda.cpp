#include <ATen/cuda/CUDAContextLight.h>
#include <cuda_runtime_api.h>

#include "tools/bench/bench_device.h"

namespace bench {

std::string device_name(c10::Device device) {
  return device.is_cuda() ? at::cuda::getDeviceProperties(device.index())->name : "";
}

}  // namespace bench

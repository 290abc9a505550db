#include "hsdp/kernels/gradient_kernel_ways.h"

namespace hsdp::kernels {

const DeviceKernels* device_kernels(c10::DeviceType) { return nullptr; }

}  // namespace hsdp::kernels

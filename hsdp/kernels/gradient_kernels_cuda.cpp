#include "hsdp/kernels/gradient_kernels_cuda.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "hsdp/kernels/gradient_kernel_ways.h"

namespace hsdp::kernels {
namespace {

template <typename Launch>
void launch_on(c10::Device device, const Launch& launch) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(static_cast<cudaError_t>(launch(c10::cuda::getCurrentCUDAStream(device.index()).stream())));
}

}  // namespace

const DeviceKernels* device_kernels(c10::DeviceType type) {
  static constexpr DeviceKernels kernels{
      [](const LandTable& table, Dtype source, Dtype destination, double divisor, c10::Device device) {
        launch_on(device, [&](auto* stream) { return launch_land(table, source, destination, divisor, stream); });
      },
      [](const PackTable& table, Dtype whole, Dtype rows, double divisor, c10::Device device) {
        launch_on(device, [&](auto* stream) { return launch_pack(table, whole, rows, divisor, stream); });
      },
      [](void* bytes, const Words& words, c10::Device device) {
        launch_on(device, [&](auto* stream) { return launch_words(bytes, words, stream); });
      }};
  return type == c10::kCUDA ? &kernels : nullptr;
}

}  // namespace hsdp::kernels

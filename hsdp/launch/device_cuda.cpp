// What c10 has no device-independent words for.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "dtensor/graph_capture.h"

namespace hsdp {
namespace {

bool is_active(c10::Device device) {
  const c10::cuda::OptionalCUDAGuard guard(device);
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

void tolerate() {
  auto mode = cudaStreamCaptureModeRelaxed;
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
}

[[maybe_unused]] const bool registered = [] {
  dtensor::register_graph_capture(c10::kCUDA, {is_active, tolerate});
  return true;
}();

}  // namespace
}  // namespace hsdp

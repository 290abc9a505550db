// What c10 has no device-independent words for.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "dtensor/graph_capture.h"

namespace hsdp {
namespace {

uint64_t current_capture(c10::Device device) {
  const c10::cuda::OptionalCUDAGuard guard(device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  auto status = cudaStreamCaptureStatusNone;
  // The cheaper question first: it is asked in every step.
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  if (status == cudaStreamCaptureStatusNone) return 0;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return id + 1;
}

void tolerate() {
  auto mode = cudaStreamCaptureModeRelaxed;
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
}

[[maybe_unused]] const bool registered = [] {
  dtensor::register_graph_capture(c10::kCUDA, {current_capture, tolerate});
  return true;
}();

}  // namespace
}  // namespace hsdp

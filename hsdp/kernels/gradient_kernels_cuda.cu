#include <cuda_runtime_api.h>

#include "hsdp/kernels/gradient_kernels_cuda.h"

namespace hsdp::kernels {
namespace {

template <typename S, typename D>
__global__ void __launch_bounds__(kThreads)
    land_kernel(const __grid_constant__ LandTable table, const __grid_constant__ Scale<Wide<S>> scale) {
  land_thread<S, D>(table, scale, blockIdx.x, threadIdx.x);
}

template <typename S, typename D>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ PackTable table, const __grid_constant__ Scale<Wide<D>> scale) {
  pack_thread<S, D>(table, scale, blockIdx.x, threadIdx.x);
}

__global__ void words_kernel(uint8_t* bytes, const __grid_constant__ Words words) {
  words_thread(bytes, words, threadIdx.x);
}

}  // namespace

int launch_land(const LandTable& table, Dtype source, Dtype destination, double divisor, cudaStream_t stream) {
  with_type(source, [&](auto s) {
    with_type(destination, [&](auto d) {
      using S = decltype(s);
      land_kernel<S, decltype(d)><<<table.chunks, kThreads, 0, stream>>>(table, Scale<Wide<S>>::of(divisor));
    });
  });
  return cudaGetLastError();
}

int launch_pack(const PackTable& table, Dtype whole, Dtype rows, double divisor, cudaStream_t stream) {
  with_type(whole, [&](auto s) {
    with_type(rows, [&](auto d) {
      using D = decltype(d);
      pack_kernel<decltype(s), D><<<table.chunks, kThreads, 0, stream>>>(table, Scale<Wide<D>>::of(divisor));
    });
  });
  return cudaGetLastError();
}

int launch_words(void* bytes, const Words& words, cudaStream_t stream) {
  words_kernel<<<1, sizeof(Words), 0, stream>>>(static_cast<uint8_t*>(bytes), words);
  return cudaGetLastError();
}

}  // namespace hsdp::kernels

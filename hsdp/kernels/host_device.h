#pragma once

/// For code that is compiled for the host and, where there is a compiler for devices, for those as well.

#ifdef __CUDACC__
#define HSDP_HOST_DEVICE __host__ __device__ __forceinline__
#define HSDP_HOST_DEVICE_CONSTANT __host__ __device__ constexpr
#else
// Inlined always: a loop in which one call is left is not vectorised.
#define HSDP_HOST_DEVICE [[gnu::always_inline]] inline
#define HSDP_HOST_DEVICE_CONSTANT constexpr
#endif

#ifdef __CUDA_ARCH__
#define HSDP_ON_DEVICE
#define HSDP_UNROLL _Pragma("unroll")
#define HSDP_NO_UNROLL _Pragma("unroll 1")
#else
#define HSDP_UNROLL
#define HSDP_NO_UNROLL
#endif

#ifdef __USE_FAST_MATH__
#error "The gradient kernels round as the host does: they cannot be compiled with --use_fast_math."
#endif

namespace hsdp::kernels {

/// Rounded once, to the nearest, ties to even, also where a device would rather not, and never joined to an fma.
#ifdef HSDP_ON_DEVICE
HSDP_HOST_DEVICE float add(float left, float right) { return __fadd_rn(left, right); }
HSDP_HOST_DEVICE double add(double left, double right) { return __dadd_rn(left, right); }
HSDP_HOST_DEVICE float multiply(float left, float right) { return __fmul_rn(left, right); }
HSDP_HOST_DEVICE double multiply(double left, double right) { return __dmul_rn(left, right); }
HSDP_HOST_DEVICE float divide(float left, float right) { return __fdiv_rn(left, right); }
HSDP_HOST_DEVICE double divide(double left, double right) { return __ddiv_rn(left, right); }
#else
template <typename T>
HSDP_HOST_DEVICE T add(T left, T right) {
  return left + right;
}
template <typename T>
HSDP_HOST_DEVICE T multiply(T left, T right) {
  return left * right;
}
template <typename T>
HSDP_HOST_DEVICE T divide(T left, T right) {
  return left / right;
}
#endif

}  // namespace hsdp::kernels

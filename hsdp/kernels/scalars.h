#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "hsdp/kernels/host_device.h"

/// The dtypes of gradients and their arithmetic, the same code on host and device: half and bfloat16 are widened to
/// float, computed in float, and rounded to the nearest, ties to even, by integer operations. NaN becomes a quiet NaN.
namespace hsdp::kernels {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

enum class Dtype : uint8_t { kFloat, kDouble, kHalf, kBFloat16 };

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2; }

/// What a dtype is computed in.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

HSDP_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

HSDP_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

/// `yes` or `no`, both of which are computed: compilers vectorise that where they would branch.
HSDP_HOST_DEVICE uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
  return no ^ ((yes ^ no) & (0u - static_cast<uint32_t>(condition)));
}

HSDP_HOST_DEVICE float widen(float value) { return value; }
HSDP_HOST_DEVICE double widen(double value) { return value; }
HSDP_HOST_DEVICE float widen(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

HSDP_HOST_DEVICE float widen(Half value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  // Below 2^-14 the bits count units of 2^-24. Above, exponents differ by 112; that of infinity and NaN by twice that.
  const uint32_t small = bits_of(multiply(static_cast<float>(static_cast<int32_t>(magnitude)), 0x1p-24f));
  const uint32_t large = (magnitude << 13) + choose(magnitude < 0x7c00u, 112u << 23, 224u << 23);
  return float_of((static_cast<uint32_t>(value.bits) & 0x8000u) << 16 | choose(magnitude < 0x400u, small, large));
}

/// Rounds to T.
template <typename T>
HSDP_HOST_DEVICE T narrow(float value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return {static_cast<uint16_t>(choose((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, rounded))};
  } else if constexpr (std::is_same_v<T, Half>) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 the units are 2^-24, which is what a sum between a half and one is rounded to.
    const uint32_t small = bits_of(add(float_of(magnitude), 0.5f)) - 0x3f000000u;
    const uint32_t large = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t finite = choose(magnitude < 0x38800000u, small, large);
    const uint32_t beyond = choose(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);  // from 2^16 on
    return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | choose(magnitude < 0x47800000u, finite, beyond))};
  } else {
    return static_cast<T>(value);
  }
}

/// As ATen converts: to half and bfloat16 by way of float.
template <typename T>
HSDP_HOST_DEVICE T narrow(double value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return narrow<T>(static_cast<float>(value));
  }
}

/// Division by one number. By powers of two it is multiplication, which gives the same bits in less time.
template <typename W>
struct Scale {
  W divisor;
  W factor;
  bool by_factor;

  static Scale of(double divisor) {
    Scale scale{static_cast<W>(divisor), 1, false};
    int exponent = 0;
    const W reciprocal = 1 / scale.divisor;
    // A reciprocal that is not normal has lost bits.
    if (std::abs(std::frexp(scale.divisor, &exponent)) == W(0.5) && std::isnormal(reciprocal)) {
      scale.factor = reciprocal;
      scale.by_factor = true;
    }
    return scale;
  }
};

/// `value` divided, rounded to T, then to D.
template <typename T, typename D>
HSDP_HOST_DEVICE D quotient(T value, const Scale<Wide<T>>& scale, bool by_factor) {
  const auto wide = widen(value);
  const auto divided = narrow<T>(by_factor ? multiply(wide, scale.factor) : divide(wide, scale.divisor));
  if constexpr (std::is_same_v<T, D>) {
    return divided;
  } else {
    return narrow<D>(widen(divided));
  }
}

/// What becomes of an element of a reduced gradient, of dtype S, in its destination of dtype D. `by_factor` is that of
/// the scale, given apart so that it can be a constant.
template <typename S, typename D>
HSDP_HOST_DEVICE D landed(S source, D destination, bool accumulate, const Scale<Wide<S>>& scale, bool by_factor) {
  const D value = quotient<S, D>(source, scale, by_factor);
  return accumulate ? narrow<D>(add(widen(destination), widen(value))) : value;
}

/// What becomes of an element of a full gradient, of dtype S, in the rows of dtype D.
template <typename S, typename D>
HSDP_HOST_DEVICE D packed(S source, const Scale<Wide<D>>& scale, bool by_factor) {
  return quotient<D, D>(narrow<D>(widen(source)), scale, by_factor);
}

/// to = value. Compilers do not vectorise the copies of a structure.
template <typename T>
HSDP_HOST_DEVICE void store(T& to, T value) {
  if constexpr (sizeof(T) == sizeof(uint16_t)) {
    to.bits = value.bits;
  } else {
    to = value;
  }
}

/// Calls function(S{}) with the C++ type of `dtype`.
template <typename Function>
decltype(auto) with_type(Dtype dtype, Function&& function) {
  switch (dtype) {
    case Dtype::kFloat:
      return function(float{});
    case Dtype::kDouble:
      return function(double{});
    case Dtype::kHalf:
      return function(Half{});
    default:
      return function(BFloat16{});
  }
}

}  // namespace hsdp::kernels

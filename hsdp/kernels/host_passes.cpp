#include "hsdp/kernels/host_passes.h"

// Element by element without a dependence between elements: also where the two are the same memory.
#if defined(__clang__)
#define HSDP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define HSDP_INDEPENDENT _Pragma("GCC ivdep")
#else
#define HSDP_INDEPENDENT
#endif

namespace hsdp::kernels {
namespace {

template <typename S, typename D, bool kAccumulate, bool kByFactor>
struct Land {
  [[gnu::always_inline]] static inline void run(void* destination, const void* source, int64_t numel, double divisor) {
    const auto scale = Scale<Wide<S>>::of(divisor);
    auto* const to = static_cast<D*>(destination);
    const auto* const from = static_cast<const S*>(source);
    HSDP_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) store(to[i], landed<S, D>(from[i], to[i], kAccumulate, scale, kByFactor));
  }
};

template <typename S, typename D, bool kByFactor>
struct Pack {
  [[gnu::always_inline]] static inline void run(void* row, const void* whole, int64_t numel, double divisor) {
    const auto scale = Scale<Wide<D>>::of(divisor);
    auto* const to = static_cast<D*>(row);
    const auto* const from = static_cast<const S*>(whole);
    HSDP_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) store(to[i], packed<S, D>(from[i], scale, kByFactor));
  }
};

// Each pass twice: for every machine, and for those with registers of twice the width. Both give the same bits.
template <typename Pass>
void plain(void* to, const void* from, int64_t numel, double divisor) {
  Pass::run(to, from, numel, divisor);
}

#if defined(__x86_64__) && defined(__GNUC__)
template <typename Pass>
[[gnu::target("avx2")]] void wide(void* to, const void* from, int64_t numel, double divisor) {
  Pass::run(to, from, numel, divisor);
}

template <typename Pass>
HostPass fitting() {
  static const bool has_wide = __builtin_cpu_supports("avx2");
  return has_wide ? wide<Pass> : plain<Pass>;
}
#else
template <typename Pass>
HostPass fitting() {
  return plain<Pass>;
}
#endif

}  // namespace

HostPass host_land_pass(Dtype source, Dtype destination, bool accumulate, double divisor) {
  return with_type(source, [&](auto s) {
    return with_type(destination, [&](auto d) {
      using S = decltype(s);
      using D = decltype(d);
      const bool by_factor = Scale<Wide<S>>::of(divisor).by_factor;
      if (accumulate) return by_factor ? fitting<Land<S, D, true, true>>() : fitting<Land<S, D, true, false>>();
      return by_factor ? fitting<Land<S, D, false, true>>() : fitting<Land<S, D, false, false>>();
    });
  });
}

HostPass host_pack_pass(Dtype whole, Dtype rows, double divisor) {
  return with_type(whole, [&](auto s) {
    return with_type(rows, [&](auto d) {
      using S = decltype(s);
      using D = decltype(d);
      return Scale<Wide<D>>::of(divisor).by_factor ? fitting<Pack<S, D, true>>() : fitting<Pack<S, D, false>>();
    });
  });
}

}  // namespace hsdp::kernels

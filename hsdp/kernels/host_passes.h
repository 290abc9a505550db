#pragma once

#include <cstdint>

#include "hsdp/kernels/scalars.h"

/// The gradient kernels on stretches of the host's memory, by the calling thread. Torch-free.
namespace hsdp::kernels {

/// Stores into `to` what becomes of the `numel` elements `from`.
using HostPass = void (*)(void* to, const void* from, int64_t numel, double divisor);

/// to[i] = or += from[i] / divisor. Both may be the same memory in the same dtype.
HostPass host_land_pass(Dtype source, Dtype destination, bool accumulate, double divisor);

/// to[i] = from[i], in the rows' dtype, / divisor.
HostPass host_pack_pass(Dtype whole, Dtype rows, double divisor);

}  // namespace hsdp::kernels

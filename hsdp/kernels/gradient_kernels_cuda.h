#pragma once

#include "hsdp/kernels/gradient_tables.h"

struct CUstream_st;

/// Implemented by gradient_kernels_cuda.cu, the one file of the device compiler, which sees no header of torch:
/// compiling those for each architecture takes minutes. Every function returns the runtime's error code of the launch,
/// 0 for none.
namespace hsdp::kernels {

int launch_land(const LandTable& table, Dtype source, Dtype destination, double divisor, CUstream_st* stream);
int launch_pack(const PackTable& table, Dtype whole, Dtype rows, double divisor, CUstream_st* stream);
int launch_words(void* bytes, const Words& words, CUstream_st* stream);

}  // namespace hsdp::kernels

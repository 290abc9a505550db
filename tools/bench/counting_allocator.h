#pragma once

#include <cstdint>

namespace bench {

/// Counts the bytes of all tensors on the host from now on: call it once, before any tensor is made.
void count_tensor_bytes();
/// In tensors now, and at most since the last reset_peak_tensor_bytes().
int64_t tensor_bytes();
int64_t peak_tensor_bytes();
void reset_peak_tensor_bytes();

}  // namespace bench

#pragma once

#include <ATen/core/Tensor.h>

namespace models {

/// Cosines and sines of the rotary angles, each (length, head_dim). They are computed in every forward and are neither
/// parameters nor buffers: a model's state then holds weights only, as checkpoints of this family do.
struct RotaryTables {
  at::Tensor cos, sin;
};

/// Position p turns the feature pair i by p * theta^(-2i / head_dim). Computed in float32, in float64 for float64, and
/// returned in the dtype and on the device of `like`.
RotaryTables rotary_tables(int64_t length, int64_t head_dim, double theta, const at::Tensor& like);

/// Turns `x` (..., length, head_dim): feature i is paired with feature i + head_dim / 2.
at::Tensor apply_rotary(const at::Tensor& x, const RotaryTables& tables);

}  // namespace models

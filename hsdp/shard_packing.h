#pragma once

#include <ATen/core/Tensor.h>

#include "dtensor/layout.h"

namespace hsdp {

/// Between the global shape of a parameter that is sharded along one dim and the order in which collectives see it: row
/// r holds the padded part of rank r. All functions work on plain tensors, without autograd.

/// Copies `whole` (global shape, any dtype and strides) into `rows` of [ranks, padded numel], whose rows may lie apart;
/// padding becomes zero.
void pack_rows(const at::Tensor& rows, const at::Tensor& whole, const dtensor::Layout& layout, int64_t dim);
/// The other way round.
void unpack_rows(const at::Tensor& whole, const at::Tensor& rows, const dtensor::Layout& layout, int64_t dim);

}  // namespace hsdp

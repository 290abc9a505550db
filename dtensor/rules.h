#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <vector>

#include "dtensor/dtensor_impl.h"

namespace c10 {
class OperatorHandle;
}

namespace dtensor {

/// Rules 0, 2 to 5 and 7 of dispatch.h: runs the operator on local shards and wraps the results, or throws naming
/// operator, tensor, placements and remedy. Runs with kDTensorKey excluded.
void run_on_shards(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Throws the error for an operator that mixes whole parameters with a distributed tensor of another layout.
[[noreturn]] void refuse_mixed(const c10::OperatorHandle& op, const DTensorImpl& impl);

/// Plain values of 0-dim Partial tensors, reduced over their mesh axes: one all-reduce for all that share mesh,
/// placements and dtype. Every rank must call it with the same list.
std::vector<at::Tensor> reduce_partials(const std::vector<at::Tensor>& partials);

}  // namespace dtensor

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

/// Whether run_on_shards knows what to do with such a call.
bool has_shard_rule(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
/// Whether the operator reads no values: what it says of a parameter holds for the whole as for the shard.
bool reads_metadata(const c10::OperatorHandle& op);
/// Whether the rule of this operator can write a shard without the whole: elementwise, copies, random draws.
bool writes_shards(const c10::OperatorHandle& op);

/// Throws where a distributed tensor that the operator is about to write must not be written, or not by this operator.
void check_write(const c10::OperatorHandle& op, const DTensorImpl& impl);

/// Throws the error for an operator that would write a whole value into a distributed tensor that nobody manages.
[[noreturn]] void refuse_mixed(const c10::OperatorHandle& op, const DTensorImpl& impl);

/// Plain values of 0-dim Partial tensors, reduced over their mesh axes: one all-reduce for all that share mesh,
/// placements and dtype. Every rank must call it with the same list.
std::vector<at::Tensor> reduce_partials(const std::vector<at::Tensor>& partials);

}  // namespace dtensor

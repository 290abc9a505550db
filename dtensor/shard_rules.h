#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "dtensor/dtensor_impl.h"

/// The single rules behind run_on_shards (rules.h), by the numbers of dispatch.h. Each takes the arguments from the
/// stack and leaves the results; all run with kDTensorKey excluded and, but for conversions, with grad mode off.
namespace dtensor {

// Rule 2, elementwise_rules.cpp.
void run_elementwise(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// `_foreach_*` and `_fused_*`: the k-th tensors of the lists meet each other; each k has a layout of its own.
void run_per_index(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// Tensors that meet in one elementwise operation: returns the one that the result lies like, null when all are plain.
/// Throws for deferred tensors, unlike layouts, and plain tensors that do not broadcast to the global shape.
const DTensorImpl* check_column(const c10::OperatorHandle& op, const std::vector<at::Tensor>& column);

/// This rank's part of a plain tensor that broadcasts to the global shape of `like`: it stands for the whole, the same
/// on all ranks.
at::Tensor part_of_plain(const at::Tensor& plain, const DTensorImpl& like);
bool broadcasts_to(const at::Tensor& plain, c10::IntArrayRef sizes);

// Optimizer state that was made on meta, pending_fill.cpp.
/// Gives memory to tensors of known constant value that meet real ones in this call.
void materialize_pending_fills(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Rule 3, conversion_rules.cpp.
void run_like_factory(const c10::OperatorHandle& op, torch::jit::Stack& stack);
void run_alias(const c10::OperatorHandle& op, torch::jit::Stack& stack);
void run_convert(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Rule 4, random_rules.cpp.
void run_random(const c10::OperatorHandle& op, torch::jit::Stack& stack);
void run_random_like(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Rule 5, reduction_rules.cpp and conversion_rules.cpp.
void run_reduce(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// Whether the arguments ask for one value rather than for one along some dims.
bool reduces_all_dims(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
void run_copy(const c10::OperatorHandle& op, torch::jit::Stack& stack);
bool has_partials(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
/// Replaces 0-dim Partial arguments by their reduced, plain values.
void reduce_partial_arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Rule 7 and what all of them use, rules.cpp.
[[noreturn]] void refuse(const c10::OperatorHandle& op, const DTensorImpl& impl, const std::string& what);
/// An operator wrote the local of this tensor: it has values, and whoever gathers it learns of it.
void note_shard_write(DTensorImpl& impl);
bool is_written(const c10::Argument& argument);
at::Tensor& self_of(const c10::OperatorHandle& op, torch::jit::Stack& stack);
/// Throws for a tensor made without a layout.
const Layout& layout_of(const c10::OperatorHandle& op, const DTensorImpl& impl);

}  // namespace dtensor

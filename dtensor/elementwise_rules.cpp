#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/operator_call.h"
#include "dtensor/shard_rules.h"

namespace dtensor {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

bool same_distribution(const DTensorImpl& a, const DTensorImpl& b) {
  if (a.layout() && b.layout()) return a.layout()->same_distribution(*b.layout());
  return a.mesh() == b.mesh() && a.alias_placements() == b.alias_placements() && a.sizes().equals(b.sizes());
}

struct Mapping {
  at::Tensor local, original;
};

at::Tensor to_shard(const at::Tensor& tensor, const DTensorImpl* reference, std::vector<Mapping>& mappings) {
  auto* impl = distributed_impl(tensor);
  if (impl == nullptr) return reference != nullptr && tensor.defined() ? part_of_plain(tensor, *reference) : tensor;
  mappings.push_back({impl->local(), tensor});
  return impl->local();
}

const at::Tensor* original_of(const at::Tensor& local, const std::vector<Mapping>& mappings) {
  for (auto& mapping : mappings) {
    if (mapping.local.is_same(local)) return &mapping.original;
  }
  return nullptr;
}

// A plain tensor cannot take a sharded result: each rank would see its own part.
void check_plain_is_read(const OperatorHandle& op, const Stack& arguments, size_t i, const DTensorImpl& reference) {
  if (!is_written(op.schema().arguments()[i])) return;
  for_each_tensor_in(arguments[i], [&](const at::Tensor& tensor) {
    if (!tensor.defined() || dtensor_impl(tensor) != nullptr) return;
    refuse(op, reference,
           c10::str("in place on a plain tensor of shape ", tensor.sizes(),
                    ", expected a distributed one: zeros_like(p) or p.detach().clone() with auto parameters = "
                    "model->parameters() on a line of its own, or DTensor::distribute of what was loaded"));
  });
}

// Writes are values, and they end a pending fill that the write did not set.
void note_writes(const OperatorHandle& op, const Stack& arguments) {
  const std::string& name = op.schema().name();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_written(op.schema().arguments()[i])) continue;
    for_each_tensor_in(arguments[i], [&](const at::Tensor& tensor) {
      auto* impl = distributed_impl(tensor);
      if (impl == nullptr) return;
      note_shard_write(*impl);
      if (!impl->local().is_meta()) return;
      if (name == "aten::zero_") {
        impl->set_pending_fill(c10::Scalar(0));
      } else if (name == "aten::fill_" && arguments[1].isScalar()) {
        impl->set_pending_fill(arguments[1].toScalar());
      } else {
        impl->set_pending_fill(std::nullopt);
      }
    });
  }
}

}  // namespace

// Which distributed tensor the results of one column lie like; checks that all of them agree.
const DTensorImpl* check_column(const OperatorHandle& op, const std::vector<at::Tensor>& column) {
  const DTensorImpl* reference = nullptr;
  for (auto& tensor : column) {
    auto* impl = dtensor_impl(tensor);
    if (impl == nullptr) continue;
    if (impl->state() == DTensorImpl::State::deferred) {
      raise<StateError>(op.schema().name().c_str(), impl->describe(),
                        " was made by meta_init and has no values, expected a materialized tensor; call "
                        "fully_shard(...) and materialize(device) first");
    }
    if (reference == nullptr) {
      reference = impl;
    } else if (!same_distribution(*reference, *impl)) {
      raise<ValueError>(op.schema().name().c_str(), "elementwise on ", reference->describe(), " and ", impl->describe(),
                        ", expected equal shapes and placements; redistribute one of them");
    }
  }
  if (reference == nullptr) return nullptr;
  for (auto& tensor : column) {
    if (!tensor.defined() || dtensor_impl(tensor) || (tensor.numel() == 1 && tensor.dim() <= 1)) continue;
    if (reference->layout() && broadcasts_to(tensor, reference->sizes())) continue;
    refuse(op, *reference,
           c10::str("elementwise with a plain tensor of shape ", tensor.sizes(),
                    ", expected a distributed tensor of the same layout, or a plain one that broadcasts to ",
                    reference->sizes()));
  }
  return reference;
}

bool broadcasts_to(const at::Tensor& plain, c10::IntArrayRef sizes) {
  if (plain.dim() > static_cast<int64_t>(sizes.size())) return false;
  for (int64_t dim = 1; dim <= plain.dim(); ++dim) {
    if (plain.size(-dim) != 1 && plain.size(-dim) != sizes[sizes.size() - static_cast<size_t>(dim)]) return false;
  }
  return true;
}

at::Tensor part_of_plain(const at::Tensor& plain, const DTensorImpl& like) {
  if (plain.numel() == 1 || !like.layout()) return plain;
  const auto& box = like.layout()->local();
  auto part = plain;
  for (int64_t dim = 1; dim <= plain.dim(); ++dim) {
    const auto of_whole = box.sizes.size() - static_cast<size_t>(dim);
    if (plain.size(-dim) != 1) part = part.narrow(-dim, box.offsets[of_whole], box.sizes[of_whole]);
  }
  return part;
}

void run_elementwise(const OperatorHandle& op, Stack& stack) {
  std::vector<at::Tensor> column;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) { column.push_back(tensor); });
  const auto* reference = check_column(op, column);
  const Stack arguments(stack.begin() + static_cast<std::ptrdiff_t>(argument_begin(op, stack)), stack.end());
  for (size_t i = 0; i < arguments.size(); ++i) check_plain_is_read(op, arguments, i, *reference);
  std::vector<Mapping> mappings;
  replace_tensors(
      op, stack, [&](const at::Tensor& tensor, const c10::Argument&) { return to_shard(tensor, reference, mappings); });
  op.callBoxed(&stack);
  replace_results(op, stack, [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined()) return result;
    if (const auto* original = original_of(result, mappings)) return *original;
    if (!result.sizes().equals(reference->local().sizes())) {
      refuse(op, *reference,
             c10::str("the local result has shape ", result.sizes(), ", expected ", reference->local().sizes()));
    }
    return wrap_local(result, *reference);
  });
  note_writes(op, arguments);
}

// `_foreach_*` and `_fused_*`: tensor lists whose k-th elements meet each other, each k with a layout of its own.
void run_per_index(const OperatorHandle& op, Stack& stack) {
  const auto begin = argument_begin(op, stack);
  const Stack arguments(stack.begin() + static_cast<std::ptrdiff_t>(begin), stack.end());
  std::vector<std::vector<at::Tensor>> columns;
  for (auto& argument : arguments) {
    if (!argument.isTensorList()) continue;
    const auto list = argument.toTensorVector();
    if (columns.size() < list.size()) columns.resize(list.size());
    for (size_t k = 0; k < list.size(); ++k) columns[k].push_back(list[k]);
  }
  std::vector<const DTensorImpl*> references;
  for (auto& column : columns) references.push_back(check_column(op, column));
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_written(op.schema().arguments()[i]) || !arguments[i].isTensorList()) continue;
    const auto list = arguments[i].toTensorVector();
    for (size_t k = 0; k < list.size(); ++k) {
      if (references[k] != nullptr && dtensor_impl(list[k]) == nullptr) {
        check_plain_is_read(op, arguments, i, *references[k]);
      }
    }
  }
  std::vector<Mapping> mappings;
  for (size_t i = begin; i < stack.size(); ++i) {
    if (!holds_tensors(stack[i])) continue;
    const bool list = stack[i].isTensorList();
    size_t k = 0;
    stack[i] = map_tensors_in(stack[i], [&](const at::Tensor& tensor) {
      return to_shard(tensor, list ? references[k++] : nullptr, mappings);
    });
  }
  op.callBoxed(&stack);
  for (size_t i = stack.size() - op.schema().returns().size(); i < stack.size(); ++i) {
    if (!stack[i].isTensorList()) continue;
    size_t k = 0;
    stack[i] = map_tensors_in(stack[i], [&](const at::Tensor& result) -> at::Tensor {
      const auto* reference = references.at(k++);
      if (const auto* original = original_of(result, mappings)) return *original;
      if (reference == nullptr) return result;
      if (!result.sizes().equals(reference->local().sizes())) {
        refuse(op, *reference,
               c10::str("a local result has shape ", result.sizes(), ", expected ", reference->local().sizes()));
      }
      return wrap_local(result, *reference);
    });
  }
  note_writes(op, arguments);
}

}  // namespace dtensor

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

// Gives real memory to a tensor of known constant value, where it meets `reference`, which has some.
void materialize_pending_fill(DTensorImpl& impl, const DTensorImpl& reference) {
  const auto options = reference.local().options().dtype(at::typeMetaToScalarType(impl.dtype())).requires_grad(false);
  auto local = at::full(reference.local().sizes(), *impl.pending_fill(), options);
  impl.distribute(std::move(local), reference.layout()->with_dtype(at::typeMetaToScalarType(impl.dtype())));
  impl.set_pending_fill(std::nullopt);
  impl.set_has_values(true);
}

bool any_pending(const OperatorHandle& op, const Stack& stack) {
  bool pending = false;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    auto* impl = dtensor_impl(tensor);
    pending |= impl != nullptr && impl->pending_fill().has_value();
  });
  return pending;
}

}  // namespace

void materialize_pending_fills(const OperatorHandle& op, const Stack& stack) {
  if (!any_pending(op, stack)) return;
  const auto begin = argument_begin(op, stack);
  std::vector<std::vector<at::Tensor>> columns;  // tensors that meet each other
  std::vector<at::Tensor> singles;
  for (size_t i = begin; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      singles.push_back(stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      const auto list = stack[i].toTensorVector();
      if (columns.size() < list.size()) columns.resize(list.size());
      for (size_t k = 0; k < list.size(); ++k) columns[k].push_back(list[k]);
    }
  }
  columns.push_back(std::move(singles));
  for (auto& column : columns) {
    const DTensorImpl* reference = nullptr;
    for (auto& tensor : column) {
      auto* impl = distributed_impl(tensor);
      if (impl != nullptr && impl->layout() && !impl->local().is_meta()) reference = impl;
    }
    if (reference == nullptr) continue;
    for (auto& tensor : column) {
      auto* impl = dtensor_impl(tensor);
      if (impl == nullptr || !impl->pending_fill()) continue;
      if (impl->sizes().equals(reference->sizes())) materialize_pending_fill(*impl, *reference);
    }
  }
}

}  // namespace dtensor

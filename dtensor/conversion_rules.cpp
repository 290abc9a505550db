#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/operator_call.h"
#include "dtensor/shard_rules.h"

namespace dtensor {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

// Result of a conversion that autograd should follow but does not: using it in grad mode is refused, data is free.
at::Tensor delay_error(const OperatorHandle& op, const at::Tensor& source, at::Tensor result) {
  if (!at::GradMode::is_enabled() || !source.requires_grad() ||
      !torch::autograd::isDifferentiableType(result.scalar_type())) {
    return result;
  }
  auto node = std::make_shared<torch::autograd::DelayedError>(
      c10::str("[", op.schema().name(),
               "] the gradient does not flow through this conversion of a sharded parameter; "
               "convert inside model->forward(...)"),
      1);
  node->set_next_edges(torch::autograd::collect_next_edges(source));
  node->add_input_metadata(result);
  torch::autograd::impl::set_gradient_edge(result, {std::move(node), 0});
  return result;
}

std::optional<c10::Scalar> fill_of(const OperatorHandle& op, const Stack& stack) {
  const std::string& name = op.schema().name();
  if (name == "aten::zeros_like") return c10::Scalar(0);
  if (name == "aten::ones_like") return c10::Scalar(1);
  if (name == "aten::full_like") return find_argument(op, stack, "fill_value")->toScalar();
  return std::nullopt;
}

// zeros_like(p) of a parameter that has only a shape: optimizer state made before the parameters have memory.
at::Tensor deferred_like(const OperatorHandle& op, Stack& stack, const DTensorImpl& self) {
  class PendingFill : public DeferredValue {
   public:
    bool expose(DTensorImpl&) override { return false; }
  };
  const auto fill = fill_of(op, stack);
  const auto* dtype = find_argument(op, stack, "dtype");
  auto options = at::TensorOptions(at::kMeta).dtype(
      dtype == nullptr || dtype->isNone() ? at::typeMetaToScalarType(self.dtype()) : dtype->toScalarType());
  auto result = at::detail::make_tensor<DTensorImpl>(at::empty(self.sizes(), options), std::make_shared<PendingFill>());
  dtensor_impl(result)->set_pending_fill(fill);
  return result;
}

// One rule for at::Tensor::to on a distributed tensor: hands the arguments to DTensor::to.
at::Tensor convert(const OperatorHandle& op, const Stack& stack, const DTensor& self) {
  const auto flag = [&](const char* name) {
    const auto* value = find_argument(op, stack, name);
    return value != nullptr && value->toBool();
  };
  const auto* memory_format = find_argument(op, stack, "memory_format");
  const auto format = memory_format == nullptr || memory_format->isNone()
                          ? std::optional<at::MemoryFormat>()
                          : std::optional<at::MemoryFormat>(memory_format->toMemoryFormat());
  if (const auto* other = find_argument(op, stack, "other")) {
    return self.to(other->toTensor(), flag("non_blocking"), flag("copy"), format);
  }
  at::TensorOptions options;
  if (const auto* dtype = find_argument(op, stack, "dtype"); dtype && !dtype->isNone()) {
    options = options.dtype(dtype->toScalarType());
  }
  if (const auto* device = find_argument(op, stack, "device"); device && !device->isNone()) {
    options = options.device(device->toDevice());
  }
  const bool copy = flag("copy") || op.schema().name() == "aten::_to_copy";
  return self.to(options, flag("non_blocking"), copy, format);
}

}  // namespace

void run_like_factory(const OperatorHandle& op, Stack& stack) {
  const auto self = self_of(op, stack);
  const auto* impl = dtensor_impl(self);
  const auto fill = fill_of(op, stack);
  at::Tensor result;
  if (impl->state() == DTensorImpl::State::deferred) {
    result = deferred_like(op, stack, *impl);
    torch::jit::drop(stack, op.schema().arguments().size());
    stack.emplace_back(std::move(result));
    return;
  }
  self_of(op, stack) = impl->local();
  op.callBoxed(&stack);
  result = wrap_local(stack.back().toTensor(), *impl);
  if (fill && distributed_impl(result)->local().is_meta()) distributed_impl(result)->set_pending_fill(fill);
  stack.back() = std::move(result);
}

void run_alias(const OperatorHandle& op, Stack& stack) {
  const auto self = self_of(op, stack);
  torch::jit::drop(stack, op.schema().arguments().size());
  auto* impl = dtensor_impl(self);
  stack.emplace_back(at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true)));
}

void run_convert(const OperatorHandle& op, Stack& stack) {
  const auto self = self_of(op, stack);
  auto* impl = distributed_impl(self);
  if (impl == nullptr) {
    check_column(op, {self});
    // A plain tensor asked to be like a distributed one.
    replace_tensors(op, stack, [](const at::Tensor& tensor, const c10::Argument&) {
      auto* like = distributed_impl(tensor);
      return like == nullptr ? tensor : like->local();
    });
    return op.callBoxed(&stack);
  }
  at::Tensor result;
  if (op.schema().name() == "aten::clone") {
    const auto* format = find_argument(op, stack, "memory_format");
    const auto local =
        impl->local().clone(format->isNone() ? std::optional<at::MemoryFormat>()
                                             : std::optional<at::MemoryFormat>(format->toMemoryFormat()));
    result = wrap_local(local, *impl);
  } else {
    at::AutoGradMode no_grad(false);
    result = convert(op, stack, DTensor(self));
    // at::Tensor::to that changes nothing returns the tensor itself.
    if (distributed_impl(result)->local().is_alias_of(impl->local()) &&
        distributed_impl(result)->local().scalar_type() == impl->local().scalar_type()) {
      torch::jit::drop(stack, op.schema().arguments().size());
      stack.emplace_back(self);
      return;
    }
  }
  if (impl->pending_fill()) distributed_impl(result)->set_pending_fill(impl->pending_fill());
  distributed_impl(result)->set_has_values(impl->has_values());
  distributed_impl(result)->set_name(impl->name());
  result = delay_error(op, self, std::move(result));
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.emplace_back(std::move(result));
}

void run_copy(const OperatorHandle& op, Stack& stack) {
  const auto begin = argument_begin(op, stack);
  const auto destination = stack[begin].toTensor();
  const auto source = stack[begin + 1].toTensor();
  auto* to = distributed_impl(destination);
  auto* from = distributed_impl(source);
  if (dtensor_impl(destination) != nullptr && to == nullptr) check_column(op, {destination});
  if (dtensor_impl(source) != nullptr && from == nullptr) check_column(op, {source});
  const bool non_blocking = stack[begin + 2].toBool();
  if (to == nullptr) {
    refuse(op, *from,
           c10::str("the destination is a plain tensor of shape ", destination.sizes(),
                    ", expected a distributed one; copy full_tensor() instead"));
  }
  auto local = to->local();
  if (from != nullptr) {
    check_column(op, {destination, source});
    local.copy_(from->local(), non_blocking);
  } else {
    if (source.dim() > 0) layout_of(op, *to);
    if (!broadcasts_to(source, to->sizes())) {
      raise<ValueError>("aten::copy_", to->describe(), " given a plain tensor of shape ", source.sizes(),
                        ", expected the global shape ", to->sizes(),
                        "; to write this rank's part use to_local().copy_");
    }
    local.copy_(part_of_plain(source, *to), non_blocking);
  }
  note_shard_write(*to);
  to->set_pending_fill(std::nullopt);
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.emplace_back(destination);
}

}  // namespace dtensor

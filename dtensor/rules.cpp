#include "dtensor/rules.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/operator_call.h"

namespace dtensor {
namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

enum class Rule { elementwise, per_index, like_factory, random_like, alias, convert, copy, random, reduce, host_read, stack, metadata, refuse };

const std::unordered_map<std::string_view, Rule>& named_rules() {
  static const auto* rules = new std::unordered_map<std::string_view, Rule>{
      {"aten::zeros_like", Rule::like_factory},
      {"aten::ones_like", Rule::like_factory},
      {"aten::empty_like", Rule::like_factory},
      {"aten::full_like", Rule::like_factory},
      {"aten::rand_like", Rule::random_like},
      {"aten::randn_like", Rule::random_like},
      {"aten::detach", Rule::alias},
      {"aten::alias", Rule::alias},
      {"aten::detach_", Rule::metadata},
      {"aten::clone", Rule::convert},
      {"aten::to", Rule::convert},
      {"aten::_to_copy", Rule::convert},
      {"aten::copy_", Rule::copy},
      {"aten::normal_", Rule::random},
      {"aten::uniform_", Rule::random},
      {"aten::bernoulli_", Rule::random},
      {"aten::exponential_", Rule::random},
      {"aten::log_normal_", Rule::random},
      {"aten::cauchy_", Rule::random},
      {"aten::geometric_", Rule::random},
      {"aten::random_", Rule::random},
      {"aten::norm", Rule::reduce},
      {"aten::linalg_vector_norm", Rule::reduce},
      {"aten::sum", Rule::reduce},
      {"aten::mean", Rule::reduce},
      {"aten::max", Rule::reduce},
      {"aten::min", Rule::reduce},
      {"aten::amax", Rule::reduce},
      {"aten::amin", Rule::reduce},
      {"aten::_foreach_norm", Rule::reduce},
      {"aten::item", Rule::host_read},
      {"aten::_local_scalar_dense", Rule::host_read},
      {"aten::is_nonzero", Rule::host_read},
      {"aten::stack", Rule::stack},
      {"aten::zero_", Rule::elementwise},
      {"aten::fill_", Rule::elementwise},
      {"aten::_has_compatible_shallow_copy_type", Rule::metadata},
      {"aten::is_same_size", Rule::metadata},
      {"aten::is_pinned", Rule::metadata},
  };
  return *rules;
}

Rule rule_of(const OperatorHandle& op) {
  // The schema lives as long as the operator is registered; libtorch never deregisters its own.
  thread_local std::unordered_map<const c10::FunctionSchema*, Rule> known;
  auto [entry, fresh] = known.try_emplace(&op.schema(), Rule::refuse);
  if (!fresh) return entry->second;
  const std::string& name = op.schema().name();
  if (auto found = named_rules().find(name); found != named_rules().end()) {
    entry->second = found->second;
  } else if (name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_")) {
    entry->second = Rule::per_index;
  } else if (op.hasTag(at::Tag::pointwise)) {
    // at::equal has the tag as well, but one answer a rank is not an elementwise result.
    const auto& returns = op.schema().returns();
    const bool tensors = std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
      return result.type()->kind() == c10::TypeKind::TensorType;
    });
    if (tensors) entry->second = Rule::elementwise;
  }
  return entry->second;
}

[[noreturn]] void refuse(const OperatorHandle& op, const DTensorImpl& impl, const std::string& what) {
  raise<NotSupportedError>(op.schema().name().c_str(), what, ", given ", impl.describe(),
                           "; to compute with whole parameters use model->forward(x), for this rank's part to_local(), for the whole "
                           "value full_tensor()");
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_partial_scalar(const at::Tensor& tensor) {
  auto* impl = distributed_impl(tensor);
  return impl != nullptr && impl->layout() && impl->layout()->is_partial();
}

bool same_distribution(const DTensorImpl& a, const DTensorImpl& b) {
  if (a.layout() && b.layout()) return a.layout()->same_distribution(*b.layout());
  return a.mesh() == b.mesh() && a.alias_placements() == b.alias_placements() && a.sizes().equals(b.sizes());
}

// First distributed tensor of a call.
const DTensorImpl* reference_of(const OperatorHandle& op, const Stack& stack) {
  const DTensorImpl* reference = nullptr;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    if (reference == nullptr) reference = distributed_impl(tensor);
  });
  return reference;
}

// ---- rule 0 ----

// What takes a parameter that requires grad and returns something that does not depend on it.
bool is_non_differentiable(Rule rule) {
  switch (rule) {
    case Rule::like_factory:
    case Rule::random_like:
    case Rule::alias:
    case Rule::convert:  // connected to a node that refuses, see delay_error
    case Rule::metadata:
      return true;
    default:
      return false;
  }
}

void refuse_lost_gradient(const OperatorHandle& op, const Stack& stack) {
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    auto* impl = distributed_impl(tensor);
    if (impl == nullptr || !tensor.requires_grad()) return;
    raise<NotSupportedError>(op.schema().name().c_str(), impl->describe(),
                             " requires grad and is used outside a forward, where its gradient would be lost; use "
                             "model->forward(x), not the bare module, or torch::NoGradGuard");
  });
}

// Result of a conversion that autograd should follow but does not: using it in grad mode is refused, data is free.
at::Tensor delay_error(const OperatorHandle& op, const at::Tensor& source, at::Tensor result) {
  if (!at::GradMode::is_enabled() || !source.requires_grad() || !torch::autograd::isDifferentiableType(result.scalar_type())) {
    return result;
  }
  auto node = std::make_shared<torch::autograd::DelayedError>(
      c10::str("[", op.schema().name(), "] the gradient does not flow through this conversion of a sharded parameter; "
               "convert inside model->forward(...)"),
      1);
  node->set_next_edges(torch::autograd::collect_next_edges(source));
  node->add_input_metadata(result);
  torch::autograd::impl::set_gradient_edge(result, {std::move(node), 0});
  return result;
}

// ---- pending fills: optimizer state that was made on meta ----

// Gives real memory to a tensor of known constant value, where it meets `reference`, which has some.
void materialize_pending_fill(DTensorImpl& impl, const DTensorImpl& reference) {
  const auto options = reference.local().options().dtype(at::typeMetaToScalarType(impl.dtype())).requires_grad(false);
  auto local = at::full(reference.local().sizes(), *impl.pending_fill(), options);
  impl.distribute(std::move(local), reference.layout()->with_dtype(at::typeMetaToScalarType(impl.dtype())));
  impl.set_pending_fill(std::nullopt);
  impl.set_has_values(true);
}

void materialize_pending_fills(const OperatorHandle& op, const Stack& stack) {
  const auto begin = argument_begin(op, stack);
  std::vector<std::vector<at::Tensor>> columns;  // tensors that meet each other
  std::vector<at::Tensor> singles;
  bool pending = false;
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
    for (auto& tensor : column) {
      auto* impl = dtensor_impl(tensor);
      pending |= impl != nullptr && impl->pending_fill().has_value();
    }
  }
  if (!pending) return;
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

// ---- rule 2: elementwise ----

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
    refuse(op, *reference, c10::str("elementwise with a plain tensor of shape ", tensor.sizes(),
                                    ", expected a distributed tensor of the same layout or a scalar"));
  }
  return reference;
}

struct Mapping {
  at::Tensor local, original;
};

at::Tensor to_shard(const at::Tensor& tensor, std::vector<Mapping>& mappings) {
  auto* impl = distributed_impl(tensor);
  if (impl == nullptr) return tensor;
  mappings.push_back({impl->local(), tensor});
  return impl->local();
}

const at::Tensor* original_of(const at::Tensor& local, const std::vector<Mapping>& mappings) {
  for (auto& mapping : mappings) {
    if (mapping.local.is_same(local)) return &mapping.original;
  }
  return nullptr;
}

// Writes are values, and they end a pending fill that the write did not set.
void note_writes(const OperatorHandle& op, const Stack& arguments) {
  const std::string& name = op.schema().name();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_written(op.schema().arguments()[i])) continue;
    for_each_tensor_in(arguments[i], [&](const at::Tensor& tensor) {
      auto* impl = distributed_impl(tensor);
      if (impl == nullptr) return;
      impl->set_has_values(!impl->local().is_meta());
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

void run_elementwise(const OperatorHandle& op, Stack& stack) {
  std::vector<at::Tensor> column;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) { column.push_back(tensor); });
  const auto* reference = check_column(op, column);
  const Stack arguments(stack.begin() + static_cast<std::ptrdiff_t>(argument_begin(op, stack)), stack.end());
  std::vector<Mapping> mappings;
  replace_tensors(op, stack, [&](const at::Tensor& tensor, const c10::Argument&) { return to_shard(tensor, mappings); });
  op.callBoxed(&stack);
  replace_results(op, stack, [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined()) return result;
    if (const auto* original = original_of(result, mappings)) return *original;
    if (!result.sizes().equals(reference->local().sizes())) {
      refuse(op, *reference, c10::str("the local result has shape ", result.sizes(), ", expected ",
                                      reference->local().sizes()));
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
  std::vector<Mapping> mappings;
  replace_tensors(op, stack, [&](const at::Tensor& tensor, const c10::Argument&) { return to_shard(tensor, mappings); });
  op.callBoxed(&stack);
  for (size_t i = stack.size() - op.schema().returns().size(); i < stack.size(); ++i) {
    if (!stack[i].isTensorList()) continue;
    size_t k = 0;
    stack[i] = map_tensors_in(stack[i], [&](const at::Tensor& result) -> at::Tensor {
      const auto* reference = references.at(k++);
      if (const auto* original = original_of(result, mappings)) return *original;
      return reference == nullptr ? result : wrap_local(result, *reference);
    });
  }
  note_writes(op, arguments);
}

// ---- rule 3: like-factories, aliases, conversions ----

std::optional<c10::Scalar> fill_of(const OperatorHandle& op, const Stack& stack) {
  const std::string& name = op.schema().name();
  if (name == "aten::zeros_like") return c10::Scalar(0);
  if (name == "aten::ones_like") return c10::Scalar(1);
  if (name == "aten::full_like") return find_argument(op, stack, "fill_value")->toScalar();
  return std::nullopt;
}

at::Tensor& self_of(const OperatorHandle& op, Stack& stack) {
  return stack[argument_begin(op, stack)].toTensor();
}

// zeros_like(p) of a parameter that has only a shape: optimizer state made before the parameters have memory.
at::Tensor deferred_like(const OperatorHandle& op, Stack& stack, const DTensorImpl& self) {
  class PendingFill : public DeferredValue {
   public:
    bool expose(DTensorImpl&) override { return false; }
  };
  const auto fill = fill_of(op, stack);
  const auto* dtype = find_argument(op, stack, "dtype");
  auto options = at::TensorOptions(at::kMeta).dtype(dtype == nullptr || dtype->isNone() ? at::typeMetaToScalarType(self.dtype())
                                                                                       : dtype->toScalarType());
  auto result = at::detail::make_tensor<DTensorImpl>(at::empty(self.sizes(), options), std::make_shared<PendingFill>());
  dtensor_impl(result)->set_pending_fill(fill);
  return result;
}

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

void run_convert(const OperatorHandle& op, Stack& stack) {
  const auto self = self_of(op, stack);
  auto* impl = distributed_impl(self);
  if (impl == nullptr) {
    check_column(op, {self});
    TORCH_INTERNAL_ASSERT(false, "a conversion of a tensor that is neither distributed nor deferred");
  }
  at::Tensor result;
  if (op.schema().name() == "aten::clone") {
    const auto* format = find_argument(op, stack, "memory_format");
    const auto local = impl->local().clone(format->isNone() ? std::optional<at::MemoryFormat>()
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

// ---- rule 4: random ----

const Layout& layout_of(const OperatorHandle& op, const DTensorImpl& impl) {
  if (!impl.layout()) refuse(op, impl, "this tensor was made without a layout");
  return *impl.layout();
}

// Draws for the whole tensor, so that every world size sees the same numbers, and keeps this rank's part.
void run_random(const OperatorHandle& op, Stack& stack) {
  const auto self = self_of(op, stack);
  auto* impl = distributed_impl(self);
  if (impl == nullptr) check_column(op, {self});
  const auto& layout = layout_of(op, *impl);
  if (layout.mesh()->size() == 1) return run_elementwise(op, stack);
  auto whole = at::empty(layout.sizes(), impl->local().options().requires_grad(false));
  self_of(op, stack) = whole;
  op.callBoxed(&stack);
  auto local = impl->local();
  if (!local.is_meta()) local.copy_(narrow_to_box(whole, layout.local()));
  impl->set_has_values(!local.is_meta());
  impl->set_pending_fill(std::nullopt);
  stack.back() = self;
}

void run_random_like(const OperatorHandle& op, Stack& stack) {
  const auto self = self_of(op, stack);
  auto* impl = distributed_impl(self);
  if (impl == nullptr) check_column(op, {self});
  const auto& layout = layout_of(op, *impl);
  self_of(op, stack) = at::empty(layout.sizes(), impl->local().options().requires_grad(false));
  op.callBoxed(&stack);
  stack.back() = wrap_local(narrow_to_box(stack.back().toTensor(), layout.local()).contiguous(), *impl);
}

// ---- rule 5: copies and reductions ----

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
    refuse(op, *from, c10::str("the destination is a plain tensor of shape ", destination.sizes(),
                               ", expected a distributed one; copy full_tensor() instead"));
  }
  auto local = to->local();
  if (from != nullptr) {
    check_column(op, {destination, source});
    local.copy_(from->local(), non_blocking);
  } else {
    if (source.dim() != 0 && !source.sizes().equals(to->sizes())) {
      raise<ValueError>("aten::copy_", to->describe(), " given a plain tensor of shape ", source.sizes(),
                        ", expected the global shape ", to->sizes(), "; to write this rank's part use to_local().copy_");
    }
    local.copy_(source.dim() == 0 ? source : narrow_to_box(source, layout_of(op, *to).local()), non_blocking);
  }
  to->set_has_values(!local.is_meta());
  to->set_pending_fill(std::nullopt);
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.emplace_back(destination);
}

struct Reduction {
  ReduceOp op;
  double norm_type = 0;
};

Reduction reduction_of(const OperatorHandle& op, const Stack& stack, const DTensorImpl& impl) {
  const std::string& name = op.schema().name();
  for (const char* argument : {"dim", "keepdim"}) {
    const auto* value = find_argument(op, stack, argument);
    if (value == nullptr || value->isNone()) continue;
    if ((value->isBool() && !value->toBool()) || (value->isIntList() && value->toIntVector().empty())) continue;
    refuse(op, impl, "a reduction over some dims only, expected one over the whole tensor");
  }
  if (find_argument(op, stack, "other") != nullptr || op.schema().returns().size() != 1) {
    refuse(op, impl, "this overload is not a reduction to one value");
  }
  if (name == "aten::sum" || name == "aten::mean") return {ReduceOp::sum};
  if (name == "aten::max" || name == "aten::amax") return {ReduceOp::max};
  if (name == "aten::min" || name == "aten::amin") return {ReduceOp::min};
  const auto* exponent = find_argument(op, stack, name == "aten::norm" ? "p" : "ord");
  const double p = exponent == nullptr || exponent->isNone() ? 2.0 : exponent->toScalar().toDouble();
  if (p == std::numeric_limits<double>::infinity()) return {ReduceOp::max};
  if (!(p > 0)) refuse(op, impl, c10::str("the norm of exponent ", p, ", expected 0 < p <= infinity"));
  return {ReduceOp::norm, p};
}

at::Tensor local_reduction(const OperatorHandle& op, const DTensorImpl& impl, const Reduction& reduction,
                           const Stack& arguments) {
  const auto& local = impl.local();
  const std::string& name = op.schema().name();
  at::Tensor result;
  if (local.numel() == 0 && reduction.op != ReduceOp::sum) {
    // A rank without elements contributes the neutral value.
    const bool norm = name.ends_with("norm");
    const double limit = std::numeric_limits<double>::infinity();
    const auto options = local.options().requires_grad(false);
    if (norm) {
      result = at::zeros({}, options);
    } else if (at::isFloatingType(local.scalar_type())) {
      result = at::full({}, reduction.op == ReduceOp::max ? -limit : limit, options);
    } else {
      refuse(op, impl, "integers on a rank with an empty part");
    }
  } else if (name == "aten::mean") {
    const auto* dtype = find_argument(op, arguments, "dtype");
    result = at::sum(local, dtype->isNone() ? std::optional<at::ScalarType>() : dtype->toScalarType());
    result.div_(static_cast<double>(impl.numel()));
  } else if (name == "aten::_foreach_norm") {
    result = reduction.op == ReduceOp::max ? local.abs().max() : at::linalg_vector_norm(local, reduction.norm_type);
  } else {
    Stack call = arguments;
    call[0] = local;
    op.callBoxed(&call);
    result = call.back().toTensor();
  }
  Placements placements;
  bool partial = false;
  for (auto& placement : impl.alias_placements()) {
    partial |= placement.is_shard();
    if (placement.is_partial()) refuse(op, impl, "a reduction of partial values; call full_tensor() first");
    if (placement.is_replicate()) {
      placements.push_back(Replicate());
    } else {
      placements.push_back(reduction.op == ReduceOp::norm ? Partial::norm(reduction.norm_type) : Partial(reduction.op));
    }
  }
  if (!partial) return result;
  auto layout = Layout::create(impl.mesh(), std::move(placements), {}, {}, result.scalar_type());
  return at::detail::make_tensor<DTensorImpl>(std::move(result), std::move(layout));
}

void run_reduce(const OperatorHandle& op, Stack& stack) {
  const auto begin = argument_begin(op, stack);
  const Stack arguments(stack.begin() + static_cast<std::ptrdiff_t>(begin), stack.end());
  IValue result;
  if (arguments[0].isTensorList()) {
    std::vector<at::Tensor> results;
    for (auto& tensor : arguments[0].toTensorVector()) {
      check_column(op, {tensor});
      auto* impl = distributed_impl(tensor);
      if (impl == nullptr) {
        raise<NotSupportedError>(op.schema().name().c_str(), "a list that mixes plain and distributed tensors, expected "
                                 "one kind; call it for each kind");
      }
      results.push_back(local_reduction(op, *impl, reduction_of(op, arguments, *impl), arguments));
    }
    result = c10::List<at::Tensor>(results);
  } else {
    check_column(op, {arguments[0].toTensor()});
    auto* impl = distributed_impl(arguments[0].toTensor());
    result = local_reduction(op, *impl, reduction_of(op, arguments, *impl), arguments);
  }
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.push_back(std::move(result));
}

// ---- metadata ----

void run_metadata(const OperatorHandle& op, Stack& stack) {
  const auto begin = argument_begin(op, stack);
  const std::string& name = op.schema().name();
  const auto self = stack[begin].toTensor();
  IValue result;
  if (name == "aten::_has_compatible_shallow_copy_type") {
    if (dtensor_impl(self) == nullptr) {
      raise<ValueError>("set_data", "a plain tensor of shape ", self.sizes(), " given ",
                        describe(stack[begin + 1].toTensor()),
                        ", expected a plain one; assign its full_tensor() or to_local()");
    }
    result = true;  // DTensorImpl::shallow_copy_from validates and names what it refuses.
  } else if (name == "aten::is_same_size") {
    result = self.sizes().equals(stack[begin + 1].toTensor().sizes());
  } else if (name == "aten::is_pinned") {
    auto* impl = distributed_impl(self);
    result = impl != nullptr && impl->local().is_pinned();
  } else {
    auto* impl = distributed_impl(self);
    if (impl != nullptr && self.grad_fn()) refuse(op, *impl, "in-place detach of a tensor with history");
    result = self;
  }
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.push_back(std::move(result));
}

bool has_partials(const OperatorHandle& op, const Stack& stack) {
  bool found = false;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) { found |= is_partial_scalar(tensor); });
  return found;
}

// Partial scalars become plain values before anything but a reduction-free read of them.
void reduce_partial_arguments(const OperatorHandle& op, Stack& stack) {
  std::vector<at::Tensor> partials;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    if (is_partial_scalar(tensor)) partials.push_back(tensor);
  });
  const auto reduced = reduce_partials(partials);
  size_t next = 0;
  replace_tensors(op, stack, [&](const at::Tensor& tensor, const c10::Argument& argument) -> at::Tensor {
    if (!is_partial_scalar(tensor)) return tensor;
    if (is_written(argument)) {
      refuse(op, *distributed_impl(tensor), "an in-place change of a value that is still to be reduced");
    }
    return reduced[next++];
  });
}

}  // namespace

std::vector<at::Tensor> reduce_partials(const std::vector<at::Tensor>& partials) {
  struct Group {
    const Layout* layout;
    std::vector<size_t> members;
  };
  std::vector<Group> groups;
  for (size_t i = 0; i < partials.size(); ++i) {
    const auto* layout = distributed_impl(partials[i])->layout().get();
    auto found = groups.begin();
    while (found != groups.end() &&
           !(found->layout->same_distribution(*layout) && found->layout->dtype() == layout->dtype())) {
      ++found;
    }
    if (found == groups.end()) found = groups.insert(found, Group{layout, {}});
    found->members.push_back(i);
  }
  std::vector<at::Tensor> results(partials.size());
  for (auto& group : groups) {
    std::vector<at::Tensor> locals;
    for (auto i : group.members) locals.push_back(distributed_impl(partials[i])->local());
    auto values = at::stack(locals);
    const auto& mesh = *group.layout->mesh();
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
      const auto& placement = group.layout->placements()[static_cast<size_t>(axis)];
      if (!placement.is_partial() || mesh.size(axis) == 1) continue;
      const bool norm = placement.op() == ReduceOp::norm;
      if (norm) values = values.pow(placement.norm_type());
      mesh.communicator(axis).all_reduce(values, norm ? ReduceOp::sum : placement.op(), {"all_reduce", "norm"})->wait();
      if (norm) values = values.pow(1 / placement.norm_type());
    }
    const auto parts = values.unbind(0);
    for (size_t k = 0; k < group.members.size(); ++k) results[group.members[k]] = parts[k];
  }
  return results;
}

void refuse_mixed(const OperatorHandle& op, const DTensorImpl& impl) {
  refuse(op, impl, "mixed with whole parameters of a forward");
}

void run_on_shards(const OperatorHandle& op, Stack& stack) {
  const Rule rule = rule_of(op);
  if (at::GradMode::is_enabled() && !is_non_differentiable(rule)) refuse_lost_gradient(op, stack);
  // conversions read grad mode to connect their error node, everything else works below autograd.
  const bool grad_mode = at::GradMode::is_enabled();
  at::AutoGradMode mode(grad_mode && rule == Rule::convert);
  if (rule != Rule::reduce && rule != Rule::metadata && rule != Rule::alias && rule != Rule::like_factory &&
      has_partials(op, stack)) {
    reduce_partial_arguments(op, stack);
    if (reference_of(op, stack) == nullptr) return op.callBoxed(&stack);
  }
  materialize_pending_fills(op, stack);
  switch (rule) {
    case Rule::elementwise:
      return run_elementwise(op, stack);
    case Rule::per_index:
      return run_per_index(op, stack);
    case Rule::like_factory:
      return run_like_factory(op, stack);
    case Rule::random_like:
      return run_random_like(op, stack);
    case Rule::alias:
      return run_alias(op, stack);
    case Rule::convert:
      return run_convert(op, stack);
    case Rule::copy:
      return run_copy(op, stack);
    case Rule::random:
      return run_random(op, stack);
    case Rule::reduce:
      return run_reduce(op, stack);
    case Rule::metadata:
      return run_metadata(op, stack);
    case Rule::host_read:
    case Rule::stack:
    case Rule::refuse:
      break;
  }
  std::vector<at::Tensor> all;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) { all.push_back(tensor); });
  for (auto& tensor : all) {
    auto* impl = dtensor_impl(tensor);
    if (impl == nullptr) continue;
    if (impl->state() == DTensorImpl::State::deferred) check_column(op, {tensor});
    refuse(op, *impl, "this operator has no rule for sharded tensors");
  }
  TORCH_INTERNAL_ASSERT(false, "run_on_shards without a distributed tensor");
}

}  // namespace dtensor

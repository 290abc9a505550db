#include "dtensor/rules.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "dtensor/collective.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/operator_call.h"
#include "dtensor/shard_rules.h"

namespace dtensor {
namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

enum class Rule {
  elementwise,
  per_index,
  like_factory,
  random_like,
  alias,
  convert,
  copy,
  random,
  reduce,
  metadata,
  shape_of_other,
  refuse
};

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
      {"aten::type_as", Rule::convert},
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
      {"aten::any", Rule::reduce},
      {"aten::all", Rule::reduce},
      {"aten::_foreach_norm", Rule::reduce},
      {"aten::zero_", Rule::elementwise},
      {"aten::fill_", Rule::elementwise},
      // Elementwise without libtorch's tag.
      {"aten::masked_fill", Rule::elementwise},
      {"aten::masked_fill_", Rule::elementwise},
      {"aten::threshold_", Rule::elementwise},
      {"aten::floor_divide", Rule::elementwise},
      {"aten::floor_divide_", Rule::elementwise},
      {"aten::multiply", Rule::elementwise},
      {"aten::multiply_", Rule::elementwise},
      {"aten::subtract", Rule::elementwise},
      {"aten::subtract_", Rule::elementwise},
      {"aten::divide", Rule::elementwise},
      {"aten::divide_", Rule::elementwise},
      {"aten::true_divide", Rule::elementwise},
      {"aten::true_divide_", Rule::elementwise},
      {"aten::absolute", Rule::elementwise},
      {"aten::absolute_", Rule::elementwise},
      {"aten::negative", Rule::elementwise},
      {"aten::negative_", Rule::elementwise},
      {"aten::greater", Rule::elementwise},
      {"aten::greater_equal", Rule::elementwise},
      {"aten::less", Rule::elementwise},
      {"aten::less_equal", Rule::elementwise},
      {"aten::not_equal", Rule::elementwise},
      {"aten::isclose", Rule::elementwise},
      {"aten::contiguous", Rule::elementwise},
      {"aten::view_as", Rule::shape_of_other},
      {"aten::reshape_as", Rule::shape_of_other},
      {"aten::expand_as", Rule::shape_of_other},
      {"aten::_has_compatible_shallow_copy_type", Rule::metadata},
      {"aten::is_same_size", Rule::metadata},
      {"aten::is_pinned", Rule::metadata},
  };
  return *rules;
}

// aten::max and aten::min of two tensors are elementwise in spite of their names.
bool is_binary(const OperatorHandle& op) { return op.schema().argumentIndexWithName("other").has_value(); }

Rule rule_of(const OperatorHandle& op) {
  // The schema lives as long as the operator is registered; libtorch never deregisters its own.
  thread_local std::unordered_map<const c10::FunctionSchema*, Rule> known;
  auto [entry, fresh] = known.try_emplace(&op.schema(), Rule::refuse);
  if (!fresh) return entry->second;
  const std::string& name = op.schema().name();
  if (auto found = named_rules().find(name); found != named_rules().end()) {
    entry->second = found->second == Rule::reduce && is_binary(op) ? Rule::elementwise : found->second;
  } else if (name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_")) {
    entry->second = Rule::per_index;
  } else if (op.hasTag(at::Tag::pointwise) && !op.hasTag(at::Tag::nondeterministic_seeded)) {
    // at::equal has the tag as well, but one answer a rank is not an elementwise result.
    const auto& returns = op.schema().returns();
    const bool tensors = std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
      return result.type()->kind() == c10::TypeKind::TensorType;
    });
    if (tensors) entry->second = Rule::elementwise;
  }
  return entry->second;
}

// First distributed tensor of a call.
const DTensorImpl* reference_of(const OperatorHandle& op, const Stack& stack) {
  const DTensorImpl* reference = nullptr;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    if (reference == nullptr) reference = distributed_impl(tensor);
  });
  return reference;
}

// A plain tensor given the shape of a distributed one.
void run_shape_of_other(const OperatorHandle& op, Stack& stack) {
  const auto begin = argument_begin(op, stack);
  if (auto* impl = dtensor_impl(stack[begin].toTensor())) {
    if (impl->state() == DTensorImpl::State::deferred) check_column(op, {stack[begin].toTensor()});
    refuse(op, *impl, "this operator has no rule for sharded tensors");
  }
  stack[begin + 1] = at::empty(stack[begin + 1].toTensor().sizes(), at::TensorOptions(at::kMeta));
  op.callBoxed(&stack);
}

// Operators that optimizers use to compute with whole parameters.
bool flattens_or_multiplies(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string_view>{
      "aten::view",   "aten::reshape", "aten::flatten", "aten::ravel", "aten::cat", "aten::dot",       "aten::mm",
      "aten::matmul", "aten::addmm",   "aten::bmm",     "aten::mv",    "aten::t",   "aten::transpose", "aten::numpy_T"};
  return names->count(name) != 0;
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
    case Rule::shape_of_other:
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
                             "model->forward(x), not the bare module; a loss term on parameters goes inside an "
                             "hsdp::ForwardScope; torch::NoGradGuard where no gradient is wanted");
  });
}

// A sharded result has no history, also where a plain argument has one.
void refuse_lost_gradient_of_plain(const OperatorHandle& op, const Stack& stack) {
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad() || dtensor_impl(tensor) != nullptr) return;
    raise<NotSupportedError>(op.schema().name().c_str(), describe(tensor),
                             " requires grad and meets a sharded tensor outside a forward, where its gradient would be "
                             "lost; do it inside an hsdp::ForwardScope, or with detach()");
  });
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
                        ", expected a plain one; assign its full_tensor() or to_local(); a sharded module has no "
                        "clone(): model->clone() makes a whole plain one, and a second sharded one is built as the "
                        "first and filled with hsdp::copy_values or copy_()");
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
    self.set_requires_grad(false);
    result = self;
  }
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.push_back(std::move(result));
}

}  // namespace

void refuse(const OperatorHandle& op, const DTensorImpl& impl, const std::string& what) {
  raise<NotSupportedError>(
      op.schema().name().c_str(), what, ", given ", impl.describe(),
      "; to compute with whole parameters use model->forward(x), for this rank's part to_local(), for the whole "
      "value full_tensor()",
      flattens_or_multiplies(op.schema().name())
          ? "; optimizers that flatten or multiply whole parameters, as LBFGS does, cannot run on shards"
          : "");
}

bool has_shard_rule(const OperatorHandle& op, const Stack& stack) {
  const Rule rule = rule_of(op);
  return rule != Rule::refuse && (rule != Rule::reduce || reduces_all_dims(op, stack));
}

bool reads_metadata(const OperatorHandle& op) { return rule_of(op) == Rule::metadata; }

bool writes_shards(const OperatorHandle& op) {
  const Rule rule = rule_of(op);
  return rule == Rule::elementwise || rule == Rule::per_index || rule == Rule::copy || rule == Rule::random;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

void note_shard_write(DTensorImpl& impl) {
  impl.set_has_values(!impl.local().is_meta());
  if (!impl.is_alias()) return;
  if (auto owner = impl.owner()) owner->shard_written(impl.owner_index());
}

at::Tensor& self_of(const OperatorHandle& op, Stack& stack) { return stack[argument_begin(op, stack)].toTensor(); }

const Layout& layout_of(const OperatorHandle& op, const DTensorImpl& impl) {
  if (!impl.layout()) refuse(op, impl, "this tensor was made without a layout");
  return *impl.layout();
}

void refuse_mixed(const OperatorHandle& op, const DTensorImpl& impl) {
  refuse(op, impl, "mixed with whole parameters of a forward");
}

void check_write(const OperatorHandle& op, const DTensorImpl& impl) {
  if (op.schema().name() == "aten::set_") {
    raise<NotSupportedError>("aten::set_", impl.describe(),
                             " is sharded and keeps its memory, expected values to be copied into it; in place of "
                             "torch::load(module, path) use hsdp::load(model, path), for one tensor copy_()");
  }
  if (auto owner = impl.owner()) owner->check_write(impl.owner_index());
}

void run_on_shards(const OperatorHandle& op, Stack& stack) {
  const Rule rule = rule_of(op);
  const auto begin = argument_begin(op, stack);
  for (size_t i = begin; i < stack.size(); ++i) {
    if (!is_written(op.schema().arguments()[i - begin])) continue;
    for_each_tensor_in(stack[i], [&](const at::Tensor& tensor) {
      if (auto* impl = distributed_impl(tensor)) check_write(op, *impl);
    });
  }
  if (at::GradMode::is_enabled() && !is_non_differentiable(rule)) refuse_lost_gradient(op, stack);
  // Conversions read grad mode to connect their error node, and plain tensors keep their graph; everything else works
  // below autograd.
  const bool grad_mode = at::GradMode::is_enabled();
  at::AutoGradMode mode(grad_mode && (rule == Rule::convert || rule == Rule::shape_of_other));
  if (rule != Rule::reduce && rule != Rule::metadata && rule != Rule::alias && rule != Rule::like_factory &&
      has_partials(op, stack)) {
    reduce_partial_arguments(op, stack);
    if (reference_of(op, stack) == nullptr) {
      at::AutoGradMode plain(grad_mode);
      return op.callBoxed(&stack);
    }
  }
  if (grad_mode && !is_non_differentiable(rule)) refuse_lost_gradient_of_plain(op, stack);
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
    case Rule::shape_of_other:
      return run_shape_of_other(op, stack);
    case Rule::refuse:
      break;
  }
  std::vector<at::Tensor> all;
  for_each_tensor(op, stack, [&](const at::Tensor& tensor) { all.push_back(tensor); });
  for (auto& tensor : all) {
    auto* impl = dtensor_impl(tensor);
    if (impl == nullptr) continue;
    if (impl->state() == DTensorImpl::State::deferred) check_column(op, {tensor});
    if (op.schema().name().starts_with("c10d::")) check_plain(op.schema().name().c_str(), tensor);
    refuse(op, *impl, "this operator has no rule for sharded tensors");
  }
  TORCH_INTERNAL_ASSERT(false, "run_on_shards without a distributed tensor");
}

}  // namespace dtensor

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "dtensor/operator_call.h"
#include "dtensor/rules.h"
#include "dtensor/shard_rules.h"

namespace dtensor {
namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

bool is_partial_scalar(const at::Tensor& tensor) {
  auto* impl = distributed_impl(tensor);
  return impl != nullptr && impl->layout() && impl->layout()->is_partial();
}

struct Reduction {
  ReduceOp op;
  double norm_type = 0;
};

// Backends drop NaN from maxima and minima, where torch keeps it: a flag a value goes along.
at::Tensor reduce_extreme(const at::Tensor& values, ReduceOp extreme, Communicator& communicator) {
  const double sign = extreme == ReduceOp::max ? 1 : -1;
  const auto lost = values.isnan();
  const double neutral = -sign * std::numeric_limits<double>::infinity();
  auto both = at::cat({values.masked_fill(lost, neutral), lost.to(values.scalar_type()).mul(sign)});
  communicator.all_reduce(both, extreme, {"all_reduce", "norm"})->wait();
  const auto count = values.numel();
  return both.narrow(0, 0, count)
      .masked_fill(both.narrow(0, count, count).ne(0), std::numeric_limits<double>::quiet_NaN());
}

Reduction reduction_of(const OperatorHandle& op, const Stack& stack, const DTensorImpl& impl) {
  const std::string& name = op.schema().name();
  if (!reduces_all_dims(op, stack)) {
    refuse(op, impl, "a reduction over some dims only, expected one over the whole tensor");
  }
  if (find_argument(op, stack, "other") != nullptr || op.schema().returns().size() != 1) {
    refuse(op, impl, "this overload is not a reduction to one value");
  }
  if (name == "aten::sum" || name == "aten::mean") return {ReduceOp::sum};
  if (name == "aten::max" || name == "aten::amax" || name == "aten::any") return {ReduceOp::max};
  if (name == "aten::min" || name == "aten::amin" || name == "aten::all") return {ReduceOp::min};
  const auto* exponent = find_argument(op, stack, name == "aten::norm" ? "p" : "ord");
  const double p = exponent == nullptr || exponent->isNone() ? 2.0 : exponent->toScalar().toDouble();
  if (p == std::numeric_limits<double>::infinity()) return {ReduceOp::max};
  if (!(p > 0)) refuse(op, impl, c10::str("the norm of exponent ", p, ", expected 0 < p <= infinity"));
  return {ReduceOp::norm, p};
}

// Not above, or not below, any value of the dtype.
c10::Scalar neutral_extreme(at::ScalarType dtype, bool lowest) {
  if (!at::isIntegralType(dtype, /*includeBool=*/true)) {
    return (lowest ? -1 : 1) * std::numeric_limits<double>::infinity();
  }
  return AT_DISPATCH_INTEGRAL_TYPES_AND(at::kBool, dtype, "neutral_extreme", [lowest] {
    using Limits = std::numeric_limits<scalar_t>;
    return c10::Scalar(lowest ? Limits::lowest() : Limits::max());
  });
}

std::optional<at::ScalarType> dtype_argument(const OperatorHandle& op, const Stack& arguments) {
  const auto* dtype = find_argument(op, arguments, "dtype");
  if (dtype == nullptr || dtype->isNone()) return std::nullopt;
  return dtype->toScalarType();
}

at::Tensor local_reduction(const OperatorHandle& op, const DTensorImpl& impl, const Reduction& reduction,
                           const Stack& arguments) {
  const auto& local = impl.local();
  const std::string& name = op.schema().name();
  at::Tensor result;
  const bool truth = name == "aten::any" || name == "aten::all";
  if (local.numel() == 0 && impl.numel() > 0 && reduction.op != ReduceOp::sum && !truth) {
    // A rank without elements contributes the neutral value.
    const auto options = local.options().requires_grad(false);
    if (name.ends_with("norm")) {
      result = at::zeros({}, options.dtype(dtype_argument(op, arguments).value_or(local.scalar_type())));
    } else {
      result = at::full({}, neutral_extreme(local.scalar_type(), reduction.op == ReduceOp::max), options);
    }
  } else if (name == "aten::mean") {
    result = at::sum(local, dtype_argument(op, arguments));
    result.div_(static_cast<double>(impl.numel()));
  } else if (name == "aten::_foreach_norm") {
    const auto dtype = dtype_argument(op, arguments);
    result = at::linalg_vector_norm(dtype ? local.to(*dtype) : local, reduction.op == ReduceOp::max
                                                                          ? std::numeric_limits<double>::infinity()
                                                                          : reduction.norm_type);
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

}  // namespace

bool reduces_all_dims(const OperatorHandle& op, const Stack& stack) {
  for (const char* argument : {"dim", "keepdim"}) {
    const auto* value = find_argument(op, stack, argument);
    if (value == nullptr || value->isNone()) continue;
    if ((value->isBool() && !value->toBool()) || (value->isIntList() && value->toIntVector().empty())) continue;
    return false;
  }
  return true;
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
        raise<NotSupportedError>(op.schema().name().c_str(),
                                 "a list that mixes plain and distributed tensors, expected "
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
    const auto& value = reduced[next++];
    if (!is_written(argument)) return value;
    distributed_impl(tensor)->become_ordinary(value);
    return tensor;
  });
}

std::vector<at::Tensor> reduce_partials(const std::vector<at::Tensor>& partials) {
  struct Group {
    const Layout* layout;
    c10::Device device;
    std::vector<size_t> members;
  };
  std::vector<Group> groups;
  for (size_t i = 0; i < partials.size(); ++i) {
    const auto* layout = distributed_impl(partials[i])->layout().get();
    const auto device = partials[i].device();
    const auto found_by = [&](const Group& group) {
      return group.layout->same_distribution(*layout) && group.layout->dtype() == layout->dtype() &&
             group.device == device;
    };
    auto found = std::find_if(groups.begin(), groups.end(), found_by);
    if (found == groups.end()) found = groups.insert(found, Group{layout, device, {}});
    found->members.push_back(i);
  }
  std::vector<at::Tensor> results(partials.size());
  for (auto& group : groups) {
    std::vector<at::Tensor> locals;
    for (auto i : group.members) locals.push_back(distributed_impl(partials[i])->local());
    auto values = at::stack(locals);
    const auto dtype = values.scalar_type();
    // What no backend compares: truth values and short numbers.
    if (at::isIntegralType(dtype, /*includeBool=*/true) && dtype != at::kLong) values = values.to(at::kInt);
    const auto& mesh = *group.layout->mesh();
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
      const auto& placement = group.layout->placements()[static_cast<size_t>(axis)];
      if (!placement.is_partial() || mesh.size(axis) == 1) continue;
      values = on_mesh_device(mesh, values);  // from shards that are kept on the host
      const bool norm = placement.op() == ReduceOp::norm;
      if (norm) values = values.pow(placement.norm_type());
      if (!norm && placement.op() != ReduceOp::sum && values.is_floating_point()) {
        values = reduce_extreme(values, placement.op(), mesh.communicator(axis));
        continue;
      }
      mesh.communicator(axis).all_reduce(values, norm ? ReduceOp::sum : placement.op(), {"all_reduce", "norm"})->wait();
      if (norm) values = values.pow(1 / placement.norm_type());
    }
    const auto parts = values.to(group.device, dtype).unbind(0);
    for (size_t k = 0; k < group.members.size(); ++k) results[group.members[k]] = parts[k];
  }
  return results;
}

}  // namespace dtensor

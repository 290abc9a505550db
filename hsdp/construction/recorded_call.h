#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "dtensor/operator_call.h"
#include "hsdp/construction/construction_memory.h"
#include "hsdp/construction/operator_traits.h"
#include "hsdp/construction/tape.h"

namespace hsdp {

/// One tensor among the arguments of an operator that is being recorded, in the order of the schema.
struct RecordedOperand {
  size_t argument;
  at::Tensor outer;
  RecordedValue* value;  // null: undefined, or a plain tensor from outside
  bool written, shape_only, indices;
  bool overwritten = false;  // written without being read
  at::Tensor inner = {};     // what the operator was given in its place

  bool data() const { return outer.defined() && !shape_only && !overwritten; }
  Memory* memory() const { return value == nullptr ? nullptr : value->memory().get(); }
  bool taped() const { return value != nullptr && !memory()->real; }
  /// The tensor below the deferred one, or the plain tensor.
  const at::Tensor& below() const { return value == nullptr ? outer : dtensor::dtensor_impl(outer)->local(); }
  /// Whether the operator gave the tensor below another shape or other memory than the deferred one still shows.
  bool changed_geometry() const {
    const auto& now = below();
    return !now.sizes().equals(outer.sizes()) || !now.strides().equals(outer.strides()) ||
           now.storage_offset() != outer.storage_offset() || !now.storage().is_alias_of(memory()->storage);
  }
  Geometry geometry() const {
    auto geometry = Geometry::of(below());
    geometry.wrapped_number |= outer.unsafeGetTensorImpl()->is_wrapped_number();
    return geometry;
  }
};

/// An operator that is being recorded.
struct RecordedCall {
  const c10::OperatorHandle& op;
  const OperatorTraits& traits;
  torch::jit::Stack& stack;
  torch::jit::Stack arguments;
  std::vector<RecordedOperand> operands;
  bool differentiable = false;       // plain construction would connect what it returns to what requires grad
  at::Generator own_generator = {};  // as it was before the call; undefined: the default one

  const std::string& name() const { return op.schema().name(); }
  bool draws_from_default() const { return traits.draws && !own_generator.defined(); }
  bool drawn() const {
    return traits.draws || std::any_of(operands.begin(), operands.end(), [](auto& operand) {
             return operand.data() && operand.taped() && operand.memory()->drawn;
           });
  }

  // The arguments with every tensor replaced by `choose(operand)`, all devices by `device`.
  template <class Choose>
  torch::jit::Stack substitute(c10::Device device, Choose&& choose) {
    torch::jit::Stack result;
    size_t next = 0;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = traits.arguments[i];
      if (argument.device) {
        result.emplace_back(device);
      } else if (argument.pin_memory) {
        result.emplace_back();
      } else {
        result.push_back(dtensor::map_tensors_in(arguments[i], [&](const at::Tensor&) {
          auto& operand = operands[next++];
          operand.inner = operand.outer.defined() ? choose(operand) : at::Tensor();
          return operand.inner;
        }));
      }
    }
    return result;
  }

  RecordedOperand* identical(const at::Tensor& result) {
    for (auto& operand : operands) {
      if (operand.inner.defined() && operand.inner.is_same(result)) return &operand;
    }
    return nullptr;
  }
  RecordedOperand* aliased(const at::Tensor& result) {
    for (auto& operand : operands) {
      if (operand.inner.defined() && operand.inner.storage().is_alias_of(result.storage())) return &operand;
    }
    return nullptr;
  }
};

}  // namespace hsdp

#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <utility>

/// Walking and replacing the tensors of a boxed operator call. Arguments are the last schema().arguments().size()
/// values of the stack, results the last schema().returns().size().
namespace dtensor {

/// Calls `visit(tensor)` for every tensor in a value: itself, or the elements of a (possibly optional) tensor list.
template <class Visit>
void for_each_tensor_in(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      if (tensor) visit(*tensor);
    }
  }
}

/// The value with every tensor replaced by `map(tensor)`; lists are copied, never changed in place.
template <class Map>
c10::IValue map_tensors_in(const c10::IValue& value, Map&& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      mapped.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

inline bool holds_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

inline size_t argument_begin(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return stack.size() - op.schema().arguments().size();
}

template <class Visit>
void for_each_tensor(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Visit&& visit) {
  for (size_t i = argument_begin(op, stack); i < stack.size(); ++i) for_each_tensor_in(stack[i], visit);
}

/// Replaces every tensor argument by `map(tensor, schema argument)`.
template <class Map>
void replace_tensors(const c10::OperatorHandle& op, torch::jit::Stack& stack, Map&& map) {
  const auto begin = argument_begin(op, stack);
  for (size_t i = begin; i < stack.size(); ++i) {
    if (!holds_tensors(stack[i])) continue;
    const auto& argument = op.schema().arguments()[i - begin];
    stack[i] = map_tensors_in(stack[i], [&](const at::Tensor& tensor) { return map(tensor, argument); });
  }
}

/// Replaces every tensor result by `map(tensor)`.
template <class Map>
void replace_results(const c10::OperatorHandle& op, torch::jit::Stack& stack, Map&& map) {
  for (size_t i = stack.size() - op.schema().returns().size(); i < stack.size(); ++i) {
    if (holds_tensors(stack[i])) stack[i] = map_tensors_in(stack[i], map);
  }
}

/// Value of the argument with this name, or null where the schema has none.
inline const c10::IValue* find_argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                                        const char* name) {
  const auto index = op.schema().argumentIndexWithName(name);
  return index ? &stack[argument_begin(op, stack) + static_cast<size_t>(*index)] : nullptr;
}

}  // namespace dtensor

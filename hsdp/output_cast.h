#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dtensor/error.h"

namespace hsdp::detail {

/// Casts the floating tensors in what a forward returned: a tensor, or optionals, pairs, tuples, arrays, vectors and
/// maps of such, at any depth. Numbers, strings and enums pass; other types are refused, because their tensors cannot
/// be seen.
inline void cast_floating(at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.defined() && at::isFloatingType(tensor.scalar_type())) tensor = tensor.to(dtype);
}

template <class T>
void cast_floating(std::optional<T>& value, at::ScalarType dtype);
template <class T, class A>
void cast_floating(std::vector<T, A>& values, at::ScalarType dtype);
template <class T, size_t N>
void cast_floating(std::array<T, N>& values, at::ScalarType dtype);
template <class... T>
void cast_floating(std::tuple<T...>& values, at::ScalarType dtype);
template <class A, class B>
void cast_floating(std::pair<A, B>& values, at::ScalarType dtype);
template <class... T>
void cast_floating(std::map<T...>& values, at::ScalarType dtype);
template <class... T>
void cast_floating(std::unordered_map<T...>& values, at::ScalarType dtype);
template <class T>
void cast_floating([[maybe_unused]] T& value, [[maybe_unused]] at::ScalarType dtype) {
  if constexpr (!std::is_arithmetic_v<T> && !std::is_enum_v<T> && !std::is_same_v<std::remove_cv_t<T>, std::string>) {
    dtensor::raise<dtensor::NotSupportedError>(
        "output_dtype", "the forward returns ", c10::demangle_type<T>(),
        ", expected tensors, or vectors, tuples, maps or optionals of them; leave output_dtype unset and cast them in "
        "the program");
  }
}

template <class T>
void cast_floating(std::optional<T>& value, at::ScalarType dtype) {
  if (value) cast_floating(*value, dtype);
}
template <class T, class A>
void cast_floating([[maybe_unused]] std::vector<T, A>& values, [[maybe_unused]] at::ScalarType dtype) {
  if constexpr (!std::is_arithmetic_v<T>) {
    for (auto& value : values) cast_floating(value, dtype);
  }
}
template <class T, size_t N>
void cast_floating(std::array<T, N>& values, at::ScalarType dtype) {
  for (auto& value : values) cast_floating(value, dtype);
}
template <class... T>
void cast_floating(std::tuple<T...>& values, at::ScalarType dtype) {
  std::apply([&](auto&... each) { (cast_floating(each, dtype), ...); }, values);
}
template <class A, class B>
void cast_floating(std::pair<A, B>& values, at::ScalarType dtype) {
  cast_floating(values.first, dtype);
  cast_floating(values.second, dtype);
}
template <class... T>
void cast_floating(std::map<T...>& values, at::ScalarType dtype) {
  for (auto& entry : values) cast_floating(entry.second, dtype);
}
template <class... T>
void cast_floating(std::unordered_map<T...>& values, at::ScalarType dtype) {
  for (auto& entry : values) cast_floating(entry.second, dtype);
}

}  // namespace hsdp::detail

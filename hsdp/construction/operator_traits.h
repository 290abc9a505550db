#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <vector>

namespace hsdp {

/// What recording needs to know of an operator, read once from its schema and tags.
struct OperatorTraits {
  struct ArgumentTraits {
    bool written = false;     // in place or out=, also where the schema does not say so (running statistics)
    bool shape_only = false;  // the operator reads the tensor's shape, dtype and strides, not its values
    bool device = false;
    bool optional_device = false;
    bool pin_memory = false;
    bool generator = false;
    bool indices = false;  // a list of index tensors, in which masks may be
  };
  std::vector<ArgumentTraits> arguments;
  bool writes = false;
  /// Gives every element of its first written argument a new value without reading the old one.
  bool overwrites = false;
  /// Takes numbers from a generator.
  bool draws = false;
  /// How many it takes follows from shapes alone.
  bool draws_by_shape = false;
  /// Returns what only the values can tell to the host: item, equal.
  bool reads_on_host = false;
  /// All it returns are arguments that it wrote, these.
  bool returns_written = false;
  std::vector<size_t> returned_arguments;
  bool makes_tensors = false;
  /// Of the shape-only argument nothing but the dtype matters: to(other), type_as.
  bool dtype_only = false;
  /// Asks whether set_data may exchange two tensors.
  bool compares_types = false;
};

/// Cached per operator and thread.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace hsdp

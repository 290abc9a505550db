#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "hsdp/sharded_module.h"

namespace hsdp {

/// A parameter or buffer of a sharded module under all the names that it is registered by.
struct RegisteredTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
  ShardedParameter* parameter;  // null: a buffer
  bool in_files;                // false below children whose is_serializable() is false: torch::save passes them over
};

/// Parameters, then buffers, in the order of named_parameters and named_buffers: the same on all ranks.
std::vector<RegisteredTensor> registered_tensors(const ShardedModule& sharded);

/// Where whole values come from.
struct ValueSource {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::function<at::Tensor()> read;
};

/// For each target the source of its values. Throws ValueError that lists all names, shapes and dtypes that do not fit,
/// and for tied targets whose sources differ in dtype or bits. `what` names the sources in messages.
std::vector<size_t> match_sources(const char* where, const std::string& what,
                                  const std::vector<RegisteredTensor>& targets,
                                  const std::vector<ValueSource>& sources);

/// Takes this rank's part of a whole value, below dispatch.
void set_value(const RegisteredTensor& target, const at::Tensor& whole);

/// The mesh that the module lies on. Throws StateError where it was made without groups.
const dtensor::DeviceMesh& mesh_of(const ShardedModule& sharded, const char* where);
/// Where that mesh communicates: parameters and buffers are there, but for what is kept on the host.
at::Device device_of(const ShardedModule& sharded);

}  // namespace hsdp

#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
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

struct MatchOptions {
  /// Whether names that only one side has are refused.
  bool strict = true;
  /// Whether dtypes must be the same. Values that are complex never become real.
  bool same_dtypes = false;
  /// Tensors that torch::save passes over may be missing, and are then none.
  bool unsaved_may_be_missing = false;
};

struct NameMatch {
  /// For each target the sources under its names; none where it is missing.
  std::vector<std::vector<size_t>> sources;
  std::vector<std::string> missing, unexpected;
};

/// Throws ValueError that lists all names, shapes and dtypes that do not fit. `what` names the sources in messages.
NameMatch match_names(const char* where, const std::string& what, const std::vector<RegisteredTensor>& targets,
                      const std::vector<ValueSource>& sources, const MatchOptions& options = {});

/// For each target the source of its values, as match_names, and none where it may be missing. Throws ValueError also
/// for tied targets whose sources differ in dtype or bits.
std::vector<std::optional<size_t>> match_sources(const char* where, const std::string& what,
                                                 const std::vector<RegisteredTensor>& targets,
                                                 const std::vector<ValueSource>& sources,
                                                 const MatchOptions& options = {});

/// `missing "a", "b" and 3 more`
std::string quoted_list(const char* label, const std::vector<std::string>& names);

/// Takes this rank's part of a whole value, below dispatch.
void set_value(const RegisteredTensor& target, const at::Tensor& whole);
/// Takes this rank's part itself, or, where it is undefined, what was written into the parameter's local as its values.
void set_local(const ShardedParameter& parameter, const at::Tensor& part);

/// The whole value, on rank 0 and those that it gathers with; undefined on other replicas. A collective. They wait
/// here, tensor by tensor, for as long as rank 0 takes to write: for a whole file would be longer than any collective
/// may take.
at::Tensor whole_for_rank_0(const RegisteredTensor& target);

/// Throws StateError while parameters, buffers or captured tensors have no values.
void check_values(const char* where, const ShardedModule& sharded);

/// The mesh that the module lies on. Throws StateError where it was made without groups.
const dtensor::DeviceMesh& mesh_of(const ShardedModule& sharded, const char* where);
/// Where that mesh communicates: parameters and buffers are there, but for what is kept on the host.
at::Device device_of(const ShardedModule& sharded);

}  // namespace hsdp

#pragma once

#include <map>
#include <string>
#include <vector>

#include "hsdp/checkpoint/checkpoint.h"
#include "hsdp/checkpoint/tensor_loading.h"
#include "hsdp/registered_tensors.h"

namespace hsdp {

/// Parameters and buffers of a module from stored tensors, by name: matched first, then given memory, filled by a
/// TensorLoading, and taken over. Until then the module keeps what it has.
class ModelLoading {
 public:
  struct Options {
    bool strict = true;
    bool convert_dtypes = false;
  };
  /// Adds to the report what only one side has. Throws ValueError as match_names does; `what` names the source. What is
  /// given must outlive it.
  ModelLoading(const char* where, const std::string& what, ShardedModule& module,
               const std::vector<RegisteredTensor>& registered, const StoredTensors& stored, const Options& options,
               LoadReport& report);

  /// Whether some of what is to be filled has no memory yet.
  bool on_meta() const;
  /// Gives a module on meta memory; adds what is to be read. Local.
  void allocate(at::Device device, TensorLoading& loading);
  /// The values become the module's. `own` are this rank's values of tensors that are not sharded, by name, instead of
  /// those that were read.
  void commit(const std::map<std::string, at::Tensor>& own);

 private:
  struct Item {
    const RegisteredTensor* target;
    std::vector<const StoredTensor*> stored;  // of tied parameters there may be several, all equal
    at::Tensor values;                        // of this rank's box
    bool in_place = false;
  };

  const char* where_;
  ShardedModule& module_;
  std::vector<Item> items_;
};

/// Adds the names to the report; with `strict` throws ValueError that lists them instead.
void refuse_unless_listed(const char* where, const std::string& what, const std::vector<std::string>& missing,
                          const std::vector<std::string>& unexpected, bool strict, LoadReport& report);

}  // namespace hsdp

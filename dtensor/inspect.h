#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace dtensor {

/// What one plain tensor handle refers to, read below dispatch: nothing is gathered, copied or counted.
struct Observation {
  const void* impl = nullptr;
  const void* storage = nullptr;  // the StorageImpl
  const void* data = nullptr;     // first byte of the storage; null on meta and for empty storages
  size_t nbytes = 0;
  bool resizable = false;
  c10::Device storage_device{c10::kMeta};
  int64_t offset = 0;  // elements
  std::vector<int64_t> sizes, strides;

  std::string to_string() const;
};

/// The three layers of a tensor: the handle's impl (identity), and for a distributed tensor its body and its local. For
/// a plain tensor body and local both observe the tensor itself.
struct Inspection {
  const void* identity = nullptr;
  bool distributed = false;
  Observation body, local;

  std::string to_string() const;
};

/// Throws ValueError for an undefined or deferred tensor.
Inspection inspect(const at::Tensor& tensor);

/// True when two plain tensors are the same memory seen the same way: StorageImpl, offset, sizes, strides, dtype and
/// device. A pointer alone proves nothing: meta and empty tensors have none, views differ by offset.
bool same_memory(const at::Tensor& a, const at::Tensor& b);

}  // namespace dtensor

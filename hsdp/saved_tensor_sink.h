#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "hsdp/unit.h"

namespace hsdp {

/// A tensor and the version that it has now, for whoever reads it later.
class VersionedTensor {
 public:
  VersionedTensor() = default;
  explicit VersionedTensor(at::Tensor tensor);
  bool defined() const { return tensor_.defined(); }
  /// Throws StateError when it has been modified in place since.
  const at::Tensor& get() const;

 private:
  at::Tensor tensor_;
  bool has_version_ = false;  // tensors of inference mode have none
  uint32_t version_ = 0;
};

/// What backward computes again where an operator wanted a tensor saved. Any thread may unpack it.
class RecomputedTensor {
 public:
  virtual ~RecomputedTensor();
  virtual at::Tensor unpack() = 0;
};

/// Hears of all that operators save for backward on a thread while it is the innermost one there.
class SavedTensorSink {
 public:
  virtual ~SavedTensorSink();
  /// What is kept instead of a tensor that does not live in a unit; null: the tensor itself.
  virtual std::unique_ptr<RecomputedTensor> save(const at::Tensor& tensor) = 0;
  /// A weight is saved, by reference. Returns the scope whose saved tensors keep the unit: `scope_token` or another.
  virtual int64_t save_weight(const std::shared_ptr<Unit>& unit, size_t index, int64_t scope_token) = 0;
};

/// Makes a sink the innermost one of this thread, null meaning none, as long as it lives.
class SavedTensorSinkScope {
 public:
  explicit SavedTensorSinkScope(SavedTensorSink* sink);
  ~SavedTensorSinkScope();
  SavedTensorSinkScope(const SavedTensorSinkScope&) = delete;
  SavedTensorSinkScope& operator=(const SavedTensorSinkScope&) = delete;

 private:
  SavedTensorSink* former_;
};

/// This thread's innermost sink, or null.
SavedTensorSink* saved_tensor_sink();

/// Throws StateError unless the parameter is as it was at `generation`.
void check_unchanged(const Unit& unit, size_t index, const Unit::Generation& generation);

}  // namespace hsdp

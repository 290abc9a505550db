#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "dtensor/dtensor_impl.h"
#include "dtensor/layout.h"

namespace dtensor {

/// A typed handle on a distributed tensor: the vocabulary of PyTorch's DTensor for code that knows what it holds. All
/// other code sees the same object as an ordinary at::Tensor with the global shape.
///
/// Ownership: a reference, like at::Tensor; copies share the object. Threads: as at::Tensor.
class DTensor {
 public:
  /// Throws ValueError for anything that is not a distributed tensor.
  explicit DTensor(at::Tensor tensor);
  static bool is_dtensor(const at::Tensor& tensor) { return distributed_impl(tensor) != nullptr; }

  /// Wraps this rank's part. Local and result share memory; requires_grad is kept; equal requests reuse one Layout.
  /// Without `shape` the global sizes are the sums of the local sizes along Shard axes: exchanged between the ranks of
  /// a mesh with groups (a collective), taken as equal on a mesh without. Throws ValueError when `shape` does not give
  /// this rank a local of this size, NotSupportedError for a local that is itself distributed or non-contiguous.
  static DTensor from_local(const at::Tensor& local, std::shared_ptr<const DeviceMesh> mesh, Placements placements,
                            std::optional<std::vector<int64_t>> shape = std::nullopt);
  /// The same from mesh and placements alone, for a caller that keeps no Layout: global sizes and strides are the
  /// local's.
  static DTensor without_layout(const at::Tensor& local, std::shared_ptr<const DeviceMesh> mesh, Placements placements);
  /// Takes this rank's part of a whole tensor that every rank has; no communication.
  static DTensor distribute(const at::Tensor& whole, std::shared_ptr<const DeviceMesh> mesh, Placements placements);

  const at::Tensor& tensor() const { return tensor_; }
  operator const at::Tensor&() const { return tensor_; }  // NOLINT(google-explicit-constructor)

  /// This rank's part, sharing memory and version counter; detached. A write through it changes the distributed tensor;
  /// one through a raw pointer is not seen by a unit that is gathered at the time.
  at::Tensor to_local() const;
  /// The whole value on every rank, a new plain tensor on the mesh's device, wherever the locals are: all-gathers Shard
  /// axes, reduces Partial ones. A collective.
  at::Tensor full_tensor() const;

  /// A new distributed tensor on the same memory, layout and version counter, without autograd history.
  DTensor detach() const;
  /// A leaf rebuilt through detach(), marked as parameter, that requires grad as asked.
  DTensor as_parameter(bool requires_grad) const;
  bool is_parameter() const { return impl().is_parameter(); }

  // The four overloads of at::Tensor::to. All arguments go to the local tensor's `to`; the result has the same mesh and
  // alias placements and is never a parameter.
  DTensor to(at::TensorOptions options, bool non_blocking = false, bool copy = false,
             std::optional<at::MemoryFormat> memory_format = std::nullopt) const;
  DTensor to(at::Device device, at::ScalarType dtype, bool non_blocking = false, bool copy = false,
             std::optional<at::MemoryFormat> memory_format = std::nullopt) const;
  DTensor to(at::ScalarType dtype, bool non_blocking = false, bool copy = false,
             std::optional<at::MemoryFormat> memory_format = std::nullopt) const;
  DTensor to(const at::Tensor& other, bool non_blocking = false, bool copy = false,
             std::optional<at::MemoryFormat> memory_format = std::nullopt) const;
  /// PyTorch's float(): to(kFloat).
  DTensor to_float() const;

  /// A distributed alias: fresh identity and body, same storage and layout, version counter of its own.
  DTensor data() const;
  /// Rebinds layout, body and local to those of `source` (or to this rank's part of a plain tensor of global shape);
  /// the identity stays.
  void set_data(const at::Tensor& source) const;
  /// The raw alias of the body that the notes on tensor identity call `.data`: a new plain impl at every call, on the
  /// body's current storage, below dispatch.
  at::Tensor body_alias() const;

  const std::shared_ptr<const DeviceMesh>& mesh() const { return impl().mesh(); }
  const Placements& placements() const { return impl().placements(); }
  const Placements& alias_placements() const { return impl().alias_placements(); }
  /// Null for a tensor made without a layout.
  const std::shared_ptr<const Layout>& layout() const { return impl().layout(); }
  DTensorImpl& impl() const { return *impl_; }

 private:
  at::Tensor tensor_;
  DTensorImpl* impl_;
};

/// A distributed tensor around `local` that lies as `like` does: same mesh and alias placements, dtype of the local.
at::Tensor wrap_local(at::Tensor local, const DTensorImpl& like);

/// This rank's box of a whole plain tensor, a view.
at::Tensor narrow_to_box(at::Tensor whole, const Box& box);

/// One line about any tensor without reading its values: `DTensor float (5, 3) [Shard(0)] on mesh(...), local (3, 3)`
/// and where that is.
std::string describe(const at::Tensor& tensor);

}  // namespace dtensor

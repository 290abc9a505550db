#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "dtensor/layout.h"

namespace dtensor {

class DTensorImpl;

/// The one dispatch key that every distributed or deferred tensor carries. libtorch reserves it for out-of-tree use and
/// runs it above autograd and autocast; the fallback registered in dispatch.cpp sees every operator on such a tensor.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::DeferredInit;

/// What manages a sharded parameter and can produce the whole of it: a unit of fully sharded training. Implemented
/// above this folder. All calls come from the thread that runs the operator.
class ParameterOwner {
 public:
  virtual ~ParameterOwner();
  /// True while operators may read whole parameters on this thread: in a forward scope, a backward pass, a recompute.
  virtual bool readable() const = 0;
  /// Whether whole parameters are in memory or on their way. While they are not, in-place changes go to the shard.
  virtual bool holds_whole() const;
  /// The whole parameter `index`, gathered if it is not; with `differentiable`, connected to the owner's autograd node.
  /// Throws StateError naming what has no values yet.
  virtual at::Tensor unsharded(size_t index, bool differentiable) = 0;
  /// The same for a caller that keeps a raw pointer: the memory stays until the outermost forward or backward ends.
  virtual at::Tensor unsharded_for_raw_access(size_t index) = 0;
  /// Makes the memory behind plain views of unsharded parameters valid again.
  virtual void gather() = 0;
  /// Keeps what is gathered until the matching unpin(): one operator may read parameters of several owners.
  virtual void pin() = 0;
  virtual void unpin() = 0;
  /// An operator wrote the whole parameter `index` through unsharded() or a view of it: the shard must follow.
  virtual void written(size_t index) = 0;
  /// An operator wrote the shard of parameter `index` through an alias, whose version counter is not the parameter's.
  virtual void shard_written(size_t index) = 0;
  /// Parameter `index`, or its shard, is about to be written: throws StateError while it must only be read.
  virtual void check_write(size_t index) const;
  /// The whole parameter `index` is about to be written by an operator: throws StateError where that would not reach
  /// the shard as it is.
  virtual void check_whole_write(size_t index) const;
  /// The dtype that the other floating inputs of an operator which reads the whole parameter `index` are cast to.
  virtual std::optional<c10::ScalarType> input_dtype(size_t index) const;
  /// Whether all parameters may only be read, and no rank need do what this one does.
  virtual bool is_read_only() const;
  /// A number went into state made like a parameter in a forward: it must be the same on all ranks.
  virtual void note_operand(uint64_t hash);
  /// Where whole parameters are while they may be read, if that is not where their shards are kept.
  virtual std::optional<c10::Device> whole_device() const;
};

/// What a tensor that was born during deferred construction stands for. Implemented by the recorder above this folder.
class DeferredValue {
 public:
  virtual ~DeferredValue();
  /// Raw access (data_ptr, accessor, torch::tensor({...})): gives `impl` real memory, or returns false where there is
  /// none to give.
  virtual bool expose(DTensorImpl& impl) = 0;
  /// `impl` starts, or ends, standing for this value: construction finds every tensor of a module this way, aliases
  /// made by data() and set_data() included.
  virtual void attach(DTensorImpl& impl);
  virtual void detach(DTensorImpl& impl);
};

/// The object behind every handle of a distributed tensor, and its identity: modules, optimizers and users hold handles
/// to this impl, and it is never replaced. What it holds is exchanged instead.
///
/// States: *deferred* (born in deferred construction: shape only, or small real memory), *distributed* (layout, body
/// and local), *ordinary* (a plain tensor again on the same impl; the key is gone and this class no longer matters).
///
/// Public metadata is that of the global tensor; device and dtype follow the local. There is no public storage outside
/// a forward. `body` and `local` are two impls on one StorageImpl, except between install_local and exchange_body. Not
/// thread-safe, as at::Tensor.
class DTensorImpl final : public c10::TensorImpl {
 public:
  enum class State { deferred, distributed, ordinary };

  /// Distributed. `layout` may be null, then `mesh`, `placements` and the given global sizes and strides describe it.
  DTensorImpl(at::Tensor local, std::shared_ptr<const Layout> layout);
  DTensorImpl(at::Tensor local, std::shared_ptr<const DeviceMesh> mesh, Placements placements, c10::IntArrayRef sizes,
              c10::IntArrayRef strides);
  /// Deferred. `value` is a meta or a small real tensor of the same shape.
  DTensorImpl(at::Tensor value, std::shared_ptr<DeferredValue> deferred);
  ~DTensorImpl() override;

  State state() const { return state_; }

  // ---- distributed: what is held ----
  const at::Tensor& local() const { return local_; }
  const at::Tensor& body() const { return body_; }
  const std::shared_ptr<const Layout>& layout() const { return layout_; }
  const std::shared_ptr<const DeviceMesh>& mesh() const { return mesh_; }
  /// The layout's where there is one, else the stored placements.
  const Placements& alias_placements() const;
  const Placements& placements() const { return placements_; }
  bool is_parameter() const { return is_parameter_; }
  void mark_parameter() { is_parameter_ = true; }
  /// Name in messages: the fully qualified parameter name once a unit manages it.
  const std::string& name() const { return name_; }
  void set_name(std::string name);
  /// `parameter "blocks.0.weight" of shape [5, 3] (Shard(0))`
  std::string describe() const;

  // ---- distributed: exchange ----
  /// Deferred or distributed -> distributed with this layout; body and local are aliases of `local`'s storage.
  void distribute(at::Tensor local, std::shared_ptr<const Layout> layout);
  /// Replaces the local only; the body keeps its storage (the transient state of deferred initialisation).
  void install_local(at::Tensor local);
  /// Exchanges the impls of the body and of `donor`, which leaves with the former body.
  void exchange_body(at::Tensor& donor);
  /// Makes key set, dtype, device, version counter follow the local; drops a gradient that is on another device.
  void refresh_identity();
  /// Counts the locals that were installed: a holder of derived views compares it to know that they are stale.
  uint64_t local_epoch() const { return local_epoch_; }

  // ---- managed parameters ----
  void set_owner(std::weak_ptr<ParameterOwner> owner, size_t index);
  std::shared_ptr<ParameterOwner> owner() const { return owner_.lock(); }
  size_t owner_index() const { return owner_index_; }
  /// A data() or detach() alias of a managed parameter rather than the parameter itself.
  bool is_alias() const { return is_alias_; }

  // ---- values ----
  /// Whether somebody gave this tensor values since its memory was made; shared by all aliases of the tensor.
  bool has_values() const;
  void set_has_values(bool value);

  /// The value that a like-factory gave while there was no memory (optimizer state built on meta): whoever first needs
  /// it beside real tensors fills it in.
  const std::optional<c10::Scalar>& pending_fill() const { return pending_fill_; }
  void set_pending_fill(std::optional<c10::Scalar> fill) { pending_fill_ = std::move(fill); }

  // ---- deferred ----
  const std::shared_ptr<DeferredValue>& deferred() const { return deferred_; }
  /// Gives a deferred tensor other memory (meta or real) and its geometry.
  void set_deferred_value(at::Tensor value, std::shared_ptr<DeferredValue> deferred);
  /// Deferred or distributed -> ordinary: a plain tensor with `value`'s storage and geometry, on the same impl.
  void become_ordinary(const at::Tensor& value);

  // ---- c10::TensorImpl ----
  c10::Device device_custom() const override;
  bool has_storage() const override;
  const c10::Storage& storage() const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                              bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                              bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) override;

 protected:
  const char* tensorimpl_type_name() const override { return "DTensorImpl"; }

 private:
  void adopt(at::Tensor local);
  void set_deferred(std::shared_ptr<DeferredValue> deferred);
  void set_geometry(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);
  void follow_local();
  c10::intrusive_ptr<c10::TensorImpl> alias(const c10::VariableVersion& version_counter, bool allow_change) const;
  std::string raw_access_text() const;

  State state_;
  at::Tensor local_, body_;
  std::shared_ptr<const Layout> layout_;
  std::shared_ptr<const DeviceMesh> mesh_;
  Placements placements_;
  std::shared_ptr<std::atomic<bool>> has_values_;
  uint32_t values_version_ = 0;
  uint64_t local_epoch_ = 0;
  bool is_parameter_ = false;
  bool is_alias_ = false;
  mutable bool raw_access_text_set_ = false;
  std::string name_;
  std::weak_ptr<ParameterOwner> owner_;
  size_t owner_index_ = 0;
  std::shared_ptr<DeferredValue> deferred_;
  std::optional<c10::Scalar> pending_fill_;
};

/// The impl of a deferred or distributed tensor; null for undefined, plain and ordinary ones.
DTensorImpl* dtensor_impl(const at::TensorBase& tensor);
/// The impl of a distributed tensor, else null.
DTensorImpl* distributed_impl(const at::TensorBase& tensor);
/// A new plain handle on the same memory with its own version counter and no autograd state; never dispatches.
at::Tensor raw_alias(const at::Tensor& plain);

}  // namespace dtensor

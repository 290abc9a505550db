#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "dtensor/layout.h"
#include "hsdp/construction/tape.h"
#include "hsdp/fully_shard_options.h"
#include "hsdp/module_access.h"

namespace hsdp {

/// One parameter of a unit: its identity (a Parameter-marked DTensor), where it is registered, and the padded memory of
/// this rank's shard.
///
/// In the healthy state the registered tensor is the identity, and body and local are two impls on the padded storage,
/// whose padding is zero. Ownership: holds the identity; modules are kept alive by the sharded module. Not thread-safe.
class ShardedParameter {
 public:
  /// `identity` is a deferred tensor; all slots register it. Remembers what it is on its tape, for replay.
  ShardedParameter(at::Tensor identity, std::vector<ParameterSlot> slots,
                   std::shared_ptr<const dtensor::Layout> layout);

  const at::Tensor& tensor() const { return tensor_; }
  dtensor::DTensorImpl& impl() const { return *impl_; }
  const std::string& name() const { return slots_.front().path; }
  const std::vector<ParameterSlot>& slots() const { return slots_; }
  /// The same places under other paths, once a larger module wraps this one.
  void set_slots(std::vector<ParameterSlot> slots);
  const dtensor::Layout& layout() const { return *impl_->layout(); }
  /// The tensor dim that the shard axis (the mesh's last) splits; none where every rank holds the whole.
  std::optional<int64_t> shard_dim() const;
  /// How it travels, null where as its own bytes.
  const std::shared_ptr<const AllGatherExtension>& extension() const { return extension_; }
  void set_extension(std::shared_ptr<const AllGatherExtension> extension) { extension_ = std::move(extension); }
  /// Shards live in host memory, page-locked with `pin_memory`, whatever the mesh's device is.
  void offload(bool pin_memory);
  bool is_materialized() const { return !impl_->local().is_meta(); }
  /// The construction that made the parameter, and its value there.
  const std::shared_ptr<Tape>& tape() const { return tape_; }
  ValueId value() const { return value_; }

  /// Turns the deferred identity into a Parameter-marked DTensor whose shard is still on meta. Metadata only.
  void shard_on_meta();

  /// Puts a plain empty tensor of this rank's shape on `device` where the parameter is registered; the identity keeps
  /// its former memory until the next reset (the transient state of deferred initialisation).
  void replace_by_empty(at::Device device);

  /// What a reset would install. `needed` is false where everything is healthy.
  struct Reset {
    bool needed = false;
    at::Tensor local;
    bool adopted = false;  // the values come from another tensor than the identity's own
  };
  /// Resolves what is registered now (the identity, a plain tensor, another DTensor of equal layout; meta gives nothing
  /// to do), validates it and builds the padded local. Changes nothing. Throws ValueError for a wrong shape, dtype,
  /// device or layout, for tied slots that disagree, and for a tensor that somebody else holds as well.
  Reset plan_reset() const;
  /// Installs the local, repairs the body from a donor alias, refreshes the identity and registers it again in all
  /// slots.
  void commit_reset(Reset reset);

  /// True when the local that was last installed by a reset is still there.
  bool is_healthy() const;
  /// The padded shard as communication sees it: 1-D, padded_local_sizes elements. On the local's storage, but for a
  /// short shard of another dim than 0.
  at::Tensor padded_shard() const;

 private:
  at::Tensor tensor_;
  dtensor::DTensorImpl* impl_;
  std::vector<ParameterSlot> slots_;
  std::shared_ptr<const dtensor::Layout> initial_layout_;
  std::shared_ptr<Tape> tape_;
  ValueId value_;
  uint64_t healthy_epoch_ = 0;
  std::shared_ptr<const AllGatherExtension> extension_;
  bool is_offloaded_ = false, pins_memory_ = false;
};

}  // namespace hsdp

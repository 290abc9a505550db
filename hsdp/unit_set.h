#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/unit.h"

namespace hsdp {

class Scheduler;

/// A gather that was started ahead; the next forward that reads the unit waits for it by itself.
class Unsharding {
 public:
  /// Returns with the unit gathered. Throws CommunicationError. A second call does nothing.
  void wait();

 private:
  friend class UnitSet;
  std::shared_ptr<Scheduler> scheduler_;
  std::vector<std::shared_ptr<Unit>> units_;
};

/// Units of a sharded module, and what may be changed about them while training: the run-time switches of FSDP2's
/// FSDPModule, under its names. `model.units("blocks.*")` gives some of them, `model.units()` all. A setting counts
/// from the unit's next forward, backward or reduction on, and must be the same on all ranks. A handle that copies
/// share; calls come from the thread that trains, between forwards and backwards.
class UnitSet {
 public:
  UnitSet(std::shared_ptr<Scheduler> scheduler, std::vector<std::shared_ptr<Unit>> units);

  /// In the order of the module, the root first.
  const std::vector<std::shared_ptr<Unit>>& units() const& { return units_; }
  std::vector<std::shared_ptr<Unit>> units() && { return std::move(units_); }

  /// Throws ValueError for an integer that does not divide the shard axis. Collective where it is a new integer.
  void set_reshard_after_forward(ReshardAfterForward reshard) const;
  /// False keeps parameters gathered between the backwards of micro-batches.
  void set_reshard_after_backward(bool reshard) const;
  /// False: backwards communicate no gradients; full ones add up on each rank, in reduce_dtype, until a backward with
  /// gradient sync.
  void set_requires_gradient_sync(bool required) const;
  /// False: backwards reduce-scatter and leave the all-reduce over replicas to a later one.
  void set_requires_all_reduce(bool required) const;
  /// Gradients are sums over the ranks divided by `factor`; by default it is the number of ranks, 1 gives sums. Throws
  /// ValueError unless finite and above 0.
  void set_gradient_divide_factor(double factor) const;
  /// Sees every buffer of reduced gradients (1-D, padded shards of several parameters, sums over all ranks, in fp16
  /// divided in part already) before it is divided, and may change it in place. Null removes it.
  void set_all_reduce_hook(std::function<void(const at::Tensor& buffer)> hook) const;
  /// These units are gathered right after each one of this set was, in forward or backward, in place of what the last
  /// forward tells; empty goes back to that, as does wrapping the module in a larger one. Throws ValueError for units
  /// of another sharded module.
  void set_modules_to_forward_prefetch(const std::vector<UnitSet>& ahead) const;
  void set_modules_to_backward_prefetch(const std::vector<UnitSet>& ahead) const;

  /// Gathers ahead of a forward. Collective. With `async` returns while it is on its way.
  Unsharding unshard(bool async = false) const;
  /// Frees unsharded parameters, unless an operator is using them.
  void reshard() const;

 private:
  std::vector<Unit*> plain(const char* where, const std::vector<UnitSet>& sets) const;

  std::shared_ptr<Scheduler> scheduler_;
  std::vector<std::shared_ptr<Unit>> units_;
};

}  // namespace hsdp

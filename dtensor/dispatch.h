#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>

#include "dtensor/dtensor_impl.h"

namespace c10 {
class OperatorHandle;
}

namespace dtensor {

/// The dispatch rules, in the order in which they are tried (rules.cpp holds 2 to 5):
///  1. whole parameters in a forward, a backward or a recompute (ParameterOwner::readable)
///  0. refusal of what would lose a gradient outside
///  2. elementwise, `_foreach_*`, `_fused_*` on locals      3. like-factories, clone, detach, to
///  4. random in-place: the shard of what the full tensor would have received
///  5. copies, norms and sums                               6. write-back of what a forward wrote into a parameter
///  7. anything else is refused by name.

/// Sees every operator of its thread before the rules: deferred construction records through it.
class OperatorInterceptor {
 public:
  virtual ~OperatorInterceptor();
  /// Runs the operator itself (arguments on the stack are replaced by results) and returns true, or returns false and
  /// leaves the stack alone. Runs with kDTensorKey excluded.
  virtual bool intercept(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
};

/// Installs an interceptor for this thread and, while it lives, sends every operator of the thread to it, factories
/// included; without `every_operator` only those that meet a distributed tensor or a view of a gathered parameter.
/// Scopes nest; the destructor restores the former one.
class InterceptScope {
 public:
  explicit InterceptScope(OperatorInterceptor& interceptor, bool every_operator = true);
  ~InterceptScope();
  InterceptScope(const InterceptScope&) = delete;
  InterceptScope& operator=(const InterceptScope&) = delete;

 private:
  OperatorInterceptor* former_;
  bool former_included_;
};

/// Runs an operator by the rules, for an interceptor that only looks on.
void run_by_rules(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// While it lives, this thread's operators treat managed parameters by rules 2 to 5 (on their shards) even where they
/// could be read whole: for optimizers and clipping that run inside a forward scope or in a backward pass. With `false`
/// the other way round again: for a forward in there.
class ShardedRulesGuard {
 public:
  explicit ShardedRulesGuard(bool sharded = true);
  /// Whether this thread's operators work on shards.
  static bool is_active();
  ~ShardedRulesGuard();
  ShardedRulesGuard(const ShardedRulesGuard&) = delete;
  ShardedRulesGuard& operator=(const ShardedRulesGuard&) = delete;

 private:
  bool sharded_, former_;
};

/// Tells dispatch that plain tensors on this storage are views of parameter `index` of `owner`. The storage must stay
/// alive until it is forgotten. Thread-safe.
void register_unsharded_storage(const c10::StorageImpl* storage, std::weak_ptr<ParameterOwner> owner, size_t index);
void forget_unsharded_storage(const c10::StorageImpl* storage);

/// The owner and index behind a plain tensor on a registered storage; owner is null for all others. Thread-safe.
struct StorageOwner {
  std::shared_ptr<ParameterOwner> owner;
  size_t index = 0;
};
StorageOwner unsharded_storage_owner(const at::TensorBase& tensor);

}  // namespace dtensor

#pragma once

#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dtensor/dispatch.h"
#include "hsdp/output_cast.h"
#include "hsdp/saved_tensors.h"
#include "hsdp/sharded_module.h"

namespace hsdp {

/// Inside it this thread's operators see whole parameters of one sharded module: what `model->forward(x)` opens for the
/// length of a full expression, for code that takes a `Net&`. Scopes nest; the outermost frees what should not stay
/// gathered. Throws StateError while another thread is in a scope of the same module.
class ForwardScope {
 public:
  explicit ForwardScope(std::shared_ptr<ShardedModule> module)
      : module_(std::move(module)), scheduler_(module_->scheduler()) {
    scheduler_->enter_scope();
  }
  ~ForwardScope() {
    if (scheduler_) scheduler_->leave_scope();
  }
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  std::shared_ptr<ShardedModule> module_;
  std::shared_ptr<Scheduler> scheduler_;
  SavedTensorScope saved_tensors_;
  dtensor::ShardedRulesGuard whole_rules_{false};
};

/// A fully sharded module of class M: a handle that copies share.
///
/// `model->anything(...)` calls the member of M inside a forward scope that ends with the full expression; `model(x)`
/// is `model->forward(x)`. Everything else that a training loop needs from the sharded state is a member with a dot.
/// Threads: one forward at a time. Collective functions must be called by all ranks in the same order.
template <class M>
class FullySharded {
 public:
  /// What operator-> returns: keeps the scope open until the end of the full expression.
  class ScopeProxy {
   public:
    ScopeProxy(std::shared_ptr<ShardedModule> core, M* module) : scope_(std::move(core)), module_(module) {}
    M* operator->() const { return module_; }

   private:
    ForwardScope scope_;
    M* module_;
  };

  FullySharded(std::shared_ptr<ShardedModule> core, std::shared_ptr<M> module)
      : core_(std::move(core)), module_(std::move(module)) {}

  ScopeProxy operator->() const { return ScopeProxy(core_, module_.get()); }

  /// `forward` with these arguments, its result cast to mixed_precision.output_dtype where that is set.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) const {
    ForwardScope scope(core_);
    using Result = decltype(module_->forward(std::forward<Arguments>(arguments)...));
    if constexpr (std::is_void_v<Result>) {
      module_->forward(std::forward<Arguments>(arguments)...);
    } else {
      std::decay_t<Result> result = module_->forward(std::forward<Arguments>(arguments)...);
      if (auto dtype = core_->mixed_precision().output_dtype) detail::cast_floating(result, *dtype);
      return result;
    }
  }

  /// Memory and values in one go: to_empty, reset_sharded_param, replay_init. Collective.
  void materialize(at::Device device) const { core_->materialize(device); }
  /// See ShardedModule; each ends with whole identities.
  void to_empty(at::Device device) const { core_->to_empty(device); }
  int64_t reset_sharded_param() const { return core_->reset_sharded_param(); }
  void replay_init() const { core_->replay_init(); }
  /// All units, or those whose name matches: the run-time switches of single units. Throws ValueError where none does.
  UnitSet units() const { return core_->unit_set(); }
  UnitSet units(const std::string& pattern) const { return core_->unit_set(pattern); }
  /// The same switches for all units; see UnitSet.
  void set_reshard_after_forward(ReshardAfterForward reshard) const { units().set_reshard_after_forward(reshard); }
  void set_reshard_after_backward(bool reshard) const { units().set_reshard_after_backward(reshard); }
  void set_requires_gradient_sync(bool required) const { units().set_requires_gradient_sync(required); }
  void set_requires_all_reduce(bool required) const { units().set_requires_all_reduce(required); }
  void set_gradient_divide_factor(double factor) const { units().set_gradient_divide_factor(factor); }
  void set_all_reduce_hook(std::function<void(const at::Tensor& buffer)> hook) const {
    units().set_all_reduce_hook(std::move(hook));
  }
  Unsharding unshard(bool async = false) const { return units().unshard(async); }
  void reshard() const { units().reshard(); }
  /// False: the backwards to come leave their last reduction in flight and the order of gathers in place, for schedules
  /// that interleave micro-batches; gradients are complete after a backward with true.
  void set_is_last_backward(bool last) const { core_->scheduler()->set_is_last_backward(last); }
  /// Makes the module usable again after an exception in a step: what was in flight, and gradients that waited for a
  /// later backward, are dropped; landed gradients stay.
  void reset_iteration_state() const { core_->scheduler()->reset_iteration_state(); }

  /// The module itself, without a scope: for its structure. Its parameters are sharded there.
  M& module() const { return *module_; }
  const std::shared_ptr<ShardedModule>& core() const { return core_; }

 private:
  std::shared_ptr<ShardedModule> core_;
  std::shared_ptr<M> module_;
};

namespace detail {

template <class N>
auto shared_module(N&& net) {
  using Plain = std::remove_cvref_t<N>;
  if constexpr (torch::detail::is_module_holder<Plain>::value) {
    return net.is_empty() ? std::shared_ptr<typename Plain::ContainedType>() : net.ptr();
  } else if constexpr (std::is_base_of_v<torch::nn::Module, Plain>) {
    static_assert(
        !std::is_lvalue_reference_v<N>,
        "fully_shard takes a module holder, a shared_ptr, or a module value that it may keep: std::move(net)");
    return std::make_shared<Plain>(std::forward<N>(net));
  } else {
    return net;  // std::shared_ptr<M>
  }
}

}  // namespace detail

/// Shards the parameters of a module made by meta_init, in place, over the mesh: each becomes a DTensor with Shard(0),
/// or as the options say, chunked as torch.chunk does. `net` is a module holder, a shared_ptr, or a module value.
/// Submodules may have been sharded before (bottom-up): they keep their units. Takes no memory, and
/// communicates only where an integer reshard_after_forward needs groups. Throws as ShardedModule::create does.
template <class N>
auto fully_shard(N&& net, const FullyShardOptions& options = {}) {
  auto module = detail::shared_module(std::forward<N>(net));
  using M = typename decltype(module)::element_type;
  auto core = ShardedModule::create(module, options);
  return FullySharded<M>(std::move(core), std::move(module));
}

/// The whole value of a sharded parameter on every rank, outside a forward. Collective.
at::Tensor unsharded(const at::Tensor& parameter);

/// A tensor for a log, without communication: for a sharded one its description and this rank's part.
std::string to_string(const at::Tensor& tensor);

}  // namespace hsdp

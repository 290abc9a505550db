#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dtensor/device_mesh.h"
#include "hsdp/transport.h"
#include "hsdp/unit_selector.h"

namespace hsdp {

/// What becomes of a unit's unsharded parameters when its forward ends: `true` frees them, `false` keeps them until
/// backward ends, and an integer n keeps this rank's part of 1/n, which backward gathers among n neighbours on the
/// shard axis. n divides that axis; n equal to it means true, 1 means false. A plain value.
class ReshardAfterForward {
 public:
  template <class T>
  requires std::same_as<T, bool> ReshardAfterForward(T reshard) : group_(reshard ? kAll : 1) {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) ReshardAfterForward(T group) : group_(group < 1 ? 0 : static_cast<int64_t>(group)) {}

  /// Whether memory is freed when a forward ends.
  bool frees() const { return group_ != 1; }
  /// Ranks among which the parameters stay spread, out of `shard_size`. Throws ValueError where the integer does not
  /// divide it.
  int64_t group_of(int64_t shard_size) const;

 private:
  static constexpr int64_t kAll = -1;
  int64_t group_;
};

/// Dtypes of one fully sharded module; unset means that of the parameter, or of the gradient. A plain value.
struct MixedPrecisionPolicy {
  /// Of the all-gather, the unsharded floating parameters, and so of what is computed with them.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Of the reduce-scatter, the all-reduce, and gradients that wait for them.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Floating tensors in the result of `model(x)` are cast to it. `model->forward(x)` returns what the module returns.
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// Operators that read a parameter of another dtype than its stored one cast their other floating inputs to it
  /// (running statistics excepted): what FSDP2 does at a module's entry, which C++ modules do not have.
  bool cast_forward_inputs = true;
  /// Of `.grad`, where it is not to be the parameter's: kFloat gives fp32 main gradients of parameters kept in bf16.
  std::optional<at::ScalarType> grad_dtype = std::nullopt;
};

/// Whether shards, their gradients and optimizer state live in host memory; they are on the device only while a unit is
/// gathered or reduced.
struct OffloadPolicy {
  bool to_host = false;
  /// Page-locked host memory, from which copies to the device are fast. Without an accelerator it means nothing.
  bool pin_memory = true;
};

/// How one parameter travels in all-gathers, in place of its own bytes: for example quantised. Stateless or
/// thread-safe; the same on all ranks. FSDP2's fsdp_pre_all_gather and fsdp_post_all_gather.
class AllGatherExtension {
 public:
  virtual ~AllGatherExtension();
  /// What this rank sends for `shard`, its padded part (1-D, stored dtype, on the device): contiguous 1-D tensors whose
  /// sizes and dtypes are the same on all ranks.
  virtual std::vector<at::Tensor> pre_all_gather(const at::Tensor& shard) const = 0;
  /// Fills `unsharded` (1-D, the padded parts of all ranks in a row, in param_dtype) from what arrived: for each sent
  /// tensor the ranks' in a row.
  virtual void post_all_gather(const std::vector<at::Tensor>& gathered, const at::Tensor& unsharded) const = 0;
};

/// How fully_shard groups, places and moves parameters. Patterns are those of each("..."), on parameter paths; one that
/// matches nothing is refused.
struct FullyShardOptions {
  /// One axis, over which parameters are sharded, or two: the first replicates what the second shards (HSDP), {N, 1}
  /// being data parallel. Null: all ranks of the current environment on one axis (init() is called if need be).
  std::shared_ptr<const dtensor::DeviceMesh> mesh = nullptr;
  /// Submodules that gather together. What matches inside a match is a unit of its own; the root unit holds the rest.
  UnitSelector units = {};
  /// Unset: true for all units but the root, as in FSDP2.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  /// Whether the next unit, in the order of the last forward, is gathered while this one computes. False: each is
  /// gathered when it is read, or where set_modules_to_forward_prefetch or set_modules_to_backward_prefetch lists it:
  /// one unit less in memory, and nothing to compute while it is on its way. The numbers are the same.
  bool prefetch = true;
  MixedPrecisionPolicy mixed_precision = {};
  OffloadPolicy offload = {};
  /// The dim that a parameter is sharded along, negative ones from the end; nullopt means 0. Any dim, uneven included.
  std::function<std::optional<int64_t>(const std::string& path, const at::Tensor& parameter)> shard_placement_fn = {};
  /// Parameters that stay ordinary tensors, made with the others and then left alone: not sharded, not reduced.
  std::vector<std::string> ignored = {};
  /// Parameters that every rank holds whole; their gradients are all-reduced over all ranks of the mesh.
  std::vector<std::string> replicated = {};
  /// Units whose forward is computed again in backward in place of keeping its activations (activation_checkpoint.h).
  UnitSelector activation_checkpoint = {};
  /// Parameters that travel otherwise than as their own bytes. The first pattern that matches counts.
  std::vector<std::pair<std::string, std::shared_ptr<const AllGatherExtension>>> all_gather_extensions = {};
  /// Makes what gathers and reduces over an axis, in place of make_transport.
  std::function<std::shared_ptr<Transport>(std::shared_ptr<dtensor::Communicator>)> transport = {};
};

}  // namespace hsdp

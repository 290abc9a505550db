#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "dtensor/device_mesh.h"
#include "hsdp/construction/tape.h"
#include "hsdp/scheduler.h"
#include "hsdp/unit.h"
#include "hsdp/unit_selector.h"

namespace hsdp {

/// How fully_shard groups and places parameters.
struct FullyShardOptions {
  /// One axis, over which parameters are sharded. Null: all ranks of the current environment (init() is called if need
  /// be).
  std::shared_ptr<const dtensor::DeviceMesh> mesh = nullptr;
  /// Submodules that gather together. What matches inside a match is a unit of its own; the root unit holds the rest.
  UnitSelector units = {};
  /// Free a unit's parameters when its forward ends and gather them again in backward. Unset: true for all units but
  /// the root, as in FSDP2.
  std::optional<bool> reshard_after_forward = std::nullopt;
};

/// The type-erased core of a fully sharded module: its units, its deferred tensors, and their way from meta to values.
///
/// Ownership: keeps the module alive; handles (FullySharded<M>), forward scopes and autograd share it. Threads: one at
/// a time. Functions marked collective must be called by all ranks of the mesh in the same order.
class ShardedModule : public std::enable_shared_from_this<ShardedModule> {
 public:
  /// Validates, then turns every parameter of `module` into a sharded DTensor on meta, in place. Nothing changes when
  /// it throws: NotSupportedError for parameters built outside meta_init, scalars, or strides that are not contiguous;
  /// ValueError for a mesh of more than one axis, a selector that matches nothing, or a module without parameters.
  static std::shared_ptr<ShardedModule> create(std::shared_ptr<torch::nn::Module> module,
                                               const FullyShardOptions& options);

  torch::nn::Module& module() const { return *module_; }
  const std::vector<std::shared_ptr<Unit>>& units() const { return units_; }
  /// The scheduler in charge: that of the outermost fully_shard call around this module.
  std::shared_ptr<Scheduler> scheduler() const;
  const std::shared_ptr<const dtensor::DeviceMesh>& mesh() const { return mesh_; }

  /// to_empty + reset_sharded_param + replay_init. Collective.
  void materialize(at::Device device);
  /// Memory without values for parameters, buffers and captured tensors on `device`; ends with reset_sharded_param, so
  /// that identities are whole again. Throws ValueError when the mesh is on another device type.
  void to_empty(at::Device device);
  /// The first half of to_empty: plain empty tensors are registered in place of the parameters, whose identities still
  /// have their former memory. For tests and for callers that fill the tensors before the reset.
  void replace_by_empty(at::Device device);
  /// Adopts what is registered now into the parameters' identities and repairs bodies; returns how many needed it. A
  /// second call changes nothing. All or nothing: throws ValueError (see ShardedParameter::plan_reset) before any
  /// change.
  int64_t reset_sharded_param();
  /// Gives all tensors the values of plain construction with the same seed, bit for bit, at any number of ranks.
  /// From then on the ranks' default generators differ (rank_generators.h), unless the program has seeded since
  /// construction. Collective. Throws StateError before to_empty, ValueError when the ranks' generators differed at
  /// construction.
  void replay_init();
  /// The same for buffers and captured tensors that have no value yet, after parameters came from elsewhere. Collective
  /// where any of these depends on random numbers.
  void replay_missing();

  /// See FullySharded. Throws StateError for a part of a larger sharded module.
  void set_gradient_divide_factor(double factor);

  /// Parameters, then buffers and captured tensors, that have no values yet, described for messages.
  std::vector<std::string> tensors_without_values() const;

 private:
  struct LooseTensor {  // a buffer, or a member that nobody registered
    std::string name;
    at::Tensor tensor;
    std::shared_ptr<Tape> tape;
    ValueId value;
    bool filled = false;
    uint32_t empty_version = 0;
  };

  explicit ShardedModule(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}
  void add_tape(const std::shared_ptr<Tape>& tape);
  void check_device(const char* where, at::Device device) const;
  static bool has_value(const LooseTensor& loose);
  void check_generators() const;
  bool replay_values(bool only_missing);
  bool registers_others(torch::nn::Module& module) const;
  void check_registered() const;
  bool check_values();
  void part_generators();

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<const dtensor::DeviceMesh> mesh_;
  std::vector<std::shared_ptr<Unit>> units_;
  std::unordered_set<const c10::TensorImpl*> managed_;  // identities of the units' parameters
  std::shared_ptr<Scheduler> own_scheduler_;
  std::shared_ptr<dtensor::ParameterOwner> loose_owner_;
  std::vector<std::shared_ptr<Tape>> tapes_;
  std::vector<LooseTensor> loose_;
  bool generators_settled_ = false;  // parted, or at a seed of the program's own
  uint64_t seed_of_to_empty_ = 0;
};

}  // namespace hsdp

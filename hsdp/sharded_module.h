#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "dtensor/device_mesh.h"
#include "hsdp/construction/tape.h"
#include "hsdp/fully_shard_options.h"
#include "hsdp/scheduler.h"
#include "hsdp/unit.h"
#include "hsdp/unit_set.h"

namespace hsdp {

/// The type-erased core of a fully sharded module: its units, its deferred tensors, and their way from meta to values.
///
/// Ownership: keeps the module alive; handles (FullySharded<M>), forward scopes and autograd share it. Threads: one at
/// a time. Functions marked collective must be called by all ranks of the mesh in the same order.
class ShardedModule : public std::enable_shared_from_this<ShardedModule> {
 public:
  /// Validates, then turns every parameter of `module` into a sharded DTensor on meta, in place. Nothing changes when
  /// it throws: NotSupportedError for parameters built outside meta_init, scalars that are not replicated, strides that
  /// are not contiguous, or a mesh of more than two axes; ValueError for a selector or pattern that matches nothing, a
  /// shard dim or group that does not fit, or a module without parameters. Collective where reshard_after_forward is an
  /// integer, which takes groups of its own.
  static std::shared_ptr<ShardedModule> create(std::shared_ptr<torch::nn::Module> module,
                                               const FullyShardOptions& options);

  torch::nn::Module& module() const { return *module_; }
  const std::vector<std::shared_ptr<Unit>>& units() const { return units_; }
  /// The scheduler in charge: that of the outermost fully_shard call around this module.
  std::shared_ptr<Scheduler> scheduler() const;
  const std::shared_ptr<const dtensor::DeviceMesh>& mesh() const { return context_->mesh; }
  const MixedPrecisionPolicy& mixed_precision() const { return context_->mixed_precision; }
  /// All units, or those of which a name matches. Throws ValueError, listing the names, where none does.
  UnitSet unit_set() const;
  UnitSet unit_set(const std::string& pattern) const;

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
  /// Whether the default generators are what this module's forwards draw from, or are still to be parted by the first.
  bool generators_settled() const { return generators_settled_; }
  /// The same, from a checkpoint whose states they have been given.
  void set_generators_settled(bool settled) { generators_settled_ = settled; }

  /// This rank's part, by name, of the parameters of which all ranks along a mesh axis hold the same.
  std::vector<std::pair<std::string, at::Tensor>> locals_replicated_over(int64_t axis) const;

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
  void check_replicas() const;
  void part_generators();

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<const UnitContext> context_;
  std::vector<std::shared_ptr<Unit>> units_;
  std::unordered_set<const c10::TensorImpl*> known_;  // identities of the units' parameters and of ignored ones
  std::shared_ptr<Scheduler> own_scheduler_;
  std::shared_ptr<dtensor::ParameterOwner> loose_owner_;
  std::vector<std::shared_ptr<Tape>> tapes_;
  std::vector<LooseTensor> loose_;
  bool generators_settled_ = false;  // parted, or at a seed of the program's own
  uint64_t seed_of_to_empty_ = 0;
};

}  // namespace hsdp

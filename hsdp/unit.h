#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "hsdp/sharded_parameter.h"
#include "hsdp/transport.h"

namespace torch::autograd {
struct Node;
}

namespace hsdp {

class Scheduler;

/// Gradients of one unit on their way from full to shards.
struct Reduction {
  std::vector<size_t> indices;          // parameters that have a gradient
  std::vector<at::Tensor> shards;       // padded, 1-D, sum over ranks once `work` is done
  double divisor = 1;                   // of the sum
  int64_t task = -1;                    // the backward that they come from
  std::shared_ptr<dtensor::Work> work;  // owns the full gradients as long as they are needed; null at one rank
};

/// Parameters that are gathered, freed and reduced together: what one fully_shard call or one match of `.units` groups.
///
/// The unsharded tensors keep one StorageImpl each whose bytes go to zero and back, so views taken of them stay valid
/// handles; dispatch finds the unit by that StorageImpl. Who decides when to gather and to free is the Scheduler; a
/// unit only knows how. Ownership: shared by the sharded module, autograd nodes and saved-tensor handles. Threads:
/// the scheduler's lock serialises gathering, freeing and reducing; pins and writes come from the thread that runs the
/// operator; holds have a lock of their own.
class Unit final : public dtensor::ParameterOwner, public std::enable_shared_from_this<Unit> {
 public:
  Unit(std::string name, const torch::nn::Module* module, std::vector<ShardedParameter> parameters,
       bool reshard_after_forward);
  ~Unit() override;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  /// Marks the parameters as managed by this unit. After construction, once.
  void adopt_parameters();
  /// Makes sure that each parameter's gradient accumulator is the unit's: set_data and dtype changes make autograd
  /// forget it, and a stock one would add full gradients to shards.
  void claim_accumulators();
  void set_scheduler(std::weak_ptr<Scheduler> scheduler) { scheduler_ = std::move(scheduler); }
  std::shared_ptr<Scheduler> scheduler() const { return scheduler_.lock(); }
  void set_transport(std::shared_ptr<Transport> transport) { transport_ = std::move(transport); }

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  /// The module whose parameters these are.
  const torch::nn::Module* module() const { return module_; }
  std::vector<ShardedParameter>& parameters() { return parameters_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  bool reshard_after_forward() const { return reshard_after_forward_; }
  /// Units whose module contains this unit's module.
  const std::vector<Unit*>& ancestors() const { return ancestors_; }
  void set_ancestors(std::vector<Unit*> ancestors) { ancestors_ = std::move(ancestors); }
  bool is_relative_of(const Unit& other) const;
  /// Ranks that share the parameters.
  int64_t shard_size() const;
  c10::Device device() const { return parameters_.front().impl().local().device(); }
  dtensor::Communicator& group() const { return parameters_.front().layout().mesh()->communicator(0); }

  // ---- gather and free ----
  bool is_gathered() const { return state_ == State::gathered; }
  bool is_gathering() const { return state_ == State::gathering; }
  /// The gathered values are no longer those of the shards.
  bool is_stale() const;
  /// Starts the all-gather; memory is allocated now.
  void start_gather();
  /// Waits for it. Throws CommunicationError and is then sharded again.
  void finish_gather();
  /// Frees the unsharded memory; a gather in flight is waited for first, its failure ignored.
  void reshard();
  /// Number of bytes of the unsharded parameters (padded).
  int64_t unsharded_bytes() const;

  // ---- reading ----
  bool is_read() const { return read_since_gather_; }
  void mark_read() { read_since_gather_ = true; }
  /// The unsharded parameter without autograd history; its memory is valid while gathered.
  const at::Tensor& whole(size_t index) const { return unsharded_[index].whole; }
  /// The same, connected to this unit's autograd node for a scope. One node per scope token.
  at::Tensor connected(size_t index, int64_t scope_token);
  /// Forgets the nodes that connected() made.
  void disconnect();
  bool has_pins() const { return pins_ > 0; }

  // ---- what backward needs ----
  /// A saved tensor that lives in this unit, saved in the scope of `scope_token`. In backward the unit is freed when
  /// the last one of a scope is gone: what an output of another scope still holds must not make ranks differ.
  class Hold {
   public:
    Hold(std::shared_ptr<Unit> unit, int64_t scope_token);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    Unit& unit() const { return *unit_; }

   private:
    std::shared_ptr<Unit> unit_;
    std::shared_ptr<Scheduler> scheduler_;  // backward works on after the sharded module is gone
    int64_t scope_token_;
  };
  /// Of one scope, or of all. Thread-safe.
  int64_t holds(int64_t scope_token) const;
  int64_t holds() const;
  /// What a saved tensor compares to know that the weights changed since.
  struct Generation {
    uint64_t epoch, alias_writes;
    uint32_t shard_version, whole_version;
    bool operator==(const Generation&) const = default;
  };
  Generation generation(size_t index) const;

  // ---- gradients ----
  /// The node that receives full gradients of a parameter which came past the unit's node, and stands for the parameter
  /// in autograd's bookkeeping.
  torch::autograd::Node* accumulator(size_t index) const { return accumulators_[index].get(); }
  /// Full gradients (some undefined) of the parameters at `indices` -> an asynchronous reduce-scatter.
  std::optional<Reduction> start_reduction(const std::vector<size_t>& indices, std::vector<at::Tensor> gradients,
                                           double divisor);
  /// Waits, divides, and adds to the parameters' `.grad` as DTensors; what has hooks waits for run_hooks().
  void finish_reduction(Reduction reduction);
  /// A reduced gradient whose parameter has hooks: they see the sum over a whole backward, as torch's do.
  struct AwaitingHooks {
    size_t index;
    int64_t task;
    at::Tensor local;
  };
  std::vector<AwaitingHooks> take_awaiting_hooks() { return std::exchange(awaiting_hooks_, {}); }
  /// Runs the hooks and adds to `.grad`.
  void run_hooks(const AwaitingHooks& awaiting);
  /// A full gradient that came past the unit's node.
  void add_direct_gradient(size_t index, const at::Tensor& gradient);
  bool has_direct_gradients() const;
  /// Moves direct gradients into the list that is about to be reduced.
  void merge_direct_gradients(std::vector<size_t>& indices, std::vector<at::Tensor>& gradients);
  void drop_gradients_in_flight() {
    direct_gradients_.clear();
    awaiting_hooks_.clear();
  }

  // ---- dtensor::ParameterOwner ----
  bool readable() const override;
  bool holds_whole() const override { return state_ != State::sharded; }
  at::Tensor unsharded(size_t index, bool differentiable) override;
  at::Tensor unsharded_for_raw_access(size_t index) override;
  void gather() override;
  void pin() override { ++pins_; }
  void unpin() override { --pins_; }
  void written(size_t index) override;
  void note_operand(uint64_t hash) override;
  void shard_written(size_t index) override { ++unsharded_[index].alias_writes; }
  void check_write(size_t index) const override;
  bool is_read_only() const override;
  /// Somebody took a raw pointer: the memory stays until the outermost scope or backward ends.
  bool is_raw_accessed() const { return raw_accessed_; }
  void drop_raw_writes() { raw_accessed_ = false; }

 private:
  enum class State { sharded, gathering, gathered };
  struct Unsharded {
    at::Tensor flat;       // padded, 1-D
    at::Tensor whole;      // global shape, version counter of its own
    at::Tensor connected;  // whole + edge to the node of `scope_token_`
    // Of the shard that was gathered; `alias_writes` counts on, `gathered_writes` is its value then.
    uint64_t epoch = 0, alias_writes = 0, gathered_writes = 0;
    uint32_t version = 0;
  };

  void prepare_shards();
  void keep_raw_writes();
  void write_back(size_t index);
  void check_signatures();
  void prepare_unsharded(size_t index);
  void forget_unsharded(Unsharded& unsharded);
  void connect(int64_t scope_token);
  void land(size_t index, const at::Tensor& shard, int64_t task);
  void accumulate(size_t index, const at::Tensor& local);

  std::string name_;
  const torch::nn::Module* module_;
  std::vector<ShardedParameter> parameters_;
  bool reshard_after_forward_;
  std::weak_ptr<Scheduler> scheduler_;
  std::shared_ptr<Transport> transport_;
  std::vector<Unit*> ancestors_;
  State state_ = State::sharded;
  bool read_since_gather_ = false;
  bool raw_accessed_ = false;
  int64_t pins_ = 0;
  mutable std::mutex holds_mutex_;
  std::map<int64_t, int64_t> holds_;  // by scope token
  int64_t scope_token_ = -1;
  std::vector<Unsharded> unsharded_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::shared_ptr<dtensor::Work> gather_work_;
  at::Tensor signatures_;  // what each rank says it gathers, beside the parameters
  std::vector<at::Tensor> direct_gradients_;
  std::vector<AwaitingHooks> awaiting_hooks_;
};

}  // namespace hsdp

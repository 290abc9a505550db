#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "hsdp/comm_streams.h"
#include "hsdp/sharded_parameter.h"
#include "hsdp/transport.h"
#include "hsdp/unit_context.h"

namespace torch::autograd {
struct Node;
}

namespace hsdp {

class Scheduler;

/// Gradients of one unit on their way from full to shards: a reduce-scatter over the shard axis, then an all-reduce
/// over the replicate axis.
struct Reduction {
  struct Part {
    size_t index;   // the parameter
    size_t buffer;  // where its padded shard lies
    int64_t offset;
  };
  std::vector<Part> parts;
  // 1-D, sums over ranks once `works` are done; where nothing is reduced, one gradient each in its own shape.
  std::vector<at::Tensor> buffers;
  std::vector<double> divisors;                       // of each buffer, what is left to divide by
  int64_t task = -1;                                  // the backward that they come from
  bool all_reducing = false;                          // the second collective is on its way
  std::optional<c10::Stream> home;                    // where the buffers come from, on devices with streams
  std::vector<std::shared_ptr<dtensor::Work>> works;  // own what they read as long as it is needed
};

/// What a run may change about a unit between steps; see UnitSet.
struct UnitSettings {
  ReshardAfterForward reshard_after_forward = true;
  bool reshard_after_backward = true;
  bool gradient_sync = true;
  bool all_reduce = true;
  /// Of the sum over ranks; unset: the number of ranks.
  std::optional<double> gradient_divide_factor;
  /// Sees each buffer of reduced gradients before it is divided.
  std::function<void(const at::Tensor&)> all_reduce_hook;
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
  /// `settings.reshard_after_forward` must fit the shard axis.
  Unit(std::string name, std::vector<const torch::nn::Module*> modules, std::vector<ShardedParameter> parameters,
       std::shared_ptr<const UnitContext> context, UnitSettings settings);
  ~Unit() override;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  /// Marks the parameters as managed by this unit. After construction, once.
  void adopt_parameters();
  /// Makes sure that each parameter's gradient accumulator is the unit's: set_data and dtype changes make autograd
  /// forget it, and a stock one would add full gradients to shards.
  /// Made anew for another current stream as well, where no graph knows them: autograd ends backwards on it.
  void claim_accumulators();
  void set_scheduler(std::weak_ptr<Scheduler> scheduler) { scheduler_ = std::move(scheduler); }
  std::shared_ptr<Scheduler> scheduler() const { return scheduler_.lock(); }

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  /// The modules whose parameters these are, more than one where they were taken together.
  const std::vector<const torch::nn::Module*>& modules() const { return modules_; }
  const UnitContext& context() const { return *context_; }
  std::vector<ShardedParameter>& parameters() { return parameters_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const UnitSettings& settings() const { return settings_; }
  /// Throws ValueError for a group that does not divide the shard axis. Collective where it asks for a new group.
  void set_reshard_after_forward(ReshardAfterForward reshard);
  UnitSettings& mutable_settings() { return settings_; }
  bool reshard_after_forward() const { return settings_.reshard_after_forward.frees(); }
  /// Whether its activations are computed again in backward.
  bool is_checkpointed() const { return is_checkpointed_; }
  void set_checkpointed(bool checkpointed) { is_checkpointed_ = checkpointed; }
  /// Units whose module contains this unit's module.
  const std::vector<Unit*>& ancestors() const { return ancestors_; }
  void set_ancestors(std::vector<Unit*> ancestors) { ancestors_ = std::move(ancestors); }
  bool is_relative_of(const Unit& other) const;
  /// Ranks that share the parameters, and all that train on data of their own.
  int64_t shard_size() const { return context_->shard_size(); }
  int64_t data_parallel_size() const { return context_->mesh->size(); }
  /// Where it computes: the shards' device, unless they are offloaded.
  c10::Device device() const { return device_.value_or(parameters_.front().impl().local().device()); }
  void set_device(c10::Device device) { device_ = device; }

  // ---- gather and free ----
  bool is_gathered() const { return state_ == State::gathered; }
  bool is_gathering() const { return state_ == State::gathering; }
  /// The gathered values are no longer those of the shards.
  bool is_stale() const;
  /// Whether its unsharded parameters are other memory than its shards.
  bool needs_gather() const;
  /// What the ranks say they gathered, as it arrived on the host. Throws CommunicationError, or StateError for unlike
  /// writes, where another rank says other than `rank`.
  void check_signatures(const at::Tensor& table, int64_t rank) const;
  /// Starts the all-gather, among fewer ranks where a forward kept a part; memory is allocated now.
  void start_gather();
  /// Waits for it. Throws CommunicationError and is then sharded again.
  void finish_gather();
  /// Frees the unsharded memory; a gather in flight is waited for first, its failure ignored.
  void reshard();
  /// The same at the end of a forward whose backward will gather again: keeps a part where the settings say so.
  void reshard_for_backward();
  bool keeps_part() const { return !kept_parts_.empty(); }
  /// Blocks the host until the device has read offloaded shards, so that they may be changed.
  void wait_for_copies_from_host();
  /// Frees that part.
  void drop_part() { kept_parts_.clear(); }
  /// Number of bytes of the unsharded parameters (padded).
  int64_t unsharded_bytes() const;

  // ---- reading ----
  bool is_read() const { return read_since_gather_; }
  bool is_read_in(int64_t scope_token) const { return read_scope_ == scope_token; }
  void mark_read(int64_t scope_token) {
    read_since_gather_ = true;
    is_requested_ = false;
    read_scope_ = scope_token;
  }
  /// Gathered on somebody's wish rather than because it was read: it stays until it is.
  bool is_requested() const { return is_requested_; }
  void mark_requested() { is_requested_ = true; }
  /// Started right after this one was gathered, in place of what the last forward tells.
  const std::vector<Unit*>& forward_prefetch() const { return forward_prefetch_; }
  const std::vector<Unit*>& backward_prefetch() const { return backward_prefetch_; }
  void set_forward_prefetch(std::vector<Unit*> units) { forward_prefetch_ = std::move(units); }
  void set_backward_prefetch(std::vector<Unit*> units) { backward_prefetch_ = std::move(units); }
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
    int64_t shard_version, whole_version;
    bool operator==(const Generation&) const = default;
  };
  Generation generation(size_t index) const;

  // ---- gradients ----
  /// The node that receives full gradients of a parameter which came past the unit's node, and stands for the parameter
  /// in autograd's bookkeeping.
  torch::autograd::Node* accumulator(size_t index) const { return accumulators_[index].get(); }
  /// Full gradients (some undefined) of the parameters at `indices` -> an asynchronous reduce-scatter, or all-reduce
  /// where nothing is sharded. Nothing where all are undefined.
  std::optional<Reduction> start_reduction(const std::vector<size_t>& indices, std::vector<at::Tensor> gradients);
  /// Waits for the first collective and starts the second, where there is one to come; `kept` says that the result
  /// waits in this unit for a later all-reduce.
  enum class Next { all_reduce, finish, kept };
  Next advance_reduction(Reduction& reduction);
  /// Waits, divides, and adds to the parameters' `.grad` as DTensors; what has hooks waits for run_hooks(), and what is
  /// on its way to the host for settle_offloaded(). Returns the parameters whose gradients are there.
  std::vector<size_t> finish_reduction(Reduction reduction);
  /// Blocks the host until offloaded gradients have arrived there, and does the rest with them. Returns the parameters
  /// whose gradients are there.
  std::vector<size_t> settle_offloaded();
  /// Frees the device's side of gradients that are on their way to the host; the compute stream waits for their copies.
  void release_offloaded();
  /// What was reduced over the shard axis only, and still waits for the other: an all-reduce of it alone.
  std::optional<Reduction> start_kept_reduction();
  bool has_kept_shards() const { return !kept_shards_.empty(); }
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
  /// Moves direct gradients into the list that is about to be reduced.
  void merge_direct_gradients(std::vector<size_t>& indices, std::vector<at::Tensor>& gradients);
  /// Adds full gradients to those that wait for a backward with gradient sync, in reduce_dtype.
  void keep_unsynced(const std::vector<size_t>& indices, std::vector<at::Tensor> gradients);
  bool has_unsynced() const { return !unsynced_gradients_.empty(); }
  void merge_unsynced(std::vector<size_t>& indices, std::vector<at::Tensor>& gradients);
  void drop_gradients_in_flight();
  /// Forgets what waits for a later backward as well.
  void drop_kept_gradients() {
    unsynced_gradients_.clear();
    kept_shards_.clear();
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
  void check_whole_write(size_t index) const override;
  std::optional<at::ScalarType> input_dtype(size_t index) const override;
  std::optional<c10::Device> whole_device() const override;
  bool is_read_only() const override;
  /// Somebody took a raw pointer: the memory stays until the outermost scope or backward ends.
  bool is_raw_accessed() const { return raw_accessed_; }
  void drop_raw_writes() { raw_accessed_ = false; }

 private:
  static constexpr int64_t kNoScope = std::numeric_limits<int64_t>::min();
  enum class State { sharded, gathering, gathered };
  /// What is left to do for a parameter once its gather has arrived.
  struct Arrival {
    size_t index;
    std::vector<at::Tensor> gathered;  // what an extension sent
    at::Tensor rows;                   // the ranks' parts, to be put in place along the parameter's dim
  };
  struct Unsharded {
    at::Tensor flat;             // padded, 1-D
    at::Tensor whole;            // global shape, version counter of its own
    at::Tensor connected;        // whole + edge to the node of `scope_token_`
    bool is_own_memory = false;  // the shard's, never freed
    // Of the shard that was gathered; `alias_writes` counts on, `gathered_writes` is its value then.
    uint64_t epoch = 0, alias_writes = 0, gathered_writes = 0;
    int64_t version = 0;
  };

  /// A reduced gradient, divided, on its way into `.grad`.
  struct Landed {
    size_t index;
    int64_t task;
    at::Tensor local;
    bool accumulated = false;  // it is in `.grad` already
  };
  struct Offloaded {
    std::vector<Landed> landed;           // on the host
    std::vector<at::Tensor> device_side;  // that they are copied from
    std::shared_ptr<StreamMark> copied;
  };

  at::ScalarType gathered_dtype(size_t index) const;
  /// Whether the unsharded parameter is the shard's own memory.
  bool is_own_memory(size_t index) const;
  bool is_sharded(size_t index) const;
  /// Copies that are one launch.
  struct CopyIn {
    std::vector<at::Tensor> to, from;
  };
  void start_gather_of(size_t index, std::vector<TensorPair>& pairs, CopyIn& copies);
  std::shared_ptr<dtensor::Work> start_collective(std::vector<TensorPair> pairs);
  void finish_arrivals();
  void compare_signatures(bool on_stream);
  void free_unsharded();
  void give_memory_home();
  Transport* gathering_transport() const;
  const CommStreams* streams() const { return CommStreams::of(device()); }
  double divide_factor() const;
  at::Tensor shard_of(const Reduction& reduction, const Reduction::Part& part) const;
  void prepare_shards();
  void keep_raw_writes();
  void write_back(size_t index);
  void prepare_unsharded(size_t index);
  void forget_unsharded(Unsharded& unsharded);
  void connect(int64_t scope_token);
  at::Tensor local_of(const Reduction::Part& part, const at::Tensor& buffer) const;
  at::Tensor accumulated_local(size_t index) const;
  void offload(std::vector<Landed> landed);
  std::vector<size_t> land(const std::vector<Landed>& landed);
  void accumulate(size_t index, const at::Tensor& local);

  std::string name_;
  std::vector<const torch::nn::Module*> modules_;
  std::vector<ShardedParameter> parameters_;
  std::shared_ptr<const UnitContext> context_;
  UnitSettings settings_;
  bool is_checkpointed_ = false;
  std::optional<c10::Device> device_;
  std::weak_ptr<Scheduler> scheduler_;
  std::vector<Unit*> ancestors_;
  State state_ = State::sharded;
  bool read_since_gather_ = false;
  bool is_requested_ = false;
  int64_t read_scope_ = kNoScope;
  std::vector<Unit*> forward_prefetch_, backward_prefetch_;
  bool raw_accessed_ = false;
  int64_t pins_ = 0;
  mutable std::mutex holds_mutex_;
  std::map<int64_t, int64_t> holds_;  // by scope token
  int64_t scope_token_ = kNoScope;
  std::vector<Unsharded> unsharded_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::shared_ptr<dtensor::Work> gather_work_;
  std::shared_ptr<StreamMark> shards_read_;  // behind the copies of offloaded shards
  // Where the unsharded memory comes from, and where it is read; unset without streams.
  std::optional<c10::Stream> home_stream_, reader_stream_;
  at::Tensor signatures_;  // what each rank says it gathers, beside the parameters
  std::vector<Arrival> arrivals_;
  // reshard_after_forward = n: the neighbours' transport, and this rank's part of each parameter between forward and
  // backward.
  std::shared_ptr<Transport> part_transport_;
  std::vector<at::Tensor> kept_parts_;
  bool gathers_parts_ = false;
  std::vector<at::Tensor> direct_gradients_;
  std::vector<at::Tensor> unsynced_gradients_;  // full, by parameter
  std::vector<at::Tensor> kept_shards_;         // reduced over the shard axis only, padded, by parameter
  std::vector<AwaitingHooks> awaiting_hooks_;
  std::vector<Offloaded> offloaded_;
};

}  // namespace hsdp

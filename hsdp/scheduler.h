#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/unit.h"

namespace hsdp {

/// What was gathered at once, at most, since the counts were reset.
struct GatheredPeaks {
  int64_t units = 0;
  /// Without units that are ancestors of another gathered one: at most two while reshard_after_forward is on.
  int64_t units_without_ancestors = 0;
  /// Padded bytes of unsharded parameters.
  int64_t bytes = 0;
};

/// Decides when the units of one sharded module gather, free and reduce.
///
/// Forward: the first read of a unit ends the forward of all units that are neither its ancestors nor its descendants,
/// gathers it, and starts the next one in the order of the last forward. Backward: what is unpacked is gathered, and
/// the unit before it in this iteration's forward is started (neither is without FullyShardOptions::prefetch); a unit
/// is freed when no saved tensor needs it; its gradients are reduced when autograd has them all: a reduce-scatter is
/// waited for when the next one is due, and its all-reduce over replicas runs beside that. At the end of the outermost
/// backward everything in flight is finished and freed.
///
/// Threads: one thread owns a forward scope at a time; calls from autograd threads are serialised by a lock. All ranks
/// must read units in the same order.
class Scheduler : public std::enable_shared_from_this<Scheduler> {
 public:
  /// `root` is the module that the units belong to.
  explicit Scheduler(const torch::nn::Module* root);

  void set_units(std::vector<std::shared_ptr<Unit>> units);
  const torch::nn::Module* root() const { return root_; }
  const std::vector<std::shared_ptr<Unit>>& units() const { return units_; }
  /// Called at the first read of every scope until it returns true: throws StateError while tensors have no values.
  void set_values_check(std::function<bool()> check) { values_check_ = std::move(check); }
  /// Called when an outermost scope opens: throws if parameters were registered that no unit has.
  void set_registration_check(std::function<void()> check) { registration_check_ = std::move(check); }
  void recheck_values() { values_checked_ = false; }
  /// Called with each parameter as soon as its reduced gradient of a backward is in `.grad`, on the thread that runs
  /// the backward.
  void set_gradient_ready(std::function<void(const at::Tensor& parameter)> ready) {
    gradient_ready_ = std::move(ready);
  }
  /// Sees what happens, in order: "all_gather", "reshard", "reduce", with the unit. For traces and tests.
  void set_observer(std::function<void(const char* event, const Unit& unit)> observer) {
    observer_ = std::move(observer);
  }
  void check_values();

  /// Opens a forward scope on this thread; scopes nest. Throws StateError while another thread is in one.
  void enter_scope();
  /// Closes it; the outermost frees what should not stay gathered.
  void leave_scope() noexcept;
  /// Whether operators on this thread see whole parameters.
  bool readable() const;
  /// Identifies the scope (or backward pass) whose reads share autograd nodes.
  int64_t scope_token() const;

  /// An operator or an unpack reads this unit: returns with it gathered. A collective.
  void read(Unit& unit);
  void last_hold_released(Unit& unit);

  /// Gathers all units and keeps them until the matching dismiss(): reads in between are local, without grad mode only,
  /// and nothing may be written. Inside a forward scope. Nests. The outermost is a collective.
  void summon();
  /// Frees them all, so that ranks which read unlike units go on alike.
  void dismiss() noexcept;
  bool is_summoned() const;
  /// Throws StateError for something that changes parameters or communicates, while they are summoned.
  void check_not_summoned(const char* where) const;

  /// Gathers a unit before it is read; it stays until it is read and done with, until reshard(), or until a backward
  /// ends. A collective.
  void unshard(Unit& unit, bool async);
  void finish_unshard(Unit& unit);
  /// Frees it, unless an operator or autograd is using it right now.
  void reshard(Unit& unit);

  /// Autograd has the full gradients of a unit.
  void reduce(Unit& unit, int64_t scope_token, std::vector<size_t> indices, std::vector<at::Tensor> gradients);
  void reduce_direct(Unit& unit, size_t index, const at::Tensor& gradient);

  /// Counts this gather and says what it is, for comparison with the other ranks: a hash over all gathers and
  /// reductions, the unit's place in units(), the number of collectives, and a hash over what forwards wrote.
  std::array<int64_t, 4> next_signature(const Unit& unit);
  /// What the ranks said they gathered, on its way to the host.
  struct Comparison {
    std::shared_ptr<Unit> unit;
    at::Tensor table;
    int64_t rank;
    std::shared_ptr<StreamMark> arrived;
  };
  /// Looks at it when it has arrived: before a later gather or at the end of a backward. A program that runs far ahead
  /// of its device is held up rather than told too late.
  void compare_later(Comparison comparison) { comparisons_.push_back(std::move(comparison)); }
  /// A whole parameter or state like it was written; `hash` is that of the values, which must be the same on all ranks.
  void note_write(const std::string& what, uint64_t hash);
  /// Throws StateError on all ranks when they have written unlike values so far. Collective; the next gather compares
  /// as well.
  void compare_writes(const dtensor::DeviceMesh& mesh);
  [[noreturn]] void raise_unlike_writes(int64_t rank, int64_t other) const;

  /// Backwards that are not the last leave their last reductions in flight, and the plan of gathers in place.
  void set_is_last_backward(bool last) { is_last_backward_ = last; }

  const GatheredPeaks& peaks() const { return peaks_; }
  void reset_peaks() { peaks_ = GatheredPeaks(); }

  /// After an exception in a step: forgets reductions and gathers in flight and frees everything, gradients that waited
  /// for a later backward included. Gradients that landed stay.
  void reset_iteration_state();

 private:
  void read_in_forward(Unit& unit);
  void read_summoned(Unit& unit) const;
  void read_in_backward(Unit& unit);
  void ensure_gathered(Unit& unit);
  void prefetch(Unit* unit, bool requested = false);
  void start_gather(Unit& unit);
  void compare_arrived(bool all = false);
  bool is_capturing() const;
  void meet_capture();
  void settle_offloaded();
  void wait_for_copies_from_host() noexcept;
  void free(Unit& unit, bool in_forward);
  bool is_kept_by_backward(const Unit& unit) const;
  void forget_iteration();
  /// Returns the unit's place in units().
  int64_t note_collective(int64_t kind, const Unit& unit, const std::vector<size_t>& indices);
  void mix_history(uint64_t value);
  void start_reduction(Unit& unit, const std::vector<size_t>& indices, std::vector<at::Tensor> gradients, int64_t task);
  void enqueue(Unit& unit, std::optional<Reduction> reduction, int64_t task);
  void advance_reductions();
  void finish_front();
  void reduce_leftovers();
  void join_backward();
  void end_backward();
  void finish_reductions();
  void free_unneeded(bool keep_kept);

  const torch::nn::Module* root_;
  uint64_t history_;  // hash over this module's collectives
  int64_t collectives_ = 0;
  std::vector<std::shared_ptr<Unit>> units_;
  std::function<bool()> values_check_;
  std::function<void()> registration_check_;
  bool values_checked_ = false;
  mutable std::recursive_mutex mutex_;

  GatheredPeaks peaks_;

  // forward
  int64_t depth_ = 0;
  int64_t summoned_ = 0;
  std::thread::id owner_thread_;
  int64_t scope_id_ = 0;
  bool records_regions_ = false;  // units of the open scope are checkpointed
  Unit* current_ = nullptr;
  std::vector<Unit*> order_, former_order_;  // gathers of this scope and of the last one
  bool prefetch_forward_ = true;
  uint64_t capture_ = 0;  // that forwards or unsharding were last in
  struct Planned {
    Unit* unit;
    int64_t scope_token;
  };
  std::vector<Planned> backward_plan_;  // gathers with grad mode on, since the last backward

  // backward
  int64_t backward_task_ = -1;
  bool is_last_backward_ = true;
  uint64_t writes_ = 0, compared_writes_ = 0;
  std::string last_written_;
  std::function<void(const at::Tensor&)> gradient_ready_;
  std::function<void(const char*, const Unit&)> observer_;
  std::deque<std::pair<Unit*, Reduction>> reductions_;
  std::deque<Comparison> comparisons_;
};

}  // namespace hsdp

// The gradient half of Scheduler: when units reduce, and what is in flight at once.
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "dtensor/error.h"
#include "dtensor/graph_capture.h"
#include "hsdp/scheduler.h"

namespace hsdp {
namespace {

bool is_completed(const Reduction& reduction) {
  return std::all_of(reduction.works.begin(), reduction.works.end(), [](auto& work) { return work->is_completed(); });
}

// backward(inputs) wants gradients of some parameters only; autograd::grad wants them returned, whole, which a reduced
// gradient cannot be.
void keep_wanted(const Unit& unit, const std::vector<size_t>& indices, std::vector<at::Tensor>& gradients) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return;
  for (size_t k = 0; k < indices.size(); ++k) {
    auto found = wanted->find(unit.accumulator(indices[k]));
    if (found == wanted->end() || !found->second.should_execute()) {
      gradients[k] = at::Tensor();
    } else if (found->second.captures_ && !found->second.captures_->empty()) {
      dtensor::raise<dtensor::NotSupportedError>(
          "autograd::grad", "asked for the gradient of sharded parameter \"", unit.parameters()[indices[k]].name(),
          "\", expected tensors that are no parameters; call backward() and read p.grad()");
    }
  }
}

}  // namespace

void Scheduler::reduce(Unit& unit, int64_t scope_token, std::vector<size_t> indices,
                       std::vector<at::Tensor> gradients) {
  std::lock_guard lock(mutex_);
  join_backward();
  keep_wanted(unit, indices, gradients);
  unit.merge_direct_gradients(indices, gradients);
  // With a retained graph the saved tensors stay; the unit has its gradients and will hardly be read again. In an inner
  // backward the outer one is in the middle of a node, which may have unpacked what it saved in another scope.
  const bool inner = torch::autograd::get_current_graph_task_id() != backward_task_;
  const bool done =
      (inner ? unit.holds() : unit.holds(scope_token)) == 0 || torch::autograd::get_current_graph_task_keep_graph();
  if (done && !unit.has_pins() && !unit.is_raw_accessed() && unit.settings().reshard_after_backward) {
    free(unit, /*in_forward=*/false);
  }
  if (!unit.settings().gradient_sync) return unit.keep_unsynced(indices, std::move(gradients));
  unit.merge_unsynced(indices, gradients);
  start_reduction(unit, indices, std::move(gradients), torch::autograd::get_current_graph_task_id());
}

void Scheduler::start_reduction(Unit& unit, const std::vector<size_t>& indices, std::vector<at::Tensor> gradients,
                                int64_t task) {
  advance_reductions();
  enqueue(unit, unit.start_reduction(indices, std::move(gradients)), task);
}

void Scheduler::enqueue(Unit& unit, std::optional<Reduction> reduction, int64_t task) {
  if (!reduction) return;
  if (observer_) observer_("reduce", unit);
  reduction->task = task;
  std::vector<size_t> indices;
  for (auto& part : reduction->parts) indices.push_back(part.index);
  note_collective(2, unit, indices);
  for (auto divisor : reduction->divisors) mix_history(std::bit_cast<uint64_t>(divisor));
  reductions_.emplace_back(&unit, std::move(*reduction));
}

// Before another reduction starts: the reduce-scatter in flight ends, so that one input of a reduction is alive at a
// time. All-reduces work in place on what becomes the gradients, and go on beside each other.
void Scheduler::advance_reductions() {
  constexpr size_t kAllReducesInFlight = 4;
  // What runs when a reduction ends may communicate: then it must end at the same place on all ranks.
  const bool hooked = gradient_ready_ || std::any_of(units_.begin(), units_.end(), [](auto& unit) {
                        return unit->settings().all_reduce_hook != nullptr;
                      });
  const size_t most = hooked ? 0 : kAllReducesInFlight;
  const auto has_ended = [&] {
    const auto& [unit, reduction] = reductions_.front();
    return !dtensor::is_capturing(unit->device()) && is_completed(reduction);
  };
  while (!reductions_.empty() && reductions_.front().second.all_reducing &&
         (reductions_.size() > most || has_ended())) {
    finish_front();
  }
  if (reductions_.empty() || reductions_.back().second.all_reducing) return;
  auto& [unit, reduction] = reductions_.back();
  switch (unit->advance_reduction(reduction)) {
    case Unit::Next::all_reduce:
      return;
    case Unit::Next::finish:
      return finish_reductions();
    case Unit::Next::kept:
      reductions_.pop_back();
  }
}

// Lands the oldest reduction, whatever stage it is in.
void Scheduler::finish_front() {
  auto [unit, reduction] = std::move(reductions_.front());
  reductions_.pop_front();
  if (unit->advance_reduction(reduction) == Unit::Next::kept) return;
  // Copies of the gradients before had the time of a unit's backward.
  for (auto& each : units_) each->release_offloaded();
  for (auto index : unit->finish_reduction(std::move(reduction))) {
    if (gradient_ready_) gradient_ready_(unit->parameters()[index].tensor());
  }
  // Others may wait for the end of the backward, when the host has nothing else to do.
  if (gradient_ready_) settle_offloaded();
}

void Scheduler::settle_offloaded() {
  for (auto& unit : units_) {
    for (auto index : unit->settle_offloaded()) {
      if (gradient_ready_) gradient_ready_(unit->parameters()[index].tensor());
    }
  }
}

// What no node brought along in this backward: gradients that reached parameters past it, and those of earlier
// backwards of units that this one did not touch.
void Scheduler::reduce_leftovers() {
  for (auto& unit : units_) {
    std::vector<size_t> indices;
    std::vector<at::Tensor> gradients;
    unit->merge_direct_gradients(indices, gradients);
    if (!unit->settings().gradient_sync) {
      if (!indices.empty()) unit->keep_unsynced(indices, std::move(gradients));
      continue;
    }
    unit->merge_unsynced(indices, gradients);
    if (!indices.empty()) start_reduction(*unit, indices, std::move(gradients), backward_task_);
  }
  for (auto& unit : units_) {
    if (!unit->has_kept_shards()) continue;
    advance_reductions();  // may take up what this unit kept
    enqueue(*unit, unit->start_kept_reduction(), backward_task_);
  }
  if (writes_ != compared_writes_ && !units_.empty() && units_.front()->context().replicate_size() > 1) {
    compare_writes(*units_.front()->context().mesh);
  }
}

void Scheduler::reduce_direct(Unit& unit, size_t index, const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  join_backward();
  unit.add_direct_gradient(index, gradient);
}

void Scheduler::finish_reductions() {
  while (!reductions_.empty()) finish_front();
}

}  // namespace hsdp

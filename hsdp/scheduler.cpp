#include "hsdp/scheduler.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "dtensor/error.h"
#include "hsdp/saved_tensors.h"

namespace hsdp {
namespace {

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

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

void Scheduler::set_units(std::vector<std::shared_ptr<Unit>> units) {
  units_ = std::move(units);
  for (auto& unit : units_) unit->set_scheduler(weak_from_this());
}

// ---- forward scopes ----

void Scheduler::enter_scope() {
  std::lock_guard lock(mutex_);
  if (depth_ > 0 && owner_thread_ != std::this_thread::get_id()) {
    dtensor::raise<dtensor::StateError>("forward", "another thread is inside a forward of this sharded module, expected "
                                        "one thread at a time; give each thread its own module or take turns");
  }
  if (depth_++ > 0) return;
  owner_thread_ = std::this_thread::get_id();
  ++scope_id_;
  order_.clear();
  current_ = nullptr;
  if (in_backward()) return;
  if (backward_task_ != -1) reset_iteration_state();  // A backward that threw never reached its end.
  for (auto& unit : units_) {
    unit->claim_accumulators();
    // Values may have changed behind an alias that left the library; what backward still needs is checked there.
    if (unit->has_local_escaped() && unit->holds() == 0) unit->reshard();
  }
}

void Scheduler::leave_scope() noexcept {
  std::lock_guard lock(mutex_);
  if (--depth_ > 0) return;
  current_ = nullptr;
  for (auto& unit : units_) unit->disconnect();
  if (in_backward()) return;
  if (!order_.empty()) former_order_ = std::move(order_);
  order_.clear();
  free_unneeded(/*keep_kept=*/true);
}

bool Scheduler::readable() const {
  if (in_backward()) return true;
  std::lock_guard lock(mutex_);
  return depth_ > 0 && owner_thread_ == std::this_thread::get_id();
}

int64_t Scheduler::scope_token() const {
  std::lock_guard lock(mutex_);
  // Graph task ids start at 0; the two kinds of token must not meet.
  if (depth_ > 0) return 2 * scope_id_;
  return 2 * static_cast<int64_t>(torch::autograd::get_current_graph_task_id()) + 1;
}

void Scheduler::free_unneeded(bool keep_kept) {
  for (auto& unit : units_) {
    if (unit->has_pins()) continue;
    const bool kept = keep_kept && !unit->reshard_after_forward() && unit->is_gathered() && unit->is_read();
    if (!kept) unit->reshard();
  }
}

// ---- reading ----

void Scheduler::check_values() {
  if (values_checked_ || !values_check_) return;
  values_checked_ = values_check_();
}

void Scheduler::read(Unit& unit) {
  std::lock_guard lock(mutex_);
  const bool backward = in_backward();
  if (backward) join_backward();
  if (&unit == current_ && unit.is_gathered() && !unit.is_stale()) return;
  check_values();
  if (backward) {
    read_in_backward(unit);
  } else {
    read_in_forward(unit);
  }
  current_ = &unit;
}

void Scheduler::ensure_gathered(Unit& unit) {
  if (unit.is_gathered() && unit.is_stale()) unit.reshard();
  if (unit.is_gathering()) {
    unit.finish_gather();
    if (unit.is_stale()) unit.reshard();  // The shards changed while their old values were under way.
  }
  if (!unit.is_gathered()) {
    start_gather(unit);
    unit.finish_gather();
  }
}

void Scheduler::read_in_forward(Unit& unit) {
  for (auto& other : units_) {
    const bool done = other->is_gathered() && other->is_read() && other->reshard_after_forward();
    if (done && !other->has_pins() && !other->is_relative_of(unit)) other->reshard();
  }
  ensure_gathered(unit);
  if (unit.is_read()) return;
  unit.mark_read();
  order_.push_back(&unit);
  if (c10::GradMode::is_enabled()) backward_plan_.push_back(&unit);
  const auto next = order_.size();
  if (former_order_.size() > next && former_order_[next - 1] == &unit) prefetch(former_order_[next]);
}

void Scheduler::read_in_backward(Unit& unit) {
  const bool fresh = !unit.is_gathered() || !unit.is_read();
  ensure_gathered(unit);
  unit.mark_read();
  if (!fresh) return;
  auto found = std::find(backward_plan_.rbegin(), backward_plan_.rend(), &unit);
  if (found == backward_plan_.rend()) return;
  auto former = found + 1;
  Unit* next = former == backward_plan_.rend() ? nullptr : *former;
  // This unit's later entries are done; another forward's may still come.
  backward_plan_.erase(former.base(), backward_plan_.end());
  if (next != nullptr && next->holds() > 0) prefetch(next);
}

void Scheduler::prefetch(Unit* unit) {
  if (unit->is_gathered() || unit->is_gathering() || unit->shard_size() == 1) return;
  start_gather(*unit);
}

void Scheduler::start_gather(Unit& unit) {
  unit.start_gather();
  GatheredPeaks now;
  for (auto& one : units_) {
    if (!one->is_gathered() && !one->is_gathering()) continue;
    ++now.units;
    now.bytes += one->unsharded_bytes();
    const bool is_ancestor = std::any_of(units_.begin(), units_.end(), [&](const auto& other) {
      const auto& above = other->ancestors();
      return (other->is_gathered() || other->is_gathering()) && std::find(above.begin(), above.end(), one.get()) != above.end();
    });
    if (!is_ancestor) ++now.units_without_ancestors;
  }
  peaks_.units = std::max(peaks_.units, now.units);
  peaks_.units_without_ancestors = std::max(peaks_.units_without_ancestors, now.units_without_ancestors);
  peaks_.bytes = std::max(peaks_.bytes, now.bytes);
}

// ---- backward ----

void Scheduler::join_backward() {
  if (backward_task_ != -1 && backward_failures_ == failed_backwards()) return;
  if (backward_task_ != -1) reset_iteration_state();
  backward_task_ = torch::autograd::get_current_graph_task_id();
  backward_failures_ = failed_backwards();
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->end_backward(); });
}

void Scheduler::end_backward() {
  std::lock_guard lock(mutex_);
  for (auto& unit : units_) {
    if (!unit->has_direct_gradients()) continue;
    std::vector<size_t> indices;
    std::vector<at::Tensor> gradients;
    unit->merge_direct_gradients(indices, gradients);
    finish_reductions(1);
    if (auto reduction = unit->start_reduction(indices, std::move(gradients))) {
      reductions_.emplace_back(unit.get(), std::move(*reduction));
    }
  }
  finish_reductions(0);
  backward_task_ = -1;
  if (depth_ > 0) return;
  current_ = nullptr;
  bool held = false;
  for (auto& unit : units_) {
    unit->disconnect();
    held |= unit->holds() > 0;
  }
  if (!held) backward_plan_.clear();
  free_unneeded(/*keep_kept=*/false);
}

void Scheduler::last_hold_released(Unit& unit) {
  std::lock_guard lock(mutex_);
  if (!in_backward() || depth_ > 0 || unit.holds() > 0 || unit.has_pins() || !unit.is_gathered()) return;
  unit.reshard();
}

void Scheduler::reduce(Unit& unit, std::vector<size_t> indices, std::vector<at::Tensor> gradients) {
  std::lock_guard lock(mutex_);
  join_backward();
  keep_wanted(unit, indices, gradients);
  unit.merge_direct_gradients(indices, gradients);
  // With a retained graph the saved tensors stay; the unit has its gradients and will hardly be read again.
  const bool done = unit.holds() == 0 || torch::autograd::get_current_graph_task_keep_graph();
  if (done && depth_ == 0 && !unit.has_pins()) unit.reshard();
  finish_reductions(0);
  if (auto reduction = unit.start_reduction(indices, std::move(gradients))) {
    reductions_.emplace_back(&unit, std::move(*reduction));
  }
}

void Scheduler::reduce_direct(Unit& unit, size_t index, const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  join_backward();
  unit.add_direct_gradient(index, gradient);
}

void Scheduler::finish_reductions(size_t leave) {
  while (reductions_.size() > leave) {
    auto [unit, reduction] = std::move(reductions_.front());
    reductions_.pop_front();
    unit->finish_reduction(std::move(reduction));
  }
}

void Scheduler::reset_iteration_state() {
  std::lock_guard lock(mutex_);
  reductions_.clear();
  backward_plan_.clear();
  order_.clear();
  current_ = nullptr;
  backward_task_ = -1;
  for (auto& unit : units_) {
    unit->drop_direct_gradients();
    unit->disconnect();
    unit->reshard();
  }
}

}  // namespace hsdp

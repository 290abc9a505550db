#include "hsdp/scheduler.h"

#include <c10/core/GradMode.h>
#include <c10/util/Logging.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "dtensor/error.h"
#include "dtensor/graph_capture.h"
#include "dtensor/hash_bytes.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/host.h"
#include "hsdp/profiling/span.h"
#include "hsdp/region_recorder.h"
#include "hsdp/saved_tensors.h"
#include "hsdp/storage_memory.h"
#include "hsdp/wait_on_host.h"

namespace hsdp {
namespace {

// The backward whose hooks this thread runs, after its gradients have landed: what they read does not begin it anew,
// and a backward of their own has its own end.
thread_local int64_t ended_task = -1;

class EndedTask {
 public:
  explicit EndedTask(int64_t task) : former_(std::exchange(ended_task, task)) {}
  ~EndedTask() { ended_task = former_; }
  EndedTask(const EndedTask&) = delete;
  EndedTask& operator=(const EndedTask&) = delete;

 private:
  int64_t former_;
};

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

Scheduler::Scheduler(const torch::nn::Module* root) : root_(root) {
  // Modules are made in the same order on all ranks, so that equal modules differ by their number.
  static std::atomic<uint64_t> made{0};
  history_ = made.fetch_add(1) * 0x9e3779b97f4a7c15ull + 1;
}

void Scheduler::set_units(std::vector<std::shared_ptr<Unit>> units) {
  units_ = std::move(units);
  for (auto& unit : units_) {
    unit->set_scheduler(weak_from_this());
    // Prefetch lists may name units of the module that this one was part of before.
    unit->set_forward_prefetch({});
    unit->set_backward_prefetch({});
  }
}

// ---- forward scopes ----

void Scheduler::enter_scope() {
  std::lock_guard lock(mutex_);
  if (depth_ > 0 && owner_thread_ != std::this_thread::get_id()) {
    dtensor::raise<dtensor::StateError>("forward",
                                        "another thread is inside a forward of this sharded module, expected "
                                        "one thread at a time; give each thread its own module or take turns");
  }
  if (depth_ == 0 && registration_check_) registration_check_();
  if (depth_ == 0 && !in_backward()) meet_capture();
  if (depth_++ > 0) return;
  owner_thread_ = std::this_thread::get_id();
  ++scope_id_;
  order_.clear();
  prefetch_forward_ = true;
  current_ = nullptr;
  records_regions_ = std::any_of(units_.begin(), units_.end(), [](auto& unit) { return unit->is_checkpointed(); });
  if (records_regions_) enter_checkpointed_forward();
  if (in_backward()) return;
  // Forwards with grad mode on and no backward must not let the plan grow for ever.
  if (backward_plan_.size() > 8 * units_.size() + 64) backward_plan_.clear();
  if (backward_task_ != -1) forget_iteration();  // A backward that threw never reached its end.
  for (auto& unit : units_) unit->claim_accumulators();
}

void Scheduler::leave_scope() noexcept {
  std::lock_guard lock(mutex_);
  if (--depth_ > 0) return;
  if (records_regions_ && owner_thread_ == std::this_thread::get_id()) leave_checkpointed_forward();
  current_ = nullptr;
  for (auto& unit : units_) unit->disconnect();
  if (in_backward()) return;
  wait_for_copies_from_host();
  if (!order_.empty()) former_order_ = std::move(order_);
  order_.clear();
  free_unneeded(/*keep_kept=*/true);
  release_cached_memory();
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

// A forward that autograd recorded gathers again in backward, from a part where the unit keeps one.
void Scheduler::free(Unit& unit, bool in_forward) {
  if (!unit.is_gathered() && !unit.is_gathering()) return;
  if (observer_) observer_("reshard", unit);
  const Span span(in_forward ? "post_forward" : "post_backward_reshard", unit.name());
  if (in_forward && c10::GradMode::is_enabled()) {
    unit.reshard_for_backward();
  } else {
    unit.reshard();
  }
}

// Left gathered by an earlier backward, whatever is set for the next one, and not yet read by this forward.
bool Scheduler::is_kept_by_backward(const Unit& unit) const {
  return unit.is_read() && !unit.is_read_in(2 * scope_id_);
}

void Scheduler::free_unneeded(bool keep_kept) {
  for (auto& unit : units_) {
    if (!keep_kept) unit->drop_part();
    if (unit->has_pins() || (keep_kept && unit->is_requested())) continue;
    const bool wanted = keep_kept ? !unit->reshard_after_forward() || is_kept_by_backward(*unit)
                                  : !unit->settings().reshard_after_backward;
    const bool kept = wanted && unit->is_gathered() && unit->is_read();
    if (!kept) free(*unit, keep_kept);
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
  if (summoned_ > 0) return read_summoned(unit);
  if (&unit == current_ && unit.is_gathered() && !unit.is_stale()) return;
  check_values();
  const Span span(backward ? "pre_backward" : "pre_forward", unit.name());
  if (backward) {
    read_in_backward(unit);
  } else {
    read_in_forward(unit);
  }
  current_ = &unit;
}

void Scheduler::ensure_gathered(Unit& unit) {
  if (unit.is_gathered() && unit.is_stale()) free(unit, /*in_forward=*/false);
  if (unit.is_gathering()) {
    unit.finish_gather();
    if (unit.is_stale()) free(unit, /*in_forward=*/false);  // The shards changed while their old values were under way.
  }
  if (!unit.is_gathered()) {
    start_gather(unit);
    unit.finish_gather();
  }
}

void Scheduler::read_in_forward(Unit& unit) {
  for (auto& other : units_) {
    if (other.get() == &unit || other->has_pins()) continue;
    if (!other->is_read()) {
      if ((!other->is_gathered() && !other->is_gathering()) || other->is_requested()) continue;
      // The one that was started ahead is not the one that is read: this forward goes another way than the last.
      free(*other, /*in_forward=*/false);
      prefetch_forward_ = false;
    } else if (other->is_gathered() && other->reshard_after_forward() && !other->is_raw_accessed() &&
               !other->is_relative_of(unit) && !is_kept_by_backward(*other)) {
      free(*other, /*in_forward=*/true);
    }
  }
  ensure_gathered(unit);
  const auto scope = scope_token();
  if (unit.is_read_in(scope)) return;
  unit.mark_read(scope);
  order_.push_back(&unit);
  if (c10::GradMode::is_enabled()) backward_plan_.push_back({&unit, scope});
  if (!unit.forward_prefetch().empty()) {
    for (auto* next : unit.forward_prefetch()) prefetch(next, /*requested=*/true);
    return;
  }
  const auto next = order_.size();
  if (unit.context().prefetch && prefetch_forward_ && former_order_.size() > next && former_order_[next - 1] == &unit)
    prefetch(former_order_[next]);
}

void Scheduler::read_in_backward(Unit& unit) {
  const auto token = scope_token();
  const bool fresh = !unit.is_gathered() || !unit.is_read_in(token);
  ensure_gathered(unit);
  unit.mark_read(token);
  if (!fresh) return;
  for (auto* next : unit.backward_prefetch()) prefetch(next, /*requested=*/true);
  auto found = std::find_if(backward_plan_.rbegin(), backward_plan_.rend(),
                            [&](const Planned& planned) { return planned.unit == &unit; });
  if (found == backward_plan_.rend()) return;
  auto former = found + 1;
  const auto scope = found->scope_token;
  const auto next = former == backward_plan_.rend() ? Planned{nullptr, 0} : *former;
  // This unit's later entries are done; another forward's may still come.
  backward_plan_.erase(former.base(), backward_plan_.end());
  if (!unit.context().prefetch || !unit.backward_prefetch().empty()) return;
  // Not across scopes: whether another scope's graph is still alive may differ between ranks.
  if (next.unit != nullptr && next.scope_token == scope && next.unit->holds(scope) > 0) prefetch(next.unit);
}

void Scheduler::prefetch(Unit* unit, bool requested) {
  if (unit->is_gathered() || unit->is_gathering() || !unit->needs_gather()) return;
  const Span span(in_backward() ? "backward_prefetch for" : "forward_prefetch for", unit->name());
  start_gather(*unit);
  if (requested) unit->mark_requested();
}

// Whoever changes offloaded shards after a forward or backward does so on the host.
void Scheduler::wait_for_copies_from_host() noexcept {
  for (auto& unit : units_) {
    try {
      unit->wait_for_copies_from_host();
    } catch (const std::exception& error) {
      LOG(ERROR) << "hsdp: copying the shards of unit " << unit->name() << ": " << error.what();
    }
  }
}

bool Scheduler::is_capturing() const { return !units_.empty() && dtensor::is_capturing(units_.front()->device()); }

// A graph that is captured gathers for itself, and what it gathered is not there before a replay.
void Scheduler::meet_capture() {
  const auto capture = units_.empty() ? 0 : dtensor::current_capture(units_.front()->device());
  if (capture == capture_) return;
  constexpr auto why = "\" is on its way since before this graph's capture, which cannot wait for it, expected nothing";
  for (const auto& unit : units_) {
    if (capture == 0 || !unit->is_gathering()) continue;
    dtensor::raise<dtensor::StateError>("all_gather", "unit \"", unit->name(), why,
                                        "; wait() for what unshard() returned");
  }
  // Those of a backward that threw are given up.
  if (capture != 0 && backward_task_ == -1 && !reductions_.empty()) {
    dtensor::raise<dtensor::StateError>("reduce_scatter", "unit \"", reductions_.front().first->name(), why,
                                        "; call set_is_last_backward(true) before the backward ahead of it");
  }
  capture_ = capture;
  for (auto& unit : units_) {
    if (!unit->has_pins()) free(*unit, /*in_forward=*/false);
    unit->drop_part();
  }
}

void Scheduler::compare_arrived(bool all) {
  if (comparisons_.empty() || is_capturing()) return;
  const size_t most = all ? 0 : 2 * units_.size() + 8;
  while (!comparisons_.empty() && (comparisons_.size() > most || comparisons_.front().arrived->is_completed())) {
    const Comparison comparison = std::move(comparisons_.front());
    comparisons_.pop_front();
    wait_on_host(*comparison.arrived, *comparison.unit->context().mesh);
    comparison.unit->check_signatures(comparison.table, comparison.rank);
  }
}

void Scheduler::start_gather(Unit& unit) {
  compare_arrived();
  if (observer_) observer_("all_gather", unit);
  unit.start_gather();
  GatheredPeaks now;
  for (auto& one : units_) {
    if (!one->is_gathered() && !one->is_gathering()) continue;
    ++now.units;
    now.bytes += one->unsharded_bytes();
    const bool is_ancestor = std::any_of(units_.begin(), units_.end(), [&](const auto& other) {
      const auto& above = other->ancestors();
      return (other->is_gathered() || other->is_gathering()) &&
             std::find(above.begin(), above.end(), one.get()) != above.end();
    });
    if (!is_ancestor) ++now.units_without_ancestors;
  }
  peaks_.units = std::max(peaks_.units, now.units);
  peaks_.units_without_ancestors = std::max(peaks_.units_without_ancestors, now.units_without_ancestors);
  peaks_.bytes = std::max(peaks_.bytes, now.bytes);
}

// ---- on request ----

void Scheduler::unshard(Unit& unit, bool async) {
  std::lock_guard lock(mutex_);
  check_not_summoned("unshard");
  check_values();
  if (depth_ == 0 && !in_backward()) meet_capture();
  if (unit.is_gathered() && unit.is_stale()) free(unit, /*in_forward=*/false);
  if (!unit.is_gathered() && !unit.is_gathering()) start_gather(unit);
  if (!unit.is_read()) unit.mark_requested();
  if (!async) unit.finish_gather();
}

void Scheduler::finish_unshard(Unit& unit) {
  std::lock_guard lock(mutex_);
  unit.finish_gather();
}

void Scheduler::reshard(Unit& unit) {
  std::lock_guard lock(mutex_);
  if (unit.has_pins() || unit.is_raw_accessed()) return;
  free(unit, /*in_forward=*/false);
  unit.drop_part();
  if (current_ == &unit) current_ = nullptr;
}

// ---- summoned ----

void Scheduler::summon() {
  std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(depth_ > 0);
  if (summoned_ > 0) {
    ++summoned_;
    return;
  }
  if (in_backward()) {
    dtensor::raise<dtensor::StateError>("SummonFull", "opened inside a backward, expected it outside of one");
  }
  check_values();
  compare_writes(*units_.front()->context().mesh);
  try {
    prefetch(units_.front().get());
    for (size_t i = 0; i < units_.size(); ++i) {
      if (i + 1 < units_.size()) prefetch(units_[i + 1].get());
      ensure_gathered(*units_[i]);
    }
  } catch (...) {
    for (auto& unit : units_) unit->reshard();
    throw;
  }
  for (auto& unit : units_) unit->pin();
  summoned_ = 1;
}

void Scheduler::dismiss() noexcept {
  std::lock_guard lock(mutex_);
  if (--summoned_ > 0) return;
  current_ = nullptr;
  for (auto& unit : units_) {
    unit->unpin();
    // Other ranks need not have written the same.
    unit->drop_raw_writes();
    unit->reshard();
  }
}

bool Scheduler::is_summoned() const {
  std::lock_guard lock(mutex_);
  return summoned_ > 0;
}

void Scheduler::check_not_summoned(const char* where) const {
  if (!is_summoned()) return;
  dtensor::raise<dtensor::StateError>(where,
                                      "called inside hsdp::SummonFull, expected forwards without gradients only, "
                                      "because other ranks need not do the same; call it after the scope");
}

void Scheduler::read_summoned(Unit& unit) const {
  if (c10::GradMode::is_enabled()) {
    dtensor::raise<dtensor::StateError>("SummonFull", "unit \"", unit.name(),
                                        "\" is read with grad mode on inside hsdp::SummonFull, expected "
                                        "torch::NoGradGuard around every forward there; train after the scope");
  }
  if (unit.is_stale()) {
    dtensor::raise<dtensor::StateError>("SummonFull", "unit \"", unit.name(),
                                        "\" was changed inside hsdp::SummonFull, expected reads only; change "
                                        "parameters after the scope");
  }
}

// ---- backward ----

void Scheduler::join_backward() {
  check_not_summoned("backward");
  if (ended_task != -1 && torch::autograd::get_current_graph_task_id() == ended_task) return;
  if (backward_task_ != -1 && !backward_failed(backward_task_)) return;
  if (backward_task_ != -1) forget_iteration();
  backward_task_ = torch::autograd::get_current_graph_task_id();
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->end_backward(); });
}

void Scheduler::end_backward() {
  std::lock_guard lock(mutex_);
  const Span span("root_post_backward_callback");
  reduce_leftovers();
  // A graph has to end with all of its streams joined.
  if (is_last_backward_ || is_capturing()) finish_reductions();
  settle_offloaded();
  wait_for_copies_from_host();
  compare_arrived();
  std::vector<std::pair<std::shared_ptr<Unit>, std::vector<Unit::AwaitingHooks>>> hooked;
  for (auto& unit : units_) hooked.emplace_back(unit, unit->take_awaiting_hooks());
  const EndedTask ended(std::exchange(backward_task_, -1));
  current_ = nullptr;
  if (is_last_backward_) backward_plan_.clear();
  // `model->forward(x).sum().backward()` ends here with its forward scope still open.
  if (depth_ == 0) {
    for (auto& unit : units_) unit->disconnect();
  }
  free_unneeded(/*keep_kept=*/false);
  // Last, because a hook may run forwards and backwards of its own.
  bool ran = false;
  for (auto& [unit, list] : hooked) {
    for (auto& awaiting : list) {
      unit->run_hooks(awaiting);
      if (gradient_ready_) gradient_ready_(unit->parameters()[awaiting.index].tensor());
      ran = true;
    }
  }
  if (ran) free_unneeded(/*keep_kept=*/false);
  release_cached_memory();
}

void Scheduler::last_hold_released(Unit& unit) {
  std::lock_guard lock(mutex_);
  if (!in_backward() || unit.has_pins() || unit.is_raw_accessed() || !unit.is_gathered()) return;
  // In an inner backward the outer one is in the middle of a node, which may use what another scope saved.
  if (torch::autograd::get_current_graph_task_id() != backward_task_ && unit.holds() > 0) return;
  if (unit.settings().reshard_after_backward) free(unit, /*in_forward=*/false);
}

void Scheduler::mix_history(uint64_t value) { history_ = (history_ ^ value) * 1099511628211ull + (history_ >> 29); }

// Two ranks whose collectives differ in unit, parameters or order differ in this hash from then on.
int64_t Scheduler::note_collective(int64_t kind, const Unit& unit, const std::vector<size_t>& indices) {
  const int64_t place =
      std::find_if(units_.begin(), units_.end(), [&](const auto& one) { return one.get() == &unit; }) - units_.begin();
  mix_history(static_cast<uint64_t>(kind));
  mix_history(static_cast<uint64_t>(place));
  for (auto index : indices) mix_history(index + 1);
  ++collectives_;
  return place;
}

std::array<int64_t, 4> Scheduler::next_signature(const Unit& unit) {
  const int64_t place = note_collective(1, unit, {});
  return {static_cast<int64_t>(history_), place, collectives_, static_cast<int64_t>(writes_)};
}

void Scheduler::note_write(const std::string& what, uint64_t hash) {
  std::lock_guard lock(mutex_);
  writes_ = dtensor::hash_bytes(&hash, sizeof(hash), writes_);
  last_written_ = what;
}

void Scheduler::compare_writes(const dtensor::DeviceMesh& mesh) {
  compare_arrived(/*all=*/true);
  if (mesh.size() == 1 || writes_ == 0) return;
  const auto own =
      at::full({1}, static_cast<int64_t>(writes_), at::TensorOptions(units_.front()->device()).dtype(at::kLong));
  const auto table = dtensor::all_gather_rows(mesh, own, {"all_gather", "what forwards wrote"}).to(kHost);
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    if (table[rank].item<int64_t>() != static_cast<int64_t>(writes_)) raise_unlike_writes(mesh.rank(), rank);
  }
  compared_writes_ = writes_;
}

void Scheduler::raise_unlike_writes(int64_t rank, int64_t other) const {
  dtensor::raise<dtensor::StateError>(
      "all_gather", "rank ", rank, " and rank ", other, " wrote other values into parameters in a forward",
      last_written_.empty() ? "" : ", here last into " + last_written_,
      ", expected the same on all ranks, because each keeps its part; all-reduce what is written first");
}

void Scheduler::reset_iteration_state() {
  std::lock_guard lock(mutex_);
  reductions_.clear();
  comparisons_.clear();
  forget_iteration();
  for (auto& unit : units_) unit->drop_kept_gradients();
}

void Scheduler::forget_iteration() {
  // Those of earlier backwards, which were not the last, still count.
  std::erase_if(reductions_, [&](const auto& entry) { return entry.second.task >= backward_task_; });
  backward_plan_.clear();
  order_.clear();
  current_ = nullptr;
  backward_task_ = -1;
  for (auto& unit : units_) {
    unit->drop_gradients_in_flight();
    unit->disconnect();
    unit->drop_part();
    if (summoned_ == 0) unit->reshard();
  }
}

}  // namespace hsdp

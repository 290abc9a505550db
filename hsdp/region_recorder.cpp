#include "hsdp/region_recorder.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/dispatch.h"
#include "dtensor/operator_call.h"
#include "hsdp/recompute_region.h"

namespace hsdp {
namespace {

// Units that an operator reads whole.
std::vector<std::shared_ptr<Unit>> units_read(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::vector<std::shared_ptr<Unit>> units;
  dtensor::for_each_tensor(op, stack, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.key_set().has(dtensor::kDTensorKey)) return;
    auto* impl = dtensor::dtensor_impl(tensor);
    auto unit = std::dynamic_pointer_cast<Unit>(impl != nullptr ? impl->owner()
                                                                : dtensor::unsharded_storage_owner(tensor).owner);
    if (!unit || !unit->readable() || std::find(units.begin(), units.end(), unit) != units.end()) return;
    units.push_back(std::move(unit));
  });
  return units;
}

int64_t collectives() {
  const auto counts = dtensor::collective_counts();
  return counts.all_gathers + counts.reduce_scatters + counts.all_reduces + counts.broadcasts;
}

class RegionRecorder final : public dtensor::OperatorInterceptor {
 public:
  void enter() {
    if (forwards_++ == 0) watching_.emplace(*this, /*every_operator=*/false);
  }

  void leave() noexcept {
    end();
    if (--forwards_ == 0) watching_.reset();
  }

  bool intercept(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const auto task = torch::autograd::get_current_graph_task_id();
    // A backward in the middle of the forward is not part of it.
    if (region_ && task != task_) return false;
    // A collective of the program's own has changed a tensor past the dispatcher.
    if (region_ && (region_->was_asked() || c10::InferenceMode::is_enabled() || collectives() != collectives_)) end();
    follow(units_read(op, stack), task);
    if (!region_) return false;
    bool recorded = false;
    try {
      recorded = region_->record(op, stack);
    } catch (...) {
      end();
      throw;
    }
    if (!recorded) end();
    collectives_ = collectives();
    return recorded;
  }

  void end() noexcept {
    if (!region_) return;
    recording_.reset();
    region_->finish();
    region_.reset();
    unit_.reset();
  }

 private:
  void follow(const std::vector<std::shared_ptr<Unit>>& units, int64_t task) {
    for (auto& unit : units) {
      if (region_ && !is_within(*unit)) end();
    }
    if (region_ || !at::GradMode::is_enabled() || c10::InferenceMode::is_enabled() || saved_tensor_sink() != nullptr) {
      return;
    }
    for (auto& unit : units) {
      if (!unit->is_checkpointed()) continue;
      region_ = std::make_shared<RecomputeRegion>(*unit);
      unit_ = unit;
      task_ = task;
      recording_.emplace(*this);
      collectives_ = collectives();
      return;
    }
  }

  bool is_within(const Unit& unit) const {
    const auto& above = unit.ancestors();
    return &unit == unit_.get() || std::find(above.begin(), above.end(), unit_.get()) != above.end();
  }

  int64_t forwards_ = 0;
  std::optional<dtensor::InterceptScope> watching_, recording_;
  std::shared_ptr<RecomputeRegion> region_;
  std::shared_ptr<Unit> unit_;  // whose forward it is
  int64_t task_ = -1;
  int64_t collectives_ = 0;  // until after the last recorded operator
};

RegionRecorder& recorder() {
  thread_local RegionRecorder instance;
  return instance;
}

}  // namespace

void enter_checkpointed_forward() { recorder().enter(); }
void leave_checkpointed_forward() noexcept { recorder().leave(); }
void end_recompute_region() noexcept { recorder().end(); }

}  // namespace hsdp

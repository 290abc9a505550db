#include "hsdp/saved_tensors.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "dtensor/dispatch.h"
#include "dtensor/error.h"
#include "hsdp/saved_tensor_sink.h"
#include "hsdp/scheduler.h"
#include "hsdp/unit.h"

namespace hsdp {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

thread_local int64_t scopes = 0;
thread_local SavedTensorSink* innermost_sink = nullptr;
// Ids of the last backward passes that threw; an id is never used twice.
std::mutex failed_mutex;
std::deque<int64_t> failed_tasks;

class SavedTensor : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    if (auto* impl = dtensor::distributed_impl(tensor)) {
      // The parameter itself: a custom autograd::Function saved it without the dispatcher.
      if (auto unit = std::dynamic_pointer_cast<Unit>(impl->owner())) {
        unit->gather();
        const auto index = impl->owner_index();
        return pack(std::move(unit), index, {});
      }
    } else if (auto found = dtensor::unsharded_storage_owner(tensor); found.owner) {
      if (auto unit = std::dynamic_pointer_cast<Unit>(found.owner)) {
        return pack(std::move(unit), found.index,
                    Geometry{tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()});
      }
    }
    if (innermost_sink != nullptr) recomputed_ = innermost_sink->save(tensor);
    // A leaf is kept itself so that its accumulator is found again; a node's own output must not be, it would keep the
    // node alive.
    if (!recomputed_) plain_ = VersionedTensor(tensor.is_leaf() ? tensor : tensor.detach());
  }

  at::Tensor call_unpack_hook() override {
    if (recomputed_) return recomputed_->unpack();
    if (!hold_) return plain_.get();
    auto& unit = hold_->unit();
    unit.gather();
    check_unchanged(unit, index_, generation_);
    c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
    c10::InferenceMode normal(false);
    at::NoGradGuard no_grad;
    // An alias with a version counter of its own: writing gathered bytes must not look like a change of a saved tensor.
    auto whole = dtensor::raw_alias(unit.whole(index_));
    if (geometry_) {
      whole.unsafeGetTensorImpl()->set_sizes_and_strides(geometry_->sizes, geometry_->strides, geometry_->offset);
    }
    return whole;
  }

 private:
  struct Geometry {
    std::vector<int64_t> sizes, strides;
    int64_t offset;
  };

  void pack(std::shared_ptr<Unit> unit, size_t index, std::optional<Geometry> geometry) {
    index_ = index;
    geometry_ = std::move(geometry);
    generation_ = unit->generation(index);
    auto scheduler = unit->scheduler();
    int64_t token = scheduler ? scheduler->scope_token() : 0;
    if (innermost_sink != nullptr) token = innermost_sink->save_weight(unit, index, token);
    hold_.emplace(std::move(unit), token);
  }

  std::unique_ptr<RecomputedTensor> recomputed_;
  VersionedTensor plain_;
  std::optional<Unit::Hold> hold_;
  size_t index_ = 0;
  std::optional<Geometry> geometry_;
  Unit::Generation generation_{};
};

class PackingEngine : public Engine {
 public:
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    // In backward with grad mode on somebody recomputes or differentiates twice: those graphs save weights as well.
    const bool backward = torch::autograd::get_current_graph_task_id() != -1 && at::GradMode::is_enabled();
    if (scopes > 0 || backward || innermost_sink != nullptr) return std::make_unique<SavedTensor>();
    return nullptr;
  }

  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task,
                           const std::shared_ptr<torch::autograd::Node>& node, std::exception& error) override {
    {
      std::lock_guard lock(failed_mutex);
      failed_tasks.push_back(static_cast<int64_t>(task->id_));
      if (failed_tasks.size() > 64) failed_tasks.pop_front();
    }
    Engine::thread_on_exception(task, node, error);
  }
};

Engine& packing_engine() {
  // Leaked: worker threads may outlive static destruction.
  static auto* engine = new PackingEngine;
  return *engine;
}

// Before main, so that no backward can have made the stock engine.
const bool installed_at_load = [] {
  install_saved_tensor_engine();
  return true;
}();

}  // namespace

void install_saved_tensor_engine() { torch::autograd::set_default_engine_stub(&packing_engine); }

SavedTensorScope::SavedTensorScope() { ++scopes; }
SavedTensorScope::~SavedTensorScope() { --scopes; }

VersionedTensor::VersionedTensor(at::Tensor tensor)
    : tensor_(std::move(tensor)),
      has_version_(!tensor_.is_inference()),
      version_(has_version_ ? static_cast<uint32_t>(tensor_._version()) : 0) {}

const at::Tensor& VersionedTensor::get() const {
  if (has_version_ && tensor_._version() != version_) {
    dtensor::raise<dtensor::StateError>("backward", "a tensor of shape ", tensor_.sizes(),
                                        " needed for gradient computation was modified by an inplace operation: it is "
                                        "at version ",
                                        tensor_._version(), ", expected ", version_);
  }
  return tensor_;
}

RecomputedTensor::~RecomputedTensor() = default;
SavedTensorSink::~SavedTensorSink() = default;

SavedTensorSinkScope::SavedTensorSinkScope(SavedTensorSink* sink) : former_(std::exchange(innermost_sink, sink)) {}
SavedTensorSinkScope::~SavedTensorSinkScope() { innermost_sink = former_; }

SavedTensorSink* saved_tensor_sink() { return innermost_sink; }

void check_unchanged(const Unit& unit, size_t index, const Unit::Generation& generation) {
  if (unit.generation(index) == generation) return;
  dtensor::raise<dtensor::StateError>("backward", "parameter \"", unit.parameters()[index].name(),
                                      "\" needed for gradient computation was modified by an inplace operation since "
                                      "the forward, expected unchanged weights; run backward before optimizer.step()");
}

bool backward_failed(int64_t graph_task) {
  std::lock_guard lock(failed_mutex);
  return std::find(failed_tasks.begin(), failed_tasks.end(), graph_task) != failed_tasks.end();
}

}  // namespace hsdp

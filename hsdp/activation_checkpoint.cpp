#include "hsdp/activation_checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "dtensor/dispatch.h"
#include "dtensor/error.h"
#include "hsdp/recomputation.h"
#include "hsdp/region_recorder.h"
#include "hsdp/run_conditions.h"

namespace hsdp::detail {
namespace {

bool lives_in_unit(const at::Tensor& tensor) {
  return dtensor::distributed_impl(tensor) != nullptr || dtensor::unsharded_storage_owner(tensor).owner != nullptr;
}

class CheckpointedFunction final : public Recomputation {
 public:
  explicit CheckpointedFunction(std::function<void()> again)
      : Recomputation("the function"), again_(std::move(again)) {}

  void set_conditions(RandomState random, AutocastState autocast) {
    random_ = std::move(random);
    autocast_ = std::move(autocast);
  }
  void run_again() override {
    const RunConditionsScope conditions(random_, autocast_);
    again_();
  }
  using Recomputation::seal;

 private:
  std::function<void()> again_;
  RandomState random_;
  AutocastState autocast_;
};

}  // namespace

KeptTensor::KeptTensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  requires_grad_ = tensor.requires_grad();
  auto* sink = saved_tensor_sink();
  if (sink != nullptr && !lives_in_unit(tensor)) recomputed_ = sink->save(tensor);
  if (!recomputed_) tensor_ = VersionedTensor(tensor);
}

at::Tensor KeptTensor::get() const {
  if (!recomputed_) return tensor_.defined() ? tensor_.get() : at::Tensor();
  at::NoGradGuard no_grad;
  return recomputed_->unpack().detach().set_requires_grad(requires_grad_);
}

struct CheckpointedRun::State {
  CheckpointOptions options;
  std::shared_ptr<CheckpointedFunction> function;
  std::vector<at::Tensor> inputs;
  std::vector<int64_t> versions;
  std::optional<Recomputation::FirstRun> run;
};

CheckpointedRun::CheckpointedRun(const CheckpointOptions& options, std::function<void()> again)
    : state_(new State{options, std::make_shared<CheckpointedFunction>(std::move(again)), {}, {}, {}}) {}

CheckpointedRun::~CheckpointedRun() = default;

void CheckpointedRun::add_input(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) state_->inputs.push_back(tensor);
}

void CheckpointedRun::add_input(const std::optional<at::Tensor>& tensor) {
  if (tensor) add_input(*tensor);
}

void CheckpointedRun::add_input(const std::vector<at::Tensor>& tensors) {
  for (auto& tensor : tensors) add_input(tensor);
}

void CheckpointedRun::start() {
  end_recompute_region();
  std::vector<c10::Device> devices;
  for (auto& tensor : state_->inputs) {
    state_->versions.push_back(tensor._version());
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) devices.push_back(tensor.device());
  }
  state_->function->set_conditions(state_->options.preserve_random_state ? RandomState::now(devices) : RandomState(),
                                   AutocastState::now());
  state_->run.emplace(*state_->function);
}

void CheckpointedRun::finish() {
  state_->run.reset();
  state_->function->seal();
  for (size_t i = 0; i < state_->inputs.size(); ++i) {
    const auto& input = state_->inputs[i];
    if (input._version() == state_->versions[i]) continue;
    dtensor::raise<dtensor::NotSupportedError>(
        "checkpoint", "the function changes an input of shape ", input.sizes(),
        " in place, expected it unchanged, since backward runs the function again; give it a clone()");
  }
}

bool builds_graph() { return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(); }

}  // namespace hsdp::detail

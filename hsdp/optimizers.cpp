#include "hsdp/optimizers.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/error.h"
#include "dtensor/graph_capture.h"
#include "hsdp/captured_state.h"
#include "hsdp/fused_batches.h"
#include "hsdp/step_counts.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

constexpr auto kAdamW = "FusedAdamW";
constexpr auto kSGD = "FusedSGD";

void check_non_negative(const char* where, const char* name, double value) {
  if (std::isfinite(value) && value >= 0) return;
  raise<ValueError>(where, name, " ", value, ", expected a finite number of at least 0");
}

void check_options(const AdamWOptions& options) {
  check_non_negative(kAdamW, "lr", options.lr());
  check_non_negative(kAdamW, "eps", options.eps());
  check_non_negative(kAdamW, "weight_decay", options.weight_decay());
  for (const double beta : {std::get<0>(options.betas()), std::get<1>(options.betas())}) {
    if (!(beta >= 0 && beta < 1)) raise<ValueError>(kAdamW, "beta ", beta, ", expected 0 <= beta < 1");
  }
}

void check_options(const SGDOptions& options) {
  check_non_negative(kSGD, "lr", options.lr());
  check_non_negative(kSGD, "momentum", options.momentum());
  check_non_negative(kSGD, "weight_decay", options.weight_decay());
  if (!std::isfinite(options.dampening())) {
    raise<ValueError>(kSGD, "dampening ", options.dampening(), ", expected a finite number");
  }
  if (options.nesterov() && !(options.momentum() > 0 && options.dampening() == 0)) {
    raise<ValueError>(kSGD, "nesterov with momentum ", options.momentum(), " and dampening ", options.dampening(),
                      ", expected momentum above 0 and no dampening");
  }
}

template <class Options>
const Options& options_of(const char* where, const OptimizerOptions& options) {
  if (const auto* ours = dynamic_cast<const Options*>(&options)) return *ours;
  raise<ValueError>(where, "a group has options of another optimizer, expected torch::optim::",
                    std::is_same_v<Options, SGDOptions> ? "SGDOptions" : "AdamWOptions");
}

// Schedulers and programs write options at any time, and groups are added behind our back.
template <class Options>
void check_groups(const char* where, const std::vector<OptimizerParamGroup>& groups) {
  for (const auto& group : groups) check_options(options_of<Options>(where, group.options()));
}

template <class State>
State state_of(const Optimizer& optimizer, const at::Tensor& parameter) {
  const auto known = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return known == optimizer.state().end() || !known->second ? State() : static_cast<const State&>(*known->second);
}

// The object that a program may hold stays.
template <class State>
void set_state(Optimizer& optimizer, const at::Tensor& parameter, const State& state) {
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (slot) {
    static_cast<State&>(*slot) = state;
  } else {
    slot = std::make_unique<State>(state);
  }
}

template <class State>
using States = std::vector<std::pair<at::Tensor, State>>;

std::optional<at::Tensor> on_device(const at::Tensor& scalar, at::Device device) {
  return scalar.defined() ? std::optional(scalar.to(device)) : std::nullopt;
}

// New states count only where the kernels have stepped.
template <class State>
bool finish(Optimizer& optimizer, const std::vector<FusedBatch>& batches, const States<State>& states,
            const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  if (grad_scale.defined()) {
    for (const auto& batch : batches) batch.finish_unscaling();
  }
  if (found_inf.defined() && found_inf.item<float>() != 0) return false;
  for (const auto& [parameter, state] : states) set_state(optimizer, parameter, state);
  return true;
}

// Whether the step is recorded in a graph rather than done.
bool is_recorded(const char* where, const std::vector<FusedBatch>& batches, bool is_scaled) {
  const FusedBatch* recorded = nullptr;
  for (const auto& batch : batches) {
    if (dtensor::is_capturing(batch.device())) recorded = &batch;
  }
  if (recorded == nullptr) return false;
  if (is_scaled) {
    raise<dtensor::NotSupportedError>(where,
                                      "step_scaled() while a graph is captured, expected outside, because the host "
                                      "reads whether gradients are finite; capture forward and backward, and step "
                                      "after each replay");
  }
  for (const auto& batch : batches) {
    if (dtensor::is_capturing(batch.device())) continue;
    raise<dtensor::NotSupportedError>(where, "step() of parameters on ", batch.device(), " while a graph of ",
                                      recorded->device(),
                                      " is captured, expected them on one device, because replays would leave the "
                                      "others out; take an optimizer for each device");
  }
  return true;
}

// A replay would begin from new state each time if that were made in the graph.
template <class State>
void check_recordable(const char* where, const CapturedState& captured, const at::Tensor& parameter, State state,
                      size_t tensors, bool counted) {
  std::vector<at::Tensor> used;
  for (auto* tensor : tensors_of(state)) {
    if (used.size() < tensors) used.push_back(*tensor);
  }
  if (counted && captured.takes(parameter, used)) return;
  raise<dtensor::NotSupportedError>(where, "the first step() while a graph is captured of a parameter of shape ",
                                    parameter.sizes(),
                                    ", or the first since its state was written, expected outside, because each "
                                    "replay would be a first one; step once before");
}

// What one call of the AdamW kernel takes besides parameters and gradients.
struct AdamWState {
  std::vector<at::Tensor> averages, squares, maxima, steps;
};

bool step_adamw(Optimizer& optimizer, StepCounts& counts, CapturedState& captured, const at::Tensor& grad_scale,
                const at::Tensor& found_inf) {
  at::NoGradGuard no_grad;
  dtensor::ShardedRulesGuard sharded;
  check_groups<AdamWOptions>(kAdamW, optimizer.param_groups());
  const auto batches = fused_batches(kAdamW, optimizer.param_groups(), [](auto&, auto&) { return false; });
  const bool recorded = is_recorded(kAdamW, batches, grad_scale.defined() || found_inf.defined());
  if (!recorded) captured.put_back<AdamWParamState>(optimizer);
  States<AdamWParamState> states;
  std::vector<AdamWState> of_batches;
  for (const auto& batch : batches) {
    const bool amsgrad = static_cast<const AdamWOptions&>(batch.options()).amsgrad();
    auto& of_batch = of_batches.emplace_back();
    std::vector<int64_t> steps;
    for (const auto& parameter : batch.parameters()) {
      auto state = state_of<AdamWParamState>(optimizer, parameter);
      steps.push_back(state.step());
      if (recorded) {
        check_recordable(kAdamW, captured, parameter, state, amsgrad ? 3 : 2,
                         counts.is_current(batch.device(), parameter, state.step()));
      }
      state.exp_avg(state_like(parameter, state.exp_avg()));
      state.exp_avg_sq(state_like(parameter, state.exp_avg_sq()));
      of_batch.averages.push_back(state.exp_avg());
      of_batch.squares.push_back(state.exp_avg_sq());
      if (amsgrad) {
        state.max_exp_avg_sq(state_like(parameter, state.max_exp_avg_sq()));
        of_batch.maxima.push_back(state.max_exp_avg_sq());
      }
      state.step(state.step() + 1);
      states.emplace_back(parameter, std::move(state));
    }
    of_batch.steps = counts.values(batch.device(), batch.parameters(), steps);
  }
  const auto run_kernels = [&] {
    for (size_t i = 0; i < batches.size(); ++i) {
      const auto& batch = batches[i];
      const auto& [averages, squares, maxima, steps] = of_batches[i];
      const auto& options = static_cast<const AdamWOptions&>(batch.options());
      const auto [beta1, beta2] = options.betas();
      at::_fused_adamw_(batch.parameters(), batch.gradients(), averages, squares, maxima, steps, options.lr(), beta1,
                        beta2, options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false,
                        on_device(grad_scale, batch.device()), on_device(found_inf, batch.device()));
    }
  };
  if (recorded) {
    counts.record_step(batches);
    run_kernels();
    for (size_t i = 0; i < batches.size(); ++i) {
      const auto& [averages, squares, maxima, steps] = of_batches[i];
      const auto& parameters = batches[i].parameters();
      for (size_t k = 0; k < parameters.size(); ++k) {
        captured.add(parameters[k], {averages[k], squares[k], maxima.empty() ? at::Tensor() : maxima[k]});
      }
    }
    return true;
  }
  // Once more for a step that was not taken: replays go on from what is on the device.
  counts.add(batches, 1);
  try {
    run_kernels();
    if (finish(optimizer, batches, states, grad_scale, found_inf)) return true;
  } catch (...) {
    counts.add(batches, -1);
    throw;
  }
  counts.add(batches, -1);
  return false;
}

bool step_sgd(Optimizer& optimizer, CapturedState& captured, const at::Tensor& grad_scale,
              const at::Tensor& found_inf) {
  at::NoGradGuard no_grad;
  dtensor::ShardedRulesGuard sharded;
  check_groups<SGDOptions>(kSGD, optimizer.param_groups());
  // A first step takes the gradient for the average, and the kernel is told so once a call.
  const auto batches = fused_batches(kSGD, optimizer.param_groups(), [&](auto& options, auto& parameter) {
    return static_cast<const SGDOptions&>(options).momentum() != 0 && !captured.has(parameter) &&
           !state_of<SGDParamState>(optimizer, parameter).momentum_buffer().defined();
  });
  const bool recorded = is_recorded(kSGD, batches, grad_scale.defined() || found_inf.defined());
  if (!recorded) captured.put_back<SGDParamState>(optimizer);
  States<SGDParamState> states;
  std::vector<std::vector<at::Tensor>> averages;
  for (const auto& batch : batches) {
    auto& of_batch = averages.emplace_back();
    if (static_cast<const SGDOptions&>(batch.options()).momentum() == 0) continue;
    for (const auto& parameter : batch.parameters()) {
      auto state = state_of<SGDParamState>(optimizer, parameter);
      if (recorded) check_recordable(kSGD, captured, parameter, state, 1, !batch.fresh());
      state.momentum_buffer(state_like(parameter, state.momentum_buffer()));
      of_batch.push_back(state.momentum_buffer());
      states.emplace_back(parameter, std::move(state));
    }
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    const auto& batch = batches[i];
    const auto& options = static_cast<const SGDOptions&>(batch.options());
    at::_fused_sgd_(batch.parameters(), batch.gradients(), averages[i], options.weight_decay(), options.momentum(),
                    options.lr(), options.dampening(), options.nesterov(), /*maximize=*/false, batch.fresh(),
                    on_device(grad_scale, batch.device()), on_device(found_inf, batch.device()));
  }
  if (recorded) {
    for (const auto& [parameter, state] : states) captured.add(parameter, {state.momentum_buffer()});
    return true;
  }
  return finish(optimizer, batches, states, grad_scale, found_inf);
}

at::Tensor loss_of(const Optimizer::LossClosure& closure) {
  if (!closure) return {};
  at::AutoGradMode grad_mode(true);
  return closure();
}

}  // namespace

ScaledStep::~ScaledStep() = default;
CapturableStep::~CapturableStep() = default;

FusedAdamW::FusedAdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults)
    : Optimizer(groups, std::make_unique<AdamWOptions>(defaults)),
      counts_(std::make_shared<StepCounts>()),
      captured_(std::make_shared<CapturedState>()) {
  check_options(defaults);
  check_groups<AdamWOptions>(kAdamW, param_groups());
}

FusedAdamW::FusedAdamW(std::vector<at::Tensor> parameters, AdamWOptions defaults)
    : FusedAdamW({OptimizerParamGroup(std::move(parameters))}, defaults) {}

at::Tensor FusedAdamW::step(LossClosure closure) {
  auto loss = loss_of(closure);
  step_adamw(*this, *counts_, *captured_, {}, {});
  return loss;
}

bool FusedAdamW::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  return step_adamw(*this, *counts_, *captured_, grad_scale, found_inf);
}

void FusedAdamW::save(torch::serialize::OutputArchive& archive) const {
  if (counts_->were_recorded()) {
    captured_->check_not_capturing(kAdamW, "save()");
    counts_->read(*this);
  }
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

void FusedAdamW::load(torch::serialize::InputArchive& archive) {
  sync_state();
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
  sync_state();
}

void FusedAdamW::sync_state() {
  if (!counts_->were_recorded()) return;
  captured_->check_not_capturing(kAdamW, "sync_state()");
  const at::NoGradGuard no_grad;
  const dtensor::ShardedRulesGuard sharded;
  captured_->put_back<AdamWParamState>(*this);
  counts_->read(*this);
  counts_->write(*this);
}

FusedSGD::FusedSGD(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults)
    : Optimizer(groups, std::make_unique<SGDOptions>(defaults)), captured_(std::make_shared<CapturedState>()) {
  check_options(defaults);
  check_groups<SGDOptions>(kSGD, param_groups());
}

FusedSGD::FusedSGD(std::vector<at::Tensor> parameters, SGDOptions defaults)
    : FusedSGD({OptimizerParamGroup(std::move(parameters))}, defaults) {}

at::Tensor FusedSGD::step(LossClosure closure) {
  auto loss = loss_of(closure);
  step_sgd(*this, *captured_, {}, {});
  return loss;
}

bool FusedSGD::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  return step_sgd(*this, *captured_, grad_scale, found_inf);
}

void FusedSGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<SGDParamState, SGDOptions>(archive, *this);
}

void FusedSGD::load(torch::serialize::InputArchive& archive) {
  sync_state();
  torch::optim::serialize<SGDParamState, SGDOptions>(archive, *this);
  sync_state();
}

void FusedSGD::sync_state() {
  if (captured_->is_empty()) return;
  captured_->check_not_capturing(kSGD, "sync_state()");
  const at::NoGradGuard no_grad;
  const dtensor::ShardedRulesGuard sharded;
  captured_->put_back<SGDParamState>(*this);
}

}  // namespace hsdp

#include "hsdp/optimizers.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "dtensor/dispatch.h"
#include "dtensor/error.h"
#include "dtensor/graph_capture.h"
#include "hsdp/fused_batches.h"

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
  return known == optimizer.state().end() ? State() : static_cast<const State&>(*known->second);
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

bool step_adamw(Optimizer& optimizer, const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  at::NoGradGuard no_grad;
  dtensor::ShardedRulesGuard sharded;
  check_groups<AdamWOptions>(kAdamW, optimizer.param_groups());
  const auto batches = fused_batches(kAdamW, optimizer.param_groups(), [](auto&, auto&) { return false; });
  for (const auto& batch : batches) {
    if (!dtensor::is_capturing(batch.device())) continue;
    raise<dtensor::NotSupportedError>(kAdamW,
                                      "step() while a graph is captured, expected outside, because a replay would "
                                      "not count steps; capture forward and backward, and step after each replay");
  }
  States<AdamWParamState> states;
  for (const auto& batch : batches) {
    const auto& options = static_cast<const AdamWOptions&>(batch.options());
    std::vector<at::Tensor> averages, squares, maxima, steps;
    std::map<int64_t, at::Tensor> step_tensors;
    for (const auto& parameter : batch.parameters()) {
      auto state = state_of<AdamWParamState>(optimizer, parameter);
      state.exp_avg(state_like(parameter, state.exp_avg()));
      state.exp_avg_sq(state_like(parameter, state.exp_avg_sq()));
      averages.push_back(state.exp_avg());
      squares.push_back(state.exp_avg_sq());
      if (options.amsgrad()) {
        state.max_exp_avg_sq(state_like(parameter, state.max_exp_avg_sq()));
        maxima.push_back(state.max_exp_avg_sq());
      }
      state.step(state.step() + 1);
      auto& step = step_tensors[state.step()];
      if (!step.defined()) {
        step = at::full({}, static_cast<double>(state.step()), at::dtype(at::kFloat).device(batch.device()));
      }
      steps.push_back(step);
      states.emplace_back(parameter, std::move(state));
    }
    const auto [beta1, beta2] = options.betas();
    at::_fused_adamw_(batch.parameters(), batch.gradients(), averages, squares, maxima, steps, options.lr(), beta1,
                      beta2, options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false,
                      on_device(grad_scale, batch.device()), on_device(found_inf, batch.device()));
  }
  return finish(optimizer, batches, states, grad_scale, found_inf);
}

bool step_sgd(Optimizer& optimizer, const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  at::NoGradGuard no_grad;
  dtensor::ShardedRulesGuard sharded;
  check_groups<SGDOptions>(kSGD, optimizer.param_groups());
  // A first step takes the gradient for the average, and the kernel is told so once a call.
  const auto batches = fused_batches(kSGD, optimizer.param_groups(), [&](auto& options, auto& parameter) {
    return static_cast<const SGDOptions&>(options).momentum() != 0 &&
           !state_of<SGDParamState>(optimizer, parameter).momentum_buffer().defined();
  });
  States<SGDParamState> states;
  for (const auto& batch : batches) {
    const auto& options = static_cast<const SGDOptions&>(batch.options());
    std::vector<at::Tensor> averages;
    if (options.momentum() != 0) {
      for (const auto& parameter : batch.parameters()) {
        auto state = state_of<SGDParamState>(optimizer, parameter);
        state.momentum_buffer(state_like(parameter, state.momentum_buffer()));
        averages.push_back(state.momentum_buffer());
        states.emplace_back(parameter, std::move(state));
      }
    }
    if (batch.fresh() && dtensor::is_capturing(batch.device())) {
      raise<dtensor::NotSupportedError>(kSGD,
                                        "the first step() with momentum while a graph is captured, expected outside, "
                                        "because each replay would be a first one; step once before");
    }
    at::_fused_sgd_(batch.parameters(), batch.gradients(), averages, options.weight_decay(), options.momentum(),
                    options.lr(), options.dampening(), options.nesterov(), /*maximize=*/false, batch.fresh(),
                    on_device(grad_scale, batch.device()), on_device(found_inf, batch.device()));
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

FusedAdamW::FusedAdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions defaults)
    : Optimizer(groups, std::make_unique<AdamWOptions>(defaults)) {
  check_options(defaults);
  check_groups<AdamWOptions>(kAdamW, param_groups());
}

FusedAdamW::FusedAdamW(std::vector<at::Tensor> parameters, AdamWOptions defaults)
    : FusedAdamW({OptimizerParamGroup(std::move(parameters))}, defaults) {}

at::Tensor FusedAdamW::step(LossClosure closure) {
  auto loss = loss_of(closure);
  step_adamw(*this, {}, {});
  return loss;
}

bool FusedAdamW::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  return step_adamw(*this, grad_scale, found_inf);
}

void FusedAdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

void FusedAdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

FusedSGD::FusedSGD(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults)
    : Optimizer(groups, std::make_unique<SGDOptions>(defaults)) {
  check_options(defaults);
  check_groups<SGDOptions>(kSGD, param_groups());
}

FusedSGD::FusedSGD(std::vector<at::Tensor> parameters, SGDOptions defaults)
    : FusedSGD({OptimizerParamGroup(std::move(parameters))}, defaults) {}

at::Tensor FusedSGD::step(LossClosure closure) {
  auto loss = loss_of(closure);
  step_sgd(*this, {}, {});
  return loss;
}

bool FusedSGD::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  return step_sgd(*this, grad_scale, found_inf);
}

void FusedSGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<SGDParamState, SGDOptions>(archive, *this);
}

void FusedSGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<SGDParamState, SGDOptions>(archive, *this);
}

}  // namespace hsdp

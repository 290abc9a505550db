#include "hsdp/grad_scaler.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/host.h"
#include "hsdp/optimizers.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;

constexpr auto kWhere = "GradScaler";

bool is_scale(double value) { return value > 0 && value <= std::numeric_limits<float>::max(); }

void check(const GradScalerState& state) {
  if (!is_scale(state.scale)) raise<ValueError>(kWhere, "scale ", state.scale, ", expected a float above 0");
  if (!(state.growth_factor > 1)) {
    raise<ValueError>(kWhere, "growth_factor ", state.growth_factor, ", expected a number above 1");
  }
  if (!(state.backoff_factor > 0 && state.backoff_factor < 1)) {
    raise<ValueError>(kWhere, "backoff_factor ", state.backoff_factor, ", expected a number between 0 and 1");
  }
  if (state.growth_interval < 1 || state.growth_tracker < 0) {
    raise<ValueError>(kWhere, "growth_interval ", state.growth_interval, " and growth_tracker ", state.growth_tracker,
                      ", expected at least 1 and at least 0");
  }
}

at::Tensor one_float(double value, at::Device device) {
  return at::full({1}, value, at::dtype(at::kFloat).device(device));
}

// What is in memory of a gradient: this rank's part, or the values that a sparse one has.
at::Tensor values_of(const at::Tensor& gradient) {
  if (dtensor::DTensor::is_dtensor(gradient)) return dtensor::DTensor(gradient).to_local();
  return gradient.is_sparse() ? gradient._values() : gradient;
}

// Gradients that one kernel takes.
struct Batch {
  at::ScalarType dtype;
  at::Device device;
  std::vector<at::Tensor> gradients;
};

std::vector<Batch> batches_of(const torch::optim::Optimizer& optimizer) {
  std::vector<Batch> batches;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      const auto gradient = values_of(parameter.grad());
      const auto dtype = gradient.scalar_type();
      auto batch = std::find_if(batches.begin(), batches.end(), [&](const auto& each) {
        return each.dtype == dtype && each.device == gradient.device();
      });
      if (batch == batches.end()) batch = batches.insert(batches.end(), {dtype, gradient.device(), {}});
      batch->gradients.push_back(gradient);
    }
  }
  return batches;
}

// In the order of the parameters, the same on all ranks.
std::vector<std::shared_ptr<const dtensor::DeviceMesh>> meshes_of(const torch::optim::Optimizer& optimizer) {
  std::vector<std::shared_ptr<const dtensor::DeviceMesh>> meshes;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto* impl = dtensor::distributed_impl(parameter);
      if (impl == nullptr) continue;
      if (std::find(meshes.begin(), meshes.end(), impl->mesh()) == meshes.end()) meshes.push_back(impl->mesh());
    }
  }
  return meshes;
}

void check_no_half(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined() || gradient.scalar_type() != at::kHalf) continue;
      raise<ValueError>(kWhere, "a gradient of shape ", gradient.sizes(),
                        " is Half, where dividing by the scale loses what the scale has saved, expected Float; keep "
                        "parameters in float, or step with FusedAdamW or FusedSGD without unscale_()");
    }
  }
}

}  // namespace

GradScaler::GradScaler(const GradScalerState& state, bool enabled) : state_(state), enabled_(enabled) { check(state); }

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!enabled_) return loss;
  scaled_ = true;
  // As a tensor of float: a loss in half would overflow if it were multiplied by a number.
  return loss * at::full({}, state_.scale, at::dtype(at::kFloat).device(loss.device()));
}

void GradScaler::check_scaled(const char* call) const {
  if (scaled_) return;
  raise<StateError>(kWhere, call, " without scale() in this iteration, expected scale(loss).backward() before it");
}

// Multiplies the gradients by `factor` and returns whether one of them, on any rank, was infinite or no number.
at::Tensor GradScaler::find_inf(const torch::optim::Optimizer& optimizer, double factor) const {
  at::NoGradGuard no_grad;
  const auto batches = batches_of(optimizer);
  const auto meshes = meshes_of(optimizer);
  const at::Device device = !meshes.empty()   ? at::Device(meshes.front()->device_type())
                            : batches.empty() ? at::Device(kHost)
                                              : batches.front().device;
  auto found = at::zeros({1}, at::dtype(at::kFloat).device(device));
  for (const auto& batch : batches) {
    auto found_here = one_float(0, batch.device);
    at::_amp_foreach_non_finite_check_and_unscale_(batch.gradients, found_here, one_float(factor, batch.device));
    found = at::maximum(found, found_here.to(device));
  }
  // The second number: whether there are gradients, which ranks must agree on before one of them complains.
  auto agreed = at::cat({found, one_float(batches.empty() ? 0 : 1, device)});
  for (const auto& mesh : meshes) {
    agreed = dtensor::on_mesh_device(*mesh, agreed);
    dtensor::all_reduce(*mesh, agreed, dtensor::ReduceOp::max, {"all_reduce", kWhere});
  }
  if (batches.empty() && agreed[1].item<float>() == 0) {
    raise<StateError>(kWhere, "none of the optimizer's parameters has a gradient, expected backward() before");
  }
  return agreed.narrow(0, 0, 1);
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!enabled_) return;
  check_scaled("unscale_()");
  if (const auto known = progress_.find(&optimizer); known != progress_.end()) {
    raise<StateError>(kWhere, "unscale_() after ", known->second.stage == Stage::stepped ? "step()" : "unscale_()",
                      " of the same optimizer, expected once an iteration and before step(); update() ends an "
                      "iteration");
  }
  check_no_half(optimizer);
  progress_[&optimizer] = {Stage::unscaled, find_inf(optimizer, 1.0 / state_.scale)};
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!enabled_) {
    optimizer.step();
    return true;
  }
  check_scaled("step()");
  const auto known = progress_.find(&optimizer);
  if (known != progress_.end() && known->second.stage == Stage::stepped) {
    raise<StateError>(kWhere, "step() after step() of the same optimizer, expected update() between them");
  }
  auto* fused = dynamic_cast<ScaledStep*>(&optimizer);
  at::Tensor grad_scale, found_inf;
  if (known != progress_.end()) {
    found_inf = known->second.found_inf;
  } else if (fused != nullptr) {
    found_inf = find_inf(optimizer, 1.0);
    grad_scale = one_float(state_.scale, found_inf.device());
  } else {
    unscale_(optimizer);
    found_inf = progress_.at(&optimizer).found_inf;
  }
  bool stepped = false;
  if (fused != nullptr) {
    stepped = fused->step_scaled(grad_scale, found_inf);
  } else if (found_inf.item<float>() == 0) {
    optimizer.step();
    stepped = true;
  }
  progress_[&optimizer] = {Stage::stepped, found_inf};
  return stepped;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!enabled_) return;
  if (new_scale) {
    if (!is_scale(*new_scale)) raise<ValueError>(kWhere, "scale ", *new_scale, ", expected a float above 0");
    state_.scale = *new_scale;
  } else {
    if (progress_.empty()) {
      raise<StateError>(kWhere, "update() without unscale_() or step() in this iteration, expected one of them before");
    }
    const bool found = std::any_of(progress_.begin(), progress_.end(),
                                   [](const auto& each) { return each.second.found_inf.template item<float>() != 0; });
    if (found) {
      state_.scale = std::max(state_.scale * state_.backoff_factor, double{std::numeric_limits<float>::min()});
      state_.growth_tracker = 0;
    } else if (++state_.growth_tracker >= state_.growth_interval) {
      const double grown = state_.scale * state_.growth_factor;
      if (is_scale(grown)) state_.scale = grown;
      state_.growth_tracker = 0;
    }
  }
  progress_.clear();
  scaled_ = false;
}

void GradScaler::load_state(const GradScalerState& state) {
  check(state);
  state_ = state;
}

}  // namespace hsdp

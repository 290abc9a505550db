#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>

namespace hsdp {

/// What a GradScaler starts from and what a checkpoint keeps of it.
struct GradScalerState {
  double scale = 65536.0;
  /// The scale is multiplied by this after `growth_interval` steps in a row without infinities, and by
  /// `backoff_factor` after a step with one.
  double growth_factor = 2.0, backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// Steps since the scale changed or an infinity was found.
  int64_t growth_tracker = 0;
};

/// Keeps small gradients of half-precision training above underflow: the loss is multiplied by a scale, gradients are
/// divided by it before the step, and a step whose gradients are not finite is skipped, on all ranks alike, and lowers
/// the scale. The calls of an iteration are those of torch.amp.GradScaler:
///
///   scaler.scale(loss).backward(); [scaler.unscale_(optimizer); clip] scaler.step(optimizer); scaler.update();
///
/// Works with any optimizer of torch::optim; FusedAdamW and FusedSGD unscale in their kernels. unscale_ and step are
/// collective over every mesh that the optimizer's parameters lie on: one all-reduce for each axis of more than one
/// rank. With `enabled` false every call does what a program without a scaler does. One thread at a time.
class GradScaler {
 public:
  /// Throws ValueError for a scale that is not above 0, a growth factor of at most 1, a backoff factor outside (0, 1),
  /// or an interval below 1.
  explicit GradScaler(const GradScalerState& state = {}, bool enabled = true);

  bool enabled() const { return enabled_; }
  /// 1 where the scaler is not enabled.
  double get_scale() const { return enabled_ ? state_.scale : 1.0; }

  /// The loss (or any output that backward starts from) times the scale.
  at::Tensor scale(const at::Tensor& loss);
  /// Divides the gradients by the scale, for code that looks at them before the step, such as clipping. Throws
  /// StateError a second time in an iteration and after step(), ValueError for gradients in half, where what the scale
  /// has saved would be lost.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Unscales what is not unscaled yet and steps unless an infinity or NaN was found on any rank. Returns whether it
  /// stepped. Throws StateError without scale() before it, a second time in an iteration, and where no rank has
  /// gradients.
  bool step(torch::optim::Optimizer& optimizer);
  /// Ends the iteration: lowers or raises the scale, or sets it. Throws StateError where nothing was unscaled or
  /// stepped and no scale is given.
  void update(std::optional<double> new_scale = std::nullopt);

  const GradScalerState& state() const { return state_; }
  /// Throws as the constructor does.
  void load_state(const GradScalerState& state);

 private:
  enum class Stage { unscaled, stepped };
  struct Progress {
    Stage stage;
    at::Tensor found_inf;  // one float, the same on all ranks
  };

  void check_scaled(const char* call) const;
  at::Tensor find_inf(const torch::optim::Optimizer& optimizer, double factor) const;

  GradScalerState state_;
  bool enabled_;
  bool scaled_ = false;  // scale() was called in this iteration
  std::map<const torch::optim::Optimizer*, Progress> progress_;
};

}  // namespace hsdp

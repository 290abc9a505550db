#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

namespace hsdp {

class CapturedState;
class StepCounts;

/// An optimizer whose kernels can do what a gradient scaler does around a step: unscale gradients in the precision of
/// the computation, and leave everything as it was when one of them is not finite.
class ScaledStep {
 public:
  virtual ~ScaledStep();
  /// A step on gradients that are `grad_scale` times what they should be, or unscaled ones where it is undefined; no
  /// step where `found_inf` is not 0. Both have one element of float. Gradients end unscaled. Returns whether the step
  /// was taken, which it reads on the host once the kernels are queued.
  virtual bool step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;
};

/// An optimizer whose step() a graph of the device may record, once each parameter has been stepped outside of one:
/// state is made there, and replays go on from it. A replay has the options that were recorded, learning rates among
/// them. The optimizer must outlive its replays. A step_scaled() is not recorded.
class CapturableStep {
 public:
  virtual ~CapturableStep();
  /// Replays count their steps on the device alone, and keep to the memory that state had when they were recorded. So
  /// once a step was recorded, call this before you read or write state(), and again after you wrote it: counts there
  /// become those of the device, for which the host waits, and what was written is copied to where replays find it.
  /// State that was erased begins with zeros. On the stream of the replays, or when they are done. save, load and
  /// checkpoints do this themselves; step() does not need it. Does nothing where no step was recorded.
  virtual void sync_state() = 0;
};

/// torch::optim::AdamW over libtorch's fused kernel: one call for each group, dtype and device, on this rank's parts of
/// sharded parameters and on whole plain ones. The same numbers, options, state and files. State is made like the
/// parameters, so that it is sharded as they are.
///
/// Throws ValueError for options out of range, at construction and where they were changed since, NotSupportedError for
/// parameters and gradients that the kernel cannot take (other dtypes than float, double, bfloat16 and half, gradients
/// of another dtype, sparse ones); then nothing has changed. No communication. Not thread-safe.
class FusedAdamW : public torch::optim::Optimizer, public ScaledStep, public CapturableStep {
 public:
  explicit FusedAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      torch::optim::AdamWOptions defaults = {});
  explicit FusedAdamW(std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults = {});

  at::Tensor step(LossClosure closure = nullptr) override;
  bool step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  void sync_state() override;

 private:
  std::shared_ptr<StepCounts> counts_;
  std::shared_ptr<CapturedState> captured_;
};

/// torch::optim::SGD in the same way: momentum, dampening, Nesterov, weight decay.
class FusedSGD : public torch::optim::Optimizer, public ScaledStep, public CapturableStep {
 public:
  explicit FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, torch::optim::SGDOptions defaults);
  explicit FusedSGD(std::vector<at::Tensor> parameters, torch::optim::SGDOptions defaults);

  at::Tensor step(LossClosure closure = nullptr) override;
  bool step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  void sync_state() override;

 private:
  std::shared_ptr<CapturedState> captured_;
};

}  // namespace hsdp

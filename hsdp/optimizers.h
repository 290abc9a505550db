#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <vector>

namespace hsdp {

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

/// torch::optim::AdamW over libtorch's fused kernel: one call for each group, dtype and device, on this rank's parts of
/// sharded parameters and on whole plain ones. The same numbers, options, state and files. State is made like the
/// parameters, so that it is sharded as they are.
///
/// Throws ValueError for options out of range, at construction and where they were changed since, NotSupportedError for
/// parameters and gradients that the kernel cannot take (other dtypes than float, double, bfloat16 and half, gradients
/// of another dtype, sparse ones); then nothing has changed. No communication. Not thread-safe.
class FusedAdamW : public torch::optim::Optimizer, public ScaledStep {
 public:
  explicit FusedAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      torch::optim::AdamWOptions defaults = {});
  explicit FusedAdamW(std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults = {});

  at::Tensor step(LossClosure closure = nullptr) override;
  bool step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

/// torch::optim::SGD in the same way: momentum, dampening, Nesterov, weight decay.
class FusedSGD : public torch::optim::Optimizer, public ScaledStep {
 public:
  explicit FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, torch::optim::SGDOptions defaults);
  explicit FusedSGD(std::vector<at::Tensor> parameters, torch::optim::SGDOptions defaults);

  at::Tensor step(LossClosure closure = nullptr) override;
  bool step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace hsdp

#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace models {

/// Root-mean-square normalisation over the last dim with a learned scale: x / sqrt(mean(x^2) + eps) * weight.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t size, double eps);

  /// (..., size) -> (..., size), same dtype.
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RmsNorm);

}  // namespace models

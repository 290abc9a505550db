#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <vector>

namespace models {

enum class Activation { relu, gelu, silu, tanh };

/// Linear layers with biases, an activation between them and none after the last. Layer i is `layers.i`.
class MlpImpl : public torch::nn::Module {
 public:
  /// sizes[0] inputs, sizes.back() outputs, one Linear for each neighbouring pair; torch's own initialisation. Throws
  /// std::invalid_argument for fewer than two sizes or one that is not positive.
  explicit MlpImpl(const std::vector<int64_t>& sizes, Activation activation = Activation::relu);

  /// (..., sizes[0]) -> (..., sizes.back()).
  torch::Tensor forward(torch::Tensor x);

  torch::nn::ModuleList layers{nullptr};

 private:
  Activation activation_;
};
TORCH_MODULE(Mlp);

}  // namespace models

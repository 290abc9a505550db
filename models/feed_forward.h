#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace models {

/// SwiGLU feed-forward: down(silu(gate(x)) * up(x)), without biases.
class FeedForwardImpl : public torch::nn::Module {
 public:
  FeedForwardImpl(int64_t hidden_size, int64_t intermediate_size);

  /// (..., hidden_size) -> (..., hidden_size).
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(FeedForward);

}  // namespace models

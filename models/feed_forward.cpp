#include "models/feed_forward.h"

#include <torch/torch.h>

namespace models {

FeedForwardImpl::FeedForwardImpl(int64_t hidden_size, int64_t intermediate_size) {
  const auto linear = [](int64_t in, int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  gate_proj = register_module("gate_proj", linear(hidden_size, intermediate_size));
  up_proj = register_module("up_proj", linear(hidden_size, intermediate_size));
  down_proj = register_module("down_proj", linear(intermediate_size, hidden_size));
}

torch::Tensor FeedForwardImpl::forward(const torch::Tensor& x) {
  return down_proj->forward(torch::silu(gate_proj->forward(x)) * up_proj->forward(x));
}

}  // namespace models

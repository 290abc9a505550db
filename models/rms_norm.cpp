#include "models/rms_norm.h"

#include <torch/torch.h>

namespace models {

RmsNormImpl::RmsNormImpl(int64_t size, double eps)
    : weight(register_parameter("weight", torch::ones({size}))), eps_(eps) {}

torch::Tensor RmsNormImpl::forward(const torch::Tensor& x) {
  return torch::rms_norm(x, {weight.size(0)}, weight, eps_);
}

}  // namespace models

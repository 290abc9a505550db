#include "models/rotary.h"

#include <torch/torch.h>

namespace models {

RotaryTables rotary_tables(int64_t length, int64_t head_dim, double theta, const at::Tensor& like) {
  const auto dtype = like.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
  const auto options = torch::TensorOptions().dtype(dtype).device(like.device());
  const torch::Tensor frequencies = torch::pow(theta, torch::arange(0, head_dim, 2, options) / -double(head_dim));
  const torch::Tensor angles = torch::outer(torch::arange(length, options), frequencies).repeat({1, 2});
  return {angles.cos().to(like.scalar_type()), angles.sin().to(like.scalar_type())};
}

at::Tensor apply_rotary(const at::Tensor& x, const RotaryTables& tables) {
  const auto halves = x.chunk(2, -1);
  return x * tables.cos + torch::cat({-halves[1], halves[0]}, -1) * tables.sin;
}

}  // namespace models

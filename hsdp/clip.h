#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace hsdp {

/// Scales the gradients of `parameters` in place so that their global norm is at most `max_norm`, and returns the norm
/// before that: the numbers of torch::nn::utils::clip_grad_norm_ on the unsharded module. All distributed gradients
/// cost one all-reduce. `norm_type` > 0, infinity included. Collective. Throws ValueError for other norm types.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0);

}  // namespace hsdp

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace hsdp {

/// Scales the gradients of `parameters` in place so that their global norm is at most `max_norm`, and returns the norm
/// before that: the numbers of torch::nn::utils::clip_grad_norm_ on the unsharded module. All distributed gradients
/// cost one all-reduce. `norm_type` > 0, infinity included. Collective. Throws ValueError for other norm types. Waits
/// for the device, which has the norm.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0);

/// The same numbers without waiting: the norm is a 0-dim double tensor where the gradients are, and gradients within
/// the norm are multiplied by 1. Where gradients lie on several devices, it waits all the same.
at::Tensor clip_grad_norm_on_device_(const std::vector<at::Tensor>& parameters, double max_norm,
                                     double norm_type = 2.0);

}  // namespace hsdp

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

namespace hsdp {

class ShardedModule;
template <class M>
class FullySharded;

/// Makes the optimizer of one parameter.
using ParameterOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const at::Tensor& parameter)>;

/// From now on each parameter of the module that requires grad is stepped by an optimizer of its own in the middle of
/// backward, as soon as its gradient is reduced, and the gradient is dropped: at no time are there gradients of more
/// units than are being reduced. `zero_grad` and `step` have no place in such a loop, nor has what needs all gradients
/// at once, such as clipping by their norm or a gradient scaler. The numbers are those of an ordinary loop.
///
/// `module` is what the outermost fully_shard call returned. Returns the optimizers in the order of the units'
/// parameters, for learning rates and state; the module keeps them as well. Ignored parameters keep their gradients. A
/// second call replaces the first. Throws StateError for a part of a larger sharded module, ValueError where `make`
/// gives no optimizer or one over anything but the parameter.
///
/// A backward that gives a parameter a second gradient, after its step, is a StateError: one backward goes through one
/// forward of each unit.
std::vector<std::shared_ptr<torch::optim::Optimizer>> apply_optimizer_in_backward(ShardedModule& module,
                                                                                  const ParameterOptimizer& make);

template <class M>
std::vector<std::shared_ptr<torch::optim::Optimizer>> apply_optimizer_in_backward(const FullySharded<M>& model,
                                                                                  const ParameterOptimizer& make) {
  return apply_optimizer_in_backward(*model.core(), make);
}

}  // namespace hsdp

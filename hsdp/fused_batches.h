#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <vector>

#include "hsdp/host.h"

namespace hsdp {

/// Parameters and gradients of one group, dtype and device, which a fused kernel takes in one call. Gradients lie in
/// memory as their parameters do, which the kernels rely on and do not check.
class FusedBatch {
 public:
  const torch::optim::OptimizerOptions& options() const { return *options_; }
  /// What the function given to fused_batches said of these parameters.
  bool fresh() const { return fresh_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& gradients() const { return gradients_; }
  /// Where the kernel runs and where its scalars have to be.
  at::Device device() const { return device_; }
  /// Gradients that had to be copied to lie as the parameters do take over what the kernel left in the copies.
  void finish_unscaling() const;

 private:
  friend std::vector<FusedBatch> fused_batches(
      const char* where, const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const std::function<bool(const torch::optim::OptimizerOptions&, const at::Tensor&)>& fresh);
  struct Copied {
    at::Tensor original, copy;
  };

  const torch::optim::OptimizerOptions* options_ = nullptr;
  bool fresh_ = false;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = kHost;
  std::vector<at::Tensor> parameters_, gradients_;
  std::vector<Copied> copied_;
};

/// The parameters that have a gradient, checked and put together. Parameters for which `fresh` differs are not in one
/// batch. Throws NotSupportedError for what no fused kernel can take, ValueError for a gradient that lies elsewhere.
std::vector<FusedBatch> fused_batches(
    const char* where, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::function<bool(const torch::optim::OptimizerOptions&, const at::Tensor&)>& fresh);

/// An optimizer's state for a fused kernel: `state` itself where it has the parameter's dtype and lies in memory as it
/// does, else a copy that does; of a whole one, as a file of an unsharded run holds it, this rank's part. Zeros where
/// it is undefined.
at::Tensor state_like(const at::Tensor& parameter, const at::Tensor& state);

/// What this rank holds of a tensor, sharded or plain.
const at::Tensor& held_part(const at::Tensor& tensor);

/// Whether the k-th element in memory of one is the k-th of the other, of the same dtype and on the same device:
/// state_like then returns the state itself.
bool lies_like(const at::Tensor& parameter, const at::Tensor& other);

}  // namespace hsdp

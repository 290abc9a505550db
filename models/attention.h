#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "models/rotary.h"
#include "models/transformer_config.h"

namespace models {

/// Causal self-attention with rotary positions and, where n_kv_heads is smaller than n_heads, grouped queries.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const TransformerConfig& config);

  /// (batch, length, hidden_size) -> the same shape; `rotary` has `length` rows.
  torch::Tensor forward(const torch::Tensor& x, const RotaryTables& rotary);

  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};

 private:
  int64_t head_dim_;
  bool grouped_;
};
TORCH_MODULE(Attention);

}  // namespace models

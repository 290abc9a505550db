#include "models/attention.h"

#include <torch/torch.h>

namespace models {

AttentionImpl::AttentionImpl(const TransformerConfig& config)
    : head_dim_(config.head_dim()), grouped_(config.kv_heads() != config.n_heads) {
  const auto linear = [](int64_t in, int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  const int64_t kv_size = config.kv_heads() * head_dim_;
  q_proj = register_module("q_proj", linear(config.hidden_size, config.hidden_size));
  k_proj = register_module("k_proj", linear(config.hidden_size, kv_size));
  v_proj = register_module("v_proj", linear(config.hidden_size, kv_size));
  o_proj = register_module("o_proj", linear(config.hidden_size, config.hidden_size));
}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x, const RotaryTables& rotary) {
  // (batch, length, heads * head_dim) -> (batch, heads, length, head_dim)
  const auto heads = [this](const torch::Tensor& features) {
    return features.unflatten(-1, {-1, head_dim_}).transpose(1, 2);
  };
  const torch::Tensor q = apply_rotary(heads(q_proj->forward(x)), rotary);
  const torch::Tensor k = apply_rotary(heads(k_proj->forward(x)), rotary);
  const torch::Tensor v = heads(v_proj->forward(x));
  const torch::Tensor y = torch::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                              /*is_causal=*/true, /*scale=*/std::nullopt, grouped_);
  return o_proj->forward(y.transpose(1, 2).flatten(2));
}

}  // namespace models

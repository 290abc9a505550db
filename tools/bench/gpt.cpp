#include "tools/bench/gpt.h"

#include <torch/torch.h>

namespace bench {

using torch::nn::Linear;
using torch::nn::LinearOptions;

namespace {

torch::nn::LayerNorm layer_norm(int64_t width) { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})); }

}  // namespace

GptBlockImpl::GptBlockImpl(const GptConfig& config)
    : heads_(config.heads()),
      norm1_(register_module("norm1", layer_norm(config.width))),
      norm2_(register_module("norm2", layer_norm(config.width))),
      qkv_(register_module("qkv", Linear(config.width, 3 * config.width))),
      out_(register_module("out", Linear(config.width, config.width))),
      up_(register_module("up", Linear(config.width, 4 * config.width))),
      down_(register_module("down", Linear(4 * config.width, config.width))) {}

at::Tensor GptBlockImpl::forward(const at::Tensor& x) {
  const auto batch = x.size(0), length = x.size(1), width = x.size(2);
  const auto qkv = qkv_(norm1_(x)).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4}).unbind(0);
  const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
  const auto y = x + out_(mixed.transpose(1, 2).reshape({batch, length, width}));
  return y + down_(at::gelu(up_(norm2_(y))));
}

GptImpl::GptImpl(const GptConfig& config)
    : tokens_(register_module("tokens", torch::nn::Embedding(config.vocabulary, config.width))),
      positions_(register_module("positions", torch::nn::Embedding(config.sequence, config.width))),
      blocks_(register_module("blocks", torch::nn::ModuleList())),
      norm_(register_module("norm", layer_norm(config.width))),
      head_(register_module("head", Linear(LinearOptions(config.width, config.vocabulary).bias(false)))) {
  for (int64_t i = 0; i < config.layers; ++i) blocks_->push_back(GptBlock(config));
}

at::Tensor GptImpl::forward(const at::Tensor& ids) {
  auto x = tokens_(ids) + positions_(torch::arange(ids.size(1), ids.options()));
  for (const auto& block : *blocks_) x = block->as<GptBlock>()->forward(x);
  return head_(norm_(x));
}

}  // namespace bench

#include "models/transformer.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace models {
namespace {

constexpr double kInitStd = 0.02;

template <class... Parts>
[[noreturn]] void refuse_call(const char* where, const Parts&... parts) {
  throw std::invalid_argument(c10::str("[", where, "] ", parts...));
}

const TransformerConfig& validated(const TransformerConfig& config) {
  config.validate();
  return config;
}

}  // namespace

TransformerBlockImpl::TransformerBlockImpl(const TransformerConfig& config) {
  self_attn = register_module("self_attn", Attention(config));
  mlp = register_module("mlp", FeedForward(config.hidden_size, config.intermediate_size));
  input_layernorm = register_module("input_layernorm", RmsNorm(config.hidden_size, config.norm_eps));
  post_attention_layernorm = register_module("post_attention_layernorm", RmsNorm(config.hidden_size, config.norm_eps));
  const double residual_std = kInitStd / std::sqrt(2.0 * double(config.n_layers));
  for (const auto& linear : {self_attn->q_proj, self_attn->k_proj, self_attn->v_proj, mlp->gate_proj, mlp->up_proj}) {
    torch::nn::init::normal_(linear->weight, 0.0, kInitStd);
  }
  for (const auto& linear : {self_attn->o_proj, mlp->down_proj}) {
    torch::nn::init::normal_(linear->weight, 0.0, residual_std);
  }
}

torch::Tensor TransformerBlockImpl::forward(const torch::Tensor& x, const RotaryTables& rotary) {
  const torch::Tensor y = x + self_attn->forward(input_layernorm->forward(x), rotary);
  return y + mlp->forward(post_attention_layernorm->forward(y));
}

DecoderImpl::DecoderImpl(const TransformerConfig& config) : config_(config) {
  embed_tokens = register_module("embed_tokens", torch::nn::Embedding(config.vocab_size, config.hidden_size));
  torch::nn::init::normal_(embed_tokens->weight, 0.0, kInitStd);
  layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.n_layers; ++i) layers->push_back(TransformerBlock(config));
  norm = register_module("norm", RmsNorm(config.hidden_size, config.norm_eps));
}

torch::Tensor DecoderImpl::forward(const torch::Tensor& ids) {
  torch::Tensor x = embed_tokens->forward(ids);
  const RotaryTables rotary = rotary_tables(ids.size(1), config_.head_dim(), config_.rope_theta, x);
  for (const auto& layer : *layers) x = layer->as<TransformerBlock>()->forward(x, rotary);
  return norm->forward(x);
}

TransformerImpl::TransformerImpl(const TransformerConfig& config) : config_(validated(config)) {
  model = register_module("model", Decoder(config));
  if (!config.tie_embeddings) {
    lm_head = register_module(
        "lm_head", torch::nn::Linear(torch::nn::LinearOptions(config.hidden_size, config.vocab_size).bias(false)));
    torch::nn::init::normal_(lm_head->weight, 0.0, kInitStd);
  }
}

torch::Tensor TransformerImpl::head(const torch::Tensor& features) {
  return config_.tie_embeddings ? torch::linear(features, model->embed_tokens->weight) : lm_head->forward(features);
}

torch::Tensor TransformerImpl::forward(const torch::Tensor& ids) {
  if (ids.dim() != 2 || ids.scalar_type() != torch::kInt64) {
    refuse_call("Transformer::forward", "ids are ", ids.scalar_type(), " of shape ", ids.sizes(),
                ", expected int64 token ids of shape (batch, length)");
  }
  if (ids.size(1) > config_.max_sequence_length) {
    refuse_call("Transformer::forward", "ids have length ", ids.size(1), ", expected at most max_sequence_length ",
                config_.max_sequence_length);
  }
  return head(model->forward(ids));
}

torch::Tensor TransformerImpl::generate(torch::Tensor ids, int64_t count, double temperature,
                                        std::optional<at::Generator> generator) {
  if (ids.dim() != 2 || ids.numel() == 0 || ids.scalar_type() != torch::kInt64) {
    refuse_call("Transformer::generate", "ids are ", ids.scalar_type(), " of shape ", ids.sizes(),
                ", expected at least one int64 token id in each row of (batch, length)");
  }
  if (count < 0 || !(temperature >= 0.0) || std::isinf(temperature)) {
    refuse_call("Transformer::generate", "count ", count, " and temperature ", temperature,
                ", expected a count of 0 or more and a finite temperature of 0 or more");
  }
  const torch::NoGradGuard no_grad;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = std::min(ids.size(1), config_.max_sequence_length);
    const torch::Tensor features = model->forward(ids.slice(1, ids.size(1) - length));
    const torch::Tensor logits = head(features.select(1, length - 1)).to(torch::kCPU, torch::kFloat32);
    // Drawn on the CPU, so that every rank and every kind of device draws the same tokens from the same seed.
    const torch::Tensor next = temperature == 0.0 ? logits.argmax(-1, /*keepdim=*/true)
                                                  : torch::multinomial(torch::softmax(logits / temperature, -1), 1,
                                                                       /*replacement=*/false, generator);
    ids = torch::cat({ids, next.to(ids.device())}, 1);
  }
  return ids;
}

}  // namespace models

#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <optional>

#include "models/attention.h"
#include "models/feed_forward.h"
#include "models/rms_norm.h"
#include "models/transformer_config.h"

namespace models {

/// One layer: x + attention(norm(x)), then x + feed_forward(norm(x)). The usual unit of sharding.
class TransformerBlockImpl : public torch::nn::Module {
 public:
  explicit TransformerBlockImpl(const TransformerConfig& config);

  /// (batch, length, hidden_size) -> the same shape.
  torch::Tensor forward(const torch::Tensor& x, const RotaryTables& rotary);

  Attention self_attn{nullptr};
  FeedForward mlp{nullptr};
  RmsNorm input_layernorm{nullptr}, post_attention_layernorm{nullptr};
};
TORCH_MODULE(TransformerBlock);

/// Embedding, layers and final norm: token ids to features, everything but the output head.
class DecoderImpl : public torch::nn::Module {
 public:
  explicit DecoderImpl(const TransformerConfig& config);

  /// ids (batch, length) int64 -> (batch, length, hidden_size).
  torch::Tensor forward(const torch::Tensor& ids);

  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::ModuleList layers{nullptr};
  RmsNorm norm{nullptr};

 private:
  TransformerConfig config_;
};
TORCH_MODULE(Decoder);

/// A decoder-only language model in plain libtorch. Its parameters are named as in a Llama checkpoint:
/// `model.embed_tokens.weight`, `model.layers.0.self_attn.q_proj.weight`, ..., `model.norm.weight`, `lm_head.weight`.
///
/// Weights start as Normal(0, 0.02), projections that write to the residual stream as Normal(0, 0.02 / sqrt(2
/// n_layers)) so that the stream's variance does not grow with depth, norm scales as 1. Not thread-safe, like any torch
/// module.
class TransformerImpl : public torch::nn::Module {
 public:
  /// Throws std::invalid_argument as TransformerConfig::validate does.
  explicit TransformerImpl(const TransformerConfig& config);

  /// ids (batch, length) int64 -> logits (batch, length, vocab_size). Throws std::invalid_argument for another shape or
  /// dtype or a length above max_sequence_length.
  torch::Tensor forward(const torch::Tensor& ids);

  /// Appends `count` sampled tokens to ids (batch, length) and returns (batch, length + count). Each token is drawn
  /// from softmax(logits / temperature) on the CPU with `generator` (default: torch's own); temperature 0 takes the
  /// most likely token. Only the last max_sequence_length tokens are looked at. No gradients. Throws
  /// std::invalid_argument for a negative count or temperature, or ids without a token.
  torch::Tensor generate(torch::Tensor ids, int64_t count, double temperature = 1.0,
                         std::optional<at::Generator> generator = std::nullopt);

  const TransformerConfig& config() const { return config_; }

  Decoder model{nullptr};
  /// Empty when the embeddings are tied.
  torch::nn::Linear lm_head{nullptr};

 private:
  torch::Tensor head(const torch::Tensor& features);

  TransformerConfig config_;
};
TORCH_MODULE(Transformer);

}  // namespace models

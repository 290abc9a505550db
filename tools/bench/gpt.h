#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace bench {

/// Unless told otherwise: one token a byte.
inline constexpr int64_t kVocab = 256;

struct GptConfig {
  int64_t width = 64, layers = 2, sequence = 32, vocabulary = kVocab;
  /// Of 64 features each, at least one.
  int64_t heads() const { return width < 64 ? 1 : width / 64; }
};

/// A pre-norm block with fused qkv and a GELU MLP of four times the width; the unit of sharding.
class GptBlockImpl : public torch::nn::Module {
 public:
  explicit GptBlockImpl(const GptConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  int64_t heads_;
  torch::nn::LayerNorm norm1_, norm2_;
  torch::nn::Linear qkv_, out_, up_, down_;
};
TORCH_MODULE(GptBlock);

/// The model that is timed, in plain libtorch: learned positions, untied head. peer.py has the same in Python.
class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const GptConfig& config);
  /// ids (batch, length) int64 -> logits (batch, length, vocabulary).
  at::Tensor forward(const at::Tensor& ids);

 private:
  torch::nn::Embedding tokens_, positions_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Gpt);

/// As if each token were its own successor: what is learnt does not matter. forward(ids) gives logits; the loss is
/// computed in float.
template <class Forward>
at::Tensor loss_of(const Forward& forward, const at::Tensor& ids) {
  const at::Tensor logits = forward(ids).to(at::kFloat);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.view({-1}));
}

}  // namespace bench

#pragma once

#include <torch/nn/modules.h>
#include <torch/torch.h>

#include <string>
#include <vector>

/// Modules that the multi-rank tests train: plain libtorch, each with a habit that a sharded run must bear. Inputs of
/// all are a batch `x` of `batch` rows (see inputs_for) and each returns a tensor to take a loss on.
namespace testing_support {

/// Linear layers of odd sizes, several with fewer rows than there are ranks.
struct OddMlpImpl : torch::nn::Module {
  OddMlpImpl() {
    const std::vector<int64_t> sizes{5, 7, 3, 1, 2};
    for (size_t i = 0; i + 1 < sizes.size(); ++i) {
      layers->push_back(torch::nn::Linear(sizes[i], sizes[i + 1]));
    }
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(OddMlp);

/// Weights that are only ever read through a view: each of the four is the whole of its unit's use.
struct ChunkedImpl : torch::nn::Module {
  ChunkedImpl(int64_t in, int64_t out) { weight = register_parameter("weight", torch::randn({3 * out, in}) * 0.3); }
  torch::Tensor forward(torch::Tensor x) {
    auto parts = weight.chunk(3);
    return torch::linear(x, parts[0]) * torch::sigmoid(torch::linear(x, parts[1])) + torch::linear(x, parts[2]);
  }
  torch::Tensor weight;
};
TORCH_MODULE(Chunked);

struct ViewedImpl : torch::nn::Module {
  ViewedImpl(int64_t in, int64_t out) : sizes{in, out} {
    weight = register_parameter("weight", torch::randn({in * out}) * 0.3);
  }
  torch::Tensor forward(torch::Tensor x) { return x.matmul(weight.view(sizes)); }
  std::vector<int64_t> sizes;
  torch::Tensor weight;
};
TORCH_MODULE(Viewed);

struct TransposedImpl : torch::nn::Module {
  TransposedImpl(int64_t in, int64_t out) { weight = register_parameter("weight", torch::randn({out, in}) * 0.3); }
  torch::Tensor forward(torch::Tensor x) { return x.matmul(weight.transpose(0, 1)); }
  torch::Tensor weight;
};
TORCH_MODULE(Transposed);

struct BiasFreeImpl : torch::nn::Module {
  BiasFreeImpl(int64_t in, int64_t out)
      : linear(register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)))) {}
  torch::Tensor forward(torch::Tensor x) { return linear(x); }
  torch::nn::Linear linear;
};
TORCH_MODULE(BiasFree);

/// A chain of the four above on 2-D or 3-D input.
struct ViewChainImpl : torch::nn::Module {
  ViewChainImpl()
      : first(register_module("first", BiasFree(6, 5))),
        chunked(register_module("chunked", Chunked(5, 7))),
        viewed(register_module("viewed", Viewed(7, 4))),
        transposed(register_module("transposed", Transposed(4, 5))),
        last(register_module("last", BiasFree(5, 3))) {}
  torch::Tensor forward(torch::Tensor x) {
    return last(torch::tanh(transposed(torch::tanh(viewed(torch::tanh(chunked(torch::tanh(first(x)))))))));
  }
  BiasFree first{nullptr};
  Chunked chunked{nullptr};
  Viewed viewed{nullptr};
  Transposed transposed{nullptr};
  BiasFree last{nullptr};
};
TORCH_MODULE(ViewChain);

/// One of each stock module, a raw parameter and a buffer. Its batch-wide statistics need the whole batch on every
/// rank.
struct ZooImpl : torch::nn::Module {
  ZooImpl()
      : conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 7, 3).padding(1)))),
        bn(register_module("bn", torch::nn::BatchNorm2d(7))),
        linear(register_module("linear", torch::nn::Linear(7 * 16, 10))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({10})))),
        attention(register_module("attention", torch::nn::MultiheadAttention(10, 2))),
        lstm(register_module("lstm", torch::nn::LSTM(10, 6))),
        embedding(
            register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 10).padding_idx(9)))),
        encoder(register_module(
            "encoder", torch::nn::TransformerEncoder(
                           torch::nn::TransformerEncoderLayer(
                               torch::nn::TransformerEncoderLayerOptions(10, 2).dropout(0).dim_feedforward(13)),
                           2))),
        head(register_module("head", torch::nn::Linear(6, 4))) {
    scale = register_parameter("scale", torch::rand({1}) * 2 + 1);
    ramp = register_buffer("ramp", torch::arange(10) / 10.0);
  }
  torch::Tensor forward(torch::Tensor images, torch::Tensor tokens) {
    auto x = torch::relu(bn(conv(images))).flatten(1);
    x = linear(x) + ramp * scale;
    x = (norm(x) + embedding(tokens)).unsqueeze(0);
    x = encoder(x);
    x = std::get<0>(attention(x, x, x));
    x = std::get<0>(lstm(x));
    return head(x.squeeze(0));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d bn{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Embedding embedding{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::Linear head{nullptr};
  torch::Tensor scale, ramp;
};
TORCH_MODULE(Zoo);

}  // namespace testing_support

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

#include "tests/testing/construction.h"

namespace module_construction_test {

using namespace torch::indexing;
using testing_support::expect_replay_matches;
using testing_support::Listed;
using testing_support::Pattern;
using torch::Tensor;

struct RawAttention : Listed {
  RawAttention(int64_t width, int64_t length) {
    const float k = 1.f / std::sqrt(static_cast<float>(width));
    wq = register_parameter("wq", torch::rand({width, width}) * (2 * k) - k);
    wk = register_parameter("wk", torch::rand({width, width}) * (2 * k) - k);
    mask = register_buffer("mask", torch::triu(torch::ones({length, length}), 1));
  }
  Tensor wq, wk, mask;
};

struct SineTable : Listed {
  SineTable(int64_t length, int64_t width) {
    pe = torch::zeros({length, width});
    auto p = torch::arange(0, length, torch::kFloat).unsqueeze(1);
    auto div = torch::exp(torch::arange(0, width, 2, torch::kFloat) * (-std::log(10000.0) / width));
    pe.index_put_({"...", Slice(0, None, 2)}, torch::sin(p * div));
    pe.index_put_({"...", Slice(1, None, 2)}, torch::cos(p * div));
    pe = pe.unsqueeze(0);
    register_buffer("pe", pe);
  }
  Tensor pe;
};

struct EveryPattern : Listed {
  EveryPattern(int64_t vocabulary, int64_t length, int64_t width) {
    embedding = register_module("embedding", torch::nn::Embedding(vocabulary, width));
    sine = register_module("sine", std::make_shared<SineTable>(length, width));
    for (int i = 0; i < 2; ++i) {
      heads.push_back(register_module("head" + std::to_string(i), std::make_shared<RawAttention>(width, length)));
    }
    ff = register_module("ff", torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::SiLU(),
                                                     torch::nn::Linear(4 * width, width)));
    for (int i = 0; i < 2; ++i) blocks->push_back(torch::nn::Linear(width, width));
    register_module("blocks", blocks);
    out = register_module("out", torch::nn::Linear(width, vocabulary));
    apply([](torch::nn::Module& m) {
      if (auto* linear = m.as<torch::nn::Linear>()) {
        torch::NoGradGuard no_grad;
        torch::nn::init::xavier_uniform_(linear->weight);
        if (linear->bias.defined()) torch::nn::init::constant_(linear->bias, 0.01);
      }
    });
    {
      torch::NoGradGuard no_grad;
      embedding->weight[3].fill_(0.5);
      embedding->weight.mul_(0.5);
      torch::nn::init::orthogonal_(out->weight);
    }
    causal = torch::zeros({length, length});
    causal.masked_fill_(torch::ones({length, length}).triu(1).to(torch::kBool), -1e9);
    table = torch::tensor({1.5f, 2.5f, 3.5f});
    if (table[1].item<float>() != 2.5f) throw std::runtime_error("table");
  }
  std::vector<Tensor> members() const override { return {causal, table}; }

  torch::nn::Embedding embedding{nullptr};
  std::shared_ptr<SineTable> sine;
  std::vector<std::shared_ptr<RawAttention>> heads;
  torch::nn::Sequential ff{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Linear out{nullptr};
  Tensor causal, table;
};

struct Stock : Listed {
  Stock() {
    namespace nn = torch::nn;
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 70, 5).groups(1)));
    transposed = register_module("transposed", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 9, 3)));
    norm = register_module("norm", nn::BatchNorm2d(70));
    layer_norm = register_module("layer_norm", nn::LayerNorm(nn::LayerNormOptions({33})));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(33, 40).num_layers(2).bidirectional(true)));
    gru = register_module("gru", nn::GRU(nn::GRUOptions(5, 6)));
    attention = register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(48, 4)));
    embedding = register_module("embedding", nn::Embedding(nn::EmbeddingOptions(301, 31).padding_idx(5)));
    bag = register_module("bag", nn::EmbeddingBag(nn::EmbeddingBagOptions(11, 3)));
    bilinear = register_module("bilinear", nn::Bilinear(5, 7, 200));
    encoder = register_module(
        "encoder", nn::TransformerEncoder(nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(32, 4)), 2));
    linear = register_module("linear", nn::Linear(65, 130));
    prelu = register_module("prelu", nn::PReLU());
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::ConvTranspose2d transposed{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::LayerNorm layer_norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::Embedding embedding{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
  torch::nn::Bilinear bilinear{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::nn::PReLU prelu{nullptr};
};

// A forward in the constructor, to learn a size.
struct ProbesItsSize : Listed {
  ProbesItsSize() {
    namespace nn = torch::nn;
    features = register_module("features", nn::Sequential(nn::Conv2d(3, 40, 5), nn::BatchNorm2d(40), nn::ReLU(),
                                                          nn::MaxPool2d(2), nn::Dropout(0.5)));
    auto probe = features->forward(torch::randn({2, 3, 12, 12})).flatten(1);
    head = register_module("head", nn::Linear(probe.size(1), 10));
  }
  torch::nn::Sequential features{nullptr};
  torch::nn::Linear head{nullptr};
};

struct Converted : Listed {
  Converted() {
    linear = register_module("linear", torch::nn::Linear(100, 100));
    norm = register_module("norm", torch::nn::BatchNorm1d(100));
    to(torch::kDouble);
    torch::NoGradGuard no_grad;
    linear->weight.add_(1e-12);
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

struct Clones : Listed {
  Clones() {
    first = register_module("first", torch::nn::Linear(80, 80));
    second = register_module("second", std::dynamic_pointer_cast<torch::nn::LinearImpl>(first->clone()));
    torch::NoGradGuard no_grad;
    second->weight.mul_(2);
  }
  torch::nn::Linear first{nullptr};
  std::shared_ptr<torch::nn::LinearImpl> second;
};

struct Tied : Listed {
  Tied() {
    embedding = register_module("embedding", torch::nn::Embedding(120, 60));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(60, 120).bias(false)));
    head->weight = embedding->weight;
    torch::NoGradGuard no_grad;
    head->weight.mul_(3);
  }
  std::vector<Tensor> members() const override { return {head->weight}; }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear head{nullptr};
};

struct BufferReassigned : Listed {
  BufferReassigned() {
    table = register_buffer("table", torch::rand({100, 100}));
    table = table.t();
    named_buffers()["table"].set_data(table + 1);
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    norm->running_mean = torch::full({3}, 2.0);
  }
  std::vector<Tensor> members() const override { return {table, norm->running_mean}; }
  Tensor table;
  torch::nn::BatchNorm1d norm{nullptr};
};

const Pattern kPatterns[] = {
    {"EveryPattern", [] { return std::make_shared<EveryPattern>(101, 96, 64); }},
    {"EveryPatternSmall", [] { return std::make_shared<EveryPattern>(11, 6, 8); }},
    {"Stock", [] { return std::make_shared<Stock>(); }},
    {"ProbesItsSize", [] { return std::make_shared<ProbesItsSize>(); }},
    {"ConvertedToDouble", [] { return std::make_shared<Converted>(); }},
    {"Clones", [] { return std::make_shared<Clones>(); }},
    {"Tied", [] { return std::make_shared<Tied>(); }},
    {"BufferReassigned", [] { return std::make_shared<BufferReassigned>(); }},
};

class ModuleConstruction : public testing::TestWithParam<Pattern> {};

TEST_P(ModuleConstruction, ReplayIsBitIdentical) { expect_replay_matches(GetParam().factory); }

INSTANTIATE_TEST_SUITE_P(Patterns, ModuleConstruction, testing::ValuesIn(kPatterns),
                         [](const auto& which) { return which.param.name; });

}  // namespace module_construction_test

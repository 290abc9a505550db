#include "models/transformer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "models/attention.h"
#include "models/mlp.h"
#include "models/rms_norm.h"
#include "models/rotary.h"

namespace models {
namespace transformer_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TransformerConfig small_config() {
  return {.vocab_size = 17,
          .hidden_size = 16,
          .intermediate_size = 24,
          .n_layers = 2,
          .n_heads = 4,
          .n_kv_heads = 0,
          .max_sequence_length = 12};
}

std::set<std::string> names(const torch::nn::Module& module) {
  std::set<std::string> result;
  for (const auto& entry : module.named_parameters()) result.insert(entry.key());
  return result;
}

at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

torch::Tensor random_ids(int64_t batch, int64_t length, int64_t vocab_size) {
  return torch::randint(vocab_size, {batch, length}, torch::kInt64);
}

template <class Work>
std::string refusal(const Work& work) {
  try {
    work();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Transformer, ParametersAreNamedAsInALlamaCheckpoint) {
  TransformerConfig config = small_config();
  config.n_layers = 1;
  const std::set<std::string> expected = {
      "model.embed_tokens.weight",
      "model.layers.0.self_attn.q_proj.weight",
      "model.layers.0.self_attn.k_proj.weight",
      "model.layers.0.self_attn.v_proj.weight",
      "model.layers.0.self_attn.o_proj.weight",
      "model.layers.0.mlp.gate_proj.weight",
      "model.layers.0.mlp.up_proj.weight",
      "model.layers.0.mlp.down_proj.weight",
      "model.layers.0.input_layernorm.weight",
      "model.layers.0.post_attention_layernorm.weight",
      "model.norm.weight",
      "lm_head.weight",
  };
  EXPECT_EQ(names(*Transformer(config)), expected);
  EXPECT_TRUE(Transformer(config)->buffers().empty());

  config.tie_embeddings = true;
  std::set<std::string> tied = expected;
  tied.erase("lm_head.weight");
  EXPECT_EQ(names(*Transformer(config)), tied);
}

TEST(Transformer, ShapesFollowTheConfiguration) {
  TransformerConfig config = small_config();
  config.n_kv_heads = 2;
  Transformer model(config);
  const auto shape = [&](const char* name) { return model->named_parameters()[name].sizes().vec(); };
  EXPECT_THAT(shape("model.embed_tokens.weight"), ElementsAre(17, 16));
  EXPECT_THAT(shape("model.layers.1.self_attn.q_proj.weight"), ElementsAre(16, 16));
  EXPECT_THAT(shape("model.layers.1.self_attn.k_proj.weight"), ElementsAre(8, 16));
  EXPECT_THAT(shape("model.layers.1.self_attn.v_proj.weight"), ElementsAre(8, 16));
  EXPECT_THAT(shape("model.layers.1.mlp.gate_proj.weight"), ElementsAre(24, 16));
  EXPECT_THAT(shape("model.layers.1.mlp.down_proj.weight"), ElementsAre(16, 24));
  EXPECT_THAT(model->forward(random_ids(3, 5, 17)).sizes().vec(), ElementsAre(3, 5, 17));
}

TEST(Transformer, WeightsStartWithTheSpreadOfTheirRole) {
  torch::manual_seed(0);
  TransformerConfig config = small_config();
  config.vocab_size = 256;
  config.hidden_size = 128;
  config.intermediate_size = 256;
  config.n_layers = 8;
  Transformer model(config);
  for (const auto& entry : model->named_parameters()) {
    const auto name = entry.key();
    const double std = entry.value().std().item<double>();
    if (name.find("norm") != std::string::npos) {
      EXPECT_TRUE(entry.value().equal(torch::ones_like(entry.value()))) << name;
    } else if (name.find("o_proj") != std::string::npos || name.find("down_proj") != std::string::npos) {
      EXPECT_NEAR(std, 0.02 / 4, 0.02 / 4 * 0.05) << name;  // 1 / sqrt(2 * 8) = 1 / 4
    } else {
      EXPECT_NEAR(std, 0.02, 0.02 * 0.05) << name;
    }
  }
}

TEST(Transformer, ATokenSeesItselfAndThePastOnly) {
  torch::manual_seed(0);
  Transformer model(small_config());
  model->to(torch::kFloat64);
  const torch::Tensor ids = random_ids(1, 10, 17);
  const torch::Tensor before = model->forward(ids);
  for (const int64_t changed : {0, 4, 9}) {
    torch::Tensor other = ids.clone();
    other[0][changed] = (ids[0][changed].item<int64_t>() + 1) % 17;
    const torch::Tensor difference = (model->forward(other) - before).abs().amax({0, 2});
    for (int64_t position = 0; position < 10; ++position) {
      const double moved = difference[position].item<double>();
      if (position < changed)
        EXPECT_LT(moved, 1e-14) << changed << " changed " << position;
      else
        EXPECT_GT(moved, 1e-9) << changed << " did not reach " << position;
    }
  }
}

TEST(Transformer, OrderMatters) {
  // Without positions the last token would see a bag of tokens.
  torch::manual_seed(0);
  Transformer model(small_config());
  model->to(torch::kFloat64);
  for (auto& parameter : model->parameters()) parameter.data().mul_(10);
  const auto last = [&](std::vector<int64_t> ids) {
    return model->forward(torch::tensor(ids, torch::kInt64).unsqueeze(0)).select(1, 3);
  };
  EXPECT_GT((last({1, 2, 3, 4}) - last({2, 1, 3, 4})).abs().max().item<double>(), 1e-6);
}

TEST(Transformer, ATiedHeadUsesTheEmbedding) {
  torch::manual_seed(0);
  TransformerConfig config = small_config();
  config.tie_embeddings = true;
  Transformer model(config);
  const torch::Tensor ids = random_ids(2, 6, 17);
  const torch::Tensor expected = torch::matmul(model->model->forward(ids), model->model->embed_tokens->weight.t());
  EXPECT_TRUE(torch::allclose(model->forward(ids), expected));
}

TEST(Transformer, EveryParameterHasAGradient) {
  for (const bool tied : {false, true}) {
    TransformerConfig config = small_config();
    config.tie_embeddings = tied;
    Transformer model(config);
    torch::nn::functional::cross_entropy(model->forward(random_ids(2, 6, 17)).flatten(0, 1),
                                         random_ids(2, 6, 17).flatten())
        .backward();
    for (const auto& entry : model->named_parameters()) {
      ASSERT_TRUE(entry.value().grad().defined()) << entry.key();
      EXPECT_GT(entry.value().grad().abs().max().item<double>(), 0.0) << entry.key();
    }
  }
}

TEST(Transformer, StartsAtTheLossOfAUniformGuess) {
  torch::manual_seed(0);
  TransformerConfig config = small_config();
  config.vocab_size = 256;
  Transformer model(config);
  const torch::Tensor loss = torch::nn::functional::cross_entropy(model->forward(random_ids(8, 12, 256)).flatten(0, 1),
                                                                  random_ids(8, 12, 256).flatten());
  EXPECT_NEAR(loss.item<double>(), std::log(256.0), 0.05);
}

TEST(Attention, GroupedQueriesEqualRepeatedKeyHeads) {
  torch::manual_seed(0);
  TransformerConfig grouped_config = small_config();
  grouped_config.n_kv_heads = 2;
  Attention grouped(grouped_config), full(small_config());
  grouped->to(torch::kFloat64);
  full->to(torch::kFloat64);
  // Two query heads share each key head: heads 0, 1 use the first 4 rows, heads 2, 3 the other 4.
  const auto repeated = [](const torch::Tensor& weight) {
    return weight.unflatten(0, {2, 4}).repeat_interleave(2, 0).flatten(0, 1);
  };
  {
    const torch::NoGradGuard no_grad;
    full->q_proj->weight.copy_(grouped->q_proj->weight);
    full->k_proj->weight.copy_(repeated(grouped->k_proj->weight));
    full->v_proj->weight.copy_(repeated(grouped->v_proj->weight));
    full->o_proj->weight.copy_(grouped->o_proj->weight);
  }
  const torch::Tensor x = torch::randn({2, 7, 16}, torch::kFloat64);
  const RotaryTables rotary = rotary_tables(7, 4, 10000.0, x);
  EXPECT_TRUE(torch::allclose(grouped->forward(x, rotary), full->forward(x, rotary), 1e-12, 1e-12));
}

TEST(Rotary, TurnsEachPairByItsAngle) {
  const torch::Tensor x = torch::tensor({{1.0, 2.0, 3.0, 4.0}, {1.0, 2.0, 3.0, 4.0}}, torch::kFloat64);
  const torch::Tensor y = apply_rotary(x, rotary_tables(2, 4, 100.0, x));
  // Position 0 is not turned; at position 1 the pair (0, 2) turns by 1 and the pair (1, 3) by 100^(-1/2) = 0.1.
  EXPECT_TRUE(y[0].equal(x[0]));
  const torch::Tensor expected =
      torch::tensor({std::cos(1.0) - 3 * std::sin(1.0), 2 * std::cos(0.1) - 4 * std::sin(0.1),
                     3 * std::cos(1.0) + std::sin(1.0), 4 * std::cos(0.1) + 2 * std::sin(0.1)},
                    torch::kFloat64);
  EXPECT_TRUE(torch::allclose(y[1], expected, 1e-12, 1e-12));
}

TEST(Rotary, ProductsDependOnTheDistanceOnly) {
  torch::manual_seed(0);
  const torch::Tensor q = torch::randn({8}, torch::kFloat64), k = torch::randn({8}, torch::kFloat64);
  const RotaryTables tables = rotary_tables(30, 8, 10000.0, q);
  const torch::Tensor qs = apply_rotary(q.expand({30, 8}), tables), ks = apply_rotary(k.expand({30, 8}), tables);
  for (int64_t position = 0; position < 25; ++position) {
    EXPECT_NEAR(qs[position + 5].dot(ks[position]).item<double>(), qs[5].dot(ks[0]).item<double>(), 1e-12);
  }
}

TEST(RmsNorm, ScalesByTheRootMeanSquare) {
  RmsNorm norm(4, 0.5);
  norm->to(torch::kFloat64);
  norm->weight.data().copy_(torch::tensor({1.0, 2.0, 3.0, 4.0}));
  const torch::Tensor y = norm->forward(torch::tensor({1.0, -1.0, 3.0, 5.0}, torch::kFloat64));
  const double scale = 1 / std::sqrt((1.0 + 1.0 + 9.0 + 25.0) / 4 + 0.5);
  EXPECT_TRUE(torch::allclose(y, scale * torch::tensor({1.0, -2.0, 9.0, 20.0}, torch::kFloat64), 1e-12, 1e-12));
}

TEST(Generate, AppendsTokensAndKeepsThePrompt) {
  torch::manual_seed(0);
  Transformer model(small_config());
  const torch::Tensor ids = random_ids(2, 3, 17);
  const torch::Tensor longer = model->generate(ids, 20);  // beyond max_sequence_length 12
  ASSERT_THAT(longer.sizes().vec(), ElementsAre(2, 23));
  EXPECT_TRUE(longer.slice(1, 0, 3).equal(ids));
  EXPECT_GE(longer.min().item<int64_t>(), 0);
  EXPECT_LT(longer.max().item<int64_t>(), 17);
  EXPECT_FALSE(longer.requires_grad());
  EXPECT_TRUE(model->generate(ids, 0).equal(ids));
}

TEST(Generate, TheSeedDecides) {
  torch::manual_seed(0);
  Transformer model(small_config());
  const torch::Tensor ids = random_ids(1, 3, 17);
  const auto text = [&](uint64_t seed) { return model->generate(ids, 30, 1.0, generator(seed)); };
  EXPECT_TRUE(text(1).equal(text(1)));
  EXPECT_FALSE(text(1).equal(text(2)));
}

TEST(Generate, TemperatureZeroTakesTheMostLikelyToken) {
  torch::manual_seed(0);
  Transformer model(small_config());
  torch::Tensor ids = random_ids(1, 3, 17);
  const torch::Tensor greedy = model->generate(ids, 8, 0.0);
  for (int64_t i = 0; i < 8; ++i) {
    const torch::Tensor next = model->forward(ids).select(1, ids.size(1) - 1).argmax(-1, true);
    ids = torch::cat({ids, next}, 1);
  }
  EXPECT_TRUE(greedy.equal(ids));
}

TEST(Generate, SamplesWithTheProbabilitiesOfTheModelAndTheTemperature) {
  torch::manual_seed(0);
  Transformer model(small_config());
  // After token 0, token 3 has the logit log(16) and the 16 others have 0.
  {
    const torch::NoGradGuard no_grad;
    const torch::Tensor features = model->model->forward(torch::zeros({1, 1}, torch::kInt64)).flatten();
    model->lm_head->weight.zero_();
    model->lm_head->weight[3] = features * (std::log(16.0) / features.dot(features));
  }
  const auto frequency = [&](double temperature) {
    const torch::Tensor drawn = model->generate(torch::zeros({10000, 1}, torch::kInt64), 1, temperature, generator(1));
    return drawn.select(1, 1).eq(3).to(torch::kFloat64).mean().item<double>();
  };
  // 10000 draws: a standard deviation of 0.005 at most.
  EXPECT_NEAR(frequency(1.0), 16.0 / (16.0 + 16.0), 0.02);
  EXPECT_NEAR(frequency(2.0), 4.0 / (4.0 + 16.0), 0.02);
  EXPECT_NEAR(frequency(0.5), 256.0 / (256.0 + 16.0), 0.02);
}

TEST(Transformer, RefusesWrongIds) {
  Transformer model(small_config());
  EXPECT_THAT(refusal([&] {
                model->forward(torch::zeros({1, 13}, torch::kInt64));
              }),
              HasSubstr("[Transformer::forward] ids have length 13, expected at most max_sequence_length 12"));
  EXPECT_THAT(refusal([&] { model->forward(torch::zeros({5}, torch::kInt64)); }),
              HasSubstr("shape [5], expected int64"));
  EXPECT_THAT(refusal([&] { model->forward(torch::zeros({1, 5})); }), HasSubstr("ids are Float of shape [1, 5]"));
  const torch::Tensor ids = torch::zeros({1, 2}, torch::kInt64);
  EXPECT_THAT(refusal([&] { model->generate(ids, -1); }), HasSubstr("count -1"));
  EXPECT_THAT(refusal([&] { model->generate(ids, 1, -0.5); }), HasSubstr("temperature -0.5"));
  EXPECT_THAT(refusal([&] { model->generate(ids, 1, std::nan("")); }), HasSubstr("temperature nan"));
  EXPECT_THAT(refusal([&] { model->generate(torch::zeros({1, 0}, torch::kInt64), 1); }), HasSubstr("shape [1, 0]"));
}

TEST(TransformerConfig, RefusesSizesThatDoNotFit) {
  const auto message = [](auto change) {
    TransformerConfig config = small_config();
    change(config);
    return refusal([&] { Transformer model(config); });
  };
  EXPECT_EQ(message([](auto&) {}), "accepted");
  EXPECT_EQ(message([](auto& c) { c.n_layers = 0; }), "[TransformerConfig] n_layers is 0, expected a positive number");
  EXPECT_THAT(message([](auto& c) { c.vocab_size = -1; }), HasSubstr("vocab_size is -1"));
  EXPECT_THAT(message([](auto& c) { c.n_kv_heads = -2; }), HasSubstr("n_kv_heads is -2"));
  EXPECT_THAT(message([](auto& c) { c.n_kv_heads = 3; }), HasSubstr("n_heads 4 is not a multiple of n_kv_heads 3"));
  EXPECT_THAT(message([](auto& c) { c.hidden_size = 20; }), HasSubstr("expected hidden_size to be a multiple of 8"));
  EXPECT_THAT(message([](auto& c) { c.norm_eps = 0; }), HasSubstr("norm_eps is 0"));
  EXPECT_THAT(message([](auto& c) { c.rope_theta = std::nan(""); }), HasSubstr("rope_theta is nan"));
}

class MlpTest : public ::testing::TestWithParam<Activation> {};

TEST_P(MlpTest, ActivatesBetweenLayersAndNotAfterTheLast) {
  torch::manual_seed(0);
  Mlp mlp(std::vector<int64_t>{3, 5, 4, 2}, GetParam());
  const torch::Tensor x = torch::randn({6, 3});
  const auto activate = [](const torch::Tensor& y) {
    switch (GetParam()) {
      case Activation::relu:
        return torch::clamp_min(y, 0);
      case Activation::gelu:
        return 0.5 * y * (1 + torch::erf(y / std::sqrt(2.0)));
      case Activation::silu:
        return y * torch::sigmoid(y);
      case Activation::tanh:
        return 1 - 2 / (1 + torch::exp(2 * y));
    }
    return torch::Tensor();
  };
  const auto parameters = mlp->named_parameters();
  const auto linear = [&](const torch::Tensor& y, const std::string& layer) {
    return torch::matmul(y, parameters[layer + ".weight"].t()) + parameters[layer + ".bias"];
  };
  const torch::Tensor expected = linear(activate(linear(activate(linear(x, "layers.0")), "layers.1")), "layers.2");
  EXPECT_TRUE(torch::allclose(mlp->forward(x), expected, 1e-5, 1e-6));
}

INSTANTIATE_TEST_SUITE_P(Activations, MlpTest,
                         ::testing::Values(Activation::relu, Activation::gelu, Activation::silu, Activation::tanh));

TEST(Mlp, RefusesSizesThatMakeNoLayer) {
  EXPECT_THAT(refusal([] { Mlp(std::vector<int64_t>{3}); }), HasSubstr("[Mlp] sizes are 3"));
  EXPECT_THAT(refusal([] { Mlp(std::vector<int64_t>{3, 0, 2}); }), HasSubstr("expected two or more positive"));
}

}  // namespace transformer_test
}  // namespace models

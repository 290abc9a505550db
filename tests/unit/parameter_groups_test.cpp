// Groups of an optimizer by patterns of names: which rule gets which parameter, and what is refused. No process group.
#include "hsdp/parameter_groups.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/fully_shard.h"
#include "hsdp/meta_init.h"
#include "hsdp/name_pattern.h"
#include "hsdp/optimizers.h"
#include "tests/testing/expect.h"
#include "tests/testing/offline_mesh.h"

namespace parameter_groups_test {

using namespace testing_support;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t blocks = 2) {
    for (int64_t i = 0; i < blocks; ++i) {
      layers->push_back(torch::nn::Linear(4, 4));
      layers->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    }
    register_module("layers", layers);
    table = register_module("table", torch::nn::Embedding(5, 4));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 5).bias(false)));
    head->register_parameter("tied", table->weight);
  }
  torch::Tensor forward(torch::Tensor x) { return x; }
  torch::nn::ModuleList layers;
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

std::vector<std::string> names_of(const torch::nn::Module& module, const OptimizerParamGroup& group) {
  std::vector<std::string> names;
  for (const auto& parameter : group.params()) {
    for (const auto& entry : module.named_parameters()) {
      if (!entry.value().is_same(parameter)) continue;
      names.push_back(entry.key());
      break;
    }
  }
  return names;
}

using Names = std::vector<std::string>;

TEST(Pattern, OneStarStaysBetweenDotsAndTwoCrossThem) {
  EXPECT_TRUE(hsdp::matches_pattern("layers.*", "layers.0"));
  EXPECT_FALSE(hsdp::matches_pattern("layers.*", "layers.0.weight"));
  EXPECT_TRUE(hsdp::matches_pattern("layers.**", "layers.0.weight"));
  EXPECT_TRUE(hsdp::matches_pattern("**.bias", "layers.0.bias"));
  EXPECT_FALSE(hsdp::matches_pattern("**.bias", "bias"));
  EXPECT_TRUE(hsdp::matches_pattern("**bias", "bias"));
  EXPECT_TRUE(hsdp::matches_pattern("**norm**", "layers.1.norm.weight"));
  EXPECT_FALSE(hsdp::matches_pattern("layers", "layers.0"));
  EXPECT_FALSE(hsdp::matches_pattern("", "layers"));
  EXPECT_TRUE(hsdp::matches_pattern("*.*.weight", "layers.0.weight"));
}

TEST(ParameterGroups, TheFirstRuleThatFitsTakesAParameterWithItsOptions) {
  Net net;
  const auto groups = hsdp::parameter_groups(net, {{"**.bias", SGDOptions(0.5).weight_decay(0)},
                                                   {"layers.1.*", SGDOptions(0.25)},
                                                   {"**", SGDOptions(0.125).weight_decay(0.1)}});
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(names_of(*net, groups[0]), (Names{"layers.0.bias", "layers.1.bias", "layers.2.bias", "layers.3.bias"}));
  EXPECT_EQ(names_of(*net, groups[1]), (Names{"layers.1.weight"}));
  EXPECT_EQ(names_of(*net, groups[2]),
            (Names{"layers.0.weight", "layers.2.weight", "layers.3.weight", "table.weight", "head.weight"}));
  EXPECT_EQ(groups[0].options().get_lr(), 0.5);
  EXPECT_EQ(groups[1].options().get_lr(), 0.25);
  EXPECT_EQ(static_cast<const SGDOptions&>(groups[2].options()).weight_decay(), 0.1);
}

TEST(ParameterGroups, WithoutOptionsTheOptimizersDefaultsHold) {
  Net net;
  torch::optim::AdamW optimizer(hsdp::parameter_groups(net, {{"**.bias", AdamWOptions(1e-3)}, {"**"}}),
                                AdamWOptions(0.5));
  ASSERT_EQ(optimizer.param_groups().size(), 2u);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-3);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.5);
}

TEST(ParameterGroups, AnyClassOfOptimizerTakesThem) {
  Net net;
  const auto expect_all = [&](torch::optim::Optimizer&& optimizer) {
    EXPECT_EQ(optimizer.param_groups().at(0).params().size(), net->parameters().size() - 1);  // one is tied
  };
  using namespace torch::optim;
  expect_all(SGD(hsdp::parameter_groups(net, {{"**", SGDOptions(0.1)}}), SGDOptions(1)));
  expect_all(Adam(hsdp::parameter_groups(net, {{"**", AdamOptions(0.1)}})));
  expect_all(Adagrad(hsdp::parameter_groups(net, {{"**", AdagradOptions(0.1)}})));
  expect_all(RMSprop(hsdp::parameter_groups(net, {{"**", RMSpropOptions(0.1)}})));
  expect_all(hsdp::FusedAdamW(hsdp::parameter_groups(net, {{"**", AdamWOptions(0.1)}})));
  expect_all(hsdp::FusedSGD(hsdp::parameter_groups(net, {{"**", SGDOptions(0.1)}}), SGDOptions(1)));
}

TEST(ParameterGroups, ATiedParameterIsThereOnceAndFitsByEachOfItsNames) {
  Net net;
  const auto groups = hsdp::parameter_groups(net, {{"head.tied"}, {"**"}});
  EXPECT_EQ(names_of(*net, groups[0]), (Names{"table.weight"}));
  EXPECT_EQ(groups[1].params().size(), net->parameters().size() - 2);
}

TEST(ParameterGroups, FrozenParametersAreLeftOut) {
  Net net;
  net->table->weight.set_requires_grad(false);
  net->layers[0]->as<torch::nn::Linear>()->weight.set_requires_grad(false);
  const auto groups = hsdp::parameter_groups(net, {{"**"}});
  EXPECT_EQ(names_of(*net, groups[0]), (Names{"layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.2.weight",
                                              "layers.2.bias", "layers.3.weight", "layers.3.bias", "head.weight"}));
}

TEST(ParameterGroups, OfAShardedModuleAreItsShardedParameters) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(3, 1)});
  const auto groups = hsdp::parameter_groups(model, {{"**.bias", SGDOptions(0.5)}, {"**", SGDOptions(0.1)}});
  EXPECT_EQ(names_of(*net, groups[0]), (Names{"layers.0.bias", "layers.1.bias", "layers.2.bias", "layers.3.bias"}));
  for (const auto& group : groups) {
    for (const auto& parameter : group.params()) EXPECT_TRUE(dtensor::DTensor::is_dtensor(parameter));
  }
}

TEST(ParameterGroups, APatternThatFitsNothingIsRefusedWithTheNames) {
  Net net(1);
  expect_error<dtensor::ValueError>(
      [&] {
        hsdp::parameter_groups(net, {{"**.baias"}, {"**.weight"}});
      },
      "[parameter_groups] pattern \"**.baias\" fits no parameter, expected at least one; those that require grad are "
      "\"layers.0.weight\", \"layers.0.bias\", \"layers.1.weight\", \"layers.1.bias\", \"table.weight\", "
      "\"head.weight\"; * stands for any characters but a dot, ** for any characters");
  for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  expect_error<dtensor::ValueError>([&] { hsdp::parameter_groups(net, {{"x"}}); }, "those that require grad are none;");
}

TEST(ParameterGroups, APatternThatGetsNothingIsRefused) {
  Net net(1);
  const std::string shadowed =
      "[parameter_groups] pattern \"**.bias\" gets no parameter, since all that fit it, \"layers.0.bias\", "
      "\"layers.1.bias\", are frozen or went to earlier patterns, expected at least one; the first pattern that fits a "
      "parameter takes it, so narrow ones come first";
  expect_error<dtensor::ValueError>([&] { hsdp::parameter_groups(net, {{"**"}, {"**.bias"}}); }, shadowed);
  for (auto& entry : net->named_parameters()) {
    if (entry.key().ends_with("bias")) entry.value().set_requires_grad(false);
  }
  expect_error<dtensor::ValueError>([&] { hsdp::parameter_groups(net, {{"**.bias"}, {"**"}}); }, shadowed);
}

TEST(ParameterGroups, ParametersThatNoPatternFitsAreRefusedByName) {
  Net net(1);
  expect_error<dtensor::ValueError>(
      [&] { hsdp::parameter_groups(net, {{"layers.**"}}); },
      "[parameter_groups] no pattern fits \"table.weight\", \"head.weight\", expected one for every parameter that "
      "requires grad; \"**\" as the last pattern takes the rest");
  Net large(20);  // 80 parameters in its layers
  expect_error<dtensor::ValueError>(
      [&] {
        hsdp::parameter_groups(large, {{"table.**"}, {"head.**"}});
      },
      "\"layers.9.bias\" and 60 more, expected");
  expect_error<dtensor::ValueError>([&] { hsdp::parameter_groups(net, {}); }, "no pattern fits \"layers.0.weight\"");
}

}  // namespace parameter_groups_test

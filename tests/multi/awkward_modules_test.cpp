// Six modules that combine many habits of construction, each with the values of plain construction and trained beside
// it.
#include "tests/testing/awkward_modules.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <tuple>

#include "hsdp/hsdp.h"
#include "tests/testing/construction_parity.h"

namespace awkward_modules_test {

using namespace testing_support;

class Awkward : public ::testing::TestWithParam<std::tuple<int, std::optional<bool>>> {
 protected:
  template <class Net>
  void train(std::function<Net()> make, const hsdp::UnitSelector& units, bool whole_batch = false) {
    const auto [ranks, reshard] = GetParam();
    run_ranks(ranks, [&, reshard = reshard](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      expect_constructed_alike<Net>(context, make, units);
      auto c = training_case<Net>(make);
      c.options.units = units;
      c.options.reshard_after_forward = reshard;
      c.whole_batch_everywhere = whole_batch;
      c.max_norm = 0.5;
      c.steps = 4;
      expect_parity(context, c);
    });
  }
};

TEST_P(Awkward, LanguageModel) {
  train<LanguageModel>([] { return LanguageModel(); }, hsdp::each<AwkwardBlock>() | hsdp::each<torch::nn::Embedding>());
}

TEST_P(Awkward, ConvNet) {
  train<ConvNet>([] { return ConvNet(ConvNetConfig{}); },
                 hsdp::each<torch::nn::Conv2d>() | hsdp::each<torch::nn::Linear>(), /*whole_batch=*/true);
}

TEST_P(Awkward, Experts) {
  train<Experts>([] { return Experts(11); }, hsdp::each<torch::nn::ParameterList>());
}

TEST_P(Awkward, Speaker) {
  train<Speaker>([] { return Speaker(); }, hsdp::each<torch::nn::LSTM>() | hsdp::each<torch::nn::GRUCell>());
}

TEST_P(Awkward, Student) {
  train<Student>([] { return Student(); }, hsdp::each<Encoder>());
}

TEST_P(Awkward, Adapted) {
  train<Adapted>([] { return Adapted(); }, hsdp::each<torch::nn::TransformerEncoderLayer>() | hsdp::each<Adapter>() |
                                               hsdp::each<torch::nn::TransformerDecoderLayer>());
}

INSTANTIATE_TEST_SUITE_P(Ranks, Awkward,
                         ::testing::Combine(::testing::Values(1, 3),
                                            ::testing::Values(std::optional<bool>(true), std::optional<bool>(false))),
                         [](const auto& which) {
                           return "Ranks_" + std::to_string(std::get<0>(which.param)) +
                                  (*std::get<1>(which.param) ? "_Reshard" : "_Keep");
                         });

}  // namespace awkward_modules_test

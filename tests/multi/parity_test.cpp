// Sharded training equals unsharded training of the same module in one process on the concatenated batch.
#include "tests/testing/parity.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>

#include "hsdp/hsdp.h"
#include "models/transformer.h"
#include "tests/testing/modules.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/small_transformer.h"

namespace {

using namespace testing_support;

enum class Optimizer { adamw, sgd };

struct Setting {
  int ranks;
  Optimizer optimizer;
  torch::ScalarType dtype;
  std::optional<bool> reshard = std::nullopt;
};

std::string setting_name(const ::testing::TestParamInfo<Setting>& info) {
  const auto& s = info.param;
  std::string name = "Ranks_" + std::to_string(s.ranks);
  name += s.optimizer == Optimizer::adamw ? "_AdamW" : "_SgdMomentum";
  name += s.dtype == torch::kFloat64 ? "_Float64" : "_Float32";
  if (s.reshard) name += *s.reshard ? "_Reshard" : "_Keep";
  return name;
}

class Parity : public ::testing::TestWithParam<Setting> {
 protected:
  template <class Net>
  void train(ParityCase<Net> c) {
    const auto setting = GetParam();
    const bool wide = setting.dtype == torch::kFloat64;
    c.loss_tolerance = wide ? 1e-11 : 1e-6;
    c.parameter_tolerance = wide ? 1e-11 : setting.optimizer == Optimizer::adamw ? 1e-5 : 1e-6;
    c.optimizer = [setting](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
      if (setting.optimizer == Optimizer::sgd) {
        return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
      }
      // The eps covers gradients that are zero in exact arithmetic, which Adam would blow up to full steps.
      return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01).eps(1e-4));
    };
    c.options.reshard_after_forward = setting.reshard;
    run_ranks(setting.ranks, [&](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(setting.dtype));
      expect_parity(context, c);
    });
  }
};

torch::Tensor rows_of(int64_t step, int64_t salt, torch::IntArrayRef sizes, int64_t begin, int64_t end) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 * salt + step));
  return torch::randn(sizes, generator).narrow(0, begin, end - begin);
}

TEST_P(Parity, OddMlp) {
  ParityCase<OddMlp> c;
  c.make = [] { return OddMlp(); };
  c.options.units = hsdp::each<torch::nn::Linear>();
  c.max_norm = 0.5;
  c.loss = [](OddMlpImpl& net, int64_t step, int64_t begin, int64_t end) {
    return torch::mse_loss(net.forward(rows_of(step, 1, {12, 5}, begin, end)), rows_of(step, 2, {12, 2}, begin, end));
  };
  train(c);
}

TEST_P(Parity, ViewsOnTwoDims) {
  ParityCase<ViewChain> c;
  c.make = [] { return ViewChain(); };
  c.options.units = hsdp::each("*");
  c.loss = [](ViewChainImpl& net, int64_t step, int64_t begin, int64_t end) {
    return torch::mse_loss(net.forward(rows_of(step, 1, {12, 6}, begin, end)), rows_of(step, 2, {12, 3}, begin, end));
  };
  train(c);
}

TEST_P(Parity, ViewsOnThreeDims) {
  ParityCase<ViewChain> c;
  c.make = [] { return ViewChain(); };
  c.options.units = hsdp::each("*");
  c.loss = [](ViewChainImpl& net, int64_t step, int64_t begin, int64_t end) {
    return torch::mse_loss(net.forward(rows_of(step, 1, {12, 4, 6}, begin, end)),
                           rows_of(step, 2, {12, 4, 3}, begin, end));
  };
  train(c);
}

TEST_P(Parity, StockModules) {
  ParityCase<Zoo> c;
  c.make = [] { return Zoo(); };
  c.options.units = hsdp::each<torch::nn::Linear>() | hsdp::each<torch::nn::LSTM>() |
                    hsdp::each<torch::nn::TransformerEncoderLayer>() | hsdp::each<torch::nn::MultiheadAttention>();
  c.whole_batch_everywhere = true;
  c.loss = [](ZooImpl& net, int64_t step, int64_t begin, int64_t end) {
    auto tokens = rows_of(step, 3, {12}, begin, end).abs().mul(10).to(torch::kLong).clamp(0, 10);
    return torch::mse_loss(net.forward(rows_of(step, 1, {12, 1, 4, 4}, begin, end), tokens),
                           rows_of(step, 2, {12, 4}, begin, end));
  };
  train(c);
}

ParityCase<models::Transformer> transformer_case(bool tied) {
  ParityCase<models::Transformer> c;
  c.make = [tied] { return small_transformer(/*layers=*/3, tied); };
  c.options.units = hsdp::each<models::TransformerBlock>();
  c.max_norm = 1.0;
  c.loss = [](models::TransformerImpl& net, int64_t step, int64_t begin, int64_t end) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
    auto ids = torch::randint(0, 17, {12, 9}, generator, torch::kLong).narrow(0, begin, end - begin);
    auto logits = net.forward(ids.narrow(1, 0, 8));
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.narrow(1, 1, 8).flatten());
  };
  return c;
}

TEST_P(Parity, TransformerUntied) { train(transformer_case(false)); }
TEST_P(Parity, TransformerTied) { train(transformer_case(true)); }

INSTANTIATE_TEST_SUITE_P(
    AllRanks, Parity,
    ::testing::Values(Setting{1, Optimizer::adamw, torch::kFloat64}, Setting{2, Optimizer::adamw, torch::kFloat64},
                      Setting{3, Optimizer::adamw, torch::kFloat64}, Setting{4, Optimizer::adamw, torch::kFloat64},
                      Setting{3, Optimizer::sgd, torch::kFloat64}, Setting{2, Optimizer::adamw, torch::kFloat32},
                      Setting{3, Optimizer::sgd, torch::kFloat32}, Setting{2, Optimizer::adamw, torch::kFloat64, true},
                      Setting{2, Optimizer::adamw, torch::kFloat64, false}),
    setting_name);
INSTANTIATE_TEST_SUITE_P(
    Nightly, Parity,
    ::testing::Values(Setting{1, Optimizer::sgd, torch::kFloat64}, Setting{2, Optimizer::sgd, torch::kFloat64},
                      Setting{4, Optimizer::sgd, torch::kFloat64}, Setting{1, Optimizer::adamw, torch::kFloat32},
                      Setting{3, Optimizer::adamw, torch::kFloat32}, Setting{4, Optimizer::adamw, torch::kFloat32},
                      Setting{1, Optimizer::sgd, torch::kFloat32}, Setting{2, Optimizer::sgd, torch::kFloat32},
                      Setting{4, Optimizer::sgd, torch::kFloat32}, Setting{3, Optimizer::adamw, torch::kFloat64, true}),
    setting_name);

}  // namespace

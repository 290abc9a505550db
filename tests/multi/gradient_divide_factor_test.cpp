// What gradients are divided by after they were added over the ranks: their number, or what the program says.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/habit.h"
#include "tests/testing/multi_process.h"

namespace gradient_divide_factor_test {

using namespace testing_support;
using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<Optimizer(std::vector<torch::Tensor>)>;

constexpr int64_t kRows = 12;

/// Rows of a rank, as unequal as a loader that packs sentences makes them.
std::pair<int64_t, int64_t> rows_of_rank(RankContext& context) {
  if (context.world_size() == 1) return {0, kRows};
  const std::vector<int64_t> ends = {0, 2, 9, kRows};
  return {ends[static_cast<size_t>(context.rank())], ends[static_cast<size_t>(context.rank() + 1)]};
}

/// Sum, over rows and columns, of squared errors: a loss that counts.
torch::Tensor summed_loss(ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
  Inputs in(step, begin, end);
  return torch::mse_loss(net.forward(in.x), in.y, torch::Reduction::Sum);
}

int64_t total_over_ranks(const hsdp::Environment& env, int64_t count) {
  auto total = torch::full({1}, count, torch::kLong);
  env.communicator()->all_reduce(total, dtensor::ReduceOp::sum, {"all_reduce", "tokens"})->wait();
  return total.item<int64_t>();
}

struct Twins {
  explicit Twins(RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    torch::manual_seed(7);
    plain = Three();
    torch::manual_seed(7);
    auto net = hsdp::meta_init([] { return Three(); });
    model = std::make_unique<hsdp::FullySharded<ThreeImpl>>(
        hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()}));
    model->materialize(at::kCPU);
  }
  void expect_equal_gradients() {
    for (auto& parameter : model->module().named_parameters()) {
      const auto ours = hsdp::unsharded(parameter.value().grad());
      const auto theirs = plain->named_parameters()[parameter.key()].grad();
      EXPECT_LE(largest_difference(ours, theirs), 1e-12) << parameter.key();
    }
  }
  double largest_parameter_difference() {
    double largest = 0;
    for (auto& parameter : model->module().named_parameters()) {
      largest = std::max(
          largest, largest_difference(hsdp::unsharded(parameter.value()), plain->named_parameters()[parameter.key()]));
    }
    return largest;
  }

  Three plain{nullptr};
  std::unique_ptr<hsdp::FullySharded<ThreeImpl>> model;
};

class DivideFactor : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DivideFactor, ::testing::Values(1, 3));

TEST_P(DivideFactor, OfOneAndALossOverAllTokensTrainAsThePlainModule) {
  const std::vector<MakeOptimizer> optimizers = {
      [](std::vector<torch::Tensor> p) -> Optimizer {
        return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.05).momentum(0.9));
      },
      [](std::vector<torch::Tensor> p) -> Optimizer { return std::make_unique<torch::optim::AdamW>(p, 0.01); },
      [](std::vector<torch::Tensor> p) -> Optimizer { return std::make_unique<torch::optim::Adagrad>(p, 0.01); }};
  for (auto& make : optimizers) {
    run_ranks(GetParam(), [&](RankContext& context) {
      Twins twins(context);
      auto& model = *twins.model;
      const auto ours = make(model->parameters()), theirs = make(twins.plain->parameters());
      model.set_gradient_divide_factor(1);
      const auto [begin, end] = rows_of_rank(context);
      for (int64_t step = 0; step < 4; ++step) {
        theirs->zero_grad();
        (summed_loss(*twins.plain, step, 0, kRows) / kRows).backward();
        const double expected_norm = torch::nn::utils::clip_grad_norm_(twins.plain->parameters(), 1.0);
        theirs->step();
        ours->zero_grad();
        const auto total = total_over_ranks(context.environment(), end - begin);
        {
          hsdp::ForwardScope scope(model.core());
          (summed_loss(model.module(), step, begin, end) / total).backward();
        }
        EXPECT_NEAR(hsdp::clip_grad_norm_(model->parameters(), 1.0), expected_norm, 1e-9 * expected_norm);
        ours->step();
        ASSERT_LE(twins.largest_parameter_difference(), 1e-11) << "after step " << step;
      }
    });
  }
}

// What the page warns of: each rank's mean, averaged over ranks, weighs tokens by the company they are in.
TEST(MeansOfMeans, AreNotTheMeanWhereCountsDiffer) {
  run_ranks(3, [](RankContext& context) {
    Twins twins(context);
    (summed_loss(*twins.plain, 0, 0, kRows) / kRows).backward();
    const auto [begin, end] = rows_of_rank(context);
    {
      hsdp::ForwardScope scope(twins.model->core());
      (summed_loss(twins.model->module(), 0, begin, end) / (end - begin)).backward();
    }
    const auto ours = hsdp::unsharded(twins.model->module().bias.grad());
    EXPECT_GT(largest_difference(ours, twins.plain->bias.grad()), 1e-2);
  });
}

TEST_P(DivideFactor, CountsFromTheNextReductionOn) {
  run_ranks(GetParam(), [](RankContext& context) {
    Twins twins(context);
    auto& model = *twins.model;
    const auto ranks = static_cast<double>(context.world_size());
    const auto [begin, end] = rows_of_rank(context);
    const auto backward = [&, begin = begin, end = end](int64_t step) {
      hsdp::ForwardScope scope(model.core());
      summed_loss(model.module(), step, begin, end).backward();
    };
    backward(0);  // a mean over ranks
    model.set_gradient_divide_factor(0.25);
    backward(1);
    model.set_gradient_divide_factor(ranks);
    backward(2);
    (summed_loss(*twins.plain, 0, 0, kRows) / ranks + summed_loss(*twins.plain, 1, 0, kRows) / 0.25 +
     summed_loss(*twins.plain, 2, 0, kRows) / ranks)
        .backward();
    twins.expect_equal_gradients();
  });
}

TEST(DivideFactorThat, IsNoNumberAboveZeroIsRefusedAndChangesNothing) {
  run_ranks(2, [](RankContext& context) {
    Twins twins(context);
    auto& model = *twins.model;
    for (const auto& [factor, text] : std::vector<std::pair<double, std::string>>{
             {0, "0"}, {-2, "-2"}, {std::numeric_limits<double>::infinity(), "inf"}, {std::nan(""), "nan"}}) {
      const double value = factor;
      expect_error<dtensor::ValueError>([&] { model.set_gradient_divide_factor(value); },
                                        "[set_gradient_divide_factor] factor " + text +
                                            ", expected a finite number above 0; the number of ranks gives means, 1 "
                                            "gives sums");
    }
    {
      hsdp::ForwardScope scope(model.core());
      summed_loss(model.module(), 0, 0, kRows).backward();
    }
    summed_loss(*twins.plain, 0, 0, kRows).backward();
    twins.expect_equal_gradients();
  });
}

TEST(DivideFactorThat, IsSetOnAPartCountsForItsUnits) {
  run_ranks(2, [](RankContext& context) {
    auto mesh = context.environment().mesh();
    auto net = hsdp::meta_init([] { return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)); });
    auto part = hsdp::fully_shard(net->ptr<torch::nn::LinearImpl>(0), {.mesh = mesh});
    part.set_gradient_divide_factor(1);
    auto model = hsdp::fully_shard(net, {.mesh = mesh});
    model.materialize(context.environment().device());
    const auto bias = [&](size_t index) { return net->ptr<torch::nn::LinearImpl>(index)->bias; };
    const auto gradient = [&](size_t index) { return hsdp::unsharded(bias(index).grad()).sum().item<double>(); };
    const auto x = torch::ones({3, 4});
    model->forward(x).sum().backward();
    const auto summed = gradient(0);
    EXPECT_EQ(gradient(1), 3 * 4) << "the mean over ranks that do the same";
    model.units("root").set_gradient_divide_factor(1);
    model.units("0").set_gradient_divide_factor(2);
    net->zero_grad();
    model->forward(x).sum().backward();
    EXPECT_EQ(gradient(0), summed / 2);
    EXPECT_EQ(gradient(1), 2 * 3 * 4);
    part.set_gradient_divide_factor(4);
    net->zero_grad();
    model->forward(x).sum().backward();
    EXPECT_EQ(gradient(0), summed / 4);
  });
}

TEST(DivideFactorThat, DiffersBetweenRanksIsAnErrorAtTheNextGather) {
  run_ranks(3, [](RankContext& context) {
    Twins twins(context);
    auto& model = *twins.model;
    model.set_gradient_divide_factor(context.rank() == 1 ? 1 : 3);
    const auto x = torch::ones({2, 6});
    const std::string other = context.rank() == 1 ? "rank 0" : "rank 1";
    // The first reduction of the step is the first that was divided unlike, and a gather follows it.
    expect_error<dtensor::CommunicationError>(
        [&] { model->forward(x).sum().backward(); },
        "[all_gather] rank " + std::to_string(context.rank()) + " gathers unit \"", ", " + other + " gathers unit \"",
        " or had other units, parameters or gradient divide factors before, expected the same on all ranks; called in ",
        "; every rank must call it");
  });
}

}  // namespace gradient_divide_factor_test

// How many collectives a step costs, how many bytes they move, and how much is gathered at once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/communicator.h"
#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"

namespace collective_counts_test {

using namespace testing_support;

constexpr int64_t kWidth = 8;

/// `blocks` linear layers, each a unit, and a head that the root holds.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i) blocks->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : *blocks) x = torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    return head(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Tower);

struct Expectation {
  std::string name;
  std::optional<bool> reshard;
  int64_t blocks;
  int64_t gathers;  // a step, of which one forward and one backward
  int64_t leaves;   // gathered at once beside ancestors
};

class Counts : public ::testing::TestWithParam<std::tuple<int, Expectation>> {};

TEST_P(Counts, OfAStep) {
  const auto& [ranks, expected] = GetParam();
  run_ranks(ranks, [&, ranks = ranks, expected = expected](RankContext& context) {
    auto net = hsdp::meta_init([&] { return Tower(expected.blocks); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                         .units = hsdp::each("blocks.*"),
                                         .reshard_after_forward = expected.reshard});
    model.materialize(at::kCPU);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto units = static_cast<int64_t>(model.core()->units().size());
    ASSERT_EQ(units, expected.blocks + 1);
    auto scheduler = model.core()->scheduler();
    for (int step = 0; step < 4; ++step) {
      dtensor::reset_collective_counts();
      scheduler->reset_peaks();
      // An input that requires grad makes backward need the first unit's weight as well.
      auto x = torch::ones({2, kWidth}).set_requires_grad(true);
      optimizer.zero_grad();
      auto loss = model->forward(x).pow(2).mean();
      loss.backward();
      optimizer.step();
      const auto counts = dtensor::collective_counts();
      EXPECT_EQ(counts.all_gathers, expected.gathers) << "step " << step;
      EXPECT_EQ(counts.reduce_scatters, units) << "step " << step;
      EXPECT_EQ(counts.all_reduces, 0);
      EXPECT_EQ(counts.broadcasts, 0);
      EXPECT_EQ(scheduler->peaks().units_without_ancestors, expected.leaves) << "step " << step;
      // Rows are padded to a multiple of the ranks.
      const int64_t rows = (kWidth + ranks - 1) / ranks * ranks;
      const int64_t block_bytes = rows * kWidth * 4 + rows * 4, head_bytes = rows * kWidth * 4;
      EXPECT_EQ(counts.reduce_scatter_bytes, expected.blocks * block_bytes + head_bytes);
      if (!expected.reshard.has_value()) {
        // Each gather carries 32 bytes a rank that say what it is.
        EXPECT_EQ(counts.all_gather_bytes,
                  2 * expected.blocks * block_bytes + head_bytes + expected.gathers * 32 * ranks);
        // Two blocks, or the last block and the head: backward frees the head before it reads the second block.
        EXPECT_EQ(scheduler->peaks().bytes, std::max(2 * block_bytes, block_bytes + head_bytes));
      }
      for (auto& unit : model.core()->units()) {
        EXPECT_FALSE(unit->is_gathered()) << unit->name() << " after step " << step;
        EXPECT_EQ(unit->holds(), 0) << unit->name();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Reshard, Counts,
                         ::testing::Combine(::testing::Values(2, 3),
                                            ::testing::Values(Expectation{"Always4", true, 4, 10, 2},
                                                              Expectation{"RootKept4", std::nullopt, 4, 9, 2},
                                                              Expectation{"Never4", false, 4, 5, 4},
                                                              Expectation{"Always1", true, 1, 4, 1},
                                                              Expectation{"RootKept7", std::nullopt, 7, 15, 2})),
                         [](const auto& which) {
                           return std::get<1>(which.param).name + "_Ranks_" + std::to_string(std::get<0>(which.param));
                         });

TEST(CountsOfInference, OneGatherAUnitAndNothingStays) {
  run_ranks(2, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Tower(3); });
    auto model = hsdp::fully_shard(
        net, {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*"), .reshard_after_forward = true});
    model.materialize(at::kCPU);
    torch::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      dtensor::reset_collective_counts();
      (void)model->forward(torch::ones({2, kWidth}));
      EXPECT_EQ(dtensor::collective_counts().all_gathers, 4);
      for (auto& unit : model.core()->units()) EXPECT_FALSE(unit->is_gathered() || unit->is_gathering());
    }
  });
}

TEST(CountsOfClipping, OneAllReduceForAllGradients) {
  run_ranks(3, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Tower(3); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*")});
    model.materialize(at::kCPU);
    model->forward(torch::ones({2, kWidth})).pow(2).mean().backward();
    for (double type : {1.0, 2.0, 3.5, std::numeric_limits<double>::infinity()}) {
      dtensor::reset_collective_counts();
      const double stock = torch::nn::utils::clip_grad_norm_(model->parameters(), 1e9, type);
      EXPECT_EQ(dtensor::collective_counts().all_reduces, 1) << "stock, norm " << type;
      dtensor::reset_collective_counts();
      const double own = hsdp::clip_grad_norm_(model->parameters(), 1e9, type);
      EXPECT_EQ(dtensor::collective_counts().all_reduces, 1) << "own, norm " << type;
      EXPECT_EQ(dtensor::collective_counts().all_gathers, 0);
      EXPECT_NEAR(own, stock, 1e-6 * stock);
      torch::Tensor all;
      for (auto& parameter : model->parameters()) {
        auto whole = hsdp::unsharded(parameter.grad()).flatten();
        all = all.defined() ? torch::cat({all, whole}) : whole;
      }
      EXPECT_NEAR(own, all.norm(type).item<double>(), 1e-5 * own);
    }
  });
}

TEST(CountsOfOneRank, NoCollectiveAtAll) {
  run_ranks(1, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Tower(2); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*")});
    dtensor::reset_collective_counts();
    model.materialize(at::kCPU);
    model->forward(torch::ones({2, kWidth})).pow(2).mean().backward();
    hsdp::clip_grad_norm_(model->parameters(), 1.0);
    const auto counts = dtensor::collective_counts();
    EXPECT_EQ(counts.all_gathers + counts.reduce_scatters + counts.all_reduces + counts.broadcasts + counts.barriers,
              0);
  });
}

}  // namespace collective_counts_test

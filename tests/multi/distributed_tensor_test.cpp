// DTensor operations that communicate: whole values, inferred shapes, norms, sums and stock clipping.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "dtensor/communicator.h"
#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"

namespace distributed_tensor_test {

using namespace testing_support;
using dtensor::DTensor;
using dtensor::Partial;
using dtensor::Placements;
using dtensor::Replicate;
using dtensor::Shard;

at::Tensor counting(at::IntArrayRef sizes) {
  return torch::arange(c10::multiply_integers(sizes), torch::kFloat64).view(sizes) + 1;
}

struct Case {
  std::string name;
  std::vector<int64_t> mesh;
  Placements placements;
  std::vector<int64_t> sizes;
};

class FullTensor : public ::testing::TestWithParam<Case> {};

TEST_P(FullTensor, ReturnsTheWholeOnEveryRank) {
  const auto& c = GetParam();
  const auto ranks = c10::multiply_integers(c.mesh);
  run_ranks(static_cast<int>(ranks), [&](RankContext& context) {
    std::vector<std::string> names;
    for (size_t i = 0; i < c.mesh.size(); ++i) names.push_back("axis" + std::to_string(i));
    auto mesh = c.mesh.size() == 1 ? context.environment().mesh() : context.environment().make_mesh(c.mesh, names);
    auto whole = counting(c.sizes);
    auto tensor = DTensor::distribute(whole, mesh, c.placements);
    EXPECT_EQ(tensor.tensor().sizes(), c.sizes);
    EXPECT_TRUE(torch::equal(tensor.full_tensor(), whole));
    // from_local finds the global shape by itself, uneven parts included.
    auto again = DTensor::from_local(tensor.to_local().clone(), mesh, c.placements);
    EXPECT_EQ(again.tensor().sizes(), c.sizes);
    EXPECT_EQ(again.layout(), tensor.layout());
    EXPECT_TRUE(torch::equal(again.full_tensor(), whole));
    for (double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      EXPECT_NEAR(tensor.tensor().norm(p).item<double>(), whole.norm(p).item<double>(),
                  1e-9 * whole.norm(p).item<double>());
    }
    EXPECT_DOUBLE_EQ(tensor.tensor().sum().item<double>(), whole.sum().item<double>());
    EXPECT_NEAR(tensor.tensor().mean().item<double>(), whole.mean().item<double>(), 1e-9);
    EXPECT_EQ(tensor.tensor().max().item<double>(), whole.max().item<double>());
    EXPECT_EQ(tensor.tensor().min().item<double>(), whole.min().item<double>());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, FullTensor,
    ::testing::Values(Case{"Even", {2}, {Shard(0)}, {4, 3}}, Case{"Uneven", {2}, {Shard(0)}, {5, 3}},
                      Case{"EmptyParts", {4}, {Shard(0)}, {2, 3}}, Case{"Tail", {4}, {Shard(0)}, {10, 3}},
                      Case{"SecondDim", {3}, {Shard(1)}, {2, 7}}, Case{"Replicated", {3}, {Replicate()}, {2, 3}},
                      Case{"ReplicateThenShard", {2, 2}, {Replicate(), Shard(0)}, {5, 3}},
                      Case{"TwoDims", {2, 2}, {Shard(0), Shard(1)}, {5, 3}},
                      Case{"OneDimTwice", {2, 2}, {Shard(0), Shard(0)}, {7, 2}}),
    [](const auto& which) { return which.param.name; });

TEST(PartialTensor, IsReducedByItsOperator) {
  run_ranks(3, [](RankContext& context) {
    auto mesh = context.environment().mesh();
    auto mine = torch::full({2, 2}, context.rank() + 1.0, torch::kFloat64);
    const auto reduced = [&](dtensor::Partial placement) {
      return DTensor::from_local(mine.clone(), mesh, {placement}).full_tensor()[0][0].item<double>();
    };
    EXPECT_DOUBLE_EQ(reduced(Partial()), 6);
    EXPECT_DOUBLE_EQ(reduced(Partial(dtensor::ReduceOp::max)), 3);
    EXPECT_DOUBLE_EQ(reduced(Partial(dtensor::ReduceOp::min)), 1);
    EXPECT_DOUBLE_EQ(reduced(Partial::norm(2)), std::sqrt(14.0));
  });
}

TEST(Norms, OfSeveralTensorsAreReducedTogether) {
  run_ranks(3, [](RankContext& context) {
    auto mesh = context.environment().mesh();
    std::vector<at::Tensor> wholes{counting({5, 3}), counting({2}), counting({7, 1})}, norms;
    dtensor::reset_collective_counts();
    for (auto& whole : wholes) norms.push_back(DTensor::distribute(whole, mesh, {Shard(0)}).tensor().norm());
    EXPECT_EQ(dtensor::collective_counts().all_reduces, 0) << "norms stay partial until somebody looks";
    auto stacked = torch::stack(norms);
    EXPECT_EQ(dtensor::collective_counts().all_reduces, 1);
    EXPECT_FALSE(DTensor::is_dtensor(stacked));
    for (size_t i = 0; i < wholes.size(); ++i) {
      EXPECT_NEAR(stacked[static_cast<int64_t>(i)].item<double>(), wholes[i].norm().item<double>(), 1e-12);
    }
  });
}

class StockClipping : public ::testing::TestWithParam<std::tuple<int, double>> {};

TEST_P(StockClipping, ScalesByTheGlobalNorm) {
  const auto [ranks, type] = GetParam();
  run_ranks(ranks, [type = type](RankContext& context) {
    auto mesh = context.environment().mesh();
    std::vector<at::Tensor> plain, sharded, waiting, queued;  // the last two for the library's own
    for (auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {1}, {7, 2}}) {
      auto values = counting(sizes);
      for (auto* own : {&waiting, &queued}) {
        own->push_back(DTensor::distribute(values, mesh, {Shard(0)}).as_parameter(true).tensor());
        own->back().mutable_grad() = DTensor::distribute(values.sin(), mesh, {Shard(0)}).tensor();
      }
      plain.push_back(values.clone().set_requires_grad(true));
      plain.back().mutable_grad() = values.sin();
      sharded.push_back(DTensor::distribute(values, mesh, {Shard(0)}).as_parameter(true).tensor());
      sharded.back().mutable_grad() = DTensor::distribute(values.sin(), mesh, {Shard(0)}).tensor();
    }
    const double expected = torch::nn::utils::clip_grad_norm_(plain, 0.7, type);
    const double norm = torch::nn::utils::clip_grad_norm_(sharded, 0.7, type);
    EXPECT_NEAR(norm, expected, 1e-12 * expected);
    const double own_norm = hsdp::clip_grad_norm_(waiting, 0.7, type);
    const auto queued_norm = hsdp::clip_grad_norm_on_device_(queued, 0.7, type);
    EXPECT_NEAR(own_norm, expected, 1e-12 * expected);
    EXPECT_EQ(queued_norm.scalar_type(), torch::kFloat64);
    EXPECT_EQ(queued_norm.item<double>(), own_norm);
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(torch::allclose(DTensor(sharded[i].grad()).full_tensor(), plain[i].grad(), 1e-12, 0));
      EXPECT_TRUE(torch::allclose(DTensor(waiting[i].grad()).full_tensor(), plain[i].grad(), 1e-12, 0));
      EXPECT_TRUE(torch::equal(DTensor(queued[i].grad()).full_tensor(), DTensor(waiting[i].grad()).full_tensor()));
    }
    // Within the norm nothing changes, and what is not finite spreads.
    const auto before = DTensor(queued[0].grad()).full_tensor();
    EXPECT_LE(hsdp::clip_grad_norm_on_device_(queued, 0.8, type).item<double>(), 0.7 * (1 + 1e-5));
    EXPECT_TRUE(torch::equal(DTensor(queued[0].grad()).full_tensor(), before));
    queued[1].grad().fill_(std::numeric_limits<double>::quiet_NaN());
    EXPECT_TRUE(std::isnan(hsdp::clip_grad_norm_on_device_(queued, 0.8, type).item<double>()));
    EXPECT_TRUE(DTensor(queued[0].grad()).full_tensor().isnan().all().item<bool>());
    EXPECT_EQ(hsdp::clip_grad_norm_on_device_({torch::ones({2})}, 1, type).item<double>(), 0);
    EXPECT_THROW(hsdp::clip_grad_norm_on_device_(queued, -1, type), dtensor::ValueError);
    torch::nn::utils::clip_grad_value_(sharded, 0.01);
    torch::nn::utils::clip_grad_value_(plain, 0.01);
    EXPECT_TRUE(torch::allclose(DTensor(sharded[0].grad()).full_tensor(), plain[0].grad(), 1e-12, 0));
  });
}

INSTANTIATE_TEST_SUITE_P(Types, StockClipping,
                         ::testing::Combine(::testing::Values(1, 2, 4),
                                            ::testing::Values(1.0, 2.0, 3.0, std::numeric_limits<double>::infinity())));

TEST(Norms, InAnotherDtypeWithEmptyPartsToo) {
  run_ranks(3, [](RankContext& context) {
    const auto whole = torch::tensor({3.0f, 4.0f});  // The third rank has none of it.
    auto tensor = DTensor::distribute(whole, context.environment().mesh(), {Shard(0)}).tensor();
    for (const auto& norm :
         {tensor.norm(2, torch::kFloat64), torch::linalg_vector_norm(tensor, 2, {}, false, torch::kFloat64),
          torch::_foreach_norm({tensor}, 2, torch::kFloat64)[0]}) {
      EXPECT_EQ(norm.scalar_type(), torch::kFloat64);
      EXPECT_EQ(norm.item<double>(), 5.0);
    }
    EXPECT_EQ(torch::_foreach_norm({tensor}, std::numeric_limits<double>::infinity())[0].item<float>(), 4.0f);
  });
}

}  // namespace distributed_tensor_test

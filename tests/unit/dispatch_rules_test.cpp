// What operators do on distributed tensors outside a forward: rules 0, 2 to 5 and 7. No process group.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/inspect.h"
#include "tests/testing/expect.h"
#include "tests/testing/offline_mesh.h"

namespace dispatch_rules_test {

using namespace testing_support;
using dtensor::DTensor;
using dtensor::Shard;

// Tensors meet only on one mesh object.
std::shared_ptr<const dtensor::DeviceMesh> mesh_of(int64_t ranks) {
  static const auto one = offline_mesh(1, 0), two = offline_mesh(2, 0);
  return ranks == 1 ? one : two;
}
at::Tensor sharded(const at::Tensor& local, int64_t ranks = 2) {
  return DTensor::from_local(local, mesh_of(ranks), {Shard(0)}).tensor();
}
at::Tensor local_of(const at::Tensor& tensor) { return DTensor(tensor).to_local(); }

struct Pointwise {
  std::string name;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> apply;
};
class Elementwise : public ::testing::TestWithParam<Pointwise> {};

TEST_P(Elementwise, WorksOnLocalsAndKeepsTheLayout) {
  auto a = torch::rand({2, 3}), b = torch::rand({2, 3});
  auto da = sharded(a.clone()), db = sharded(b.clone());
  auto expected = GetParam().apply(a, b);
  auto result = GetParam().apply(da, db);
  ASSERT_TRUE(DTensor::is_dtensor(result));
  EXPECT_EQ(result.sizes(), da.sizes());
  EXPECT_EQ(DTensor(result).placements(), DTensor(da).placements());
  EXPECT_TRUE(torch::equal(local_of(result), expected));
  EXPECT_EQ(DTensor(result).layout()->dtype(), expected.scalar_type());
}

INSTANTIATE_TEST_SUITE_P(
    Operators, Elementwise,
    ::testing::Values(Pointwise{"add", [](auto& a, auto& b) { return a + b; }},
                      Pointwise{"add_scaled", [](auto& a, auto& b) { return a.add(b, 0.5); }},
                      Pointwise{"mul", [](auto& a, auto& b) { return a * b; }},
                      Pointwise{"sub_scalar", [](auto& a, auto&) { return a - 3; }},
                      Pointwise{"div_zero_dim", [](auto& a, auto&) { return a / torch::full({}, 2.0); }},
                      Pointwise{"sqrt", [](auto& a, auto&) { return a.sqrt(); }},
                      Pointwise{"abs_neg", [](auto& a, auto&) { return (-a).abs(); }},
                      Pointwise{"addcmul", [](auto& a, auto& b) { return a.addcmul(a, b, 2); }},
                      Pointwise{"addcdiv", [](auto& a, auto& b) { return a.addcdiv(a, b, 2); }},
                      Pointwise{"lerp", [](auto& a, auto& b) { return a.lerp(b, 0.25); }},
                      Pointwise{"maximum", [](auto& a, auto& b) { return torch::maximum(a, b); }},
                      Pointwise{"clamp", [](auto& a, auto&) { return a.clamp(0.2, 0.7); }},
                      Pointwise{"where", [](auto& a, auto& b) { return torch::where(a > b, a, b); }},
                      Pointwise{"isfinite", [](auto& a, auto&) { return torch::isfinite(a); }},
                      Pointwise{"clone", [](auto& a, auto&) { return a.clone(); }},
                      Pointwise{"zeros_like", [](auto& a, auto&) { return torch::zeros_like(a); }},
                      Pointwise{"ones_like_double",
                                [](auto& a, auto&) { return torch::ones_like(a, torch::kFloat64); }},
                      Pointwise{"full_like", [](auto& a, auto&) { return torch::full_like(a, 2.5); }},
                      Pointwise{"to_half", [](auto& a, auto&) { return a.to(torch::kHalf); }}),
    [](const auto& which) { return which.param.name; });

TEST(InPlace, ReturnsTheTensorItselfAndCountsVersions) {
  auto tensor = sharded(torch::ones({2, 3}));
  const auto version = tensor._version();
  auto& result = tensor.mul_(2).add_(1);
  EXPECT_TRUE(result.is_same(tensor));
  EXPECT_EQ(tensor._version(), version + 2);
  EXPECT_TRUE(torch::equal(local_of(tensor), torch::full({2, 3}, 3.f)));
  tensor.zero_();
  tensor.fill_(7);
  EXPECT_TRUE(torch::equal(local_of(tensor), torch::full({2, 3}, 7.f)));
}

TEST(Foreach, ListsOfDifferentLayouts) {
  std::vector<at::Tensor> a{sharded(torch::ones({2, 3})), sharded(torch::full({4}, 2.f))};
  std::vector<at::Tensor> b{sharded(torch::full({2, 3}, 5.f)), sharded(torch::full({4}, 6.f))};
  at::_foreach_add_(a, b, 2);
  EXPECT_TRUE(torch::equal(local_of(a[0]), torch::full({2, 3}, 11.f)));
  EXPECT_TRUE(torch::equal(local_of(a[1]), torch::full({4}, 14.f)));
  auto products = at::_foreach_mul(a, 2);
  ASSERT_TRUE(DTensor::is_dtensor(products[1]));
  EXPECT_EQ(products[1].sizes(), a[1].sizes());
  EXPECT_TRUE(torch::equal(local_of(products[1]), torch::full({4}, 28.f)));
}

TEST(Fused, AdamWOnShardsEqualsTheStockStepOnLocals) {
  auto p = torch::rand({3, 2}), g = torch::rand({3, 2});
  auto q = p.clone();
  auto dp = sharded(q), dg = sharded(g.clone());
  auto m = torch::zeros_like(p), v = torch::zeros_like(p);
  auto dm = torch::zeros_like(dp), dv = torch::zeros_like(dp);
  std::vector<at::Tensor> steps{torch::ones({})}, dsteps{torch::ones({})};
  std::vector<at::Tensor> lp{p}, lg{g}, lm{m}, lv{v}, none, ldp{dp}, ldg{dg}, ldm{dm}, ldv{dv};
  at::_fused_adamw_(lp, lg, lm, lv, none, steps, 1e-2, 0.9, 0.99, 0.1, 1e-8, false, false);
  at::_fused_adamw_(ldp, ldg, ldm, ldv, none, dsteps, 1e-2, 0.9, 0.99, 0.1, 1e-8, false, false);
  EXPECT_TRUE(torch::equal(local_of(dp), p));
  EXPECT_TRUE(torch::equal(local_of(dv), v));
}

TEST(RandomInPlace, GivesEveryRankItsPartOfTheWholeDraw) {
  const std::vector<std::function<void(at::Tensor&)>> draws{[](at::Tensor& t) { t.normal_(1, 2); },
                                                            [](at::Tensor& t) { t.uniform_(-1, 1); },
                                                            [](at::Tensor& t) { t.bernoulli_(0.3); },
                                                            [](at::Tensor& t) { t.exponential_(2); },
                                                            [](at::Tensor& t) { t.random_(0, 100); },
                                                            [](at::Tensor& t) { torch::nn::init::xavier_uniform_(t); },
                                                            [](at::Tensor& t) { torch::nn::init::kaiming_normal_(t); }};
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < draws.size(); ++i) {
    torch::manual_seed(3);
    auto whole = torch::zeros({7, 5});
    draws[i](whole);
    auto after = torch::rand({1});
    for (int64_t ranks : {1, 2, 3, 4, 9}) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        auto range = dtensor::chunk_range(7, ranks, rank);
        auto tensor = DTensor::from_local(torch::zeros({range.end - range.begin, 5}), offline_mesh(ranks, rank),
                                          {Shard(0)}, {{7, 5}})
                          .tensor();
        torch::manual_seed(3);
        draws[i](tensor);
        EXPECT_TRUE(torch::equal(local_of(tensor), whole.narrow(0, range.begin, range.end - range.begin)))
            << "draw " << i << ", rank " << rank << " of " << ranks;
        EXPECT_TRUE(torch::equal(torch::rand({1}), after)) << "generator after draw " << i;
      }
    }
  }
}

TEST(Copy, TakesTheShardOfAWholeTensorAndRefusesOtherShapes) {
  auto tensor = DTensor::from_local(torch::zeros({2, 3}), offline_mesh(2, 1), {Shard(0)}, {{5, 3}}).tensor();
  auto whole = torch::arange(15).view({5, 3});
  tensor.copy_(whole);
  EXPECT_TRUE(torch::equal(local_of(tensor), whole.narrow(0, 3, 2).to(torch::kFloat)));
  expect_error<dtensor::ValueError>(
      [&] {
        tensor.copy_(torch::zeros({2, 3}));
      },
      "[2, 3]", "expected the global shape [5, 3]", "to_local().copy_");
  auto plain = torch::zeros({5, 3});
  expect_error<dtensor::NotSupportedError>([&] { plain.copy_(tensor); }, "full_tensor()");
}

TEST(Reductions, OfAWorldOfOneEqualThePlainOnes) {
  auto values = torch::randn({4, 3});
  auto tensor = sharded(values.clone(), 1);
  EXPECT_EQ(tensor.norm().item<float>(), values.norm().item<float>());
  EXPECT_EQ(tensor.norm(1).item<float>(), values.norm(1).item<float>());
  EXPECT_EQ(tensor.abs().max().item<float>(), values.abs().max().item<float>());
  EXPECT_EQ(tensor.sum().item<float>(), values.sum().item<float>());
  EXPECT_EQ(tensor.min().item<float>(), values.min().item<float>());
  EXPECT_NEAR(tensor.mean().item<float>(), values.mean().item<float>(), 1e-6);
  expect_error<dtensor::NotSupportedError>([&] { tensor.sum(0); }, "some dims only");
}

TEST(StockClipping, OfAWorldOfOneScalesGradients) {
  for (double type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    auto p = torch::rand({4, 3}).set_requires_grad(true), q = torch::rand({5}).set_requires_grad(true);
    p.mutable_grad() = torch::randn({4, 3});
    q.mutable_grad() = torch::randn({5});
    auto dp = DTensor::from_local(p.detach().clone(), offline_mesh(1, 0), {Shard(0)}).as_parameter(true).tensor();
    auto dq = DTensor::from_local(q.detach().clone(), offline_mesh(1, 0), {Shard(0)}).as_parameter(true).tensor();
    dp.mutable_grad() = sharded(p.grad().clone(), 1);
    dq.mutable_grad() = sharded(q.grad().clone(), 1);
    const double expected = torch::nn::utils::clip_grad_norm_(std::vector<at::Tensor>{p, q}, 0.5, type);
    const double norm = torch::nn::utils::clip_grad_norm_(std::vector<at::Tensor>{dp, dq}, 0.5, type);
    EXPECT_DOUBLE_EQ(norm, expected);
    EXPECT_TRUE(torch::equal(local_of(dp.grad()), p.grad()));
    EXPECT_TRUE(torch::equal(local_of(dq.grad()), q.grad()));
  }
}

TEST(Refusals, NameOperatorTensorAndRemedy) {
  auto tensor = DTensor::from_local(torch::rand({2, 3}), offline_mesh(2, 0), {Shard(0)}).tensor();
  DTensor(tensor).impl().set_name("fc.weight");
  auto x = torch::rand({2, 3});
  const std::vector<std::pair<std::string, std::function<void()>>> calls{
      {"aten::linear", [&] { torch::linear(x, tensor); }}, {"aten::t", [&] { tensor.t(); }},
      {"aten::view", [&] { tensor.view({-1}); }},          {"aten::item", [&] { tensor.item(); }},
      {"aten::dot", [&] { tensor.dot(tensor); }},          {"aten::equal", [&] { torch::equal(tensor, tensor); }},
      {"aten::slice", [&] { tensor.slice(0, 0, 1); }},     {"aten::cat", [&] { torch::cat({tensor, tensor}); }}};
  for (auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    expect_error<dtensor::NotSupportedError>(call, "[" + name + "]", "\"fc.weight\"", "Shard(0)", "model->forward(x)");
  }
  expect_error<dtensor::NotSupportedError>(
      [&] {
        tensor + torch::rand({2, 3});
      },
      "[aten::add]", "plain tensor of shape [2, 3]", "broadcasts to [4, 3]");
  auto plain = torch::rand({4, 3});
  expect_error<dtensor::NotSupportedError>([&] { plain.add_(tensor); }, "[aten::add_]", "in place on a plain tensor");
  expect_error<dtensor::ValueError>(
      [&] {
        tensor + sharded(torch::rand({3, 3}));
      },
      "[aten::add]", "expected equal shapes");
}

TEST(LostGradients, AreRefused) {
  auto parameter = DTensor::from_local(torch::rand({2, 3}), offline_mesh(2, 0), {Shard(0)}).as_parameter(true).tensor();
  DTensor(parameter).impl().set_name("fc.weight");
  expect_error<dtensor::NotSupportedError>([&] { parameter.pow(2); }, "[aten::pow]", "\"fc.weight\"",
                                           "gradient would be lost", "use model->forward(x)", "torch::NoGradGuard");
  // A conversion gives data to whoever only wants data; computing with it would lose the gradient as well.
  auto converted = parameter.to(torch::kFloat64);
  EXPECT_TRUE(converted.requires_grad());
  expect_error<dtensor::NotSupportedError>([&] { converted * 2; }, "gradient would be lost");
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(DTensor::is_dtensor(parameter.pow(2)));
}

TEST(StateMadeOnMeta, IsFilledInWhenItMeetsValues) {
  ShardedOne one({5, 3}, 2, 1);
  auto zeros = torch::zeros_like(one.net->weight);
  auto tenth = torch::full_like(one.net->weight.data(), 0.1);
  ASSERT_TRUE(zeros.is_meta());
  one.model.to_empty(at::kCPU);
  torch::NoGradGuard no_grad;
  one.net->weight.fill_(2);
  zeros.add_(one.net->weight);
  tenth.mul_(one.net->weight);
  EXPECT_TRUE(torch::equal(local_of(zeros), torch::full({2, 3}, 2.f)));
  EXPECT_TRUE(torch::allclose(local_of(tenth), torch::full({2, 3}, 0.2f)));
}

}  // namespace dispatch_rules_test

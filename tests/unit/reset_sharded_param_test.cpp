// reset_sharded_param: what is adopted, what is refused, and what does not change. No process group.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/inspect.h"
#include "tests/testing/expect.h"
#include "tests/testing/offline_mesh.h"

namespace reset_sharded_param_test {

using namespace testing_support;
using dtensor::DTensor;
using dtensor::inspect;

// Identity of the member, of the registered entry and of an optimizer's entry.
void expect_one_identity(ShardedOne& one, const torch::optim::Optimizer& optimizer, const void* identity) {
  EXPECT_EQ(one.net->weight.unsafeGetTensorImpl(), identity);
  EXPECT_EQ(one.registered().unsafeGetTensorImpl(), identity);
  EXPECT_EQ(optimizer.param_groups()[0].params()[0].unsafeGetTensorImpl(), identity);
}

TEST(ResetShardedParam, IdentityIsOneImplBeforeAndAfter) {
  ShardedOne one({4, 2}, 2, 0);
  const void* identity = one.net->weight.unsafeGetTensorImpl();
  torch::optim::SGD optimizer(one.net->parameters(), 0.1);
  expect_one_identity(one, optimizer, identity);
  one.model.core()->replace_by_empty(at::kCPU);
  // In between a plain tensor is registered, while the member and the optimizer still hold the identity.
  EXPECT_NE(one.registered().unsafeGetTensorImpl(), identity);
  EXPECT_FALSE(DTensor::is_dtensor(one.registered()));
  EXPECT_EQ(one.net->weight.unsafeGetTensorImpl(), identity);
  EXPECT_TRUE(one.net->weight.is_meta());
  EXPECT_EQ(one.model.reset_sharded_param(), 1);
  expect_one_identity(one, optimizer, identity);
  EXPECT_FALSE(one.net->weight.is_meta());
  EXPECT_TRUE(one.net->weight.requires_grad());
  EXPECT_TRUE(one.net->weight.is_leaf());
  EXPECT_TRUE(DTensor(one.net->weight).is_parameter());
}

TEST(ResetShardedParam, AdoptsThePlainTensorAndASecondCallChangesNothing) {
  ShardedOne one({4, 2}, 2, 0);
  one.model.core()->replace_by_empty(at::kCPU);
  one.slot().fill_(1);
  EXPECT_EQ(one.model.reset_sharded_param(), 1);
  const auto first = inspect(one.net->weight);
  EXPECT_EQ(first.body.storage, first.local.storage);
  EXPECT_TRUE(torch::equal(one.impl().local(), torch::ones({2, 2})));
  const auto version = one.net->weight._version();
  EXPECT_EQ(one.model.reset_sharded_param(), 0);
  const auto second = inspect(one.net->weight);
  EXPECT_EQ(second.body.impl, first.body.impl);
  EXPECT_EQ(second.local.impl, first.local.impl);
  EXPECT_EQ(second.body.storage, first.body.storage);
  EXPECT_EQ(one.net->weight._version(), version);
}

struct Uneven {
  std::vector<int64_t> global;
  int64_t ranks, rank;
  std::vector<int64_t> actual, padded;
};

class ResetUneven : public ::testing::TestWithParam<Uneven> {};

TEST_P(ResetUneven, PadsWithZerosAndSharesStorage) {
  const auto& c = GetParam();
  ShardedOne one(c.global, c.ranks, c.rank);
  one.model.core()->replace_by_empty(at::kCPU);
  one.slot().fill_(9);
  one.model.reset_sharded_param();
  EXPECT_EQ(one.net->weight.sizes(), c.global);
  EXPECT_EQ(one.impl().local().sizes(), c.actual);
  EXPECT_EQ(one.parameter().layout().padded_local_sizes(), c.padded);
  const auto flat = one.parameter().padded_shard();
  const auto count = c10::multiply_integers(c.actual);
  ASSERT_EQ(flat.numel(), c10::multiply_integers(c.padded));
  EXPECT_TRUE(flat.narrow(0, 0, count).eq(9).all().item<bool>());
  EXPECT_TRUE(flat.narrow(0, count, flat.numel() - count).eq(0).all().item<bool>());
  EXPECT_EQ(inspect(flat).body.storage, inspect(one.net->weight).body.storage);
  EXPECT_EQ(inspect(flat).body.storage, inspect(one.net->weight).local.storage);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ResetUneven,
                         ::testing::Values(Uneven{{5, 3}, 2, 0, {3, 3}, {3, 3}}, Uneven{{5, 3}, 2, 1, {2, 3}, {3, 3}},
                                           Uneven{{2, 3}, 4, 1, {1, 3}, {1, 3}}, Uneven{{2, 3}, 4, 3, {0, 3}, {1, 3}},
                                           Uneven{{10, 3}, 4, 3, {1, 3}, {3, 3}}, Uneven{{7}, 3, 2, {1}, {3}},
                                           Uneven{{4, 2, 3}, 4, 2, {1, 2, 3}, {1, 2, 3}}));

TEST(ResetShardedParam, AdoptsTheLocalOfAnotherDTensorOfEqualLayout) {
  ShardedOne one({5, 3}, 2, 1);
  const void* identity = one.net->weight.unsafeGetTensorImpl();
  one.model.to_empty(at::kCPU);
  auto& mesh = one.model.core()->mesh();
  one.slot() = DTensor::from_local(torch::full({2, 3}, 9.f), mesh, {dtensor::Shard(0)}, {{5, 3}}).tensor();
  EXPECT_EQ(one.model.reset_sharded_param(), 1);
  EXPECT_EQ(one.registered().unsafeGetTensorImpl(), identity);
  const auto flat = one.parameter().padded_shard();
  EXPECT_TRUE(flat.narrow(0, 0, 6).eq(9).all().item<bool>());
  EXPECT_TRUE(flat.narrow(0, 6, 3).eq(0).all().item<bool>());
}

TEST(ResetShardedParam, MetaGivesNothingToDo) {
  ShardedOne one({4, 2}, 2, 0);
  EXPECT_EQ(one.model.reset_sharded_param(), 0);
  EXPECT_TRUE(one.net->weight.is_meta());
  one.slot() = torch::empty({2, 2}, at::kMeta);
  EXPECT_EQ(one.model.reset_sharded_param(), 0);
}

TEST(ResetShardedParam, RepairsAStaleBodyWhoseLocalIsAlreadyInPlace) {
  ShardedOne one({4, 2}, 2, 0);
  one.model.to_empty(at::kCPU);
  at::Tensor stale = torch::empty({2, 2}, at::kMeta);
  one.impl().exchange_body(stale);
  ASSERT_NE(inspect(one.net->weight).body.storage, inspect(one.net->weight).local.storage);
  const auto* local = inspect(one.net->weight).local.impl;
  EXPECT_EQ(one.model.reset_sharded_param(), 1);
  EXPECT_EQ(inspect(one.net->weight).body.storage, inspect(one.net->weight).local.storage);
  EXPECT_EQ(inspect(one.net->weight).local.impl, local);
}

TEST(ResetShardedParam, BringsAReplacedLocalIntoPaddedForm) {
  ShardedOne one({5, 3}, 2, 1);
  one.model.to_empty(at::kCPU);
  one.net->weight.set_data(torch::full({5, 3}, 4.f));
  EXPECT_EQ(one.model.reset_sharded_param(), 1);
  const auto flat = one.parameter().padded_shard();
  EXPECT_TRUE(flat.narrow(0, 0, 6).eq(4).all().item<bool>());
  EXPECT_TRUE(flat.narrow(0, 6, 3).eq(0).all().item<bool>());
}

TEST(ResetShardedParam, KeepsHooksNameAndRequiresGradAndDropsAMetaGradient) {
  ShardedOne one({4, 2}, 2, 0);
  one.net->weight.set_requires_grad(false);
  one.net->weight.set_requires_grad(true);
  one.net->weight.register_hook([](const at::Tensor& gradient) { return gradient; });
  one.net->weight.mutable_grad() = torch::zeros_like(one.net->weight);
  ASSERT_TRUE(one.net->weight.grad().is_meta());
  one.model.to_empty(at::kCPU);
  EXPECT_FALSE(one.net->weight.grad().defined());
  EXPECT_TRUE(one.net->weight.requires_grad());
  EXPECT_EQ(torch::autograd::impl::hooks(one.net->weight).size(), 1u);
  EXPECT_EQ(one.impl().name(), "weight");
}

struct Refusal {
  std::string name;
  std::function<at::Tensor(ShardedOne&)> registered;
  std::vector<std::string> parts;
};

class ResetRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(ResetRefuses, AndChangesNothing) {
  ShardedOne one({5, 3}, 2, 1);
  one.model.to_empty(at::kCPU);
  one.impl().local().fill_(2);
  const auto before = inspect(one.net->weight);
  auto bad = GetParam().registered(one);
  one.slot() = bad;
  const auto* bad_impl = bad.unsafeGetTensorImpl();
  if (GetParam().name != "HeldElsewhere") bad.reset();
  std::string text;
  try {
    one.model.reset_sharded_param();
    ADD_FAILURE() << "was not refused";
  } catch (const dtensor::ValueError& error) {
    text = error.what();
  }
  for (auto& part : GetParam().parts) EXPECT_NE(text.find(part), std::string::npos) << part << " not in: " << text;
  EXPECT_NE(text.find("[reset_sharded_param] parameter \"weight\""), std::string::npos) << text;
  const auto after = inspect(one.net->weight);
  EXPECT_EQ(after.body.impl, before.body.impl);
  EXPECT_EQ(after.local.impl, before.local.impl);
  EXPECT_EQ(one.registered().unsafeGetTensorImpl(), bad_impl);
  EXPECT_TRUE(one.impl().local().eq(2).all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(
    All, ResetRefuses,
    ::testing::Values(
        Refusal{"Size", [](ShardedOne&) { return torch::zeros({3}); }, {"sizes [3]", "expected [2, 3]"}},
        Refusal{"GlobalSize",
                [](ShardedOne&) {
                  return torch::zeros({5, 3});
                },
                {"sizes [5, 3]", "expected [2, 3]"}},
        Refusal{"Dtype",
                [](ShardedOne&) {
                  return torch::zeros({2, 3}, torch::kFloat64);
                },
                {"dtype Double", "expected Float"}},
        Refusal{"HeldElsewhere",
                [](ShardedOne&) {
                  return torch::zeros({2, 3});
                },
                {"1 other holders", "clone()"}},
        Refusal{"MemoryHeldByAnAlias",
                [](ShardedOne&) {
                  static at::Tensor held;
                  held = torch::zeros({2, 3});
                  return held.detach();
                },
                {"the memory of the tensor to adopt has other holders", "clone()"}},
        Refusal{"MemoryOfALargerTensor",
                [](ShardedOne&) {
                  static at::Tensor large;
                  large = torch::zeros({4, 3});
                  return large.narrow(0, 2, 2);
                },
                {"the memory of the tensor to adopt has other holders"}},
        Refusal{"MemoryOfADTensorHeldElsewhere",
                [](ShardedOne& one) {
                  static at::Tensor held;
                  held = torch::zeros({2, 3});
                  return DTensor::from_local(held, one.model.core()->mesh(), {dtensor::Shard(0)}, {{5, 3}}).tensor();
                },
                {"the memory of the tensor to adopt has other holders"}},
        Refusal{"AnotherMesh",
                [](ShardedOne&) {
                  return DTensor::from_local(torch::zeros({2, 3}), offline_mesh(2, 1), {dtensor::Shard(0)}, {{5, 3}})
                      .tensor();
                },
                {"expected", "Shard(0)", "redistribute it first"}},
        Refusal{"Layout",
                [](ShardedOne& one) {
                  return DTensor::from_local(torch::zeros({2, 3}), one.model.core()->mesh(), {dtensor::Replicate()})
                      .tensor();
                },
                {"Replicate()", "expected", "Shard(0)"}},
        Refusal{"Sparse",
                [](ShardedOne&) {
                  return torch::zeros({2, 3}).to_sparse();
                },
                {"Sparse", "dense"}}),
    [](const auto& which) { return which.param.name; });

TEST(ResetShardedParam, RefusesOneOfTwoParametersAndLeavesBoth) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() {
      a = register_parameter("a", torch::rand({4}));
      b = register_parameter("b", torch::rand({4}));
    }
    torch::Tensor a, b;
  };
  auto net = hsdp::meta_init([] { return std::make_shared<TwoImpl>(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0)});
  model.core()->replace_by_empty(at::kCPU);
  auto& slots = hsdp::ModuleAccess::parameters(*net);
  slots["b"] = torch::zeros({3});
  expect_error<dtensor::ValueError>([&] { model.reset_sharded_param(); }, "parameter \"b\"", "[3]", "expected [2]");
  EXPECT_TRUE(net->a.is_meta());
  EXPECT_FALSE(DTensor::is_dtensor(slots["a"]));
  slots["b"] = torch::zeros({2});
  EXPECT_EQ(model.reset_sharded_param(), 2);
}

TEST(ResetShardedParam, RefusesTiedSlotsThatDisagree) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      a = register_parameter("a", torch::rand({4}));
      register_parameter("b", a);
    }
    torch::Tensor a;
  };
  auto net = hsdp::meta_init([] { return std::make_shared<TiedImpl>(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0)});
  ASSERT_EQ(model.core()->units().front()->parameters().size(), 1u);
  model.to_empty(at::kCPU);
  auto& slots = hsdp::ModuleAccess::parameters(*net);
  EXPECT_TRUE(slots["a"].is_same(slots["b"]));
  slots["b"] = torch::zeros({2});
  expect_error<dtensor::ValueError>([&] { model.reset_sharded_param(); }, "tied parameter", "\"a\"", "\"b\"",
                                    "assign both");
}

}  // namespace reset_sharded_param_test

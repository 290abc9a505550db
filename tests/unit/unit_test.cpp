// Gathering, freeing and reducing of one unit, against a group in which the other ranks are played.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "tests/testing/expect.h"
#include "tests/testing/fake_communicator.h"
#include "tests/testing/offline_mesh.h"

namespace unit_test {

using namespace testing_support;
using dtensor::DTensor;

// A row of a gather: 6 parameter elements, then 32 bytes that say what is gathered and are the same on all ranks.
constexpr int64_t kRow = 6 + 32 / 4;

at::Tensor zero_parameters(int64_t, const at::Tensor& own) {
  auto row = own.clone();
  if (row.numel() == kRow) row.narrow(0, 0, 6).zero_();
  return row;
}

/// One parameter (5, 3) over 4 ranks (rows 2, 2, 1, 0), seen by one rank; the others hold zeros.
struct Played {
  explicit Played(int64_t rank, FakeCommunicator::Contribution contribution = zero_parameters)
      : communicator(std::make_shared<FakeCommunicator>(rank, 4, false, std::move(contribution))),
        net(hsdp::meta_init([] {
          return OneParameter(torch::IntArrayRef{5, 3});
        })),
        model(hsdp::fully_shard(net, {.mesh = dtensor::DeviceMesh::from_communicator(at::kCPU, communicator, "shard"),
                                      .reshard_after_forward = true})) {
    model.to_empty(at::kCPU);
    torch::NoGradGuard no_grad;
    net->weight.fill_(static_cast<double>(rank + 1));
    communicator->clear_calls();
  }
  hsdp::Unit& unit() { return *model.core()->units().front(); }

  std::shared_ptr<FakeCommunicator> communicator;
  OneParameter net;
  hsdp::FullySharded<OneParameterImpl> model;
};

class Rank : public ::testing::TestWithParam<int64_t> {};

TEST_P(Rank, UnshardedHasTheLogicalShapeAndHidesThePadding) {
  const auto rank = GetParam();
  Played played(rank);
  torch::NoGradGuard no_grad;
  auto whole = played.model->forward(torch::ones({5, 3}));
  auto expected = torch::zeros({5, 3});
  const auto range = dtensor::chunk_range(5, 4, rank);
  expected.narrow(0, range.begin, range.end - range.begin).fill_(static_cast<double>(rank + 1));
  EXPECT_TRUE(torch::equal(whole, expected));
  ASSERT_EQ(played.communicator->calls().size(), 1u);
  EXPECT_EQ(played.communicator->calls()[0].operation, "all_gather");
  EXPECT_EQ(played.communicator->calls()[0].subject, "root");
  EXPECT_EQ(played.communicator->calls()[0].numel, 4 * kRow);
}

TEST_P(Rank, GradientsArePaddedReducedAveragedAndAccumulated) {
  const auto rank = GetParam();
  // Every other rank sends the same gradient again.
  Played played(rank, [](int64_t, const at::Tensor& own) { return own.clone(); });
  auto x = torch::arange(15).to(torch::kFloat).view({5, 3});
  for (int pass = 1; pass <= 2; ++pass) {
    played.communicator->clear_calls();
    played.model->forward(x).sum().backward();
    auto gradient = played.net->weight.grad();
    ASSERT_TRUE(DTensor::is_dtensor(gradient));
    EXPECT_EQ(gradient.sizes(), (std::vector<int64_t>{5, 3}));
    const auto range = dtensor::chunk_range(5, 4, rank);
    auto expected = x.narrow(0, range.begin, range.end - range.begin) * pass;
    EXPECT_TRUE(torch::equal(DTensor(gradient).to_local(), expected)) << "pass " << pass;
    ASSERT_EQ(played.communicator->calls().size(), 2u);  // x needs no gradient, so backward reads no weight
    EXPECT_EQ(played.communicator->calls()[1].operation, "reduce_scatter");
    EXPECT_EQ(played.communicator->calls()[1].numel, 4 * 2 * 3);
  }
}

INSTANTIATE_TEST_SUITE_P(OfFour, Rank, ::testing::Values(0, 1, 2, 3));

TEST(Gathering, KeepsOneStorageWhoseBytesComeAndGo) {
  Played played(1);
  torch::NoGradGuard no_grad;
  const c10::StorageImpl* storage = nullptr;
  for (int pass = 0; pass < 3; ++pass) {
    hsdp::ForwardScope scope(played.model.core());
    auto view = played.net->weight.narrow(0, 0, 5);
    const auto* now = view.storage().unsafeGetStorageImpl();
    EXPECT_TRUE(storage == nullptr || storage == now);
    storage = now;
    EXPECT_EQ(now->nbytes(), 4u * 2 * 3 * 4);
    played.unit().reshard();
    EXPECT_EQ(now->nbytes(), 0u);
    EXPECT_EQ(view.sum().item<float>(), 12) << "a view that is read after its unit was freed gathers again";
  }
}

TEST(Gathering, DoesNotMoveVersionCounters) {
  Played played(1);
  auto x = torch::ones({5, 3}).set_requires_grad(true);
  auto y = played.model->forward(x);
  const auto version = played.unit().whole(0)._version();
  y.sum().backward();
  EXPECT_EQ(played.unit().whole(0)._version(), version);
}

TEST(Gathering, ThatFailsLeavesTheUnitShardedAndUsable) {
  Played played(1);
  torch::NoGradGuard no_grad;
  played.communicator->fail_wait(1);
  EXPECT_THROW(played.model->forward(torch::ones({5, 3})), dtensor::CommunicationError);
  EXPECT_FALSE(played.unit().is_gathered() || played.unit().is_gathering());
  EXPECT_EQ(played.model->forward(torch::ones({5, 3})).sum().item<float>(), 12);
}

TEST(Gathering, SeesWhatAnOptimizerOrARawAliasWrote) {
  Played played(0);
  torch::NoGradGuard no_grad;
  const auto sum = [&] { return played.model->forward(torch::ones({5, 3})).sum().item<float>(); };
  EXPECT_EQ(sum(), 6);
  played.net->weight.add_(1);
  EXPECT_EQ(sum(), 12);
  played.net->weight.data().add_(1);
  EXPECT_EQ(sum(), 18);
  auto local = DTensor(played.net->weight).to_local();
  local.data_ptr<float>()[0] += 1;
  EXPECT_EQ(sum(), 19);
}

TEST(KeptUnits, AreGatheredAgainWhenTheirShardsChange) {
  Played played(0);
  auto model = played.model;
  torch::NoGradGuard no_grad;
  auto net = hsdp::meta_init([] { return OneParameter(torch::IntArrayRef{5, 3}); });
  auto kept = hsdp::fully_shard(net, {.mesh = model.core()->mesh(), .reshard_after_forward = false});
  kept.to_empty(at::kCPU);
  net->weight.fill_(2);
  const auto sum = [&] { return kept->forward(torch::ones({5, 3})).sum().item<float>(); };
  played.communicator->clear_calls();
  EXPECT_EQ(sum(), 12);
  EXPECT_EQ(sum(), 12);
  EXPECT_EQ(played.communicator->calls().size(), 1u) << "kept between forwards without gradients";
  net->weight.fill_(3);
  EXPECT_EQ(sum(), 18);
  net->weight.data().fill_(4);
  EXPECT_EQ(sum(), 24);
  DTensor(net->weight).to_local()[0].fill_(5);
  EXPECT_EQ(sum(), 27);
}

TEST(KeptUnits, SeeAnOptimizerThatWritesThroughData) {
  Played played(0);
  auto net = hsdp::meta_init([] { return OneParameter(torch::IntArrayRef{5, 3}); });
  auto kept = hsdp::fully_shard(net, {.mesh = played.model.core()->mesh(), .reshard_after_forward = false});
  kept.to_empty(at::kCPU);
  {
    torch::NoGradGuard no_grad;
    net->weight.fill_(2);
  }
  auto alive = kept->forward(torch::ones({5, 3}));
  net->weight.data().fill_(3);  // as torch::optim::SGD does, with a version counter of its own
  EXPECT_EQ(kept->forward(torch::ones({5, 3})).sum().item<float>(), 18);
  auto x = torch::ones({5, 3}).set_requires_grad(true);
  auto loss = kept->forward(x).sum();
  net->weight.data().fill_(4);
  expect_error<dtensor::StateError>([&] { loss.backward(); }, "modified by an inplace operation");
}

TEST(Signatures, OfRanksThatGatherSomethingElseAreCompared) {
  Played played(1, [](int64_t rank, const at::Tensor& own) {
    auto row = own.clone();
    if (rank == 2 && row.numel() == kRow) row.view(torch::kByte)[24].bitwise_xor_(1);
    return row;
  });
  torch::NoGradGuard no_grad;
  expect_error<dtensor::CommunicationError>(
      [&] {
        played.model->forward(torch::ones({5, 3}));
      },
      "[all_gather] rank 1 gathers unit \"root\" as collective 1, rank 2", "every rank must call it");
  EXPECT_FALSE(played.unit().is_gathered());
}

TEST(RawPointers, OfAForwardStayValidAndTheirWritesReachTheShard) {
  Played played(1);
  torch::NoGradGuard no_grad;
  {
    hsdp::ForwardScope scope(played.model.core());
    played.net->weight.data_ptr<float>()[6] = 42;
  }
  auto expected = torch::full({2, 3}, 2.f);
  expected[0][0] = 42;
  EXPECT_TRUE(torch::equal(DTensor(played.net->weight).to_local(), expected));
}

TEST(Lifetime, AViewOfAWeightThatOutlivesTheModelIsRefused) {
  at::Tensor view;
  {
    Played played(1);
    hsdp::ForwardScope scope(played.model.core());
    view = played.net->weight.detach().t();
  }
  EXPECT_THROW(view.sum().item<float>(), std::exception);
}

TEST(Lifetime, BackwardRunsAfterTheModelIsGone) {
  torch::Tensor loss, weight;
  {
    Played played(1);
    weight = played.net->weight;
    loss = played.model->forward(torch::ones({5, 3}).set_requires_grad(true)).sum();
  }
  loss.backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(WriteBack, OfWhatAForwardWroteReachesTheShard) {
  Played played(1);
  {
    torch::NoGradGuard no_grad;
    hsdp::ForwardScope scope(played.model.core());
    played.net->weight.clamp_(0, 1.5);
    played.net->weight.select(0, 2).mul_(10);
  }
  auto expected = torch::full({2, 3}, 1.5);
  expected[0] *= 10;
  EXPECT_TRUE(torch::equal(DTensor(played.net->weight).to_local(), expected));
}

TEST(Gradients, PostAccumulateHooksRunOnTheReducedGradient) {
  struct Hook : torch::autograd::PostAccumulateGradHook {
    explicit Hook(std::vector<double>& seen) : sums(seen) {}
    void operator()(const torch::autograd::Variable& parameter) override {
      EXPECT_TRUE(DTensor::is_dtensor(parameter.grad()));
      sums.push_back(DTensor(parameter.grad()).to_local().sum().item<double>());
      torch::NoGradGuard no_grad;
      parameter.mutable_grad().mul_(2);  // by the rules for sharded tensors
    }
    std::vector<double>& sums;
  };
  Played played(0, [](int64_t, const at::Tensor& own) { return own.clone(); });
  std::vector<double> sums;
  torch::autograd::impl::set_post_acc_grad_hooks(played.net->weight, std::make_unique<Hook>(sums));
  for (int pass = 0; pass < 2; ++pass) played.model->forward(torch::ones({5, 3})).sum().backward();
  EXPECT_EQ(sums, (std::vector<double>{6, 18}));
}

TEST(Gradients, ThatAreNotDTensorsAreRefused) {
  Played played(0);
  played.net->weight.mutable_grad() = torch::zeros({5, 3});
  auto loss = played.model->forward(torch::ones({5, 3})).sum();
  expect_error<dtensor::StateError>([&] { loss.backward(); },
                                    "[backward] parameter \"weight\" has a gradient that is plain", "zero_grad()");
}

}  // namespace unit_test

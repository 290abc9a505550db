// After initialisation the ranks' default generators go their own ways, so that dropout differs between ranks, and
// nothing else changes: rank 0 and a world of one draw what plain construction would, and what all ranks must draw
// alike they still do.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/modules.h"
#include "tests/testing/multi_process.h"

namespace {

using namespace testing_support;

struct DroppingImpl : torch::nn::Module {
  DroppingImpl()
      : linear(register_module("linear", torch::nn::Linear(16, 16))),
        dropout(register_module("dropout", torch::nn::Dropout(0.5))) {}
  torch::Tensor forward(const torch::Tensor& x) { return dropout(linear(x)); }
  torch::nn::Linear linear;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(Dropping);

hsdp::FullySharded<DroppingImpl> sharded(RankContext& context) {
  auto net = hsdp::meta_init([] { return Dropping(); });
  return hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
}

/// The tensors of all ranks, one a row.
torch::Tensor of_all_ranks(RankContext& context, const torch::Tensor& own) {
  auto all = torch::empty({context.world_size() * own.numel()}, own.options());
  context.environment().communicator()->all_gather(all, own.contiguous().view({-1}), {"all_gather", "test"})->wait();
  return all.view({context.world_size(), own.numel()});
}

void expect_all_unlike(RankContext& context, const torch::Tensor& own) {
  const auto all = of_all_ranks(context, own.detach());
  for (int64_t a = 0; a < all.size(0); ++a) {
    for (int64_t b = 0; b < a; ++b) EXPECT_FALSE(torch::equal(all[a], all[b])) << "ranks " << a << " and " << b;
  }
}

void expect_all_alike(RankContext& context, const torch::Tensor& own) {
  const auto all = of_all_ranks(context, own);
  for (int64_t rank = 1; rank < all.size(0); ++rank) EXPECT_TRUE(torch::equal(all[rank], all[0])) << "rank " << rank;
}

class RankGenerators : public ::testing::TestWithParam<int> {
 protected:
  static void run(const std::function<void(RankContext&)>& body) { run_ranks(GetParam(), body); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, RankGenerators, ::testing::Values(1, 2, 3));

TEST_P(RankGenerators, DropoutDiffersBetweenRanksAndIsThatOfThePlainModuleOnRankZero) {
  run([](RankContext& context) {
    torch::manual_seed(7);
    Dropping plain;
    const auto x = torch::full({4, 16}, 0.3);
    const auto expected = plain->forward(x), next = plain->forward(x);
    torch::Tensor first;
    for (int repetition = 0; repetition < 2; ++repetition) {
      torch::manual_seed(7);
      auto model = sharded(context);
      model.materialize(at::kCPU);
      const auto masked = model->forward(x);
      if (context.rank() == 0) {
        EXPECT_TRUE(torch::equal(masked, expected));
        EXPECT_TRUE(torch::equal(model->forward(x), next));
      }
      expect_all_unlike(context, masked.eq(0).to(torch::kByte));
      if (repetition == 0) first = masked;
      EXPECT_TRUE(torch::equal(masked, first)) << "another run draws other numbers";
    }
  });
}

TEST_P(RankGenerators, ASeedOfTheProgramStands) {
  run([](RankContext& context) {
    torch::manual_seed(9);
    const auto expected = torch::rand({8});
    torch::manual_seed(7);
    auto model = sharded(context);
    model.materialize(at::kCPU);
    torch::manual_seed(9);
    EXPECT_TRUE(torch::equal(torch::rand({8}), expected));
    torch::manual_seed(7);  // the one before construction is a seed like any other
    const auto again = torch::rand({8});
    torch::manual_seed(7);
    EXPECT_TRUE(torch::equal(torch::rand({8}), again));
    expect_all_alike(context, again);
    model.materialize(at::kCPU);
    expect_all_alike(context, torch::rand({8}));
  });
}

TEST_P(RankGenerators, ANextModuleIsConstructedAlikeOnAllRanks) {
  run([](RankContext& context) {
    torch::manual_seed(7);
    Dropping plain_one, plain_two;
    const auto next = torch::rand({8});
    torch::manual_seed(7);
    auto one = sharded(context);
    one.materialize(at::kCPU);
    if (context.rank() > 0) (void)torch::rand({5});  // what one rank draws changes nothing for the others
    auto two = sharded(context);
    two.materialize(at::kCPU);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(two->linear->weight), plain_two->linear->weight));
    const auto drawn = torch::rand({8});
    EXPECT_EQ(torch::equal(drawn, next), context.rank() == 0);
    expect_all_unlike(context, drawn);
  });
}

TEST_P(RankGenerators, InPlaceInitialisationDrawsTheSameOnAllRanks) {
  run([](RankContext& context) {
    torch::NoGradGuard no_grad;
    torch::manual_seed(7);
    Dropping plain;
    for (auto& parameter : plain->parameters()) torch::nn::init::normal_(parameter, 0.0, 0.02);
    const auto like = torch::rand_like(plain->linear->weight);
    torch::manual_seed(7);
    auto model = sharded(context);
    model.materialize(at::kCPU);
    for (auto& parameter : model.module().parameters()) torch::nn::init::normal_(parameter, 0.0, 0.02);
    const auto ours = torch::rand_like(model.module().linear->weight);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(ours), like));
    for (auto& parameter : model.module().named_parameters()) {
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value()), plain->named_parameters()[parameter.key()]));
    }
    expect_all_unlike(context, torch::rand({8}));
  });
}

TEST_P(RankGenerators, InitialisersOfGatheredWeightsDrawTheSameOnAllRanks) {
  run([](RankContext& context) {
    torch::NoGradGuard no_grad;
    torch::manual_seed(7);
    Dropping plain;
    torch::nn::init::normal_(plain->linear->weight);
    plain->linear->weight[0].uniform_();
    torch::manual_seed(7);
    auto model = sharded(context);
    model.materialize(at::kCPU);
    {
      hsdp::ForwardScope scope(model.core());
      (void)model.module().linear->weight.sum();
      torch::nn::init::normal_(model.module().linear->weight);
      model.module().linear->weight[0].uniform_();
      EXPECT_TRUE(torch::equal(model.module().linear->weight, plain->linear->weight));
    }
    EXPECT_TRUE(torch::equal(hsdp::unsharded(model.module().linear->weight), plain->linear->weight));
    (void)model->forward(torch::full({4, 16}, 0.3));  // What was written was the same on all ranks.
  });
}

TEST_P(RankGenerators, WithoutReplayTheyPartAtTheFirstForward) {
  run([](RankContext& context) {
    torch::manual_seed(7);
    auto model = sharded(context);
    model.to_empty(at::kCPU);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : model.module().parameters()) torch::nn::init::uniform_(parameter);
    }
    expect_all_alike(context, torch::rand({8}));
    expect_all_unlike(context, model->forward(torch::full({4, 16}, 0.3)).eq(0).to(torch::kByte));
    // A seed of the program's own, set since, stands there as well.
    auto other = sharded(context);
    other.to_empty(at::kCPU);
    torch::manual_seed(3);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : other.module().parameters()) torch::nn::init::uniform_(parameter);
    }
    expect_all_alike(context, other->forward(torch::full({4, 16}, 0.3)).eq(0).to(torch::kByte));
  });
}

}  // namespace

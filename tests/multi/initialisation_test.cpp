// replay_init gives every rank the values of plain construction; optimizers may be built at any point of the sequence.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/modules.h"
#include "tests/testing/multi_process.h"

namespace initialisation_test {

using namespace testing_support;

/// Parameters by expression, buffers, and tensors kept as members and never registered.
struct EclecticImpl : torch::nn::Module {
  EclecticImpl() {
    weight = register_parameter("weight", torch::rand({70, 90}) * 0.2 - 0.1);
    small = register_parameter("small", torch::randn({3, 2}));
    zoo = register_module("zoo", Zoo());
    mask = register_buffer("mask", torch::triu(torch::ones({80, 80}), 1));
    noise = register_buffer("noise", torch::randn({7}));
    secret = torch::randn({65, 65});  // not registered
    table = torch::tensor({1.5f, 2.5f, 3.5f});
    torch::NoGradGuard no_grad;
    weight[3].fill_(0.5);
    torch::nn::init::orthogonal_(zoo->linear->weight);
  }
  torch::Tensor weight, small, mask, noise, secret, table;
  Zoo zoo{nullptr};
};
TORCH_MODULE(Eclectic);

class Replay : public ::testing::TestWithParam<int> {};

TEST_P(Replay, ParametersBuffersAndMembersAreBitIdentical) {
  run_ranks(GetParam(), [](RankContext& context) {
    torch::manual_seed(11);
    Eclectic plain;
    auto after = torch::rand({4});
    torch::manual_seed(11);
    auto net = hsdp::meta_init([] { return Eclectic(); });
    auto model =
        hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()});
    model.materialize(at::kCPU);
    EXPECT_EQ(torch::equal(torch::rand({4}), after), context.rank() == 0)
        << "the generator of rank 0 goes on as after plain construction, the others do not";
    const auto expected = plain->named_parameters();
    ASSERT_EQ(net->named_parameters().size(), expected.size());
    for (auto& parameter : net->named_parameters()) {
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value()), expected[parameter.key()])) << parameter.key();
    }
    const auto buffers = plain->named_buffers();
    for (auto& buffer : net->named_buffers()) {
      EXPECT_TRUE(torch::equal(buffer.value(), buffers[buffer.key()])) << buffer.key();
    }
    EXPECT_TRUE(torch::equal(net->secret, plain->secret));
    EXPECT_TRUE(torch::equal(net->table, plain->table));
    EXPECT_TRUE(net->mask.is_same(net->named_buffers()["mask"]));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Replay, ::testing::Values(1, 2, 3, 4));

TEST(ReplaySeeds, ThatDifferBetweenRanksAreRefusedOnAll) {
  run_ranks(3, [](RankContext& context) {
    torch::manual_seed(context.rank() == 2 ? 5 : 4);
    auto net = hsdp::meta_init([] { return OddMlp(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    model.to_empty(at::kCPU);
    expect_error<dtensor::ValueError>(
        [&] { model.replay_init(); },
        "[replay_init] rank 2 had another generator state than rank 0 when meta_init ran, expected the same on all "
        "ranks; call torch::manual_seed(seed) with one seed before meta_init");
  });
}

TEST(SeveralConstructions, GoOnFromEachOtherAsPlainOnesDo) {
  for (const bool second_first : {false, true}) {
    run_ranks(2, [second_first](RankContext& context) {
      auto mesh = context.environment().mesh();
      torch::manual_seed(7);
      OddMlp plain_one, plain_two;
      auto after = torch::rand({3});
      torch::manual_seed(7);
      auto one = hsdp::meta_init([] { return OddMlp(); });
      auto two = hsdp::meta_init([] { return OddMlp(); });
      auto model_one = hsdp::fully_shard(one, {.mesh = mesh});
      auto model_two = hsdp::fully_shard(two, {.mesh = mesh});
      if (second_first) model_two.materialize(at::kCPU);
      model_one.materialize(at::kCPU);
      if (!second_first) model_two.materialize(at::kCPU);
      EXPECT_EQ(torch::equal(torch::rand({3}), after), context.rank() == 0);
      for (auto [net, plain] : {std::pair(one, plain_one), std::pair(two, plain_two)}) {
        const auto expected = plain->named_parameters();
        for (auto& parameter : net->named_parameters()) {
          EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value()), expected[parameter.key()])) << parameter.key();
        }
      }
    });
  }
}

TEST(SeedsInBetween, StandAfterReplay) {
  run_ranks(2, [](RankContext& context) {
    torch::manual_seed(7);
    auto net = hsdp::meta_init([] { return OddMlp(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    torch::manual_seed(100 + static_cast<uint64_t>(context.rank()));
    const auto expected = torch::rand({3});
    torch::manual_seed(100 + static_cast<uint64_t>(context.rank()));
    model.materialize(at::kCPU);
    model.materialize(at::kCPU);
    EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
  });
}

enum class Built { after_meta_init, after_fully_shard, after_to_empty, after_materialize };
enum class Kind { adamw, adagrad };

class OptimizerBuilt : public ::testing::TestWithParam<std::tuple<Built, Kind, int>> {};

TEST_P(OptimizerBuilt, AtAnyPointTrains) {
  const auto [built, kind, ranks] = GetParam();
  run_ranks(ranks, [built = built, kind = kind](RankContext& context) {
    using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
    const auto make = [kind](const std::vector<torch::Tensor>& parameters) -> Optimizer {
      if (kind == Kind::adamw)
        return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.05));
      return std::make_unique<torch::optim::Adagrad>(parameters,
                                                     torch::optim::AdagradOptions(0.05).initial_accumulator_value(0.1));
    };
    torch::manual_seed(1);
    OddMlp reference;
    auto theirs = make(reference->parameters());
    torch::manual_seed(1);
    Optimizer ours;
    auto net = hsdp::meta_init([] { return OddMlp(); });
    const auto* identity = net->parameters()[0].unsafeGetTensorImpl();
    if (built == Built::after_meta_init) ours = make(net->parameters());
    auto model =
        hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()});
    if (built == Built::after_fully_shard) ours = make(model->parameters());
    model.to_empty(at::kCPU);
    if (built == Built::after_to_empty) ours = make(model->parameters());
    model.replay_init();
    if (built == Built::after_materialize) ours = make(model->parameters());
    EXPECT_EQ(ours->param_groups()[0].params()[0].unsafeGetTensorImpl(), identity);
    EXPECT_EQ(net->parameters()[0].unsafeGetTensorImpl(), identity);
    EXPECT_EQ(net->layers->ptr<torch::nn::LinearImpl>(0)->weight.unsafeGetTensorImpl(), identity);
    for (int step = 0; step < 3; ++step) {
      auto x = torch::full({4, 5}, 0.1 * (step + 1));
      theirs->zero_grad();
      reference->forward(x).pow(2).mean().backward();
      theirs->step();
      ours->zero_grad();
      model->forward(x).pow(2).mean().backward();
      ours->step();
    }
    const auto expected = reference->named_parameters();
    for (auto& parameter : model->named_parameters()) {
      EXPECT_TRUE(torch::allclose(hsdp::unsharded(parameter.value()), expected[parameter.key()], 1e-5, 1e-6))
          << parameter.key();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Points, OptimizerBuilt,
                         ::testing::Combine(::testing::Values(Built::after_meta_init, Built::after_fully_shard,
                                                              Built::after_to_empty, Built::after_materialize),
                                            ::testing::Values(Kind::adamw, Kind::adagrad), ::testing::Values(1, 2, 3)));

TEST(BottomUp, CallsGiveTheSameUnitsAndValues) {
  run_ranks(2, [](RankContext& context) {
    auto mesh = context.environment().mesh();
    torch::manual_seed(1);
    OddMlp reference;
    torch::manual_seed(1);
    auto net = hsdp::meta_init([] { return OddMlp(); });
    std::vector<hsdp::FullySharded<torch::nn::LinearImpl>> parts;
    for (size_t i = 0; i < 2; ++i)
      parts.push_back(hsdp::fully_shard(net->layers->ptr<torch::nn::LinearImpl>(i), {.mesh = mesh}));
    auto model = hsdp::fully_shard(net, {.mesh = mesh});
    ASSERT_EQ(model.core()->units().size(), 3u);
    EXPECT_EQ(model.core()->units()[1]->name(), "layers.0");
    EXPECT_EQ(model.core()->units()[1]->parameters()[0].name(), "layers.0.weight");
    model.materialize(at::kCPU);
    auto x = torch::full({4, 5}, 0.3);
    EXPECT_TRUE(torch::allclose(model->forward(x), reference->forward(x)));
    model->forward(x).sum().backward();
    reference->forward(x).sum().backward();
    for (auto& parameter : model->named_parameters()) {
      EXPECT_TRUE(torch::allclose(hsdp::unsharded(parameter.value().grad()),
                                  reference->named_parameters()[parameter.key()].grad()))
          << parameter.key();
    }
  });
}

}  // namespace initialisation_test

// Ranks that do unlike things in collectives of equal size: an error on all of them, never wrong numbers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace mismatch_test {

using namespace testing_support;

struct TwinsImpl : torch::nn::Module {
  TwinsImpl() : a(register_module("a", torch::nn::Linear(6, 6))), b(register_module("b", torch::nn::Linear(6, 6))) {}
  torch::Tensor forward(torch::Tensor x) { return b(a(x)); }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Twins);

hsdp::FullySharded<TwinsImpl> sharded(RankContext& context, hsdp::UnitSelector units) {
  auto net = hsdp::meta_init([] { return Twins(); });
  auto model =
      hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = units, .reshard_after_forward = true});
  model.materialize(at::kCPU);
  return model;
}

TEST(Mismatch, UnitsReadInAnotherOrder) {
  run_ranks(2, [](RankContext& context) {
    auto model = sharded(context, hsdp::each<torch::nn::Linear>());
    const auto x = torch::ones({2, 6});
    const auto other_order = [&] {
      hsdp::ForwardScope scope(model.core());
      auto& net = model.module();
      return context.rank() == 0 ? net.b(net.a(x)) : net.a(net.b(x));
    };
    const bool first = context.rank() == 0;
    expect_error<dtensor::CommunicationError>(
        [&] { other_order(); }, first ? "[all_gather] a, " : "[all_gather] b, ",
        first ? "): rank 1 calls all_gather \"b\" of " : "): rank 0 calls all_gather \"a\" of ",
        ", expected the same call on all ranks; called in ", "; every rank must call it");
  });
}

TEST(Mismatch, OtherParametersOfAUnitOnEachRank) {
  run_ranks(2, [](RankContext& context) {
    auto model = sharded(context, {});
    const auto x = torch::ones({2, 6});
    {
      hsdp::ForwardScope scope(model.core());
      auto& net = model.module();
      (context.rank() == 0 ? net.a : net.b)(x).pow(2).mean().backward();
    }
    // The reduction itself has equal sizes; the next gather tells.
    expect_error<dtensor::CommunicationError>([&] { model->forward(x); },
                                              "had other units, parameters or gradient divide factors before",
                                              "use the same parameters on all ranks");
  });
}

TEST(Mismatch, WhatOnlyOneRankKeepsOrPrintsChangesNothing) {
  run_ranks(2, [](RankContext& context) {
    for (std::optional<bool> reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
      auto net = hsdp::meta_init([] { return Twins(); });
      auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                           .units = hsdp::each<torch::nn::Linear>(),
                                           .reshard_after_forward = reshard});
      model.materialize(at::kCPU);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      std::vector<torch::Tensor> kept;
      for (int step = 0; step < 3; ++step) {
        const auto x = torch::full({2, 6}, 0.1 * step).set_requires_grad(true);
        auto evaluation = model->forward(x);
        if (context.rank() == 0) kept.push_back(evaluation);  // with its graph
        evaluation.reset();
        if (context.rank() == 1) (void)hsdp::to_string(net->a->weight.detach());
        optimizer.zero_grad();
        model->forward(x).pow(2).mean().backward();
        optimizer.step();
      }
    }
  });
}

}  // namespace mismatch_test

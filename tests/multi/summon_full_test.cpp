// SummonFull: one gather of everything, forwards without communication on all ranks or on one, and what is refused
// inside.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/habit.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/parity.h"

namespace summon_full_test {

using namespace testing_support;

/// A sharded Three beside a plain one; both are trained by step() on the same batch on every rank.
struct Pair {
  explicit Pair(RankContext& context)
      : environment((torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64)), context.environment())) {
    torch::manual_seed(5);
    plain = Three();
    torch::manual_seed(5);
    net = hsdp::meta_init([] { return Three(); });
    model.emplace(hsdp::fully_shard(net, {.mesh = environment.mesh(), .units = hsdp::each<torch::nn::Linear>()}));
    model->materialize(environment.device());
    ours.emplace(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    theirs.emplace(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  void step() {
    ours->zero_grad();
    torch::mse_loss((*model)->forward(in.x), in.y).backward();
    ours->step();
    theirs->zero_grad();
    torch::mse_loss(plain->forward(in.x), in.y).backward();
    theirs->step();
    const auto expected = plain->named_parameters();
    for (auto& entry : net->named_parameters()) {
      EXPECT_LE(largest_difference(hsdp::unsharded(entry.value()), expected[entry.key()]), 1e-12) << entry.key();
    }
  }
  torch::Tensor expected() {
    torch::NoGradGuard no_grad;
    return plain->forward(in.x);
  }
  void expect_gradients_of_plain() {
    theirs->zero_grad();
    torch::mse_loss(plain->forward(in.x), in.y).backward();
    const auto gradients = plain->named_parameters();
    for (auto& entry : net->named_parameters()) {
      EXPECT_LE(largest_difference(hsdp::unsharded(entry.value().grad()), gradients[entry.key()].grad()), 1e-12);
    }
  }
  int64_t gathered() const {
    int64_t count = 0;
    for (auto& unit : model->core()->units()) count += unit->is_gathered() || unit->is_gathering();
    return count;
  }
  int64_t ranks() const { return environment.world_size(); }

  hsdp::Environment& environment;
  Three net{nullptr}, plain{nullptr};
  std::optional<hsdp::FullySharded<ThreeImpl>> model;
  std::optional<torch::optim::SGD> ours, theirs;
  Inputs in{0, 0, 12};
};

int64_t collectives() {
  const auto counts = dtensor::collective_counts();
  return counts.all_gathers + counts.reduce_scatters + counts.all_reduces + counts.broadcasts + counts.barriers;
}

class Summoned : public ::testing::TestWithParam<int> {
 protected:
  static void on_ranks(const std::function<void(Pair&)>& body) {
    run_ranks(GetParam(), [&](RankContext& context) {
      Pair pair(context);
      pair.step();
      body(pair);
      pair.step();
      pair.step();
    });
  }
};

TEST_P(Summoned, OneGatherAUnitForAnyNumberOfForwards) {
  on_ranks([](Pair& p) {
    const int64_t units = p.ranks() > 1 ? 4 : 0;
    const auto gathers_of_a_step = [&] {
      dtensor::reset_collective_counts();
      torch::mse_loss((*p.model)->forward(p.in.x), p.in.y).backward();
      return dtensor::collective_counts().all_gathers;
    };
    const auto usual = gathers_of_a_step();
    dtensor::reset_collective_counts();
    {
      hsdp::SummonFull scope(*p.model);
      EXPECT_EQ(dtensor::collective_counts().all_gathers, units);
      torch::NoGradGuard no_grad;
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(torch::allclose((*p.model)->forward(p.in.x), p.expected(), 1e-12));
        // The bare module, raw pointers and views of the parameters as well.
        EXPECT_TRUE(torch::allclose(p.net->forward(p.in.x), p.expected(), 1e-12));
        EXPECT_NEAR(p.net->b->weight.data_ptr<double>()[48], p.plain->b->weight.data_ptr<double>()[48], 1e-12);
        EXPECT_NEAR(p.net->a->weight.t()[5][6].item<double>(), p.plain->a->weight[6][5].item<double>(), 1e-12);
      }
      {
        c10::InferenceMode inference;
        (void)(*p.model)->forward(p.in.x);
      }
      EXPECT_EQ(collectives(), units);
      EXPECT_EQ(p.gathered(), 4);
    }
    EXPECT_EQ(collectives(), units);
    EXPECT_EQ(p.gathered(), 0);
    EXPECT_EQ(gathers_of_a_step(), usual);
  });
}

TEST_P(Summoned, ForwardsOnOneRankAlone) {
  on_ranks([](Pair& p) {
    for (int round = 0; round < 3; ++round) {
      {
        hsdp::SummonFull scope(*p.model);
        torch::NoGradGuard no_grad;
        // Other units on every rank, in other orders.
        for (int64_t i = 0; i < p.environment.rank(); ++i) (void)p.net->c(torch::tanh(p.net->b(torch::ones({1, 7}))));
        if (p.environment.rank() == 0) {
          EXPECT_TRUE(torch::allclose((*p.model)->forward(p.in.x), p.expected(), 1e-12));
        }
      }
      p.step();
    }
  });
}

TEST_P(Summoned, ScopesNestAndEndWithAnException) {
  on_ranks([](Pair& p) {
    torch::NoGradGuard no_grad;
    dtensor::reset_collective_counts();
    {
      hsdp::SummonFull outer(*p.model);
      {
        hsdp::SummonFull inner(*p.model);
        (void)p.net->forward(p.in.x);
      }
      EXPECT_EQ(p.gathered(), 4);
      (void)p.net->forward(p.in.x);
      p.model->reset_iteration_state();
      (void)p.net->forward(p.in.x);
    }
    EXPECT_EQ(collectives(), p.ranks() > 1 ? 4 : 0);
    EXPECT_EQ(p.gathered(), 0);
    EXPECT_THROW(
        {
          hsdp::SummonFull scope(*p.model);
          (void)(*p.model)->forward(torch::ones({2, 5}));  // the wrong width
        },
        c10::Error);
    EXPECT_EQ(p.gathered(), 0);
    torch::AutoGradMode grad(true);
    p.step();
  });
}

TEST_P(Summoned, InsideAForwardScopeOfTheSameModule) {
  on_ranks([](Pair& p) {
    // The graph of a forward before the scope is differentiated after it.
    hsdp::ForwardScope forward(p.model->core());
    auto h = torch::tanh(p.net->a(p.in.x));
    {
      hsdp::SummonFull scope(*p.model);
      torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::allclose(p.net->forward(p.in.x), p.expected(), 1e-12));
    }
    EXPECT_EQ(p.gathered(), 0);
    auto loss = torch::mse_loss(p.net->c(torch::tanh(p.net->b(h))) + p.net->bias, p.in.y);
    p.ours->zero_grad();
    loss.backward();
    p.expect_gradients_of_plain();
  });
}

TEST_P(Summoned, ForwardsWithGradModeAreRefused) {
  on_ranks([](Pair& p) {
    hsdp::SummonFull scope(*p.model);
    expect_error<dtensor::StateError>(
        [&] { (void)(*p.model)->forward(p.in.x); },
        "[SummonFull] unit \"a\" is read with grad mode on inside hsdp::SummonFull, expected "
        "torch::NoGradGuard around every forward there; train after the scope");
  });
}

TEST_P(Summoned, BackwardIsRefusedAndWorksAfterwards) {
  on_ranks([](Pair& p) {
    p.ours->zero_grad();
    auto loss = torch::mse_loss((*p.model)->forward(p.in.x), p.in.y);
    {
      hsdp::SummonFull scope(*p.model);
      expect_error<dtensor::StateError>(
          [&] { loss.backward({}, /*retain_graph=*/true); },
          "[backward] called inside hsdp::SummonFull, expected forwards without gradients "
          "only, because other ranks need not do the same; call it after the scope");
    }
    loss.backward();
    p.expect_gradients_of_plain();
  });
}

TEST_P(Summoned, WritesAreRefusedBeforeTheyChangeAnything) {
  on_ranks([](Pair& p) {
    p.ours->zero_grad();
    torch::mse_loss((*p.model)->forward(p.in.x), p.in.y).backward();
    const auto before = hsdp::unsharded(p.net->a->weight);
    const auto bias = hsdp::unsharded(p.net->bias);
    {
      hsdp::SummonFull scope(*p.model);
      torch::NoGradGuard no_grad;
      const auto refused = [&](const std::string& name, const std::function<void()>& call) {
        expect_error<dtensor::StateError>(call,
                                          "[SummonFull] parameter \"" + name +
                                              "\" is changed inside hsdp::SummonFull, expected reads only, because "
                                              "other ranks need not do the same; change it after the scope");
      };
      torch::optim::SGD stock(p.net->parameters(), 0.1);
      refused("bias", [&] { stock.step(); });
      torch::optim::AdamW adam(p.net->parameters(), 0.1);
      refused("bias", [&] { adam.step(); });
      refused("a.weight", [&] { p.net->a->weight.clamp_(-0.1, 0.1); });
      refused("a.weight", [&] { p.net->a->weight.data().mul_(2); });
      refused("a.weight", [&] { p.net->a->weight.narrow(0, 1, 2).zero_(); });
      refused("a.weight", [&] { p.net->a->weight.copy_(torch::zeros({7, 6})); });
      refused("a.weight", [&] { p.net->a->weight.set_data(torch::zeros({7, 6})); });
      refused("a.weight", [&] { torch::nn::init::normal_(p.net->a->weight); });
      const auto closed = [&](const std::string& where, const std::function<void()>& call) {
        expect_error<dtensor::StateError>(call, "[" + where +
                                                    "] called inside hsdp::SummonFull, expected forwards "
                                                    "without gradients only");
      };
      closed("to_empty", [&] { p.model->to_empty(torch::kCPU); });
      closed("replay_init", [&] { p.model->replay_init(); });
      closed("reset_sharded_param", [&] { p.model->reset_sharded_param(); });
      closed("copy_values", [&] { hsdp::copy_values(*p.model, p.plain); });
      closed("load", [&] { hsdp::load(*p.model, "/nowhere.pt"); });
      EXPECT_TRUE(torch::allclose(p.net->forward(p.in.x), p.expected(), 1e-12));
    }
    EXPECT_TRUE(torch::equal(hsdp::unsharded(p.net->a->weight), before));
    EXPECT_TRUE(torch::equal(hsdp::unsharded(p.net->bias), bias));
  });
}

TEST_P(Summoned, WritesPastTheDispatcherAreFoundAtTheNextRead) {
  on_ranks([](Pair& p) {
    {
      hsdp::SummonFull scope(*p.model);
      torch::NoGradGuard no_grad;
      dtensor::DTensor(p.net->a->weight).to_local().mul_(1);
      expect_error<dtensor::StateError>(
          [&] { (void)p.net->forward(p.in.x); },
          "[SummonFull] unit \"a\" was changed inside hsdp::SummonFull, expected reads only; "
          "change parameters after the scope");
    }
  });
}

TEST_P(Summoned, OpenedBeforeThereAreValues) {
  run_ranks(GetParam(), [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Three(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    expect_error<dtensor::StateError>([&] { hsdp::SummonFull scope(model); }, "[forward] 7 tensors have no values");
    model.materialize(at::kCPU);
    hsdp::SummonFull scope(model);
    torch::NoGradGuard no_grad;
    (void)model->forward(torch::ones({2, 6}));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Summoned, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace summon_full_test

// Expressions that keep the scope of `model->` open while something else runs, and values that go between two sharded
// models: initialisers, loops over names, averages and target networks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/communicator.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/training_run.h"

namespace open_scope_test {

using namespace testing_support;
using Parameters = std::vector<torch::Tensor>;

class OpenScope : public ::testing::TestWithParam<int> {
 protected:
  static void on_ranks(int ranks, const std::function<void(RankContext&)>& body) {
    run_ranks(ranks, [&](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      body(context);
    });
  }
  /// Initialises by `fill`, without or after a replay, trains, initialises again and trains on.
  void initialised_by(const std::function<void(torch::Tensor)>& fill) {
    for (auto stage : {Stage::empty, Stage::materialized}) {
      expect_initialised(GetParam(), stage, fill);
      if (HasFatalFailure()) return;
    }
  }

 private:
  static void expect_initialised(int ranks, Stage stage, const std::function<void(torch::Tensor)>& fill) {
    on_ranks(ranks, [&](RankContext& context) {
      std::vector<std::unique_ptr<TrainingRun>> runs;
      for (auto way : {Way::plain, Way::two_lines, Way::open_scope}) {
        auto& run = *runs.emplace_back(std::make_unique<TrainingRun>(way, context));
        run.advance_to(stage);
        torch::manual_seed(31);
        run.with_parameters([&](const Parameters& parameters) {
          for (auto& parameter : parameters) fill(parameter);
        });
        run.numbers.push_back(run.backward(0));
        run.with_parameters([&](const Parameters& parameters) {
          for (auto& parameter : parameters) fill(parameter);
        });
        run.numbers.push_back(run.backward(1));
        const auto expected = runs[0]->net().named_parameters();
        for (auto& parameter : run.net().named_parameters()) {
          ASSERT_TRUE(torch::equal(whole_value(parameter.value()), expected[parameter.key()])) << parameter.key();
        }
        for (size_t i = 0; i < run.numbers.size(); ++i) EXPECT_NEAR(run.numbers[i], runs[0]->numbers[i], 1e-11);
      }
    });
  }
};

TEST_P(OpenScope, InitialisedByRandomDraws) {
  initialised_by([](torch::Tensor t) {
    if (t.dim() >= 2) {
      torch::nn::init::kaiming_uniform_(t, std::sqrt(5.0));
    } else {
      torch::nn::init::uniform_(t, -0.5, 0.5);
    }
  });
  initialised_by([](torch::Tensor t) {
    if (t.dim() >= 2) {
      torch::nn::init::xavier_normal_(t);
    } else {
      torch::nn::init::normal_(t, 0.1, 0.2);
    }
  });
  initialised_by([](torch::Tensor t) { t.data().normal_(0, 0.3); });
  initialised_by([](torch::Tensor t) {
    torch::NoGradGuard no_grad;
    t.uniform_(-1, 1).mul_(0.5);
  });
}

TEST_P(OpenScope, InitialisedByConstantsAndCopies) {
  initialised_by([](torch::Tensor t) {
    if (t.dim() >= 2) {
      torch::nn::init::constant_(t, 0.25);
    } else {
      torch::nn::init::zeros_(t);
    }
  });
  initialised_by([](torch::Tensor t) {
    torch::NoGradGuard no_grad;
    t.copy_(torch::randn(t.sizes()));
    t.data().mul_(0.5);
  });
  initialised_by([](torch::Tensor t) { t.set_data(torch::rand(t.sizes()) - 0.5); });
  initialised_by([](torch::Tensor t) { t.data().fill_(0.125).add_(1); });
}

TEST_P(OpenScope, LoopsOverNamesAndModules) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    return [&run](int64_t step) {
      const auto update = [](auto&& named) {
        torch::NoGradGuard no_grad;
        for (auto& parameter : named) {
          if (!parameter.value().grad().defined()) continue;
          if (parameter.key().find("weight") != std::string::npos) parameter.value().mul_(0.99);
          parameter.value().sub_(parameter.value().grad(), 0.1);
        }
      };
      if (run.is_sharded()) {
        run.model()->zero_grad();
        run.backward(step);
        update(run.model()->named_parameters());
        run.model()->apply([](torch::nn::Module& module) {
          torch::NoGradGuard no_grad;
          if (auto* linear = module.as<torch::nn::Linear>()) linear->bias.clamp_(-0.2, 0.2);
        });
      } else {
        run.net().zero_grad();
        run.backward(step);
        update(run.net().named_parameters());
        run.net().apply([](torch::nn::Module& module) {
          torch::NoGradGuard no_grad;
          if (auto* linear = module.as<torch::nn::Linear>()) linear->bias.clamp_(-0.2, 0.2);
        });
      }
    };
  });
}

TEST_P(OpenScope, TargetNetworkOfEqualLayout) {
  on_ranks(GetParam(), [](RankContext& context) {
    // Two plain ones, and two sharded ones in both spellings.
    for (auto way : {Way::two_lines, Way::open_scope}) {
      TrainingRun plain(Way::plain, context), plain_target(Way::plain, context);
      TrainingRun online(way, context), target(way, context);
      for (auto* run : {&plain, &plain_target, &online, &target}) run->advance_to(Stage::materialized);
      torch::optim::SGD theirs(plain.net().parameters(), 0.1), ours(online.net().parameters(), 0.1);
      const auto hard = [](TrainingRun& from, TrainingRun& to) {
        torch::NoGradGuard no_grad;
        from.with_parameters([&](const Parameters& source) {
          to.with_parameters([&](const Parameters& destination) {
            for (size_t i = 0; i < source.size(); ++i) destination[i].copy_(source[i]);
          });
        });
      };
      const auto soft = [](TrainingRun& from, TrainingRun& to) {
        from.with_parameters([&](const Parameters& source) {
          to.with_parameters([&](const Parameters& destination) {
            for (size_t i = 0; i < source.size(); ++i) {
              destination[i].data().mul_(0.9).add_(source[i].data(), 0.1);
              torch::NoGradGuard no_grad;
              destination[i].lerp_(source[i], 0.05);
              destination[i].copy_(0.5 * destination[i] + 0.5 * source[i]);
              destination[i].set_data(destination[i] + 0.01 * source[i]);
            }
          });
        });
      };
      for (int64_t step = 0; step < 3; ++step) {
        theirs.zero_grad();
        ours.zero_grad();
        plain.backward(step);
        online.backward(step);
        theirs.step();
        ours.step();
        if (step == 1) {
          hard(plain, plain_target);
          hard(online, target);
        } else {
          soft(plain, plain_target);
          soft(online, target);
        }
        const auto expected = plain_target.net().named_parameters();
        for (auto& parameter : target.net().named_parameters()) {
          expect_close(parameter.value(), expected[parameter.key()], 1e-11, parameter.key());
        }
        EXPECT_NEAR(target.backward(step), plain_target.backward(step), 1e-11);
        target.net().zero_grad();
        plain_target.net().zero_grad();
      }
    }
  });
}

TEST_P(OpenScope, TargetNetworkWithOtherUnits) {
  on_ranks(GetParam(), [](RankContext& context) {
    TrainingRun online(Way::two_lines, context);
    online.advance_to(Stage::materialized);
    // One unit for all: the parameters lie alike all the same.
    torch::manual_seed(8);
    auto target = hsdp::fully_shard(hsdp::meta_init([] { return OddNet(); }), {.mesh = context.environment().mesh()});
    target.materialize(context.environment().device());
    torch::NoGradGuard no_grad;
    auto source = online.net().parameters(), destination = target.module().parameters();
    for (size_t i = 0; i < source.size(); ++i) {
      const auto expected = 0.5 * whole_value(destination[i]) + 0.25 * whole_value(source[i]);
      destination[i].mul_(0.5).add_(source[i], 0.25);
      EXPECT_TRUE(torch::allclose(whole_value(destination[i]), expected));
      destination[i].copy_(source[i]);
      EXPECT_TRUE(torch::equal(whole_value(destination[i]), whole_value(source[i])));
    }
  });
}

TEST_P(OpenScope, PlainAndShardedModels) {
  on_ranks(GetParam(), [](RankContext& context) {
    TrainingRun online(Way::two_lines, context);
    online.advance_to(Stage::materialized);
    OddNet plain;
    torch::NoGradGuard no_grad;
    auto source = online.net().parameters(), destination = plain->parameters();
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        online, [&] { destination[0].copy_(source[0]); },
        "[aten::copy_] the destination is a plain tensor of shape [1], expected a distributed one; copy full_tensor() "
        "instead, given parameter \"gain\" of shape [1] (Shard(0)); to compute with whole parameters use "
        "model->forward(x), for this rank's part to_local(), for the whole value full_tensor()");
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        online, [&] { destination[0].mul_(0.9).add_(source[0], 0.1); },
        "[aten::add_] in place on a plain tensor of shape [1], expected a distributed one: zeros_like(p) or "
        "p.detach().clone() with auto parameters = model->parameters() on a line of its own, or DTensor::distribute of "
        "what was loaded, given parameter \"gain\" of shape [1] (Shard(0)); to compute with whole parameters use "
        "model->forward(x), for this rank's part to_local(), for the whole value full_tensor()");
    for (size_t i = 0; i < source.size(); ++i) {
      destination[i].copy_(hsdp::unsharded(source[i]));
      source[i].mul_(0.5).add_(destination[i], 2);
      EXPECT_TRUE(torch::allclose(whole_value(source[i]), 2.5 * destination[i]));
    }
  });
}

TEST_P(OpenScope, MeshesThatDifferAreRefused) {
  on_ranks(GetParam(), [](RankContext& context) {
    TrainingRun online(Way::two_lines, context);
    online.advance_to(Stage::materialized);
    auto other = context.environment().make_mesh({context.world_size()}, {"other"});
    auto copy = dtensor::DTensor::distribute(torch::ones({7, 6}), other, {dtensor::Replicate()}).tensor();
    torch::NoGradGuard no_grad;
    expect_refused_and_unchanged<dtensor::ValueError>(
        online, [&] { online.net().a->weight.copy_(copy); },
        "[aten::copy_] elementwise on parameter \"a.weight\" of shape [7, 6] (Shard(0)) and a tensor of shape [7, 6] "
        "(Replicate()), expected equal shapes and placements; redistribute one of them");
    expect_refused_and_unchanged<dtensor::ValueError>(
        online, [&] { online.net().a->weight.add_(copy); },
        "[aten::add_] elementwise on parameter \"a.weight\" of shape [7, 6] (Shard(0)) and a tensor of shape [7, 6] "
        "(Replicate()), expected equal shapes and placements; redistribute one of them");
  });
}

TEST_P(OpenScope, OptimizersAndInitialisersGatherNothing) {
  on_ranks(GetParam(), [](RankContext& context) {
    TrainingRun run(Way::open_scope, context);
    run.advance_to(Stage::empty);
    const auto gathers_of = [&](const std::function<void(const Parameters&)>& use) {
      const auto before = dtensor::collective_counts().all_gathers;
      run.with_parameters(use);
      return dtensor::collective_counts().all_gathers - before;
    };
    EXPECT_EQ(gathers_of([](const Parameters& parameters) {
                for (auto& parameter : parameters) torch::nn::init::uniform_(parameter, -0.5, 0.5);
              }),
              0);
    torch::optim::AdamW optimizer(run.net().parameters(), torch::optim::AdamWOptions(0.05).weight_decay(0.1));
    for (int64_t step = 0; step < 2; ++step) {
      run.backward(step);
      EXPECT_EQ(gathers_of([&](const Parameters& parameters) {
                  (void)torch::nn::utils::clip_grad_norm_(parameters, 1);
                  optimizer.step();
                  torch::NoGradGuard no_grad;
                  torch::_foreach_mul_(parameters, 0.99);
                }),
                0);
    }
  });
}

TEST_P(OpenScope, PenaltyOnTheDistanceFromACopy) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    // Taken on a line of its own, so that it is sharded; read whole beside the parameters.
    Parameters start;
    for (auto& parameter : run.net().parameters()) start.push_back(parameter.detach().clone());
    auto optimizer = std::make_shared<torch::optim::SGD>(run.net().parameters(), torch::optim::SGDOptions(0.1));
    return [&run, start, optimizer](int64_t step) {
      optimizer->zero_grad();
      run.backward(step);
      const auto penalty = [&](const Parameters& parameters) {
        auto sum = torch::zeros({});
        for (size_t i = 0; i < parameters.size(); ++i) sum = sum + (parameters[i] - start[i] * 0.9).pow(2).sum();
        sum.backward();
        return sum.item<double>();
      };
      if (run.is_sharded()) {
        hsdp::ForwardScope scope(run.model().core());
        run.numbers.push_back(penalty(run.net().parameters()));
      } else {
        run.numbers.push_back(penalty(run.net().parameters()));
      }
      optimizer->step();
    };
  });
}

TEST_P(OpenScope, NoiseInAForwardWithoutGradients) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    return [&run](int64_t step) {
      torch::NoGradGuard no_grad;
      Inputs in(step, 0, 12);
      const auto evaluate = [&] {
        auto& a = *run.net().a;
        auto h = torch::linear(in.x, a.weight + 0.1 * torch::randn_like(a.weight), a.bias);
        h = h + torch::zeros_like(a.bias).add_(0.5);
        return torch::linear(torch::tanh(h), torch::ones_like(run.net().b->weight)).sum().item<double>();
      };
      if (run.is_sharded()) {
        hsdp::ForwardScope scope(run.model().core());
        run.numbers.push_back(evaluate());
      } else {
        run.numbers.push_back(evaluate());
      }
    };
  });
}

TEST_P(OpenScope, WholeStateFromAnOpenScopeIsRefusedOutside) {
  on_ranks(GetParam(), [](RankContext& context) {
    TrainingRun run(Way::open_scope, context);
    run.advance_to(Stage::materialized);
    Parameters shadow;
    run.with_parameters([&](const Parameters& parameters) {
      for (auto& parameter : parameters) shadow.push_back(parameter.detach().clone());
    });
    torch::NoGradGuard no_grad;
    const auto update = [&](const Parameters& parameters) { shadow[0].mul_(0.9).add_(parameters[0], 0.1); };
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run, [&] { update(run.net().parameters()); },
        "[aten::add_] in place on a plain tensor of shape [1], expected a distributed one: zeros_like(p) or "
        "p.detach().clone() with auto parameters = model->parameters() on a line of its own, or DTensor::distribute of "
        "what was loaded, given parameter \"gain\" of shape [1] (Shard(0)); to compute with whole parameters use "
        "model->forward(x), for this rank's part to_local(), for the whole value full_tensor()");
    run.with_parameters(update);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OpenScope, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace open_scope_test

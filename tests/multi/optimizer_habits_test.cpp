// Optimizers over sharded parameters, each compared with the unsharded module on two lines and with the scope of
// `model->` left open: every class of torch::optim at every point of the sequence, groups, schedulers and state, the
// fused kernels, and the styles in which users write their own.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <vector>

#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/training_run.h"

namespace optimizer_habits_test {

using namespace testing_support;
using Parameters = std::vector<torch::Tensor>;
using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;

class OptimizerHabit : public ::testing::TestWithParam<int> {
 protected:
  /// Trains with the optimizer that `make` returns, made at each point of the sequence; its step runs in a scope where
  /// the run's way keeps one open.
  void stock(const std::function<OptimizerPtr(const Parameters&)>& make) {
    for (auto stage : {Stage::constructed, Stage::sharded, Stage::empty, Stage::materialized}) {
      LoopOptions options;
      options.stage = stage;
      expect_same_in_all_ways(
          GetParam(),
          [&](TrainingRun& run) -> Step {
            auto optimizer = run.with_parameters([&](const Parameters& parameters) { return make(parameters); });
            return [&run, optimizer](int64_t step) {
              optimizer->zero_grad();
              run.backward(step, 5);
              run.with_parameters([&](const Parameters&) { optimizer->step(); });
            };
          },
          options);
      if (HasFatalFailure()) return;
    }
  }
  /// Trains by hand: `make(run)` returns what is done with the parameters after each backward.
  void by_hand(const std::function<std::function<void(const Parameters&)>(TrainingRun&)>& make,
               LoopOptions options = {}) {
    expect_same_in_all_ways(
        GetParam(),
        [&](TrainingRun& run) -> Step {
          auto update = make(run);
          return [&run, update](int64_t step) {
            run.with_parameters([](const Parameters& parameters) {
              for (auto& parameter : parameters) parameter.mutable_grad().reset();
            });
            run.backward(step, 5);
            run.with_parameters(update);
          };
        },
        options);
  }
};

using torch::optim::AdagradOptions;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::RMSpropOptions;
using torch::optim::SGDOptions;

template <class Optimizer, class Options>
std::function<OptimizerPtr(const Parameters&)> made_with(Options options) {
  return [options](const Parameters& parameters) { return std::make_shared<Optimizer>(parameters, options); };
}

TEST_P(OptimizerHabit, Sgd) { stock(made_with<torch::optim::SGD>(SGDOptions(0.1))); }
TEST_P(OptimizerHabit, SgdMomentumDampeningDecay) {
  stock(made_with<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.01)));
}
TEST_P(OptimizerHabit, SgdNesterov) {
  stock(made_with<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)));
}
TEST_P(OptimizerHabit, Adam) { stock(made_with<torch::optim::Adam>(AdamOptions(0.05).eps(1e-3))); }
TEST_P(OptimizerHabit, AdamAmsgradDecay) {
  stock(made_with<torch::optim::Adam>(AdamOptions(0.05).eps(1e-3).amsgrad(true).weight_decay(0.01)));
}
TEST_P(OptimizerHabit, AdamW) { stock(made_with<torch::optim::AdamW>(AdamWOptions(0.05).eps(1e-3))); }
TEST_P(OptimizerHabit, AdamWAmsgradDecay) {
  stock(made_with<torch::optim::AdamW>(AdamWOptions(0.05).eps(1e-3).amsgrad(true).weight_decay(0.1)));
}
TEST_P(OptimizerHabit, Adagrad) {
  stock(made_with<torch::optim::Adagrad>(
      AdagradOptions(0.1).initial_accumulator_value(0.2).lr_decay(0.1).weight_decay(0.01).eps(1e-3)));
}
TEST_P(OptimizerHabit, RmsProp) { stock(made_with<torch::optim::RMSprop>(RMSpropOptions(0.05).eps(1e-3))); }
TEST_P(OptimizerHabit, RmsPropCenteredMomentum) {
  stock(
      made_with<torch::optim::RMSprop>(RMSpropOptions(0.05).eps(1e-3).centered(true).momentum(0.9).weight_decay(0.01)));
}

// ---- groups, schedulers, state ----

TEST_P(OptimizerHabit, LbfgsIsRefusedInAnOpenScope) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    torch::optim::LBFGS optimizer(run.model()->parameters(), torch::optim::LBFGSOptions(0.1));
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run,
        [&] {
          hsdp::ForwardScope scope(run.model().core());
          optimizer.step([&] {
            optimizer.zero_grad();
            return torch::tensor(run.backward(0));
          });
        },
        "[aten::view] this operator has no rule for sharded tensors, given tensor \"gain.grad\" of shape [1] "
        "(Shard(0)); to compute with whole parameters use model->forward(x), for this rank's part to_local(), for the "
        "whole value full_tensor(); optimizers that flatten or multiply whole parameters, as LBFGS does, cannot run on "
        "shards");
  });
}

TEST_P(OptimizerHabit, LearningRatesGroupsAndSchedulers) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    auto all = run.net().parameters();
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Parameters{all[0], all[2]},
                        std::make_unique<AdamWOptions>(AdamWOptions(0.05).weight_decay(0.1)));
    groups.emplace_back(Parameters{all[1], all[3]}, std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0)));
    auto optimizer = std::make_shared<torch::optim::AdamW>(groups, AdamWOptions(0.01).eps(1e-3));
    auto every_two = std::make_shared<torch::optim::StepLR>(*optimizer, 2, 0.5);
    auto plateau = std::make_shared<torch::optim::ReduceLROnPlateauScheduler>(
        *optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.5f, 0);
    return [&run, all, optimizer, every_two, plateau](int64_t step) {
      if (step == 1) {
        optimizer->add_param_group(torch::optim::OptimizerParamGroup(
            {all[4], all[5], all[6]}, std::make_unique<AdamWOptions>(AdamWOptions(0.03).eps(1e-3))));
      }
      for (auto& group : optimizer->param_groups()) {
        auto& options = static_cast<AdamWOptions&>(group.options());
        options.lr(options.lr() * 0.9);
      }
      optimizer->zero_grad();
      const double loss = run.backward(step);
      optimizer->step();
      every_two->step();
      plateau->step(static_cast<float>(loss) + static_cast<float>(step));
      for (auto& group : optimizer->param_groups()) run.numbers.push_back(group.options().get_lr());
    };
  });
}

TEST_P(OptimizerHabit, StateIsInspectedByParameter) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    auto optimizer = std::make_shared<torch::optim::Adam>(run.net().parameters(), AdamOptions(0.05).eps(1e-3));
    return [&run, optimizer](int64_t step) {
      optimizer->zero_grad();
      run.backward(step);
      optimizer->step();
      run.tracked.clear();
      for (auto& parameter : run.net().parameters()) {
        auto& state =
            static_cast<torch::optim::AdamParamState&>(*optimizer->state().at(parameter.unsafeGetTensorImpl()));
        EXPECT_TRUE(state.exp_avg().sizes().equals(parameter.sizes()));
        EXPECT_EQ(dtensor::DTensor::is_dtensor(state.exp_avg()), run.is_sharded());
        run.numbers.push_back(state.exp_avg().norm().item<double>());
        run.numbers.push_back(static_cast<double>(state.step()));
        run.tracked.push_back(state.exp_avg_sq());
        if (step == 1) state.exp_avg().zero_();
      }
      if (step == 1) optimizer->state().erase(run.net().gain.unsafeGetTensorImpl());
    };
  });
}

TEST_P(OptimizerHabit, ClosuresAreCalled) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    auto optimizer = std::make_shared<torch::optim::SGD>(run.net().parameters(), SGDOptions(0.1).momentum(0.9));
    return [&run, optimizer](int64_t step) {
      auto loss = optimizer->step([&] {
        optimizer->zero_grad();
        return torch::tensor(run.backward(step));
      });
      run.numbers.push_back(loss.item<double>());
    };
  });
}

TEST_P(OptimizerHabit, SavingAnOptimizerIsRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    torch::optim::Adam optimizer(run.net().parameters(), AdamOptions(0.05));
    optimizer.step();
    std::ostringstream stream;
    // The first of the state's tensors that the map comes to.
    const auto& [key, first] = *optimizer.state().begin();
    const auto& average = static_cast<torch::optim::AdamParamState&>(*first).exp_avg();
    expect_refused_and_unchanged<dtensor::StateError>(
        run, [&] { torch::save(optimizer, stream); },
        c10::str(
            "[raw access] a tensor of shape ", average.sizes(),
            " (Shard(0)) is sharded and has no storage of its own outside a forward; use hsdp::export_pt(model, path) "
            "to save the module, hsdp::unsharded(p) for the whole value, to_local() for this rank's part, "
            "hsdp::to_string(t) to print"));
    // By pointer, the map's order is another one on each rank.
    for (auto& parameter : run.net().parameters()) {
      auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
      const auto whole = hsdp::unsharded(static_cast<torch::optim::AdamParamState&>(state).exp_avg());
      EXPECT_TRUE(whole.sizes().equals(parameter.sizes()));
    }
  });
}

TEST_P(OptimizerHabit, StateOfAnUnshardedRunIsRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    OddNet plain;
    torch::optim::Adam theirs(plain->parameters(), AdamOptions(0.05)), ours(run.net().parameters(), AdamOptions(0.05));
    plain->forward(torch::ones({2, 6})).sum().backward();
    theirs.step();
    std::stringstream stream;
    torch::save(theirs, stream);
    torch::load(ours, stream);
    const auto text = [](const char* shape, const char* name) {
      return c10::str(
          "[aten::add_] in place on a plain tensor of shape ", shape,
          ", expected a distributed one: zeros_like(p) or p.detach().clone() with auto parameters = "
          "model->parameters() on a line of its own, or DTensor::distribute of what was loaded, given tensor \"",
          name, ".grad\" of shape ", shape,
          " (Shard(0)); to compute with whole parameters use model->forward(x), for this rank's part "
          "to_local(), for the whole value full_tensor()");
    };
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run, [&] { ours.step(); }, text("[1]", "gain"));
    // As the message says.
    for (auto& parameter : run.net().parameters()) {
      auto& state = static_cast<torch::optim::AdamParamState&>(*ours.state().at(parameter.unsafeGetTensorImpl()));
      const auto spread = [&](const torch::Tensor& whole) {
        return dtensor::DTensor::distribute(whole, dtensor::distributed_impl(parameter)->mesh(), {dtensor::Shard(0)})
            .tensor();
      };
      state.exp_avg(spread(state.exp_avg()));
      state.exp_avg_sq(spread(state.exp_avg_sq()));
    }
    ours.step();
  });
}

TEST_P(OptimizerHabit, LbfgsIsRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    torch::optim::LBFGS optimizer(run.net().parameters(), torch::optim::LBFGSOptions(0.1));
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run,
        [&] {
          optimizer.step([&] {
            optimizer.zero_grad();
            return torch::tensor(run.backward(0));
          });
        },
        "[aten::view] this operator has no rule for sharded tensors, given tensor \"gain.grad\" of shape [1] "
        "(Shard(0)); to "
        "compute with whole parameters use model->forward(x), for this rank's part to_local(), for the whole value "
        "full_tensor(); optimizers that flatten or multiply whole parameters, as LBFGS does, cannot run on shards");
    // The module is as usable as before.
    run.net().zero_grad();
    run.backward(1);
  });
}

// ---- the fused kernels and lists ----

TEST_P(OptimizerHabit, FusedAdamW) {
  by_hand([](TrainingRun&) -> std::function<void(const Parameters&)> {
    struct State {
      Parameters averages, squares, maxima, steps;
    };
    auto state = std::make_shared<State>();
    return [state](const Parameters& parameters) {
      torch::NoGradGuard no_grad;
      const bool first = state->steps.empty();
      Parameters gradients;
      for (auto& parameter : parameters) {
        gradients.push_back(parameter.grad());
        if (!first) continue;
        for (auto* list : {&state->averages, &state->squares, &state->maxima}) {
          list->push_back(torch::zeros_like(parameter));
        }
        state->steps.push_back(torch::zeros({}, torch::kFloat32));
      }
      torch::_foreach_add_(state->steps, 1);
      at::_fused_adamw_(parameters, gradients, state->averages, state->squares, state->maxima, state->steps, 0.05, 0.9,
                        0.99, 0.1, 1e-3, /*amsgrad=*/true, /*maximize=*/false);
    };
  });
}

TEST_P(OptimizerHabit, FusedSgd) {
  by_hand([](TrainingRun&) -> std::function<void(const Parameters&)> {
    auto momenta = std::make_shared<Parameters>();
    return [momenta](const Parameters& parameters) {
      torch::NoGradGuard no_grad;
      const bool first = momenta->empty();
      Parameters gradients;
      for (auto& parameter : parameters) {
        gradients.push_back(parameter.grad());
        if (first) momenta->push_back(torch::zeros_like(parameter));
      }
      at::_fused_sgd_(parameters, gradients, *momenta, 0.01, 0.9, 0.1, 0.0, false, false, first);
    };
  });
}

TEST_P(OptimizerHabit, ForeachLists) {
  by_hand([](TrainingRun&) -> std::function<void(const Parameters&)> {
    auto momenta = std::make_shared<Parameters>();
    return [momenta](const Parameters& parameters) {
      torch::NoGradGuard no_grad;
      Parameters gradients;
      for (auto& parameter : parameters) gradients.push_back(parameter.grad());
      if (momenta->empty()) *momenta = torch::_foreach_mul(gradients, 0.0);
      torch::_foreach_mul_(*momenta, 0.9);
      torch::_foreach_add_(*momenta, gradients, 1);
      torch::_foreach_mul_(parameters, 0.999);
      auto denominators = torch::_foreach_sqrt(torch::_foreach_abs(*momenta));
      torch::_foreach_add_(denominators, 1);
      torch::_foreach_addcdiv_(parameters, *momenta, denominators, -0.05);
      torch::_foreach_add_(parameters, gradients, -0.01);
      torch::_foreach_clamp_max_(parameters, 0.9);
    };
  });
}

// ---- written by users ----

TEST_P(OptimizerHabit, DescentInEverySpelling) {
  by_hand([](TrainingRun&) -> std::function<void(const Parameters&)> {
    return [](const Parameters& p) {
      constexpr double lr = 0.1;
      p[0].data().add_(p[0].grad(), -lr);
      p[1].data() -= lr * p[1].grad();
      p[2].set_data(p[2].data() - lr * p[2].grad());
      torch::NoGradGuard no_grad;
      p[2].sub_(lr * p[2].grad());
      p[3].add_(p[3].grad().data(), -lr);
      p[4].copy_(p[4] - lr * p[4].grad());
      torch::Tensor alias = p[4];
      alias -= lr * p[4].grad().sign();
      p[5].data().copy_(p[5].data().sub(p[5].grad(), lr));
      p[5].set_data(p[5] - lr * p[5].grad());
      torch::add_out(const_cast<torch::Tensor&>(p[6]), p[6], p[6].grad(), -lr);
    };
  });
}

TEST_P(OptimizerHabit, LionWithSign) {
  by_hand([](TrainingRun&) -> std::function<void(const Parameters&)> {
    auto averages = std::make_shared<Parameters>();
    return [averages](const Parameters& parameters) {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters.size(); ++i) {
        auto& p = parameters[i];
        if (averages->size() == i) averages->push_back(torch::zeros_like(p));
        auto& m = (*averages)[i];
        p.mul_(1 - 0.01 * 0.1);
        p.add_((m * 0.9 + p.grad() * 0.1).sign_(), -0.01);
        m.mul_(0.99).add_(p.grad(), 0.01);
      }
    };
  });
}

/// Adam as a subclass of torch::optim::Optimizer, with operators of every kind.
class OwnAdam : public torch::optim::Optimizer {
 public:
  explicit OwnAdam(Parameters parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::make_unique<SGDOptions>(0.05)) {}
  torch::Tensor step(LossClosure = nullptr) override {
    torch::NoGradGuard no_grad;
    ++steps_;
    for (auto& group : param_groups_) {
      for (auto& p : group.params()) {
        if (!p.grad().defined()) continue;
        auto& [m, v, top] = state_[p.unsafeGetTensorImpl()];
        if (!m.defined()) {
          m = torch::zeros_like(p);
          v = torch::full_like(p, 0.001);
          top = torch::empty_like(p).zero_();
        }
        auto g = p.grad().clone();
        if (p.dim() >= 2) g = g.add(p, 0.01);
        m.lerp_(g, 0.1);
        v.mul_(0.99).addcmul_(g, g, 0.01);
        top = torch::maximum(top, v);
        auto denominator = top.sqrt().div_(std::sqrt(1 - std::pow(0.99, steps_))).add_(1e-3);
        auto update = torch::where(g.abs() > 1e-4, m / denominator, torch::zeros_like(m)).clamp_(-3, 3);
        p.addcdiv_(m, denominator, -0.02);
        p.add_(update, -get_lr());
        p.clamp_(-2, 2);
      }
    }
    return {};
  }

 private:
  double get_lr() { return param_groups_[0].options().get_lr(); }
  struct State {
    torch::Tensor m, v, top;
  };
  std::map<const void*, State> state_;
  int steps_ = 0;
};

TEST_P(OptimizerHabit, AdamAsASubclassWithOperators) {
  stock([](const Parameters& parameters) { return std::make_shared<OwnAdam>(parameters); });
}

TEST_P(OptimizerHabit, TrustRatiosFromNorms) {
  LoopOptions options;
  options.same_bits = false;
  by_hand(
      [](TrainingRun& run) -> std::function<void(const Parameters&)> {
        return [&run](const Parameters& parameters) {
          torch::NoGradGuard no_grad;
          for (auto& p : parameters) {
            const auto update = p.grad() + 0.01 * p;
            const auto ratio = p.norm() / (update.norm() + 1e-6);
            p.add_(update * ratio.clamp_max(10), -0.01);
            // On the host.
            const double weight = p.norm().item<double>(), change = p.grad().norm().item<double>();
            p.add_(p.grad(), -0.01 * weight / (change + 1e-3));
            const auto scale = torch::where(p.norm() > 0, p.norm() / (p.grad().norm() + 1), torch::ones({}));
            p.sub_(p.grad() * scale, 0.01);
            run.numbers.push_back(ratio.item<double>());
          }
        };
      },
      options);
}

TEST_P(OptimizerHabit, AveragesOfWeights) {
  by_hand([](TrainingRun& run) -> std::function<void(const Parameters&)> {
    // EMA by lerp_ and by mul_().add_(), SWA by a running mean; taken before the first step.
    run.with_parameters([&](const Parameters& parameters) {
      for (auto& p : parameters) {
        run.tracked.push_back(p.detach().clone());
        run.tracked.push_back(p.data().clone());
        run.tracked.push_back(torch::zeros_like(p));
        run.tracked.push_back(p.clone().detach());
        run.tracked.push_back(p.detach().clone().zero_());
        torch::NoGradGuard no_grad;
        run.tracked.push_back(p.clone());
        run.tracked.push_back(torch::empty_like(p).copy_(p));
      }
    });
    auto count = std::make_shared<int>(0);
    return [&run, count](const Parameters& parameters) {
      const double n = ++*count;
      for (size_t i = 0; i < parameters.size(); ++i) {
        auto& p = parameters[i];
        auto* shadow = &run.tracked[7 * i];
        p.data().sub_(p.grad(), 0.1);
        torch::NoGradGuard no_grad;
        shadow[0].mul_(0.9).add_(p, 0.1);
        shadow[1].lerp_(p.detach(), 0.1);
        shadow[2].mul_(n - 1).add_(p.data()).div_(n);
        shadow[3] = 0.9 * shadow[3] + 0.1 * p.data();
        shadow[4].add_((p - shadow[4]) / n);
        shadow[5].copy_(shadow[5] * 0.9 + p * 0.1);
        shadow[6].set_data(shadow[6].mul(0.9).add(p, 0.1));
        // Swapped in for an evaluation and out again.
        auto kept = p.detach().clone();
        p.copy_(shadow[0]);
        run.numbers.push_back(p.sum().item<double>());
        p.copy_(kept);
      }
    };
  });
}

TEST_P(OptimizerHabit, OrthogonalisedUpdatesAreRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    const auto gradient = run.net().a->weight.grad();
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run,
        [&] {
          auto x = gradient / (gradient.norm() + 1e-7);
          x = x.mm(x.t());
        },
        "[aten::t] this operator has no rule for sharded tensors, given a tensor of shape [7, 6] (Shard(0)); to "
        "compute "
        "with whole parameters use model->forward(x), for this rank's part to_local(), for the whole value "
        "full_tensor(); "
        "optimizers that flatten or multiply whole parameters, as LBFGS does, cannot run on shards");
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run,
        [&] {
          (void)gradient.mm(torch::ones({6, 2}));
        },
        "[aten::mm] this operator has no rule for sharded tensors, given tensor \"a.weight.grad\" of shape [7, 6] "
        "(Shard(0)); to compute with whole parameters use model->forward(x), for this rank's part to_local(), for the "
        "whole value full_tensor(); optimizers that flatten or multiply whole parameters, as LBFGS does, cannot run on "
        "shards");
    // As the message says: on the whole value.
    auto whole = dtensor::DTensor(gradient).full_tensor();
    auto x = whole / (whole.norm() + 1e-7);
    torch::NoGradGuard no_grad;
    const auto before = whole_value(run.net().a->weight);
    run.net().a->weight.sub_(x.mm(x.t()).mm(x));
    EXPECT_TRUE(torch::allclose(whole_value(run.net().a->weight), before - x.mm(x.t()).mm(x)));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OptimizerHabit, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace optimizer_habits_test

// Optimizers that step in the middle of backward: the numbers of an ordinary loop, and how many gradients there are.
#include "hsdp/optimizer_in_backward.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/optimizers.h"
#include "tests/testing/expect.h"
#include "tests/testing/training_run.h"

namespace optimizer_in_backward_test {

using namespace testing_support;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::SGDOptions;

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(const std::vector<torch::Tensor>&)> make;
};

std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }

std::vector<Kind> kinds() {
  return {{"Sgd", [](auto& p) { return std::make_unique<torch::optim::SGD>(p, SGDOptions(0.1).momentum(0.9)); }},
          {"AdamW", [](auto& p) { return std::make_unique<torch::optim::AdamW>(p, AdamWOptions(0.05)); }},
          {"FusedSgd", [](auto& p) { return std::make_unique<hsdp::FusedSGD>(p, SGDOptions(0.1).momentum(0.9)); }},
          {"FusedAdamW", [](auto& p) { return std::make_unique<hsdp::FusedAdamW>(p, AdamWOptions(0.05)); }}};
}

int64_t gradients_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return std::count_if(parameters.begin(), parameters.end(), [](const auto& p) { return p.grad().defined(); });
}

class InBackward : public ::testing::TestWithParam<std::tuple<int, Kind>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  static std::unique_ptr<Optimizer> make(const std::vector<torch::Tensor>& parameters) {
    return std::get<1>(GetParam()).make(parameters);
  }
};

// Outside of any scope, and with one open around forward and backward.
TEST_P(InBackward, GivesTheNumbersOfAnOrdinaryLoop) {
  expect_same_in_all_ways(ranks(),
                          [](TrainingRun& run) -> Step {
                            if (!run.is_sharded()) {
                              std::shared_ptr<Optimizer> optimizer = make(run.net().parameters());
                              return [&run, optimizer](int64_t step) {
                                if (step == 5) {
                                  for (auto& group : optimizer->param_groups()) group.options().set_lr(0.02);
                                }
                                run.backward(step, 5);
                                optimizer->step();
                                optimizer->zero_grad();
                              };
                            }
                            const auto optimizers = hsdp::apply_optimizer_in_backward(
                                run.model(), [](const at::Tensor& parameter) { return make({parameter}); });
                            EXPECT_EQ(optimizers.size(), run.net().parameters().size());
                            return [&run, optimizers](int64_t step) {
                              if (step == 5) {
                                for (auto& optimizer : optimizers) optimizer->param_groups()[0].options().set_lr(0.02);
                              }
                              run.with_parameters([&](const auto&) { run.backward(step, 5); });
                            };
                          },
                          {.steps = 10, .tolerance = 1e-12});
}

INSTANTIATE_TEST_SUITE_P(Ranks, InBackward, ::testing::Combine(::testing::Values(1, 3), ::testing::ValuesIn(kinds())),
                         [](const auto& which) {
                           return std::get<1>(which.param).name + std::to_string(std::get<0>(which.param));
                         });

/// Counts the gradients that there are when it steps.
class CountingSgd : public torch::optim::SGD {
 public:
  CountingSgd(const at::Tensor& parameter, const torch::nn::Module& module, int64_t& most, int64_t& steps)
      : SGD({parameter}, SGDOptions(0.1)), module_(module), most_(most), steps_(steps) {}
  torch::Tensor step(LossClosure closure) override {
    most_ = std::max(most_, gradients_of(module_));
    ++steps_;
    return SGD::step(closure);
  }

 private:
  const torch::nn::Module& module_;
  int64_t &most_, &steps_;
};

TEST(OptimizerInBackward, NeverHasGradientsOfMoreThanOneUnit) {
  run_ranks(2, [](RankContext& context) {
    TrainingRun run(Way::two_lines, context);
    run.advance_to(Stage::materialized);
    int64_t most = 0, steps = 0;
    hsdp::apply_optimizer_in_backward(run.model(), [&](const at::Tensor& parameter) {
      return std::make_unique<CountingSgd>(parameter, run.net(), most, steps);
    });
    for (int64_t step = 0; step < 3; ++step) {
      run.backward(step);
      EXPECT_EQ(gradients_of(run.net()), 0);
    }
    // A linear layer is a unit: its weight and its bias.
    EXPECT_EQ(most, 2);
    EXPECT_EQ(steps, 3 * 7);
  });
}

TEST(OptimizerInBackward, FrozenParametersHaveNone) {
  run_ranks(2, [](RankContext& context) {
    TrainingRun run(Way::two_lines, context);
    run.advance_to(Stage::materialized);
    run.net().b->weight.set_requires_grad(false);
    const auto before = whole_value(run.net().b->weight);
    const auto optimizers = hsdp::apply_optimizer_in_backward(run.model(), [&](const at::Tensor& parameter) {
      return std::make_unique<hsdp::FusedSGD>(std::vector<at::Tensor>{parameter}, SGDOptions(0.1));
    });
    EXPECT_EQ(optimizers.size(), 6u);
    run.backward(0);
    EXPECT_TRUE(torch::equal(whole_value(run.net().b->weight), before));
    EXPECT_EQ(gradients_of(run.net()), 0);
  });
}

TEST(OptimizerInBackward, ASecondGradientInOneBackwardIsRefused) {
  run_ranks(2, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return torch::nn::Linear(4, 3); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    model.materialize(context.environment().device());
    hsdp::apply_optimizer_in_backward(model, [](const at::Tensor& parameter) {
      return std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{parameter}, SGDOptions(0.1));
    });
    // Two forwards, whose input needs no gradient, so that no weight is read again.
    auto first = model->forward(torch::ones({2, 4})).sum();
    auto second = model->forward(torch::ones({2, 4})).sum();
    expect_error<dtensor::StateError>([&] { (first + second).backward(); },
                                      "[apply_optimizer_in_backward] parameter \"weight\" of shape [3, 4] (Shard(0)) "
                                      "received a second gradient in one "
                                      "backward and was stepped with the first, expected one; call backward for each "
                                      "forward, or step after backward");
    model.reset_iteration_state();
    net->zero_grad();
    for (int step = 0; step < 2; ++step) model->forward(torch::ones({2, 4})).sum().backward();
  });
}

TEST(OptimizerInBackward, BadFactoriesAreRefusedBeforeAnythingChanges) {
  run_ranks(2, [](RankContext& context) {
    TrainingRun run(Way::two_lines, context);
    run.advance_to(Stage::materialized);
    expect_error<dtensor::ValueError>(
        [&] {
          hsdp::apply_optimizer_in_backward(run.model(),
                                            [](const at::Tensor&) { return std::unique_ptr<Optimizer>(); });
        },
        "[apply_optimizer_in_backward] no optimizer for parameter \"gain\", expected one");
    expect_error<dtensor::ValueError>(
        [&] {
          hsdp::apply_optimizer_in_backward(run.model(), [&](const at::Tensor&) {
            return std::make_unique<torch::optim::SGD>(run.net().parameters(), SGDOptions(0.1));
          });
        },
        "[apply_optimizer_in_backward] the optimizer for parameter \"gain\" has others or not this one, expected one "
        "over this parameter alone");
    run.backward(0);
    EXPECT_EQ(gradients_of(run.net()), 7);
  });
}

TEST(OptimizerInBackward, APartOfALargerModuleIsRefused) {
  run_ranks(1, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return OddNet(); });
    auto inner = hsdp::fully_shard(net->a, {.mesh = context.environment().mesh()});
    auto outer = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    expect_error<dtensor::StateError>(
        [&] {
          hsdp::apply_optimizer_in_backward(inner, [](const at::Tensor&) { return std::unique_ptr<Optimizer>(); });
        },
        "[apply_optimizer_in_backward] the module is part of a larger sharded module, expected the outermost");
  });
}

}  // namespace optimizer_in_backward_test

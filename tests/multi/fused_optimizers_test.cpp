// FusedAdamW and FusedSGD: the numbers of torch::optim's classes, on one and three ranks, sharded and plain, and what
// they refuse.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/optimizers.h"
#include "hsdp/parameter_groups.h"
#include "tests/testing/expect.h"
#include "tests/testing/offline_mesh.h"
#include "tests/testing/training_run.h"

namespace fused_optimizers_test {

using namespace testing_support;
using dtensor::DTensor;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;
using Parameters = std::vector<torch::Tensor>;
using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;

/// torch's class for the plain module, ours for the sharded one.
template <class Stock, class Fused, class Options>
OptimizerPtr make(const TrainingRun& run, const std::vector<OptimizerParamGroup>& groups, const Options& options) {
  if (run.is_sharded()) return std::make_shared<Fused>(groups, options);
  return std::make_shared<Stock>(groups, options);
}
OptimizerPtr make(const TrainingRun& run, const std::vector<OptimizerParamGroup>& groups, const AdamWOptions& options) {
  return make<torch::optim::AdamW, hsdp::FusedAdamW>(run, groups, options);
}
OptimizerPtr make(const TrainingRun& run, const std::vector<OptimizerParamGroup>& groups, const SGDOptions& options) {
  return make<torch::optim::SGD, hsdp::FusedSGD>(run, groups, options);
}
template <class Options>
OptimizerPtr make(const TrainingRun& run, const Parameters& parameters, const Options& options) {
  return make(run, std::vector<OptimizerParamGroup>{OptimizerParamGroup(parameters)}, options);
}

LoopOptions steps_of(int64_t steps) { return {.steps = steps, .tolerance = 1e-12}; }

/// State of the optimizer in the order of the module's parameters, for comparison.
void track_state(TrainingRun& run, const torch::optim::Optimizer& optimizer) {
  run.tracked.clear();
  for (const auto& parameter : run.net().parameters()) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    if (const auto* adamw = dynamic_cast<const AdamWParamState*>(found->second.get())) {
      run.numbers.push_back(static_cast<double>(adamw->step()));
      run.tracked.push_back(adamw->exp_avg());
      run.tracked.push_back(adamw->exp_avg_sq());
      run.tracked.push_back(adamw->max_exp_avg_sq());
    } else {
      run.tracked.push_back(dynamic_cast<const SGDParamState&>(*found->second).momentum_buffer());
    }
    for (const auto& tensor : run.tracked) {
      EXPECT_EQ(DTensor::is_dtensor(tensor), tensor.defined() && run.is_sharded());
    }
  }
}

class FusedOptimizer : public ::testing::TestWithParam<int> {
 protected:
  /// Ten steps beside torch's class: parameters, gradients and state within 1e-12, and the same bits where a forward
  /// scope is open around the step.
  template <class Options>
  void expect_as_stock(const Options& options) {
    expect_same_in_all_ways(
        GetParam(),
        [&](TrainingRun& run) -> Step {
          auto optimizer =
              run.with_parameters([&](const Parameters& parameters) { return make(run, parameters, options); });
          return [&run, optimizer](int64_t step) {
            optimizer->zero_grad();
            run.backward(step, 5);
            run.with_parameters([&](const Parameters&) { optimizer->step(); });
            track_state(run, *optimizer);
          };
        },
        steps_of(10));
  }
};

TEST_P(FusedOptimizer, AdamW) { expect_as_stock(AdamWOptions(0.05)); }
TEST_P(FusedOptimizer, AdamWAmsgradDecay) {
  expect_as_stock(AdamWOptions(0.05).betas({0.8, 0.95}).eps(1e-4).amsgrad(true).weight_decay(0.1));
}
TEST_P(FusedOptimizer, Sgd) { expect_as_stock(SGDOptions(0.1)); }
TEST_P(FusedOptimizer, SgdMomentumDampeningDecay) {
  expect_as_stock(SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.01));
}
TEST_P(FusedOptimizer, SgdNesterov) { expect_as_stock(SGDOptions(0.1).momentum(0.9).nesterov(true)); }

TEST_P(FusedOptimizer, GroupsByPatternAndSchedulers) {
  expect_same_in_all_ways(
      GetParam(),
      [](TrainingRun& run) -> Step {
        auto optimizer = make(run,
                              hsdp::parameter_groups(run.net(), {{"**.bias", AdamWOptions(0.05).weight_decay(0)},
                                                                 {"a.*", AdamWOptions(0.02).betas({0.7, 0.9})},
                                                                 {"**"}}),
                              AdamWOptions(0.03).weight_decay(0.2));
        auto every_two = std::make_shared<torch::optim::StepLR>(*optimizer, 2, 0.5);
        return [&run, optimizer, every_two](int64_t step) {
          if (step == 3) optimizer->param_groups()[0].options().set_lr(0.2);
          optimizer->zero_grad();
          run.backward(step, 5);
          optimizer->step();
          every_two->step();
          for (auto& group : optimizer->param_groups()) run.numbers.push_back(group.options().get_lr());
        };
      },
      steps_of(6));
}

// Gradients that come and go: steps and momenta differ between the parameters of one call.
template <class Options>
Step with_gradients_that_come_and_go(TrainingRun& run, const Options& options) {
  auto optimizer = make(run, run.net().parameters(), options);
  return [&run, optimizer](int64_t step) {
    optimizer->zero_grad();
    run.backward(step, 5);
    auto parameters = run.net().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if ((static_cast<size_t>(step) + i) % 3 == 0) parameters[i].mutable_grad().reset();
    }
    optimizer->step();
    track_state(run, *optimizer);
  };
}

TEST_P(FusedOptimizer, ParametersWithoutGradientsAreSkipped) {
  expect_same_in_all_ways(
      GetParam(), [](TrainingRun& run) { return with_gradients_that_come_and_go(run, AdamWOptions(0.05)); },
      steps_of(6));
  expect_same_in_all_ways(
      GetParam(),
      [](TrainingRun& run) {
        return with_gradients_that_come_and_go(run, SGDOptions(0.05).momentum(0.9).dampening(0.2));
      },
      steps_of(6));
}

TEST_P(FusedOptimizer, OptionsThatChangeBetweenSteps) {
  expect_same_in_all_ways(
      GetParam(),
      [](TrainingRun& run) -> Step {
        auto optimizer = make(run, run.net().parameters(), SGDOptions(0.05));
        return [&run, optimizer](int64_t step) {
          auto& options = static_cast<SGDOptions&>(optimizer->param_groups()[0].options());
          if (step == 1) options.momentum(0.8);
          if (step == 3) options.momentum(0).weight_decay(0.1);
          if (step == 4) options.momentum(0.5);
          optimizer->zero_grad();
          run.backward(step, 5);
          optimizer->step();
          track_state(run, *optimizer);
        };
      },
      steps_of(6));
}

TEST_P(FusedOptimizer, PlainParametersBesideShardedOnes) {
  auto options = steps_of(6);
  options.tolerance = 1e-6;  // one of them is in float
  expect_same_in_all_ways(
      GetParam(),
      [](TrainingRun& run) -> Step {
        auto single = torch::full({3}, 0.5, torch::kFloat).requires_grad_();
        auto transposed = torch::linspace(0, 1, 12).view({3, 4}).t().detach().requires_grad_();
        auto parameters = run.net().parameters();
        parameters.insert(parameters.begin() + 2, {single, transposed});
        auto optimizer = make(run, parameters, AdamWOptions(0.05));
        return [&run, optimizer, single, transposed](int64_t step) {
          optimizer->zero_grad();
          run.backward(step, 5);
          single.mutable_grad() = torch::full({3}, 1.0 + double(step), torch::kFloat);
          // Not in the order in which the parameter lies in memory.
          transposed.mutable_grad() = torch::arange(12).to(torch::kDouble).view({4, 3}) + double(step);
          optimizer->step();
          run.tracked = {single, transposed};
        };
      },
      options);
}

TEST_P(FusedOptimizer, ClosuresAreCalled) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    auto optimizer = make(run, run.net().parameters(), SGDOptions(0.1).momentum(0.9));
    return [&run, optimizer](int64_t step) {
      auto loss = optimizer->step([&] {
        optimizer->zero_grad();
        return torch::tensor(run.backward(step));
      });
      run.numbers.push_back(loss.item<double>());
    };
  });
}

TEST_P(FusedOptimizer, StateLiesAsTheParametersDo) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    hsdp::FusedAdamW optimizer(run.net().parameters(), AdamWOptions(0.05).amsgrad(true));
    optimizer.step();
    ASSERT_EQ(optimizer.state().size(), run.net().parameters().size());
    for (auto& parameter : run.net().parameters()) {
      auto& state = static_cast<AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT_EQ(state.step(), 1);
      for (const auto& tensor : {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()}) {
        ASSERT_TRUE(DTensor::is_dtensor(tensor));
        EXPECT_EQ(DTensor(tensor).layout(), DTensor(parameter).layout());
      }
    }
  });
}

// A file of torch's class from an unsharded run: each rank takes its part of the state.
TEST_P(FusedOptimizer, StateOfAnUnshardedRunGoesOnSharded) {
  run_ranks(GetParam(), [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    TrainingRun plain(Way::plain, context), sharded(Way::two_lines, context);
    sharded.advance_to(Stage::materialized);
    torch::optim::AdamW theirs(plain.net().parameters(), AdamWOptions(0.05));
    for (int64_t step = 0; step < 3; ++step) {
      theirs.zero_grad();
      plain.backward(step);
      theirs.step();
    }
    std::stringstream stream;
    torch::save(theirs, stream);
    hsdp::FusedAdamW ours(sharded.net().parameters(), AdamWOptions(1));
    torch::load(ours, stream);
    auto values = plain.net().parameters(), parameters = sharded.net().parameters();
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(values[i]);
    torch::AutoGradMode grad_mode(true);
    for (int64_t step = 3; step < 6; ++step) {
      for (auto* run : {&plain, &sharded}) run->net().zero_grad();
      plain.backward(step);
      sharded.backward(step);
      theirs.step();
      ours.step();
      for (size_t i = 0; i < parameters.size(); ++i) expect_close(parameters[i], values[i], 1e-12, "parameter");
    }
    auto& state = static_cast<AdamWParamState&>(*ours.state().at(parameters[0].unsafeGetTensorImpl()));
    EXPECT_EQ(state.step(), 6);
    EXPECT_TRUE(DTensor::is_dtensor(state.exp_avg()));
  });
}

// ---- dtypes ----

/// Gives each parameter the gradient `value(i)`, of the parameter's dtype, this rank's part where it is sharded.
void set_gradients(const Parameters& parameters, int64_t step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto generator = at::detail::createCPUGenerator(100 * static_cast<uint64_t>(step) + i);
    auto gradient = torch::randn(parameters[i].sizes(), generator, torch::kDouble).to(parameters[i].scalar_type());
    if (auto* impl = dtensor::distributed_impl(parameters[i])) {
      gradient = DTensor::distribute(gradient, impl->mesh(), impl->placements()).tensor();
    }
    parameters[i].mutable_grad() = gradient;
  }
}

TEST_P(FusedOptimizer, DtypesOfTheKernel) {
  run_ranks(GetParam(), [](RankContext& context) {
    for (auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      TrainingRun plain(Way::plain, context), sharded(Way::two_lines, context);
      sharded.advance_to(Stage::materialized);
      sharded.model()->to(dtype);
      plain.net().to(dtype);
      const auto values = plain.net().parameters(), parameters = sharded.net().parameters();
      hsdp::FusedAdamW whole(values, AdamWOptions(0.05)), parts(parameters, AdamWOptions(0.05));
      for (int64_t step = 0; step < 5; ++step) {
        set_gradients(values, step);
        set_gradients(parameters, step);
        whole.step();
        parts.step();
      }
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_EQ(parameters[i].scalar_type(), dtype);
        expect_same_bits(parameters[i], values[i], c10::str("parameter ", i, " in ", dtype));
      }
    }
  });
}

TEST(FusedOptimizers, HalfPrecisionIsThatOfTheDtype) {
  for (auto dtype : {torch::kBFloat16, torch::kHalf}) {
    auto low = torch::linspace(-2, 2, 9).to(dtype).requires_grad_();
    auto high = low.detach().to(torch::kDouble).requires_grad_();
    hsdp::FusedSGD ours({low}, SGDOptions(0.25).momentum(0.5));
    torch::optim::SGD theirs({high}, SGDOptions(0.25).momentum(0.5));
    for (int64_t step = 0; step < 4; ++step) {
      high.mutable_grad() = torch::linspace(-1, 1, 9, torch::kDouble) * double(step + 1);
      low.mutable_grad() = high.grad().to(dtype);
      ours.step();
      theirs.step();
    }
    EXPECT_LE(largest_difference(low.detach().to(torch::kDouble), high.detach()), dtype == torch::kHalf ? 2e-3 : 2e-2);
  }
}

TEST(FusedOptimizers, OneKernelCallForEachGroupDtypeAndDevice) {
  Parameters floats, doubles;
  for (int i = 0; i < 5; ++i) {
    floats.push_back(torch::ones({i}, torch::kFloat).requires_grad_());
    doubles.push_back(torch::ones({i}, torch::kDouble).requires_grad_());
  }
  auto all = floats;
  all.insert(all.end(), doubles.begin(), doubles.end() - 1);
  hsdp::FusedAdamW optimizer({OptimizerParamGroup(all), OptimizerParamGroup({doubles.back()})}, AdamWOptions(0.1));
  static std::atomic<int> calls;
  calls = 0;
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        if (std::string(function.name()) == "aten::_fused_adamw_") ++calls;
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  for (int64_t step = 0; step < 2; ++step) {
    for (auto* list : {&floats, &doubles}) set_gradients(*list, step);
    optimizer.step();
  }
  at::removeCallback(handle);
  EXPECT_EQ(calls, 2 * 3);
}

TEST(FusedOptimizers, ScalarsAndOtherPlacements) {
  const auto mesh = offline_mesh(3, 1);
  Parameters whole, parts;
  for (const auto& [sizes, placement] :
       std::vector<std::pair<std::vector<int64_t>, dtensor::Placement>>{{{}, dtensor::Replicate()},
                                                                        {{4, 3}, dtensor::Replicate()},
                                                                        {{4, 7}, dtensor::Shard(1)},
                                                                        {{2, 3}, dtensor::Shard(0)}}) {
    whole.push_back(torch::ones(sizes, torch::kDouble).requires_grad_());
    parts.push_back(DTensor::distribute(whole.back().detach(), mesh, {placement}).as_parameter(true).tensor());
  }
  hsdp::FusedAdamW ours(parts, AdamWOptions(0.1));
  torch::optim::AdamW theirs(whole, AdamWOptions(0.1));
  for (int64_t step = 0; step < 3; ++step) {
    set_gradients(whole, step);
    set_gradients(parts, step);
    ours.step();
    theirs.step();
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    const auto part = dtensor::narrow_to_box(whole[i].detach(), DTensor(parts[i]).layout()->local());
    EXPECT_LE(largest_difference(DTensor(parts[i]).to_local(), part), 1e-12) << i;
  }
}

// ---- plain parameters ----

TEST(FusedOptimizers, FilesAreThoseOfTheStockClasses) {
  const auto step = [](torch::optim::Optimizer& optimizer, int64_t index) {
    set_gradients(optimizer.param_groups()[0].params(), index);
    optimizer.step();
  };
  const auto options = AdamWOptions(0.05).amsgrad(true);
  const Parameters first{torch::ones({4, 3}).requires_grad_(), torch::ones({3}).requires_grad_()};
  torch::optim::AdamW stock(first, options);
  step(stock, 0);
  std::stringstream stream;
  torch::save(stock, stream);
  Parameters second;
  for (const auto& parameter : first) second.push_back(parameter.detach().clone().requires_grad_());
  hsdp::FusedAdamW fused(second, AdamWOptions(1));
  torch::load(fused, stream);
  step(stock, 1);
  step(fused, 1);
  EXPECT_TRUE(static_cast<const AdamWOptions&>(fused.param_groups()[0].options()) == options);
  std::stringstream back;
  torch::save(fused, back);
  torch::load(stock, back);
  step(stock, 2);
  step(fused, 2);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_LE(largest_difference(second[i], first[i]), 1e-6);

  const Parameters third{torch::ones({4}).requires_grad_()}, fourth{torch::ones({4}).requires_grad_()};
  hsdp::FusedSGD from(third, SGDOptions(0.1).momentum(0.5));
  step(from, 0);
  std::stringstream momenta;
  torch::save(from, momenta);
  torch::optim::SGD to(fourth, SGDOptions(1));
  torch::load(to, momenta);
  fourth[0].data().copy_(third[0].data());
  step(from, 1);
  step(to, 1);
  EXPECT_LE(largest_difference(fourth[0], third[0]), 1e-6);
}

// State that lies in another order than its parameter, which the kernel would mix up.
TEST(FusedOptimizers, StateOfAnotherMemoryOrderIsPutInOrder) {
  const auto start = torch::linspace(0, 1, 12, torch::kDouble).view({3, 4});
  auto ours = start.clone().t().requires_grad_(), theirs = start.clone().t().contiguous().requires_grad_();
  hsdp::FusedSGD fused({ours}, SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD stock({theirs}, SGDOptions(0.1).momentum(0.9));
  for (int64_t step = 0; step < 3; ++step) {
    set_gradients({ours}, step);
    set_gradients({theirs}, step);
    fused.step();
    stock.step();
    auto& state = static_cast<SGDParamState&>(*fused.state().at(ours.unsafeGetTensorImpl()));
    state.momentum_buffer(state.momentum_buffer().contiguous());
  }
  EXPECT_LE(largest_difference(ours, theirs), 1e-12);
}

// ---- refused ----

TEST(FusedOptimizers, OptionsOutOfRangeAreRefused) {
  const auto parameter = torch::ones({2}).requires_grad_();
  const auto refuses_adamw = [&](const AdamWOptions& options, const std::string& text) {
    expect_error<dtensor::ValueError>([&] { hsdp::FusedAdamW({parameter}, options); }, "[FusedAdamW] " + text);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(Parameters{parameter}, std::make_unique<AdamWOptions>(options));
    expect_error<dtensor::ValueError>([&] { hsdp::FusedAdamW optimizer(groups); }, "[FusedAdamW] " + text);
  };
  refuses_adamw(AdamWOptions(-1), "lr -1, expected a finite number of at least 0");
  refuses_adamw(AdamWOptions(std::numeric_limits<double>::quiet_NaN()), "lr nan, expected");
  refuses_adamw(AdamWOptions(1).eps(-1), "eps -1, expected");
  refuses_adamw(AdamWOptions(1).weight_decay(-2), "weight_decay -2, expected");
  refuses_adamw(AdamWOptions(1).betas({1, 0.5}), "beta 1, expected 0 <= beta < 1");
  refuses_adamw(AdamWOptions(1).betas({0.5, -0.5}), "beta -0.5, expected 0 <= beta < 1");
  const auto refuses_sgd = [&](const SGDOptions& options, const std::string& text) {
    expect_error<dtensor::ValueError>([&] { hsdp::FusedSGD({parameter}, options); }, "[FusedSGD] " + text);
  };
  refuses_sgd(SGDOptions(-1), "lr -1, expected a finite number of at least 0");
  refuses_sgd(SGDOptions(1).momentum(-1), "momentum -1, expected");
  refuses_sgd(SGDOptions(1).weight_decay(-1), "weight_decay -1, expected");
  refuses_sgd(SGDOptions(1).dampening(std::numeric_limits<double>::infinity()), "dampening inf, expected");
  refuses_sgd(SGDOptions(1).nesterov(true),
              "nesterov with momentum 0 and dampening 0, expected momentum above 0 and no dampening");
  refuses_sgd(SGDOptions(1).momentum(0.5).dampening(0.5).nesterov(true),
              "nesterov with momentum 0.5 and dampening 0.5");
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Parameters{parameter}, std::make_unique<torch::optim::AdamOptions>(0.1));
  expect_error<dtensor::ValueError>(
      [&] { hsdp::FusedAdamW optimizer(groups); },
      "[FusedAdamW] a group has options of another optimizer, expected torch::optim::AdamWOptions");
}

TEST(FusedOptimizers, OptionsThatWentOutOfRangeAreRefusedBeforeAnythingChanges) {
  const Parameters parameters{torch::ones({2}).requires_grad_(), torch::ones({2}).requires_grad_()};
  hsdp::FusedSGD optimizer({OptimizerParamGroup({parameters[0]}), OptimizerParamGroup({parameters[1]})},
                           SGDOptions(0.5).momentum(0.5));
  set_gradients(parameters, 0);
  optimizer.param_groups()[1].options().set_lr(-1);
  expect_error<dtensor::ValueError>([&] { optimizer.step(); },
                                    "[FusedSGD] lr -1, expected a finite number of at least 0");
  for (const auto& parameter : parameters) EXPECT_TRUE(torch::equal(parameter, torch::ones({2})));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(FusedOptimizers, WhatNoKernelTakesIsRefused) {
  const auto good = torch::ones({2}).requires_grad_();
  const auto refuses = [&](const torch::Tensor& parameter, const torch::Tensor& gradient, const std::string& text) {
    hsdp::FusedSGD optimizer({good, parameter}, SGDOptions(0.5).momentum(0.5));
    good.mutable_grad() = torch::ones({2});
    parameter.mutable_grad() = gradient;
    expect_error<dtensor::NotSupportedError>([&] { optimizer.step(); }, text);
    EXPECT_TRUE(torch::equal(good, torch::ones({2})));
    EXPECT_TRUE(optimizer.state().empty());
  };
  const auto complex = torch::ones({2, 3}, torch::kComplexFloat).requires_grad_();
  refuses(complex, torch::ones_like(complex),
          "[FusedSGD] a parameter of shape [2, 3] is of dtype ComplexFloat, expected Float, Double, BFloat16 or Half; "
          "use the class of torch::optim");
  const auto column = torch::ones({2, 3}).select(1, 0).detach().requires_grad_();
  refuses(column, torch::ones({2}),
          "[FusedSGD] a parameter of shape [2] has strides [3], expected memory without gaps; use the class");
  const auto table = torch::ones({5, 2}).requires_grad_();
  refuses(table, torch::zeros({5, 2}).to_sparse(),
          "[FusedSGD] a parameter of shape [5, 2] has a Sparse gradient, expected a dense one; use the class");
}

TEST_P(FusedOptimizer, GradientsThatDoNotFitAreRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    hsdp::FusedAdamW optimizer(run.net().parameters(), AdamWOptions(0.05));
    const auto weight = run.net().c->weight;
    const auto fits = weight.grad();
    weight.mutable_grad() = fits.to(torch::kFloat);
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run, [&] { optimizer.step(); },
        "[FusedAdamW] parameter \"c.weight\" of shape [6, 2] (Shard(0)) of dtype Double has a gradient of dtype Float, "
        "expected the same; use the class of torch::optim");
    weight.mutable_grad() = torch::ones({6, 2});
    expect_refused_and_unchanged<dtensor::ValueError>(
        run, [&] { optimizer.step(); },
        "[FusedAdamW] parameter \"c.weight\" of shape [6, 2] (Shard(0)) has a gradient that is plain Double [6, 2] "
        "cpu, "
        "expected one that lies as the parameter does; call zero_grad()");
    EXPECT_TRUE(optimizer.state().empty());
    weight.mutable_grad() = fits;
    optimizer.step();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, FusedOptimizer, ::testing::Values(1, 3),
                         [](const auto& which) { return std::to_string(which.param); });

}  // namespace fused_optimizers_test

// What users do with gradients between backward and step, each compared with the unsharded module on two lines and with
// the scope of `model->` left open: the stock clipping functions, loops over p.grad(), resets, accumulation.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/training_run.h"

namespace gradient_habits_test {

using namespace testing_support;
using Parameters = std::vector<torch::Tensor>;

class GradientHabit : public ::testing::TestWithParam<int> {
 protected:
  /// Does `change` to the gradients of each step, then a plain step of SGD.
  void with_gradients(const std::function<void(TrainingRun&, const Parameters&)>& change, LoopOptions options = {}) {
    expect_same_in_all_ways(
        GetParam(),
        [&](TrainingRun& run) -> Step {
          auto optimizer = std::make_shared<torch::optim::SGD>(run.net().parameters(), torch::optim::SGDOptions(0.1));
          return [&run, &change, optimizer](int64_t step) {
            optimizer->zero_grad();
            run.backward(step, 20);
            run.with_parameters([&](const Parameters& parameters) { change(run, parameters); });
            optimizer->step();
          };
        },
        options);
  }
};

TEST_P(GradientHabit, StockClippingByNorm) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const double norm_type : {1.0, 2.0, 3.5, infinity}) {
    with_gradients([&](TrainingRun& run, const Parameters& parameters) {
      run.numbers.push_back(torch::nn::utils::clip_grad_norm_(parameters, 0.7, norm_type));
      run.numbers.push_back(torch::nn::utils::clip_grad_norm_(parameters, 0.5, norm_type, /*error_if_nonfinite=*/true));
      run.numbers.push_back(torch::nn::utils::clip_grad_norm_(parameters[2], 0.1, norm_type));
    });
  }
}

TEST_P(GradientHabit, OwnClippingByNorm) {
  with_gradients([](TrainingRun& run, const Parameters& parameters) {
    run.numbers.push_back(run.is_sharded() ? hsdp::clip_grad_norm_(parameters, 0.7)
                                           : torch::nn::utils::clip_grad_norm_(parameters, 0.7));
  });
}

TEST_P(GradientHabit, ClippingOfGradientsThatAreNoNumbers) {
  with_gradients([](TrainingRun& run, const Parameters& parameters) {
    parameters[0].grad().div_((parameters[5].grad() - parameters[5].grad()).sum());
    for (const double norm_type : {2.0, std::numeric_limits<double>::infinity()}) {
      EXPECT_THROW((void)torch::nn::utils::clip_grad_norm_(parameters, 1, norm_type, true), c10::Error);
    }
    run.numbers.push_back(torch::nn::utils::clip_grad_norm_(parameters, 1));
  });
}

TEST_P(GradientHabit, StockClippingByValue) {
  with_gradients([](TrainingRun&, const Parameters& parameters) {
    torch::nn::utils::clip_grad_value_(parameters, 0.3);
    torch::nn::utils::clip_grad_value_(parameters[1], 0.2);
  });
}

TEST_P(GradientHabit, ScaledInPlaceOrReplaced) {
  with_gradients([](TrainingRun&, const Parameters& parameters) {
    parameters[0].grad().mul_(0.5);
    parameters[1].grad().data().div_(3);
    parameters[2].mutable_grad() = parameters[2].grad() * 2;
    parameters[3].mutable_grad() *= 0.25;
    parameters[4].mutable_grad() = torch::zeros_like(parameters[4]);
    parameters[5].grad().copy_(parameters[5].grad() + 0.5 * parameters[5].detach());
    parameters[6].grad().zero_();
  });
}

TEST_P(GradientHabit, NoiseIsThatOfTheWholeTensor) {
  with_gradients([](TrainingRun&, const Parameters& parameters) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters) {
      parameter.grad().add_(torch::randn_like(parameter.grad()), 0.1);
      parameter.mutable_grad() = parameter.grad() + 0.1 * torch::rand_like(parameter);
      parameter.grad().add_(torch::empty_like(parameter.grad()).normal_(0, 0.1));
      parameter.mutable_grad() += 0.1 * torch::randn(parameter.sizes());
    }
  });
}

TEST_P(GradientHabit, MasksAndFactorsOfPlainTensors) {
  with_gradients([](TrainingRun& run, const Parameters& parameters) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters) {
      auto mask = torch::rand(parameter.sizes()) > 0.3;
      parameter.grad().mul_(mask);
      parameter.mul_(mask.to(torch::kFloat64));
      parameter.grad().masked_fill_(torch::rand(parameter.sizes()) > 0.8, 0.125);
      parameter.mutable_grad() =
          torch::where(torch::rand(parameter.sizes()) > 0.8, parameter.grad(), 2 * parameter.grad());
    }
    auto& weight = run.net().a->weight;
    weight.grad().mul_(torch::rand({weight.size(0), 1}));
    weight.grad().mul_(torch::rand({weight.size(1)}));
    weight.mutable_grad() += torch::ones({1, 1});
    torch::_foreach_mul_({parameters[0].grad(), parameters[1].grad()},
                         {torch::rand(parameters[0].sizes()), torch::rand(parameters[1].sizes())});
  });
}

TEST_P(GradientHabit, ChecksForNumbers) {
  with_gradients([](TrainingRun& run, const Parameters& parameters) {
    const auto check = [&run](const torch::Tensor& gradient) {
      run.numbers.push_back(gradient.isnan().any().item<bool>());
      run.numbers.push_back(torch::isinf(gradient).any().item().toBool());
      run.numbers.push_back(gradient.isfinite().all().item<bool>());
      run.numbers.push_back((gradient > 1).any().item<bool>());
      run.numbers.push_back((gradient < 100).all().item<bool>());
      if (!torch::isfinite(gradient).all().item<bool>()) gradient.nan_to_num_(0.5);
      run.numbers.push_back(torch::isclose(gradient, gradient * 1.0).all().item<bool>());
    };
    for (auto& parameter : parameters) {
      check(parameter.grad());
      check(torch::log(parameter.grad()));
      // Not a number in one element, of the last row.
      auto row = torch::zeros(parameter.sizes());
      row.view(-1)[-1] = std::numeric_limits<double>::quiet_NaN();
      check(parameter.grad() + row);
    }
  });
}

TEST_P(GradientHabit, StatisticsOfEachParameter) {
  with_gradients([](TrainingRun& run, const Parameters& parameters) {
    torch::NoGradGuard no_grad;
    torch::Tensor total = torch::zeros({});
    for (auto& parameter : parameters) {
      const auto& gradient = parameter.grad();
      run.numbers.push_back(gradient.norm().item<double>());
      run.numbers.push_back(gradient.norm(1).item<double>());
      run.numbers.push_back(gradient.abs().max().item<double>());
      run.numbers.push_back(gradient.min().item<double>());
      run.numbers.push_back(gradient.mean().item<double>() + gradient.sum().item<double>());
      run.numbers.push_back((gradient * gradient).sum().sqrt().item<double>());
      run.numbers.push_back(parameter.norm().item<double>() / (gradient.norm().item<double>() + 1));
      run.numbers.push_back(parameter.pow(2).sum().item<double>());
      run.numbers.push_back((gradient.norm() / (parameter.norm() + 1e-6)).item<double>());
      run.numbers.push_back(static_cast<double>(gradient.numel() + gradient.dim()));
      total += gradient.pow(2).sum();
    }
    run.numbers.push_back(total.sqrt().item<double>());
  });
}

TEST_P(GradientHabit, ZeroGradOfOptimizerAndModule) {
  for (const bool set_to_none : {true, false}) {
    for (const bool of_module : {true, false}) {
      expect_same_in_all_ways(GetParam(), [&](TrainingRun& run) -> Step {
        auto optimizer =
            std::make_shared<torch::optim::SGD>(run.net().parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        return [&run, optimizer, set_to_none, of_module](int64_t step) {
          run.backward(step);
          optimizer->step();
          // The gradients are compared after the step: undefined, or zeros.
          if (of_module) {
            run.is_sharded() ? run.model()->zero_grad(set_to_none) : run.net().zero_grad(set_to_none);
          } else {
            optimizer->zero_grad(set_to_none);
          }
          for (auto& parameter : run.net().parameters()) EXPECT_EQ(parameter.grad().defined(), !set_to_none);
        };
      });
    }
  }
}

TEST_P(GradientHabit, ResetByHand) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    auto optimizer = std::make_shared<torch::optim::SGD>(run.net().parameters(), torch::optim::SGDOptions(0.1));
    return [&run, optimizer](int64_t step) {
      run.with_parameters([&](const Parameters& parameters) {
        for (size_t i = 0; i < parameters.size(); ++i) {
          if (i % 3 == 0) parameters[i].mutable_grad().reset();
          if (i % 3 == 1) parameters[i].mutable_grad() = torch::Tensor();
          if (i % 3 == 2 && parameters[i].grad().defined()) parameters[i].grad().detach_().zero_();
        }
      });
      run.backward(step);
      optimizer->step();
    };
  });
}

TEST_P(GradientHabit, AccumulatedOverBackwards) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    auto optimizer = std::make_shared<torch::optim::SGD>(run.net().parameters(), torch::optim::SGDOptions(0.1));
    return [&run, optimizer](int64_t step) {
      for (int64_t micro = 0; micro < 3; ++micro) run.numbers.push_back(run.backward(10 * step + micro, 1.0 / 3));
      optimizer->step();
      optimizer->zero_grad(/*set_to_none=*/false);
    };
  });
}

TEST_P(GradientHabit, AssignedTensorsOfTheGlobalShape) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    auto optimizer =
        std::make_shared<torch::optim::Adam>(run.net().parameters(), torch::optim::AdamOptions(0.05).eps(1e-3));
    return [&run, optimizer](int64_t step) {
      run.backward(step);
      run.with_parameters([&](const Parameters& parameters) {
        // Plain ones, equal on all ranks.
        for (auto& parameter : parameters) parameter.mutable_grad() = torch::randn(parameter.sizes());
        run.numbers.push_back(torch::nn::utils::clip_grad_norm_(parameters, 0.5));
      });
      optimizer->step();
      optimizer->zero_grad();
    };
  });
}

TEST_P(GradientHabit, BackwardOntoAPlainGradientIsRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    run.net().a->weight.mutable_grad() = torch::zeros({7, 6});
    expect_error<dtensor::StateError>(
        [&] { run.backward(1); },
        "[backward] parameter \"a.weight\" has a gradient that is plain Double [7, 6] cpu, expected a DTensor ",
        "; reset it with zero_grad()");
    run.model().reset_iteration_state();
    run.model()->zero_grad();
    run.backward(1);
  });
}

TEST_P(GradientHabit, PrintingIsRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    std::string text;
    try {
      std::ostringstream() << run.net().a->weight.grad();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    EXPECT_EQ(
        text,
        "[raw access] tensor \"a.weight.grad\" of shape [7, 6] (Shard(0)) is sharded and has no storage of its own "
        "outside a forward; use hsdp::export_pt(model, path) to save the module, hsdp::unsharded(p) for the whole "
        "value, to_local() for this rank's part, hsdp::to_string(t) to print; gradients are already reduced");
    EXPECT_FALSE(hsdp::to_string(run.net().a->weight.grad()).empty());
  });
}

TEST_P(GradientHabit, VectorsOfParameters) {
  expect_same_in_all_ways(GetParam(), [](TrainingRun& run) -> Step {
    return [&run](int64_t step) {
      torch::manual_seed(static_cast<uint64_t>(step));
      int64_t count = 0;
      for (auto& parameter : run.net().parameters()) count += parameter.numel();
      const auto values = torch::randn({count});
      run.with_parameters(
          [&](const Parameters& parameters) { torch::nn::utils::vector_to_parameters(values, parameters); });
      run.backward(step);
    };
  });
}

TEST_P(GradientHabit, ParametersToVectorIsRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    const auto flatten = [&] { (void)torch::nn::utils::parameters_to_vector(run.net().parameters()); };
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run, flatten,
        "[aten::view] parameter \"gain\" of shape [1] (Shard(0)) requires grad and is used outside a forward, where "
        "its "
        "gradient would be lost; use model->forward(x), not the bare module; a loss term on parameters goes inside an "
        "hsdp::ForwardScope; torch::NoGradGuard where no gradient is wanted");
    torch::NoGradGuard no_grad;
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run, flatten,
        "[aten::view] this operator has no rule for sharded tensors, given parameter \"gain\" of shape [1] (Shard(0)); "
        "to "
        "compute with whole parameters use model->forward(x), for this rank's part to_local(), for the whole value "
        "full_tensor(); optimizers that flatten or multiply whole parameters, as LBFGS does, cannot run on shards");
    // In a scope they are whole.
    const auto vector = torch::nn::utils::parameters_to_vector(run.model()->parameters());
    EXPECT_TRUE(torch::equal(vector[0], whole_value(run.net().gain)[0]));
    EXPECT_TRUE(torch::equal(vector.slice(0, 1, 43).view({7, 6}), whole_value(run.net().a->weight)));
  });
}

TEST_P(GradientHabit, ReductionsOverSomeDimsAreRefused) {
  with_sharded_run(GetParam(), [](TrainingRun& run) {
    const auto gradient = run.net().a->weight.grad();
    // Gradient centralisation.
    expect_refused_and_unchanged<dtensor::NotSupportedError>(
        run, [&] { gradient.sub_(gradient.mean(1, true)); },
        "[aten::mean] a reduction over some dims only, expected one over the whole tensor, given tensor "
        "\"a.weight.grad\" "
        "of shape [7, 6] (Shard(0)); to compute with whole parameters use model->forward(x), for this rank's part "
        "to_local(), for the whole value full_tensor()");
    // As the message says: the mean of the whole, of which each rank takes its part.
    const auto whole = whole_value(gradient);
    gradient.sub_(whole.mean(1, true));
    EXPECT_TRUE(torch::equal(whole_value(gradient), whole - whole.mean(1, true)));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GradientHabit, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace gradient_habits_test

// GradScaler: the arithmetic of the scale, exact unscaling, steps that all ranks skip together, and the order of calls.
#include "hsdp/grad_scaler.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/optimizers.h"
#include "tests/testing/expect.h"
#include "tests/testing/training_run.h"

namespace grad_scaler_test {

using namespace testing_support;
using dtensor::DTensor;
using dtensor::StateError;
using dtensor::ValueError;
using hsdp::GradScaler;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;
using Parameters = std::vector<torch::Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

torch::Tensor part_of(const torch::Tensor& tensor) {
  return DTensor::is_dtensor(tensor) ? DTensor(tensor).to_local() : tensor;
}

// ---- one process, closed form ----

/// A parameter of two ones whose gradient is the scale times `slope`.
struct Line {
  torch::Tensor parameter = torch::ones({2}, torch::kFloat).requires_grad_();
  torch::optim::SGD optimizer{{parameter}, SGDOptions(0.5)};

  bool iterate(GradScaler& scaler, double slope) {
    optimizer.zero_grad();
    scaler.scale((parameter * slope).sum()).backward();
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    return stepped;
  }
};

/// Runs in a process of its own, as everything does that uses autograd.
void alone(const std::function<void()>& body) {
  run_ranks(1, [&](RankContext&) { body(); });
}

TEST(Scale, GrowsAfterTheIntervalAndBacksOffAtAnInfinity) {
  alone([] {
    GradScaler scaler({.scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
    Line line;
    std::vector<double> scales;
    std::vector<int64_t> trackers;
    std::vector<bool> steps;
    for (double slope : {1.0, 1.0, kInfinity, 1.0, 1.0, 1.0, kNaN, 1.0}) {
      steps.push_back(line.iterate(scaler, slope));
      scales.push_back(scaler.get_scale());
      trackers.push_back(scaler.state().growth_tracker);
    }
    EXPECT_EQ(steps, (std::vector<bool>{true, true, false, true, true, true, false, true}));
    EXPECT_EQ(scales, (std::vector<double>{8, 8, 2, 2, 2, 8, 2, 2}));
    EXPECT_EQ(trackers, (std::vector<int64_t>{1, 2, 0, 1, 2, 0, 0, 1}));
    // Six steps of 0.5 down a slope of 1.
    EXPECT_TRUE(torch::equal(line.parameter, torch::full({2}, -2.0, torch::kFloat)));
  });
}

TEST(Scale, StaysAFiniteFloat) {
  alone([] {
    GradScaler high({.scale = 0x1p127, .growth_interval = 1}), low({.scale = 0x1p-126});
    Line line;
    EXPECT_TRUE(line.iterate(high, 0x1p-126));
    EXPECT_EQ(high.get_scale(), 0x1p127);
    EXPECT_FALSE(line.iterate(low, kInfinity));
    EXPECT_EQ(low.get_scale(), 0x1p-126);
  });
}

TEST(Scale, IsMultipliedIntoTheLossInFloat) {
  alone([] {
    GradScaler scaler;
    EXPECT_EQ(scaler.get_scale(), 65536.0);
    EXPECT_EQ(scaler.scale(torch::tensor(3.0f)).item<float>(), 196608.0f);
    // 2 * 65536 is no half.
    EXPECT_EQ(scaler.scale(torch::tensor(2.0f).to(torch::kHalf)).item<float>(), 131072.0f);
  });
}

TEST(Scale, IsSetByUpdateAndByState) {
  alone([] {
    GradScaler scaler({.scale = 4, .growth_interval = 2});
    Line line;
    line.iterate(scaler, 1);
    scaler.update(16);
    EXPECT_EQ(scaler.get_scale(), 16);
    EXPECT_EQ(scaler.state().growth_tracker, 1);
    GradScaler other;
    other.load_state(scaler.state());
    EXPECT_EQ(other.get_scale(), 16);
    line.iterate(other, 1);
    EXPECT_EQ(other.get_scale(), 32);
  });
}

TEST(Scale, ADisabledScalerDoesNothing) {
  alone([] {
    GradScaler scaler({}, /*enabled=*/false);
    Line line;
    const auto loss = line.parameter.sum();
    EXPECT_TRUE(scaler.scale(loss).is_same(loss));
    loss.backward();
    scaler.unscale_(line.optimizer);
    EXPECT_TRUE(scaler.step(line.optimizer));
    scaler.update();
    scaler.update(7);
    EXPECT_EQ(scaler.get_scale(), 1);
    EXPECT_TRUE(torch::equal(line.parameter, torch::full({2}, 0.5, torch::kFloat)));
  });
}

TEST(Scale, TwoOptimizersOfOneIteration) {
  alone([] {
    GradScaler scaler({.scale = 4});
    Line first, second;
    scaler.scale((first.parameter * kInfinity).sum() + second.parameter.sum()).backward();
    EXPECT_FALSE(scaler.step(first.optimizer));
    EXPECT_TRUE(scaler.step(second.optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2);
  });
}

TEST(Scale, BadValuesAreRefused) {
  const auto refuses = [](const hsdp::GradScalerState& state, const std::string& text) {
    expect_error<ValueError>([&] { GradScaler scaler(state); }, "[GradScaler] " + text);
    GradScaler scaler;
    expect_error<ValueError>([&] { scaler.load_state(state); }, "[GradScaler] " + text);
    EXPECT_EQ(scaler.get_scale(), 65536.0);
  };
  refuses({.scale = 0}, "scale 0, expected a float above 0");
  refuses({.scale = kInfinity}, "scale inf, expected a float above 0");
  refuses({.scale = kNaN}, "scale nan, expected a float above 0");
  refuses({.growth_factor = 1}, "growth_factor 1, expected a number above 1");
  refuses({.backoff_factor = 1}, "backoff_factor 1, expected a number between 0 and 1");
  refuses({.growth_interval = 0}, "growth_interval 0 and growth_tracker 0, expected at least 1 and at least 0");
  GradScaler scaler;
  expect_error<ValueError>([&] { scaler.update(-1); }, "[GradScaler] scale -1, expected a float above 0");
}

TEST(Scale, CallsOutOfOrderAreRefused) {
  alone([] {
    GradScaler scaler;
    Line line;
    auto& optimizer = line.optimizer;
    const auto refuses = [](const std::function<void()>& call, const std::string& text) {
      expect_error<StateError>(call, "[GradScaler] " + text);
    };
    const std::string no_scale = " without scale() in this iteration, expected scale(loss).backward() before it";
    refuses([&] { scaler.step(optimizer); }, "step()" + no_scale);
    refuses([&] { scaler.unscale_(optimizer); }, "unscale_()" + no_scale);
    refuses([&] { scaler.update(); },
            "update() without unscale_() or step() in this iteration, expected one of them before");
    const auto loss = scaler.scale(line.parameter.sum());
    refuses([&] { scaler.step(optimizer); },
            "none of the optimizer's parameters has a gradient, expected backward() before");
    loss.backward();
    scaler.unscale_(optimizer);
    const auto gradient = line.parameter.grad().clone();
    refuses([&] { scaler.unscale_(optimizer); },
            "unscale_() after unscale_() of the same optimizer, expected once an iteration and before step(); update() "
            "ends an iteration");
    EXPECT_TRUE(torch::equal(line.parameter.grad(), gradient));
    scaler.step(optimizer);
    refuses([&] { scaler.unscale_(optimizer); }, "unscale_() after step() of the same optimizer");
    refuses([&] { scaler.step(optimizer); },
            "step() after step() of the same optimizer, expected update() between them");
    EXPECT_TRUE(torch::equal(line.parameter, torch::full({2}, 0.5, torch::kFloat)));
    scaler.update();
    refuses([&] { scaler.step(optimizer); }, "step()" + no_scale);
  });
}

// Half: unscaled by the fused kernel in float, where dividing the gradients in half is refused.
TEST(Scale, HalfParametersAreUnscaledByTheKernel) {
  alone([] {
    auto parameter = torch::ones({2}, torch::kFloat).to(torch::kHalf).requires_grad_();
    hsdp::FusedSGD optimizer({parameter}, SGDOptions(1024));
    GradScaler scaler({.scale = 65536});
    // A slope of 2^-26 is 0 in half, and times the scale it is not.
    const auto iterate = [&] {
      optimizer.zero_grad();
      scaler.scale(parameter.to(torch::kFloat).sum() * 0x1p-26).backward();
    };
    iterate();
    expect_error<ValueError>([&] { scaler.unscale_(optimizer); },
                             "[GradScaler] a gradient of shape [2] is Half, where dividing by the scale loses what the "
                             "scale has saved, expected Float; keep parameters in float, or step with FusedAdamW or "
                             "FusedSGD without unscale_()");
    torch::optim::SGD stock({parameter}, SGDOptions(1));
    expect_error<ValueError>([&] { scaler.step(stock); }, "is Half, where dividing");
    for (int step = 0; step < 64; ++step) {
      if (step > 0) iterate();
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
    }
    EXPECT_EQ(parameter[0].item<float>(), 1.0f);  // 2^-16 a step is lost beside 1 in half
    torch::NoGradGuard no_grad;
    parameter.zero_();
    torch::AutoGradMode grad_mode(true);
    iterate();
    scaler.step(optimizer);
    EXPECT_EQ(parameter[0].item<float>(), -0x1p-16f);
  });
}

// ---- ranks ----

struct Kind {
  std::string name;
  std::function<OptimizerPtr(const Parameters&)> make;
};

std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }

std::vector<Kind> kinds() {
  return {{"Sgd", [](auto& p) { return std::make_unique<torch::optim::SGD>(p, SGDOptions(0.1).momentum(0.9)); }},
          {"AdamW", [](auto& p) { return std::make_unique<torch::optim::AdamW>(p, AdamWOptions(0.05)); }},
          {"FusedSgd", [](auto& p) { return std::make_unique<hsdp::FusedSGD>(p, SGDOptions(0.1).momentum(0.9)); }},
          {"FusedAdamW", [](auto& p) { return std::make_unique<hsdp::FusedAdamW>(p, AdamWOptions(0.05)); }}};
}

class ScaledTraining : public ::testing::TestWithParam<std::tuple<int, Kind>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  static OptimizerPtr make(const Parameters& parameters) { return std::get<1>(GetParam()).make(parameters); }
};

TEST_P(ScaledTraining, GivesTheBitsOfUnscaledTraining) {
  run_ranks(ranks(), [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    for (bool unscale : {false, true}) {
      TrainingRun bare(Way::two_lines, context), scaled(Way::two_lines, context);
      for (auto* run : {&bare, &scaled}) run->advance_to(Stage::materialized);
      auto theirs = make(bare.net().parameters()), ours = make(scaled.net().parameters());
      GradScaler scaler({.scale = 1024, .growth_interval = 3});
      for (int64_t step = 0; step < 7; ++step) {
        for (auto* optimizer : {theirs.get(), ours.get()}) optimizer->zero_grad();
        bare.backward(step);
        scaled.backward(step, scaler.scale(torch::ones({})).item<double>());
        if (unscale) scaler.unscale_(*ours);
        theirs->step();
        EXPECT_TRUE(scaler.step(*ours));
        scaler.update();
        auto values = bare.net().parameters(), parameters = scaled.net().parameters();
        for (size_t i = 0; i < values.size(); ++i) {
          EXPECT_TRUE(torch::equal(part_of(parameters[i]), part_of(values[i]))) << i << " at " << step;
          EXPECT_TRUE(torch::equal(part_of(parameters[i].grad()), part_of(values[i].grad()))) << i << " at " << step;
        }
      }
      EXPECT_EQ(scaler.get_scale(), 4096);
    }
  });
}

TEST_P(ScaledTraining, AnInfinityOnOneRankIsSkippedByAll) {
  run_ranks(ranks(), [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    TrainingRun run(Way::two_lines, context);
    run.advance_to(Stage::materialized);
    auto optimizer = make(run.net().parameters());
    GradScaler scaler({.scale = 1024});
    const int last = context.world_size() - 1;
    // Rank 0 holds the one element of gain, the last rank the last rows of a.weight.
    const auto spoil = [&](int step) {
      if (step == 1 && context.rank() == 0) part_of(run.net().gain.grad()).fill_(kInfinity);
      if (step == 2 && context.rank() == last) part_of(run.net().a->weight.grad())[-1][0].fill_(kNaN);
      if (step == 4 && context.rank() == last) part_of(run.net().a->bias.grad())[-1].fill_(-kInfinity);
    };
    double scale = 1024;
    int64_t taken = 0;
    for (int step = 0; step < 6; ++step) {
      optimizer->zero_grad();
      run.backward(step, scaler.scale(torch::ones({})).item<double>());
      spoil(step);
      Parameters before;
      for (const auto& parameter : run.net().parameters()) before.push_back(part_of(parameter).clone());
      const auto states = optimizer->state().size();
      dtensor::reset_collective_counts();
      if (step == 4) scaler.unscale_(*optimizer);
      const bool stepped = scaler.step(*optimizer);
      EXPECT_EQ(dtensor::collective_counts().all_reduces, context.world_size() > 1 ? 1 : 0);
      const bool good = step == 0 || step == 3 || step == 5;
      EXPECT_EQ(stepped, good) << step;
      taken += good ? 1 : 0;
      auto parameters = run.net().parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (before[i].numel() == 0) continue;
        EXPECT_EQ(torch::equal(part_of(parameters[i]), before[i]), !good) << i << " at step " << step;
      }
      if (!good) {
        EXPECT_EQ(optimizer->state().size(), states);
        scale /= 2;
      }
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), scale) << step;
    }
    for (const auto& [key, state] : optimizer->state()) {
      const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(state.get());
      EXPECT_EQ(adamw != nullptr ? adamw->step() : taken, taken);
    }
  });
}

// Skipped before there is state: momenta still start from the first gradient that is used.
TEST_P(ScaledTraining, AFirstStepThatIsSkippedLeavesNoState) {
  run_ranks(ranks(), [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    TrainingRun bare(Way::two_lines, context), scaled(Way::two_lines, context);
    for (auto* run : {&bare, &scaled}) run->advance_to(Stage::materialized);
    auto theirs = make(bare.net().parameters()), ours = make(scaled.net().parameters());
    GradScaler scaler({.scale = 16});
    for (int64_t step = 0; step < 3; ++step) {
      for (auto* optimizer : {theirs.get(), ours.get()}) optimizer->zero_grad();
      scaled.backward(step, scaler.scale(torch::ones({})).item<double>());
      if (step == 0) {
        if (context.rank() == 0) part_of(scaled.net().gain.grad()).fill_(kInfinity);
        EXPECT_FALSE(scaler.step(*ours));
        EXPECT_TRUE(ours->state().empty());
      } else {
        bare.backward(step);
        theirs->step();
        EXPECT_TRUE(scaler.step(*ours));
      }
      scaler.update();
    }
    auto values = bare.net().parameters(), parameters = scaled.net().parameters();
    for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(torch::equal(part_of(parameters[i]), part_of(values[i])));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ScaledTraining,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::ValuesIn(kinds())),
                         [](const auto& which) {
                           return std::get<1>(which.param).name + std::to_string(std::get<0>(which.param));
                         });

TEST(ScaledRanks, UnscaledGradientsAreClippedInAnOpenScope) {
  run_ranks(3, [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    TrainingRun bare(Way::two_lines, context), scaled(Way::open_scope, context);
    for (auto* run : {&bare, &scaled}) run->advance_to(Stage::materialized);
    hsdp::FusedAdamW theirs(bare.net().parameters(), AdamWOptions(0.05));
    hsdp::FusedAdamW ours(scaled.net().parameters(), AdamWOptions(0.05));
    GradScaler scaler({.scale = 256});
    for (int64_t step = 0; step < 3; ++step) {
      theirs.zero_grad();
      ours.zero_grad();
      bare.backward(step);
      scaled.backward(step, scaler.scale(torch::ones({})).item<double>());
      const double norm = hsdp::clip_grad_norm_(bare.net().parameters(), 0.01);
      theirs.step();
      scaled.with_parameters([&](const Parameters& parameters) {
        scaler.unscale_(ours);
        EXPECT_EQ(hsdp::clip_grad_norm_(parameters, 0.01), norm);
        EXPECT_TRUE(scaler.step(ours));
      });
      scaler.update();
    }
    auto values = bare.net().parameters(), parameters = scaled.net().parameters();
    for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(torch::equal(part_of(parameters[i]), part_of(values[i])));
  });
}

TEST(ScaledRanks, APlainLossIsScaledBeforeBackward) {
  run_ranks(2, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return torch::nn::Linear(4, 3); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    model.materialize(context.environment().device());
    torch::optim::SGD optimizer(model->parameters(), SGDOptions(0.5));
    GradScaler scaler({.scale = 32});
    scaler.scale(model->forward(torch::ones({2, 4})).sum()).backward();
    EXPECT_TRUE(torch::equal(hsdp::unsharded(net->bias.grad()), torch::full({3}, 64.0)));
    scaler.unscale_(optimizer);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(net->bias.grad()), torch::full({3}, 2.0)));
  });
}

/// Parameters over a mesh of 2 x 2 with gradients of ones, without a module.
struct OnMesh {
  explicit OnMesh(const std::shared_ptr<const dtensor::DeviceMesh>& mesh) {
    for (int64_t rows : {5, 1}) {
      const auto spread = [&](const torch::Tensor& whole) {
        return DTensor::distribute(whole, mesh, {dtensor::Replicate(), dtensor::Shard(0)});
      };
      parameters.push_back(spread(torch::ones({rows, 2})).as_parameter(true).tensor());
      parameters.back().mutable_grad() = spread(torch::ones({rows, 2})).tensor();
    }
  }
  Parameters parameters;
};

TEST(ScaledRanks, AreAgreedOverBothAxesOfAMesh) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.environment().make_mesh({2, 2}, {"replicate", "shard"});
    for (int bad = 0; bad < 4; ++bad) {
      for (bool fused : {false, true}) {
        OnMesh on(mesh);
        OptimizerPtr optimizer;
        if (fused) optimizer = std::make_unique<hsdp::FusedSGD>(on.parameters, SGDOptions(0.5));
        if (!fused) optimizer = std::make_unique<torch::optim::SGD>(on.parameters, SGDOptions(0.5));
        GradScaler scaler({.scale = 4});
        scaler.scale(torch::ones({}));
        if (context.rank() == bad) part_of(on.parameters[0].grad())[0][0].fill_(kInfinity);
        dtensor::reset_collective_counts();
        EXPECT_FALSE(scaler.step(*optimizer));
        EXPECT_EQ(dtensor::collective_counts().all_reduces, 2);
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 2);
        EXPECT_TRUE((part_of(on.parameters[0]) == 1).all().item<bool>());
      }
    }
    OnMesh on(mesh);
    hsdp::FusedSGD optimizer(on.parameters, SGDOptions(0.5));
    GradScaler scaler({.scale = 4});
    scaler.scale(torch::ones({}));
    EXPECT_TRUE(scaler.step(optimizer));
    for (const auto& parameter : on.parameters) {
      EXPECT_TRUE((part_of(parameter) == 1 - 0.5 / 4).all().item<bool>());
    }
  });
}

// Replicas of shards: the numbers of the plain module, but for a step that an infinity on one of four ranks spoils.
TEST(ScaledRanks, TrainOverReplicasAndShards) {
  run_ranks(4, [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    torch::manual_seed(7);
    OddNet plain;
    torch::manual_seed(7);
    auto net = hsdp::meta_init([] { return OddNet(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().make_mesh({2, 2}, {"replicate", "shard"}),
                                         .units = hsdp::each<torch::nn::Linear>()});
    model.materialize(context.environment().device());
    torch::optim::AdamW theirs(plain->parameters(), AdamWOptions(0.05));
    hsdp::FusedAdamW ours(net->parameters(), AdamWOptions(0.05));
    GradScaler scaler({.scale = 64});
    for (int64_t step = 0; step < 4; ++step) {
      theirs.zero_grad();
      ours.zero_grad();
      const Inputs all(step, 0, 12), mine(step, 3 * context.rank(), 3 * context.rank() + 3);
      scaler.scale(torch::mse_loss(model->forward(mine.x), mine.y)).backward();
      if (step == 1 && context.rank() == 2) part_of(net->c->weight.grad())[0].fill_(kInfinity);
      EXPECT_EQ(scaler.step(ours), step != 1);
      scaler.update();
      if (step == 1) continue;
      torch::mse_loss(plain->forward(all.x), all.y).backward();
      theirs.step();
    }
    EXPECT_EQ(scaler.get_scale(), 32);
    auto values = plain->parameters(), parameters = net->parameters();
    for (size_t i = 0; i < values.size(); ++i) expect_close(parameters[i], values[i], 1e-12, "parameter");
  });
}

TEST(ScaledRanks, ARankWithoutGradientsTakesPart) {
  run_ranks(3, [](RankContext& context) {
    const auto mesh = context.environment().mesh();
    for (bool any : {true, false}) {
      auto parameter = DTensor::distribute(torch::ones({3}), mesh, {dtensor::Shard(0)}).as_parameter(true).tensor();
      if (any && context.rank() == 1) {
        parameter.mutable_grad() = DTensor::distribute(torch::full({3}, kInfinity), mesh, {dtensor::Shard(0)}).tensor();
      }
      hsdp::FusedSGD optimizer({parameter}, SGDOptions(0.5));
      GradScaler scaler({.scale = 4});
      scaler.scale(torch::ones({}));
      if (any) {
        EXPECT_FALSE(scaler.step(optimizer));
      } else {
        expect_error<StateError>([&] { scaler.step(optimizer); },
                                 "[GradScaler] none of the optimizer's parameters has a gradient");
      }
    }
  });
}

}  // namespace grad_scaler_test

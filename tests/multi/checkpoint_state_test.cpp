// What a checkpoint keeps beside parameters and their optimizers: schedules, the gradient scaler, values of the
// program, progress, random generators, each rank's own buffers; and what a load does where the two sides differ.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/checkpoint_run.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/scratch_folder.h"

namespace checkpoint_state_test {

using namespace testing_support;
using torch::optim::ReduceLROnPlateauScheduler;
using torch::optim::StepLR;

std::vector<double> lrs_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> lrs;
  for (auto& group : optimizer.param_groups()) lrs.push_back(group.options().get_lr());
  return lrs;
}

// ---- schedules, scaler, values ----

TEST(CheckpointSchedules, GoOnWhereTheyWere) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    struct Scheduled : CheckpointRun {
      explicit Scheduled(RankContext& context) : CheckpointRun(context) {}
      hsdp::TrainingState state() {
        auto result = CheckpointRun::state();
        result.lr_schedulers = {&steps, &plateau};
        return result;
      }
      // A metric that improves twice and then no more.
      void step_schedules(int64_t count) {
        for (int64_t i = 0; i < count; ++i, ++progress.step) {
          steps.step();
          plateau.step(1.0f / static_cast<float>(1 + std::min<int64_t>(progress.step, 2)));
          lrs.push_back(lrs_of(*optimizer));
        }
      }
      StepLR steps{*optimizer, 3, 0.5};
      ReduceLROnPlateauScheduler plateau{*optimizer, ReduceLROnPlateauScheduler::min, 0.1f, 2,
                                         1e-4,       ReduceLROnPlateauScheduler::rel, 1};
      std::vector<std::vector<double>> lrs;
    };
    Scheduled whole(context);
    whole.model.materialize(at::kCPU);
    for (const int64_t before : {4, 6}) {
      whole.step_schedules(before);
      hsdp::save(whole.state(), path);
      whole.lrs.clear();
      auto resumed = std::make_unique<Scheduled>(context);
      if (before == 6) resumed->step_schedules(5);
      resumed->lrs.clear();
      auto state = resumed->state();
      hsdp::load(state, path);
      resumed->progress = state.progress;
      whole.step_schedules(12);
      resumed->step_schedules(12);
      EXPECT_EQ(resumed->lrs, whole.lrs);
      EXPECT_LT(whole.lrs.back()[0], whole.lrs.front()[0] / 15) << "both schedules had something to do";
    }
  });
}

TEST(CheckpointSchedules, AreThoseOfTheProgram) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    StepLR steps(*run.optimizer, 3, 0.5);
    ReduceLROnPlateauScheduler plateau(*run.optimizer);
    auto state = run.state();
    state.lr_schedulers = {&steps};
    hsdp::save(state, path);
    const auto refused = [&](const std::vector<hsdp::LrScheduler>& schedulers, const std::string& message) {
      const auto before = run.values();
      auto target = run.state();
      target.lr_schedulers = schedulers;
      expect_error<dtensor::ValueError>([&] { hsdp::load(target, path); }, "[load] " + message);
      expect_same_values(run.values(), before);
    };
    run.step();
    refused({}, "the checkpoint has 1 learning-rate schedules, expected 0 as in the program");
    refused({&steps, &plateau}, "the checkpoint has 1 learning-rate schedules, expected 2 as in the program");
    refused({&plateau}, "learning-rate schedule 0 comes with step_count, expected best, cooldown_counter, ");
    refused({static_cast<StepLR*>(nullptr)}, "learning-rate schedule 0 is null");
  });
}

TEST(CheckpointScaler, GoesOnWhereItWas) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    hsdp::GradScaler scaler({.scale = 1024, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 4});
    const auto steps = [](CheckpointRun& on, hsdp::GradScaler& with, int64_t count, double infinite_at = -1) {
      for (int64_t i = 0; i < count; ++i) {
        on.model->zero_grad();
        auto loss = on.model->forward(torch::arange(12) % 11).pow(2).mean();
        if (static_cast<double>(i) == infinite_at) loss = loss * std::numeric_limits<double>::infinity();
        with.scale(loss).backward();
        with.step(*on.optimizer);
        with.update();
      }
    };
    steps(run, scaler, 4, 0);
    auto state = run.state();
    state.grad_scaler = &scaler;
    hsdp::save(state, path);
    CheckpointRun resumed(context);
    hsdp::GradScaler fresh;
    auto target = resumed.state();
    target.grad_scaler = &fresh;
    hsdp::load(target, path);
    EXPECT_EQ(fresh.state().scale, 256);
    EXPECT_EQ(fresh.state().growth_factor, 3);
    EXPECT_EQ(fresh.state().backoff_factor, 0.25);
    EXPECT_EQ(fresh.state().growth_interval, 4);
    EXPECT_EQ(fresh.state().growth_tracker, 3);
    steps(run, scaler, 1);
    steps(resumed, fresh, 1);
    EXPECT_EQ(fresh.get_scale(), 768);
    EXPECT_EQ(scaler.get_scale(), 768);
    expect_same_values(resumed.values(), run.values());
    // Both sides or none.
    auto without = resumed.state();
    expect_error<dtensor::ValueError>([&] { hsdp::load(without, path); },
                                      "[load] the checkpoint has a gradient scaler and the program none");
    hsdp::save(without, path);
    expect_error<dtensor::ValueError>([&] { hsdp::load(target, path); },
                                      "[load] the checkpoint has no gradient scaler and the program one");
  });
}

TEST(CheckpointValues, OfTheProgramComeBackBitForBit) {
  run_ranks(2, [](RankContext& context) {
    using Double = std::numeric_limits<double>;
    using Long = std::numeric_limits<int64_t>;
    const auto path = context.directory() + "/checkpoint";
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    auto state = run.state();
    state.progress = {.step = 12, .tokens = Long::max(), .data_position = 34567};
    state.values = {{"yes", true},
                    {"no", false},
                    {"most", Long::max()},
                    {"least", Long::min()},
                    {"third", 1.0 / 3},
                    {"minus zero", -0.0},
                    {"tiny", Double::denorm_min()},
                    {"infinite", -Double::infinity()},
                    {"one", 1.0},
                    {"empty", std::string()},
                    {"text \"\\/\n\u00e4", std::string("a\0b\n\"\\\u00e4\U0001F600", 13)},
                    {"longs", std::vector<int64_t>{Long::min(), 0, -1}},
                    {"no longs", std::vector<int64_t>{}},
                    {"doubles", std::vector<double>{0.1, Double::infinity(), -0.0}},
                    {"no doubles", std::vector<double>{}}};
    hsdp::save(state, path);
    CheckpointRun other(context);
    auto target = other.state();
    target.values["was there"] = true;
    hsdp::load(target, path);
    EXPECT_EQ(target.progress, state.progress);
    EXPECT_TRUE(target.values == state.values);
    EXPECT_TRUE(std::signbit(std::get<double>(target.values["minus zero"])));
    EXPECT_TRUE(std::signbit(std::get<std::vector<double>>(target.values["doubles"])[2]));
    // Not a number is not equal to itself.
    state.values = {{"nan", Double::quiet_NaN()}};
    hsdp::save(state, path);
    hsdp::load(target, path);
    ASSERT_EQ(target.values.size(), 1u);
    EXPECT_TRUE(std::isnan(std::get<double>(target.values["nan"])));
  });
}

// ---- random numbers ----

torch::Tensor of_all_ranks(RankContext& context, const torch::Tensor& own) {
  auto all = torch::empty({context.world_size() * own.numel()}, own.options());
  context.environment().communicator()->all_gather(all, own.contiguous().view({-1}), {"all_gather", "test"})->wait();
  return all.view({context.world_size(), own.numel()});
}

/// What dropout makes of ones, and numbers of the generator that all ranks share.
torch::Tensor draw_masks() { return torch::dropout(torch::ones({64}), 0.5, /*train=*/true); }
torch::Tensor draw_common(CheckpointRun& run) {
  torch::NoGradGuard no_grad;
  run.net->out->weight.normal_();
  return hsdp::unsharded(run.net->out->weight).clone();
}

std::string values_path(const ScratchFolder& folder, int rank) { return folder / ("rank-" + std::to_string(rank)); }

class CheckpointGenerators : public ::testing::Test {
 protected:
  /// Saves in processes of their own, which go on drawing.
  void save_on(int ranks) {
    run_ranks(ranks, [&](RankContext& context) {
      CheckpointRun run(context);
      run.model.materialize(at::kCPU);
      draw_masks();
      run.save(folder / "checkpoint");
      std::map<std::string, torch::Tensor> drawn{{"masks", draw_masks()}, {"common", draw_common(run)}};
      drawn["masks again"] = draw_masks();
      write_values(drawn, values_path(folder, context.rank()));
    });
  }
  ScratchFolder folder;
};

TEST_F(CheckpointGenerators, GoOnWhereTheyWereOnEachRank) {
  save_on(2);
  run_ranks(2, [&](RankContext& context) {
    CheckpointRun run(context, {.seed = 19});
    draw_masks();
    EXPECT_TRUE(run.load(folder / "checkpoint").same_ranks);
    auto expected = read_values(values_path(folder, context.rank()));
    const auto masks = draw_masks();
    EXPECT_TRUE(torch::equal(masks, expected["masks"]));
    EXPECT_TRUE(torch::equal(draw_common(run), expected["common"]));
    EXPECT_TRUE(torch::equal(draw_masks(), expected["masks again"]));
    const auto all = of_all_ranks(context, masks);
    EXPECT_FALSE(torch::equal(all[0], all[1]));
    // Also in a program that has drawn in the meantime.
    run.load(folder / "checkpoint");
    EXPECT_TRUE(torch::equal(draw_masks(), expected["masks"]));
  });
}

TEST_F(CheckpointGenerators, PartAtAnotherNumberOfRanks) {
  save_on(2);
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](RankContext& context) {
      CheckpointRun run(context);
      torch::Tensor masks;
      for (int repetition = 0; repetition < 2; ++repetition) {
        EXPECT_FALSE(run.load(folder / "checkpoint").same_ranks);
        const auto drawn = draw_masks();
        if (repetition > 0) {
          EXPECT_TRUE(torch::equal(drawn, masks)) << "another load draws other numbers";
        }
        masks = drawn;
      }
      // Rank 0 goes on. What all ranks draw alike does, too; a rank alone has one generator for all.
      auto expected = read_values(values_path(folder, 0));
      if (context.rank() == 0) {
        EXPECT_TRUE(torch::equal(masks, expected["masks"]));
      }
      if (ranks > 1) {
        EXPECT_TRUE(torch::equal(draw_common(run), expected["common"]));
      }
      const auto all = of_all_ranks(context, masks);
      for (int64_t a = 0; a < ranks; ++a) {
        for (int64_t b = 0; b < a; ++b) EXPECT_FALSE(torch::equal(all[a], all[b])) << a << " " << b;
      }
      // None repeats what rank 1 would have drawn.
      const auto of_rank_1 = read_values(values_path(folder, 1))["masks"];
      EXPECT_FALSE(torch::equal(masks, of_rank_1));
    });
  }
}

// ---- buffers ----

/// Statistics that differ from rank to rank, as those of BatchNorm over different data do.
void fill_buffers(CheckpointRun& run, double value) {
  torch::NoGradGuard no_grad;
  for (auto& entry : run.net->named_buffers()) entry.value().fill_(value);
}

void expect_buffers(CheckpointRun& run, double value) {
  for (auto& entry : run.net->named_buffers()) {
    EXPECT_TRUE(torch::equal(entry.value(), torch::full_like(entry.value(), value))) << entry.key() << entry.value();
  }
}

TEST(CheckpointBuffers, AreEachRanksOwnAtTheSameNumberOfRanks) {
  const ScratchFolder folder;
  run_ranks(3, [&](RankContext& context) {
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    // Those of ranks 0 and 2 are equal.
    fill_buffers(run, context.rank() == 1 ? 7 : 5);
    run.save(folder / "checkpoint");
    expect_buffers(run, context.rank() == 1 ? 7 : 5);
    for (const bool materialized : {false, true}) {
      CheckpointRun other(context);
      if (materialized) other.model.materialize(at::kCPU);
      EXPECT_TRUE(other.load(folder / "checkpoint").same_ranks);
      expect_buffers(other, context.rank() == 1 ? 7 : 5);
    }
    // On another mesh, too.
    CheckpointRun replicated(context, {.mesh = {3, 1}});
    replicated.load(folder / "checkpoint");
    expect_buffers(replicated, context.rank() == 1 ? 7 : 5);
  });
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](RankContext& context) {
      CheckpointRun run(context);
      EXPECT_FALSE(run.load(folder / "checkpoint").same_ranks);
      expect_buffers(run, 5);
    });
  }
}

TEST(CheckpointBuffers, ThatBatchNormKeepsGoOn) {
  const ScratchFolder folder;
  const auto train = [](CheckpointRun& run, RankContext& context, int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      const auto rows = (torch::arange(12) * (i + 2) + 3 * context.rank()) % 11;
      run.model->zero_grad();
      run.model->forward(rows).pow(2).mean().backward();
      run.optimizer->step();
    }
  };
  run_ranks(2, [&](RankContext& context) {
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    train(run, context, 2);
    const auto means = of_all_ranks(context, run.net->body->norm->running_mean);
    EXPECT_FALSE(torch::equal(means[0], means[1]));
    run.save(folder / "checkpoint");
    train(run, context, 2);
    CheckpointRun resumed(context);
    resumed.load(folder / "checkpoint");
    train(resumed, context, 2);
    expect_same_values(resumed.values(), run.values());
  });
}

TEST(CheckpointBuffers, ThatNobodyRegisteredAreMadeAgain) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    torch::manual_seed(7);
    const CheckpointNet plain;
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    run.train(1);
    run.save(path);
    CheckpointRun other(context);
    other.load(path);
    EXPECT_TRUE(torch::equal(other.net->noise, plain->noise));
    EXPECT_TRUE(other.model.core()->tensors_without_values().empty());
    // One that has values keeps them.
    other.net->noise.fill_(3);
    other.load(path);
    EXPECT_TRUE(torch::equal(other.net->noise, torch::full({5}, 3.0f)));
  });
}

// ---- a model alone ----

TEST(CheckpointOfAModel, IsPartOfEachCheckpoint) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    StepLR steps(*run.optimizer, 3, 0.5);
    hsdp::GradScaler scaler;
    auto state = run.state();
    state.lr_schedulers = {&steps};
    state.grad_scaler = &scaler;
    state.values["epoch"] = int64_t{3};
    run.train(2);
    state.progress = run.progress;
    hsdp::save(state, path);
    CheckpointRun other(context, {.seed = 8});
    hsdp::TrainingState model;
    model.model = other.model.core();
    const auto report = hsdp::load(model, path);
    EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
    EXPECT_EQ(model.progress, run.progress);
    EXPECT_TRUE(model.values == state.values);
    auto expected = run.values();
    std::erase_if(expected, [](const auto& entry) { return entry.first.starts_with("state."); });
    expect_same_values(other.values(), expected);
  });
}

TEST(CheckpointOfAModel, CanBeSavedAndLoadedAlone) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    hsdp::TrainingState model;
    model.model = run.model.core();
    hsdp::save(model, path);
    const auto values = run.values();
    CheckpointRun other(context, {.seed = 8});
    auto whole = other.state();
    expect_error<dtensor::ValueError>([&] { hsdp::load(whole, path); },
                                      "'s optimizer state does not fit: missing \"state.");
    model.model = other.model.core();
    hsdp::load(model, path);
    expect_same_values(other.values(), values);
  });
}

// What the checkpoint has besides is not lost in silence.
TEST(CheckpointOfAModel, WithASchedulerOrAScalerIsMore) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    CheckpointRun run(context);
    run.model.materialize(at::kCPU);
    hsdp::GradScaler scaler({.scale = 8});
    hsdp::TrainingState state;
    state.model = run.model.core();
    state.grad_scaler = &scaler;
    hsdp::save(state, path);
    hsdp::GradScaler fresh;
    state.grad_scaler = &fresh;
    hsdp::load(state, path);
    EXPECT_EQ(fresh.get_scale(), 8);
  });
}

}  // namespace checkpoint_state_test

// save_async: what is saved is what was there at the time of the call, whatever training does next; and the life of a
// PendingSave.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/checkpointed_training.h"
#include "tests/testing/damaged_checkpoint.h"
#include "tests/testing/disk_calls.h"
#include "tests/testing/file_size_limit.h"
#include "tests/testing/multi_process.h"

namespace {

namespace fs = std::filesystem;
using namespace testing_support;

constexpr uint64_t kSeed = 7, kOtherSeed = 9;

/// Below dispatch, so that no operator copies first.
void overwrite(const torch::Tensor& tensor) {
  torch::NoGradGuard no_grad;
  const auto local = dtensor::DTensor::is_dtensor(tensor) ? dtensor::DTensor(tensor).to_local() : tensor;
  local.fill_(99);
}

struct Change {
  const char* name;
  std::function<void(CheckpointedTraining&)> make;
};
void PrintTo(const Change& change, std::ostream* out) { *out << change.name; }

class SavedInTheBackground : public ::testing::TestWithParam<Change> {};

TEST_P(SavedInTheBackground, IsWhatWasThereAtTheCall) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/step-2";
    CheckpointedTraining training(context, kSeed, 2), twin(context, kSeed, 2);
    const auto expected = twin.snapshot();
    HeldDisk held;
    auto pending = hsdp::save_async(training.state, path);
    GetParam().make(training);
    EXPECT_FALSE(pending.poll());
    held.release();
    pending.wait();
    CheckpointedTraining fresh(context, kOtherSeed);
    hsdp::load(fresh.state, path);
    expect_same_snapshots(fresh.snapshot(), expected);
  });
}

const Change kChanges[] = {
    {"Nothing", [](auto&) {}},
    {"ParametersAreWritten",
     [](auto& training) {
       for (auto& parameter : training.run.net->parameters()) overwrite(parameter);
     }},
    {"BuffersAreWritten",
     [](auto& training) {
       for (auto& buffer : training.run.net->buffers()) overwrite(buffer);
     }},
    {"OptimizerStateIsWritten",
     [](auto& training) {
       for (auto& entry : training.run.optimizer->state()) {
         auto& state = static_cast<torch::optim::AdamWParamState&>(*entry.second);
         overwrite(state.exp_avg());
         overwrite(state.exp_avg_sq());
         state.step(77);
       }
     }},
    {"TrainingGoesOn",
     [](auto& training) {
       for (int i = 0; i < 3; ++i) training.step();
     }},
    {"ScalarsChange",
     [](auto& training) {
       training.state.values["seed"] = 77.5;
       training.state.progress = {77, 78, 79};
       training.scaler.load_state({.scale = 77});
       for (auto& group : training.run.optimizer->param_groups()) group.options().set_lr(77);
     }},
    {"GeneratorsDraw", [](auto&) { torch::rand({100}); }},
};
INSTANTIATE_TEST_SUITE_P(Changes, SavedInTheBackground, ::testing::ValuesIn(kChanges),
                         [](const auto& which) { return std::string(which.param.name); });

// ---- the life of a PendingSave ----

TEST(PendingSave, IsPendingUntilAllRanksHaveWritten) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run/step-2";
    CheckpointedTraining training(context, kSeed, 2);
    hsdp::PendingSave none;
    EXPECT_FALSE(none.pending());
    EXPECT_TRUE(none.poll());
    none.wait();
    for (const int last : {0, 1}) {
      HeldDisk held;
      auto pending = hsdp::save_async(training.state, path);
      EXPECT_TRUE(pending.pending());
      EXPECT_FALSE(pending.poll());
      if (context.rank() != last) held.release();
      for (int i = 0; i < 3; ++i) EXPECT_FALSE(pending.poll());
      EXPECT_TRUE(pending.pending());
      EXPECT_FALSE(fs::exists(path));
      context.environment().barrier("looked");
      held.release();
      while (!pending.poll()) EXPECT_TRUE(pending.pending());
      EXPECT_FALSE(pending.pending());
      EXPECT_TRUE(pending.poll());
      pending.wait();
      EXPECT_TRUE(fs::exists(path + "/manifest.json"));
      context.environment().barrier("seen");
      on_rank_0(context, [&] { fs::remove_all(path); });
    }
  });
}

TEST(PendingSave, OfTwoPathsAtOnce) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/run";
    CheckpointedTraining training(context, kSeed, 2), twin(context, kSeed, 2);
    HeldDisk held;
    auto first = hsdp::save_async(training.state, folder + "/first");
    training.step();
    auto second = hsdp::save_async(training.state, folder + "/second");
    training.step();
    EXPECT_FALSE(first.poll());
    EXPECT_FALSE(second.poll());
    held.release();
    second.wait();
    EXPECT_TRUE(fs::exists(folder + "/second/manifest.json"));
    EXPECT_FALSE(fs::exists(folder + "/first"));
    context.environment().barrier("looked");
    first.wait();
    for (const auto* name : {"/first", "/second"}) {
      CheckpointedTraining fresh(context, kOtherSeed);
      hsdp::load(fresh.state, folder + name);
      expect_same_values(fresh.run.values(), twin.run.values());
      twin.step();
    }
  });
}

TEST(PendingSave, MovesAround) {
  on_two_ranks([](RankContext& context) {
    const auto folder = context.directory() + "/run";
    CheckpointedTraining training(context, kSeed, 2);
    auto first = hsdp::save_async(training.state, folder + "/first");
    hsdp::PendingSave taken(std::move(first));
    EXPECT_FALSE(first.pending());  // NOLINT(bugprone-use-after-move): that it is empty is promised
    EXPECT_TRUE(first.poll());
    first.wait();
    EXPECT_TRUE(taken.pending());
    EXPECT_FALSE(fs::exists(folder + "/first"));
    context.environment().barrier("looked");
    first = std::move(taken);
    EXPECT_FALSE(taken.pending());  // NOLINT(bugprone-use-after-move)
    first.wait();
    EXPECT_TRUE(fs::exists(folder + "/first/manifest.json"));
    // Another takes its place, and it is thrown away.
    first = hsdp::save_async(training.state, folder + "/second");
    first = hsdp::save_async(training.state, folder + "/third");
    first.wait();
    context.environment().barrier("saved");
    EXPECT_FALSE(fs::exists(folder + "/second"));
    EXPECT_TRUE(fs::exists(folder + "/third/manifest.json"));
  });
}

TEST(PendingSave, ThrownAway) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run/step-2";
    CheckpointedTraining first(context, kSeed, 2), second(context, kSeed, 3);
    hsdp::save(first.state, path);
    hsdp::save_async(second.state, path);
    {
      auto pending = hsdp::save_async(second.state, path);
      pending.poll();
    }
    // The last that a rank writes of it, while another already saves again, is not part of the next. That has no
    // optimizer, and so none of its files.
    auto without = second.state;
    without.optimizers.clear();
    without.lr_schedulers.clear();
    {
      HeldDisk held;
      std::thread later([&] {
        if (context.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        held.release();
      });
      hsdp::save_async(second.state, path);
      hsdp::save(without, path);
      later.join();
    }
    CheckpointedTraining fresh(context, kOtherSeed);
    fresh.state.optimizers.clear();
    fresh.state.lr_schedulers.clear();
    hsdp::load(fresh.state, path);
    EXPECT_EQ(fresh.state.progress.step, 3);
    EXPECT_FALSE(fs::exists(path + ".writing"));
  });
}

TEST(PendingSave, ThatFailsIsNotPending) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run/step-2";
    CheckpointedTraining training(context, kSeed, 2);
    for (const int full : {0, 1}) {
      hsdp::PendingSave pending;
      {
        std::optional<FileSizeLimit> limit;
        if (context.rank() == full) limit.emplace(100);
        pending = hsdp::save_async(training.state, path);
        value_error_of(context, [&] {
          while (!pending.poll()) {
          }
        });
      }
      EXPECT_FALSE(pending.pending());
      EXPECT_TRUE(pending.poll());
      pending.wait();
      EXPECT_FALSE(fs::exists(path));
      context.environment().barrier("looked");
      hsdp::save(training.state, path);
      on_rank_0(context, [&] { fs::remove_all(path); });
    }
  });
}

}  // namespace

#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "hsdp/agreement.h"
#include "hsdp/checkpoint/checkpointed_tensors.h"
#include "hsdp/checkpoint/training_state_json.h"
#include "hsdp/rank_generators.h"
#include "hsdp/registered_tensors.h"
#include "tests/testing/checkpoint_run.h"

/// A run with all that a checkpoint may hold, and all of it at one moment, to be compared.
namespace testing_support {

/// All that a load may change: values, scalars as a checkpoint's text of them, and generators.
struct Snapshot {
  std::map<std::string, torch::Tensor> values;
  std::string scalars;
  hsdp::GeneratorStates generators;
};

inline void expect_same_snapshots(const Snapshot& found, const Snapshot& expected) {
  expect_same_values(found.values, expected.values);
  EXPECT_EQ(found.scalars, expected.scalars);
  ASSERT_EQ(found.generators.size(), expected.generators.size());
  for (size_t i = 0; i < found.generators.size(); ++i) {
    EXPECT_EQ(found.generators[i].first, expected.generators[i].first);
    EXPECT_TRUE(torch::equal(found.generators[i].second, expected.generators[i].second)) << found.generators[i].first;
  }
}

/// A CheckpointRun with a schedule, a scaler, values of its own, and a buffer that is another one on each rank.
class CheckpointedTraining {
 public:
  /// On meta, with nothing done.
  CheckpointedTraining(RankContext& context, uint64_t seed)
      : run(context, {.seed = seed}), schedule(*run.optimizer, 2, 0.5), rank_(context.rank()) {
    state = run.state();
    state.lr_schedulers = {&schedule};
    state.grad_scaler = &scaler;
  }
  /// With that many steps done.
  CheckpointedTraining(RankContext& context, uint64_t seed, int64_t steps) : CheckpointedTraining(context, seed) {
    run.model.materialize(at::kCPU);
    run.net->table.fill_(10 * static_cast<int64_t>(seed) + rank_);
    scaler.load_state({.scale = 1024.0 * static_cast<double>(seed)});
    state.values = {{"seed", static_cast<int64_t>(seed)}, {"name", "of " + std::to_string(seed)}};
    for (int64_t i = 0; i < steps; ++i) step();
  }

  void step() {
    run.progress = state.progress;
    run.step();
    state.progress = run.progress;
    schedule.step();
  }
  /// A collective.
  Snapshot snapshot() {
    const auto names = hsdp::parameter_names(hsdp::registered_tensors(*state.model));
    return {run.values(), hsdp::to_json(hsdp::scalars_of(state, names)), hsdp::capture_generators()};
  }

  CheckpointRun run;
  torch::optim::StepLR schedule;
  hsdp::GradScaler scaler;
  hsdp::TrainingState state;

 private:
  int64_t rank_;
};

/// The text of the ValueError that `call` throws; it must be one line, and the same on all ranks. A collective.
template <class Call>
std::string value_error_of(RankContext& context, Call&& call) {
  std::string text = "nothing was thrown";
  try {
    call();
    ADD_FAILURE() << text;
  } catch (const dtensor::ValueError& error) {
    text = error.what();
  } catch (const std::exception& error) {
    text = std::string("threw ") + c10::demangle(typeid(error).name()) + ": " + error.what();
    ADD_FAILURE() << text;
  }
  EXPECT_EQ(text.find('\n'), std::string::npos) << "more than one line: " << text;
  EXPECT_EQ(text, hsdp::broadcast_text(*context.environment().mesh(), at::kCPU, "test", text, 0));
  return text;
}

inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "missing '" << part << "' in: " << text;
  }
}

/// Two ranks with time for a disk that is busy with other things.
inline void on_two_ranks(const std::function<void(RankContext&)>& body) {
  run_ranks(2, body, {.timeout = std::chrono::seconds(300), .communication_timeout = std::chrono::seconds(60)});
}

/// Runs `work` on rank 0, before any rank goes on. A collective.
template <class Work>
void on_rank_0(RankContext& context, Work&& work) {
  if (context.rank() == 0) work();
  context.environment().barrier("test");
}

}  // namespace testing_support

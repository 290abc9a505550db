#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/checkpoint/optimizer_state.h"
#include "hsdp/checkpoint/training_state.h"

namespace hsdp {

/// The scalars of a checkpoint: `training_state.json`, everything that is no tensor and the same on all ranks.
struct TrainingScalars {
  TrainingProgress progress;
  std::map<std::string, CheckpointValue> values;
  /// The numbers that each schedule keeps, by name: {"step_count": 7} and so on, in order.
  std::vector<std::map<std::string, double>> lr_schedulers;
  std::optional<GradScalerState> grad_scaler;
  /// `tensors` are undefined: their names are what counts.
  OptimizerStates optimizers;
};

/// Of a training state; tensors of the optimizers come along. Throws ValueError for a schedule that is null, and what
/// optimizer_states throws.
TrainingScalars scalars_of(const TrainingState& state, const ParameterNames& names);

/// Doubles read back bit for bit, those that are not finite included. Throws ValueError for texts that are no UTF-8.
std::string to_json(const TrainingScalars& scalars);
/// Throws ValueError naming `path` and the entry.
TrainingScalars parse_training_scalars(const char* where, const std::string& text, const std::string& path);

/// Gives schedules, scaler, progress and values what the checkpoint has; optimizers are restore_optimizer_states's.
/// `check` throws ValueError where the number or kind of schedules differs, or one side alone has a scaler; `restore`
/// follows it and does not throw.
void check_restorable(const char* where, const TrainingState& state, const TrainingScalars& scalars);
void restore(TrainingState& state, const TrainingScalars& scalars);

}  // namespace hsdp

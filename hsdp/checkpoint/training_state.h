#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "hsdp/grad_scaler.h"
#include "hsdp/sharded_module.h"

namespace hsdp {

/// A value of the program's own that a checkpoint keeps.
using CheckpointValue = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;

/// How far training is.
struct TrainingProgress {
  /// Optimizer steps done, and tokens seen in them.
  int64_t step = 0, tokens = 0;
  /// Where the data goes on, in the data loader's own unit.
  int64_t data_position = 0;

  bool operator==(const TrainingProgress&) const = default;
};

/// A learning-rate schedule of libtorch.
using LrScheduler = std::variant<torch::optim::LRScheduler*, torch::optim::ReduceLROnPlateauScheduler*>;

/// What a checkpoint saves and loads: pointers to what a program trains with, and its own values. A plain value; what
/// it points to must outlive it.
struct TrainingState {
  /// `model.core()` of what the outermost fully_shard returned.
  std::shared_ptr<ShardedModule> model;
  std::vector<torch::optim::Optimizer*> optimizers = {};
  std::vector<LrScheduler> lr_schedulers = {};
  GradScaler* grad_scaler = nullptr;
  TrainingProgress progress = {};
  std::map<std::string, CheckpointValue> values = {};
};

}  // namespace hsdp

#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include "apps/config.h"
#include "dtensor/communicator.h"

namespace apps {

/// What is logged of one training step.
struct StepMetrics {
  /// From 1.
  int64_t step = 0;
  /// Mean over the global batch, before the step.
  double loss = 0.0;
  /// Global norm of the gradients before they were clipped.
  double grad_norm = 0.0;
  double lr = 0.0;
  /// Over all ranks, since the step that was logged before.
  double tokens_per_second = 0.0;
  /// Of the rank that uses most, since the step that was logged before, or since training began: allocated on the
  /// device, or counted in tensors on the host with MetricsConfig::count_memory. Without that the largest resident size
  /// of the process since it started.
  int64_t peak_memory_bytes = 0;
  /// Trained on so far, over all ranks.
  int64_t tokens = 0;
  /// Since training began. A run that goes on from a checkpoint adds to those of its last kept line.
  double seconds = 0.0;
  /// That train together.
  int64_t ranks = 1;
  /// Of this rank in this step alone: forwards, backwards, clipping, gradient scaler and optimizer. Not those that
  /// logging and checkpoints need, nor barriers; none alone, since a group of one rank communicates nothing. In the
  /// first step of a process copies of the parameters are compared as well.
  dtensor::CollectiveCounts collectives = {};
};

/// One line of JSON without the newline. Numbers that are not finite become null, since JSON has no word for them.
std::string to_json(const StepMetrics& metrics);

/// One console line of fixed columns, without the newline.
std::string to_console(const StepMetrics& metrics, int64_t steps);

/// The folder of one run, kept by one rank: metrics.jsonl and the resolved config.yaml. A former run's files of these
/// names are replaced; a run that goes on from a checkpoint keeps the lines up to its step and adds to them. Every line
/// is flushed, so that a run that was killed can be read up to its last logged step.
class RunFolder {
 public:
  /// Makes the folder where needed and starts both files. `resumed_step` is 0 for a run that starts anew. Lines that
  /// are kept come first in the file; what follows the first that was cut short or is of a later step goes. Throws
  /// dtensor::ValueError when the folder is a file or cannot be made or written.
  explicit RunFolder(const Config& config, int64_t resumed_step = 0);

  /// True when a metrics.jsonl of a former run was there and nothing of it was kept.
  bool replaced() const { return replaced_; }
  /// How many of its lines were.
  int64_t kept_lines() const { return kept_lines_; }
  /// The last kept line's; 0 without one.
  double kept_seconds() const { return kept_seconds_; }
  /// Appends one line. Throws std::runtime_error when it cannot be written, for example on a full disk.
  void append(const StepMetrics& metrics);

 private:
  std::string path_;
  bool replaced_ = false;
  int64_t kept_lines_ = 0;
  double kept_seconds_ = 0.0;
  std::ofstream file_;
};

}  // namespace apps

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "apps/config.h"
#include "apps/data_loader.h"
#include "hsdp/checkpoint/checkpoint_folder.h"
#include "hsdp/checkpoint/training_state.h"

namespace apps {

/// Saves and resumes one training run as config.checkpoint says. What a run goes on from, by `load`:
///
///   auto    the newest complete checkpoint of the folder; the run begins anew where there is none
///   none    nothing: ValueError where the folder has checkpoints, which the run would replace
///   step-N  that one of the folder; later ones are moved to `after-step-N` in it, out of the way of `auto`
///   a path  a checkpoint elsewhere, or the newest of a folder of them; where checkpoint.folder has some, as auto
///
/// A run that begins anew takes its weights from `weights`, or has initial ones. All ranks make one each and call the
/// same functions, which are collectives. Rank 0 says on stdout what was loaded and saved. One thread.
class Checkpointing {
 public:
  /// Takes the folder, if there is one; `config` and `environment` must outlive this. Throws as hsdp::CheckpointFolder
  /// does.
  Checkpointing(const Config& config, const hsdp::Environment& environment, const DataLoader& data);

  /// Gives a model on meta its values, and after a resume optimizers, scaler and progress theirs. Learning rates and
  /// the like stay those of the configuration. Throws dtensor::ValueError for a checkpoint of other data (file, order
  /// or batches), and as hsdp::load; SetupFailure where that was found on some ranks.
  void start(hsdp::TrainingState& state);
  /// After each step: completes what was written in the background, and saves every config.checkpoint.every steps.
  /// Throws as hsdp::save, and what a save in the background threw.
  void step_done(const hsdp::TrainingState& state);
  /// Saves now unless that was done for this step.
  void save(const hsdp::TrainingState& state);
  /// Waits until all that was saved is on disk.
  void wait();

 private:
  struct ResumePoint {
    std::string path;
    bool in_folder;
  };
  std::optional<ResumePoint> resume_point() const;
  ResumePoint named(int64_t step) const;
  void check_data(const std::string& path) const;
  void set_later_aside(int64_t step) const;
  void say(const std::string& text) const;
  void say_saved(const std::optional<std::string>& path) const;

  const Config& config_;
  const hsdp::Environment& environment_;
  /// What the order of the data follows from, kept in every checkpoint.
  std::map<std::string, hsdp::CheckpointValue> values_;
  std::optional<hsdp::CheckpointFolder> folder_;
  std::optional<int64_t> saved_step_;
};

}  // namespace apps

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/checkpoint/checkpoint.h"
#include "hsdp/init.h"

namespace hsdp {

/// A checkpoint in a folder of them.
struct FoundCheckpoint {
  int64_t step = 0;
  std::string path;
};

/// The complete checkpoints `step-N` in a folder, by step; none where there is no such folder. No communication. Throws
/// ValueError for a path that is a file.
std::vector<FoundCheckpoint> find_checkpoints(const std::string& folder);

struct CheckpointFolderOptions {
  /// How many of the newest are kept; 0: all.
  int64_t keep_latest = 10;
  /// Steps divisible by this are kept besides; 0: none.
  int64_t keep_every = 0;
  /// Whether save() returns before the files are written.
  bool async = false;
};

/// The folder of one run's checkpoints: `step-N` each, the older ones removed as new ones are complete. While it lives
/// no other run can write there: rank 0 holds a lock on `.lock`, which the system releases even when the process is
/// killed. What a killed run left half-written is removed by the next save.
///
/// All functions but path() are collectives. One thread.
class CheckpointFolder {
 public:
  /// Makes the folder where needed. Throws, alike on all ranks, ValueError for a path that is a file or cannot be
  /// written, and for a folder that another run writes to, with that run's host and process.
  CheckpointFolder(Environment environment, std::string path, const CheckpointFolderOptions& options = {});
  /// Waits for this rank's part of a pending save.
  ~CheckpointFolder();
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  const std::string& path() const;
  /// Saves as `step-<progress.step>`, replacing one of the same step. When another save is pending it is finished
  /// first, and its error thrown. Retention counts complete checkpoints, and never removes the newest. Throws, besides
  /// what hsdp::save does, ValueError where the folder has a complete one of a later step.
  void save(const TrainingState& state);
  /// Between steps: completes a pending save when it is written. Throws its error. Nothing, without communication,
  /// where none is pending. Returns the path of a checkpoint that has become complete in this call.
  std::optional<std::string> poll();
  /// The same, waiting.
  std::optional<std::string> finish();
  /// The complete one with the highest step; the same on all ranks.
  std::optional<FoundCheckpoint> newest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hsdp

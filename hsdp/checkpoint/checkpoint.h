#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/checkpoint/training_state.h"

/// Checkpoints of a training run: a folder that all ranks write and that any number of ranks can read.
///
///   step-100/shard-00001-model-00001-of-00001.safetensors   rank 0's boxes of parameters and buffers, and so on
///   step-100/optimizer/shard-...safetensors                 of the optimizer's tensors
///   step-100/ranks/rank-00001.safetensors                   each rank's random generators and own buffers
///   step-100/training_state.json                            scalars
///   step-100/manifest.json                                  sizes and checksums of all files; written last
///
/// docs/checkpoints.md has the format in full. All functions are collectives over the model's mesh, and all ranks must
/// see the same file system.
namespace hsdp {

/// Saves `state` as the folder `path`, which appears complete, with everything on disk, or not at all; a complete
/// checkpoint that was there is replaced once the new one is. Each box of values is written by one rank that holds it.
/// Gradients are not part of it: save between a step and the next backward.
///
/// Throws, alike on all ranks, ValueError for a path that cannot be written, NotSupportedError for optimizers that are
/// not supported (LBFGS) and dtypes that safetensors lacks, StateError while tensors have no values. Then an earlier
/// checkpoint at `path` is still there.
void save(const TrainingState& state, const std::string& path);

class StagingMemory;

/// A checkpoint that is being written in the background. The tensors were copied, so that training goes on at once.
/// Lives on the thread that made it; destroying one that is not finished waits for this rank's writing and leaves the
/// checkpoint incomplete, which no collective could then help.
class PendingSave {
 public:
  PendingSave();
  ~PendingSave();
  PendingSave(PendingSave&&) noexcept;
  PendingSave& operator=(PendingSave&&) noexcept;

  /// False once it is complete, and for a default-constructed one.
  bool pending() const { return job_ != nullptr; }
  /// Completes the checkpoint if all ranks have written, and returns whether it is complete. A collective of one
  /// all-reduce. Throws what a rank's writing threw, on all ranks; nothing is pending then.
  bool poll();
  /// The same, waiting.
  void wait();

 private:
  friend PendingSave save_async(const TrainingState& state, const std::string& path,
                                const std::shared_ptr<StagingMemory>& memory);
  friend void save(const TrainingState& state, const std::string& path);
  struct Job;
  std::unique_ptr<Job> job_;
};

/// Host memory that the copies of one save in the background are made in, kept for those of the next: memory that a
/// process gets anew costs more time than the copying. Not for two saves at once.
std::shared_ptr<StagingMemory> make_staging_memory();

/// As save(), but returns when this rank's tensors have been copied to host memory. Nothing appears at `path` before
/// poll() or wait() has completed it. Without `memory` the copies are in memory of their own.
PendingSave save_async(const TrainingState& state, const std::string& path,
                       const std::shared_ptr<StagingMemory>& memory = nullptr);

struct LoadOptions {
  /// Refuses what only one side has. Without it, what the checkpoint lacks keeps its values, what the program lacks is
  /// passed over, and the report lists both.
  bool strict = true;
  /// Whether values of other dtypes are converted, and optimizer state of a parameter's dtype with it. Complex ones
  /// never become real.
  bool convert_dtypes = false;
  /// Whether optimizers take over the checkpoint's options, learning rates among them.
  bool optimizer_options = true;
};

struct LoadReport {
  /// Names that only the program has, and that only the checkpoint has; optimizer state as `state.<parameter>.<name>`.
  std::vector<std::string> missing, unexpected;
  /// By this rank from tensors' files.
  uint64_t bytes_read = 0;
  /// Whether the number of ranks was the same, so that random generators and each rank's own buffers go on where they
  /// were. At another number, generators part anew, and buffers are those of rank 0.
  bool same_ranks = true;
};

/// Gives `state` what the checkpoint at `path` holds, whatever ranks, mesh, placements and units wrote it. A model on
/// meta is given memory first; members that nobody registered and that have no values are replayed. Each rank reads
/// what it needs; of replicas one reads and sends it to the others. All that is read is compared with its checksum.
/// Optimizers, schedules and a scaler that `state` does not have are passed over if it has none of them; progress,
/// values and generators always are the checkpoint's. For weights alone: load(model, path).
///
/// Memory beyond the result: this rank's shards once more where the model has values already.
///
/// Throws, alike on all ranks and before anything has changed, ValueError naming file, tensor and values for a folder
/// that is incomplete or damaged, and for names, shapes, dtypes and optimizers that do not fit. A model that was on
/// meta has memory then, and no values.
LoadReport load(TrainingState& state, const std::string& path, const LoadOptions& options = {});

}  // namespace hsdp

#pragma once

#include <ATen/core/Tensor.h>

#include "apps/token_file.h"

namespace apps {

/// What one rank trains on in one step: int64 on the CPU, (rows, sequence_length) each, targets one token ahead.
struct Batch {
  at::Tensor inputs, targets;
};

struct DataLoaderOptions {
  int64_t global_batch_size = 1;
  int64_t sequence_length = 1;
  /// Tokens are below this number.
  int64_t vocab_size = 256;
  int64_t seed = 0;
  /// This process among those that share the global batch.
  int64_t rank = 0;
  int64_t ranks = 1;
  /// Parts of equal size that each rank cuts its rows into.
  int64_t micro_batches = 1;
};

/// Cuts a token file into windows of sequence_length (+ 1 for the last target) and deals them out.
///
/// The global batch of a step is a function of (file, seed, step, global_batch_size, sequence_length) alone: the same
/// at any number of ranks, and after any step without replaying those before. Each rank takes its own contiguous rows
/// of it. Within an epoch every window is used at most once, in an order drawn anew for each epoch; windows that no
/// longer fill a global batch are left out of that epoch. Owns its file; has no state, so batches may be made on any
/// thread.
class DataLoader {
 public:
  /// Throws dtensor::ValueError when global_batch_size is not a multiple of ranks x micro_batches, or when the file has
  /// fewer windows than one global batch.
  DataLoader(TokenFile file, const DataLoaderOptions& options);

  /// This rank's rows of the global batch of `step` (from 0). Throws dtensor::ValueError when the global batch holds a
  /// token that is not below vocab_size: all ranks look at the whole of it, so that they all throw.
  Batch batch(int64_t step) const;

  const TokenFile& file() const { return file_; }
  int64_t windows() const { return windows_; }
  int64_t steps_per_epoch() const { return windows_ / options_.global_batch_size; }

 private:
  /// First token of row `row` of the global batch of `step`.
  int64_t window_begin(int64_t step, int64_t row) const;

  TokenFile file_;
  DataLoaderOptions options_;
  int64_t windows_;
};

/// Where `index` goes in a pseudo-random permutation of [0, size) chosen by `key`: a bijection, computed without a
/// table.
int64_t permuted(int64_t index, int64_t size, uint64_t key);

}  // namespace apps

#include "apps/data_loader.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <utility>
#include <vector>

#include "dtensor/error.h"

namespace apps {
namespace {

/// Scrambles 64 bits; every input bit reaches every output bit.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

int64_t permuted(int64_t index, int64_t size, uint64_t key) {
  // A Feistel network permutes [0, 4^half) for any round function. Values that land outside [0, size) are sent through
  // again until they land inside, which keeps it a bijection; fewer than 4 tries are needed on average.
  const int half = (std::bit_width(uint64_t(size - 1)) + 1) / 2;
  const uint64_t mask = (uint64_t(1) << half) - 1;
  uint64_t value = uint64_t(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      left = std::exchange(right, left ^ (mix(mix(key + round) ^ right) & mask));
    }
    value = left << half | right;
  } while (value >= uint64_t(size));
  return int64_t(value);
}

DataLoader::DataLoader(TokenFile file, const DataLoaderOptions& options)
    : file_(std::move(file)), options_(options), windows_((file_.size() - 1) / options.sequence_length) {
  if (options_.global_batch_size % (options_.ranks * options_.micro_batches) != 0) {
    dtensor::raise<dtensor::ValueError>(
        "data", "global_batch_size ", options_.global_batch_size, " over ", options_.ranks,
        " ranks, expected a multiple of the ranks",
        options_.micro_batches == 1 ? "" : c10::str(" times training.gradient_accumulation ", options_.micro_batches));
  }
  if (windows_ < options_.global_batch_size) {
    dtensor::raise<dtensor::ValueError>(
        "data", file_.path(), ": ", file_.size(), " tokens are ", windows_, " windows of ", options_.sequence_length,
        " and a target, expected at least global_batch_size ", options_.global_batch_size);
  }
}

int64_t DataLoader::window_begin(int64_t step, int64_t row) const {
  const int64_t epoch = step / steps_per_epoch();
  const int64_t index = step % steps_per_epoch() * options_.global_batch_size + row;
  const uint64_t key = mix(mix(uint64_t(options_.seed)) + uint64_t(epoch));
  return permuted(index, windows_, key) * options_.sequence_length;
}

Batch DataLoader::batch(int64_t step) const {
  const int64_t length = options_.sequence_length;
  const int64_t rows = options_.global_batch_size / options_.ranks;
  const int64_t first = options_.rank * rows;
  at::Tensor tokens = at::empty({rows, length + 1}, at::kLong);
  std::vector<int64_t> elsewhere(size_t(length + 1));
  for (int64_t row = 0; row < options_.global_batch_size; ++row) {
    const bool mine = row >= first && row < first + rows;
    int64_t* out = mine ? tokens.data_ptr<int64_t>() + (row - first) * (length + 1) : elsewhere.data();
    const int64_t begin = window_begin(step, row);
    file_.read(begin, length + 1, out);
    for (int64_t i = 0; i <= length; ++i) {
      if (out[i] >= options_.vocab_size) {
        dtensor::raise<dtensor::ValueError>("data", file_.path(), ": token ", begin + i, " is ", out[i],
                                            ", expected tokens below model.vocab_size ", options_.vocab_size,
                                            "; data.format or model.vocab_size does not fit the file");
      }
    }
  }
  return {tokens.slice(1, 0, length), tokens.slice(1, 1, length + 1)};
}

}  // namespace apps

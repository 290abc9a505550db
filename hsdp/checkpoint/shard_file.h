#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "hsdp/checkpoint/files.h"

namespace hsdp {

/// A box of a tensor, to be written.
struct ShardPiece {
  std::string name;
  at::Tensor values;  // of the box, on any device
  std::vector<int64_t> offsets;
};

/// Writes pieces to a safetensors file, one after another, without a second copy of values that are in host memory and
/// contiguous. With `sharded` their offsets are in the file. Throws ValueError where it cannot be written,
/// NotSupportedError for a dtype that the format does not have.
WrittenFile write_shard_file(const char* where, const std::string& path, const std::vector<ShardPiece>& pieces,
                             bool sharded);

}  // namespace hsdp

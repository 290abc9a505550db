#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

/// What checkpoints are compared with: the same bytes in a file, without names, layout or checksums. All functions
/// throw std::runtime_error naming the path.
namespace bench {

/// Writes tensors one after another into a new file, in large blocks. File and folder are on disk when it returns.
/// Tensors are on the host and contiguous.
void write_plain(const std::string& path, const std::vector<at::Tensor>& tensors);

/// Reads what write_plain wrote, in large blocks, into new tensors like those.
std::vector<at::Tensor> read_plain(const std::string& path, const std::vector<at::Tensor>& like);

/// Makes the system forget what it keeps in memory of the files in a folder, which must be on disk.
void drop_cache(const std::string& folder);

}  // namespace bench

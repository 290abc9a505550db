#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/checkpoint/stored_tensors.h"

namespace hsdp {

/// Reads boxes of stored tensors, wherever the parts lie that they are in, and no more of a file than what is wanted,
/// rounded to checksummed blocks. What has checksums is verified before it is handed out. Opens a file when it is first
/// needed. One thread at a time; `tensors` must outlive it.
class StoredReader {
 public:
  StoredReader(const char* where, const StoredTensors& tensors);
  ~StoredReader();
  StoredReader(const StoredReader&) = delete;
  StoredReader& operator=(const StoredReader&) = delete;

  /// Fills `out`, row-major contiguous in the tensor's dtype, with the box. Throws ValueError naming file, tensor and
  /// byte range for a file that ends early and for bytes that are not what was written; `out` then has any values.
  void read(const StoredTensor& tensor, const dtensor::Box& box, void* out);

  /// From files, so far.
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  struct OpenFile;
  OpenFile& open(int64_t file);
  void read_part(const StoredTensor& tensor, const StoredPart& part, const dtensor::Box& box, char* out);
  void read_bytes(const StoredTensor& tensor, int64_t file, uint64_t begin, char* out, uint64_t count);
  void read_blocks(const StoredTensor& tensor, int64_t file, uint64_t block, char* out, size_t count);

  const char* where_;
  const StoredTensors& tensors_;
  std::map<int64_t, std::unique_ptr<OpenFile>> files_;
  uint64_t reads_ = 0;
  uint64_t bytes_read_ = 0;
};

/// Compares block number `block` of a file, `bytes`, with its checksum, where there is one. Throws ValueError naming
/// file, byte range, both checksums and `subject`: what lies there.
void verify_block(const char* where, const std::string& path, const std::vector<uint64_t>& block_checksums,
                  uint64_t block, const void* bytes, size_t count, const std::string& subject);

}  // namespace hsdp

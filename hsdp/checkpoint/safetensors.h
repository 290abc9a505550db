#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/checkpoint/files.h"

/// Files of Hugging Face's safetensors format: 8 bytes of header length (little endian), a JSON header, the values.
/// https://github.com/huggingface/safetensors describes it; the sharding information is that of PyTorch's
/// HuggingFaceStorageWriter.
namespace hsdp {

/// One tensor, or a box of a larger one, in a file.
struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype;
  /// Of what the file holds: row-major, contiguous.
  std::vector<int64_t> sizes;
  /// Where that begins in the whole tensor, one number a dim; zeros in a file without sharding information.
  std::vector<int64_t> offsets;
  /// Its bytes, from the beginning of the file.
  uint64_t begin = 0, end = 0;
};

struct SafetensorsHeader {
  /// In the order of their bytes.
  std::vector<SafetensorsEntry> entries;
  /// Whether entries are boxes of larger tensors (`DCP_SHARDING_INFO` is there).
  bool sharded = false;
  /// The other text entries of `__metadata__`.
  std::map<std::string, std::string> metadata;
};

/// Reads and checks the header of a file; values are not read. Throws ValueError naming file, tensor and values for
/// anything that the format forbids: a header that is longer than the file or than 100,000,000 bytes, no JSON object,
/// repeated names, unknown dtypes, negative or overflowing sizes, byte ranges that overlap, leave holes, do not fit the
/// sizes or do not end with the file, and sharding information that does not fit the tensors.
SafetensorsHeader read_safetensors_header(const char* where, const ReadableFile& file);

/// Gives entries the order of the format (by size of an element, descending, then by name) and their byte ranges, and
/// returns the first bytes of such a file, up to the first value. With `sharded` their offsets are written.
/// Throws NotSupportedError for a dtype that the format has no name for, ValueError for a repeated name.
std::string layout_safetensors(const char* where, std::vector<SafetensorsEntry>& entries, bool sharded,
                               const std::map<std::string, std::string>& metadata = {});

/// "F32", or null where the format has no name for the dtype.
const char* safetensors_name(c10::ScalarType dtype);
/// The reverse; none for an unknown name.
std::optional<c10::ScalarType> safetensors_dtype(const std::string& name);

/// Of all elements; none for a negative size, and where the product of dtype's bytes and the sizes that are not 0
/// overflows int64.
std::optional<uint64_t> tensor_bytes(const std::vector<int64_t>& sizes, c10::ScalarType dtype);

}  // namespace hsdp

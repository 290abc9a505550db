#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/checkpoint/safetensors.h"

/// Whole models in Hugging Face's layout: `model.safetensors`, or several `model-00001-of-00003.safetensors` and
/// `model.safetensors.index.json`.
namespace hsdp {

struct HuggingFaceOptions {
  /// A file is closed before it would become larger; one tensor alone may be.
  uint64_t max_file_bytes = 5'000'000'000;
  /// Of floating-point tensors in the files: their own unless given. Others stay as they are.
  std::optional<c10::ScalarType> dtype = std::nullopt;
};

/// A tensor that is to be written, as it will be in the file.
struct HuggingFaceTensor {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
};

/// Which tensors come into one file, and in which order: indices into the tensors, a list for each file. Throws
/// ValueError for a repeated name or `max_file_bytes` 0, NotSupportedError for a dtype that the format does not have.
std::vector<std::vector<size_t>> plan_hugging_face(const char* where, const std::vector<HuggingFaceTensor>& tensors,
                                                   uint64_t max_file_bytes);

/// Writes such a folder tensor by tensor, in the order of plan_hugging_face, each from memory that the caller may reuse
/// at once. One thread.
class HuggingFaceWriter {
 public:
  /// Makes the folder where needed. Throws ValueError for a path that cannot be written or has .safetensors files.
  HuggingFaceWriter(const char* where, std::string folder, std::vector<HuggingFaceTensor> tensors,
                    uint64_t max_file_bytes);
  /// Removes what was written unless complete() was called.
  ~HuggingFaceWriter();
  HuggingFaceWriter(const HuggingFaceWriter&) = delete;
  HuggingFaceWriter& operator=(const HuggingFaceWriter&) = delete;

  /// Row-major values of the next tensor.
  void write(const void* bytes, size_t count);
  /// After the last.
  void complete();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The dtype in the file of a tensor that has `dtype`. Throws ValueError for options whose dtype is no floating-point
/// one.
c10::ScalarType exported_dtype(c10::ScalarType dtype, const HuggingFaceOptions& options);

/// Makes such a folder of the model in a checkpoint (`step-N`), or of another Hugging Face folder, one tensor in memory
/// at a time, twice where its dtype is converted. One process; no device, no model. Throws ValueError as load() and
/// HuggingFaceWriter do.
void consolidate(const std::string& from, const std::string& to, const HuggingFaceOptions& options = {});

}  // namespace hsdp

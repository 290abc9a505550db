#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dtensor/layout.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/safetensors.h"

namespace hsdp {

/// A box of a tensor in a file: row-major, contiguous, from byte `begin` of file number `file` on.
struct StoredPart {
  int64_t file = 0;
  dtensor::Box box;
  uint64_t begin = 0;
};

/// A whole tensor and where its parts are. The parts cover it, each element once; parts without elements are left out.
struct StoredTensor {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<StoredPart> parts;
};

/// A file that tensors are stored in. Without block checksums, it is read unverified.
struct StoredFile {
  std::string path;
  uint64_t bytes = 0;
  std::vector<uint64_t> block_checksums;
};

/// The tensors of a folder of safetensors files, by name: whole tensors, or boxes of them that any number of ranks has
/// written. An index: values are read by StoredReader. A plain value.
class StoredTensors {
 public:
  enum class Kind { model, optimizer };

  /// Those of a checkpoint's model or optimizer. Reads the headers of its files. Throws ValueError naming file and
  /// tensor where they are not what the manifest says, and where boxes overlap, leave holes, or reach out of their
  /// tensor.
  static StoredTensors of_checkpoint(const char* where, const std::string& folder, const Manifest& manifest, Kind kind);
  /// Those of one file, each of them whole.
  static StoredTensors of_file(const char* where, StoredFile file);
  /// Those of a Hugging Face model: a .safetensors file; or a folder with model.safetensors.index.json, and the files
  /// that it names; or a folder whose .safetensors files all belong to one model. Throws ValueError as above, and for
  /// files that the index names and that are missing or lack a tensor that it places there.
  static StoredTensors of_hugging_face(const char* where, const std::string& path);

  /// For sending to other ranks, which then read the same files without opening all of them.
  std::string serialize() const;
  static StoredTensors deserialize(const std::string& text);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const std::vector<StoredFile>& files() const { return files_; }
  /// Null where there is none.
  const StoredTensor* find(const std::string& name) const;

 private:
  void add_file(const char* where, StoredFile file, const SafetensorsHeader& header);
  void check_cover(const char* where);

  std::vector<StoredFile> files_;
  std::vector<StoredTensor> tensors_;  // by name
  std::map<std::string, size_t> places_;
};

}  // namespace hsdp

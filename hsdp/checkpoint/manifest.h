#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hsdp/checkpoint/files.h"

namespace hsdp {

/// A file of a checkpoint, by its path within the folder.
struct FileRecord {
  std::string path;
  WrittenFile written;
};

/// A whole tensor, whichever files hold its parts.
struct TensorFacts {
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
};

/// What a checkpoint consists of. It is written after everything else, and a folder without it is incomplete: never
/// loaded, free to be removed. JSON, `manifest.json`.
struct Manifest {
  int64_t step = 0;
  int64_t world_size = 1;
  /// As DeviceMesh::to_string.
  std::string mesh;
  std::string torch_version;
  std::vector<FileRecord> files;
  /// By name. Keys of optimizer tensors are `state.<parameter>.<name>`.
  std::map<std::string, TensorFacts> model, optimizer;
};

constexpr auto kManifestFile = "manifest.json";
/// Where the optimizer's tensors and the ranks' own lie; those of the model are in the checkpoint's folder itself.
constexpr auto kOptimizerFolder = "optimizer";
constexpr auto kRanksFolder = "ranks";
constexpr auto kTrainingStateFile = "training_state.json";

/// Text of the file. A format version and kChecksumBlock are in it.
std::string to_json(const Manifest& manifest);
/// Throws ValueError naming `path` and the entry for text that is no manifest, has an unknown version, repeated or
/// unsafe paths (absolute, or with `..`), or checksums that do not fit the sizes.
Manifest parse_manifest(const char* where, const std::string& text, const std::string& path);

/// That of a checkpoint's folder. Throws ValueError for a path that is missing, a file, or has no manifest (the
/// checkpoint is incomplete), and as parse_manifest.
Manifest read_manifest(const char* where, const std::string& folder);
void write_manifest(const char* where, const std::string& folder, const Manifest& manifest);

/// Compares sizes, and with `checksums` all bytes, of the files with what the manifest says. Throws ValueError naming
/// the first file, byte range and values that differ, and .safetensors files that
/// the manifest does not list, since other readers would take them for parts of the checkpoint.
void verify_files(const char* where, const std::string& folder, const Manifest& manifest, bool checksums);

}  // namespace hsdp

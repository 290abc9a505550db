#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/checkpoint/files.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/safetensors.h"
#include "hsdp/checkpoint/shard_file.h"
#include "tests/testing/scratch_folder.h"

/// Changes by hand to the folder of a checkpoint: to bytes, or to what files hold, with a manifest whose sizes and
/// checksums fit, so that nothing but the change itself can be noticed.
namespace testing_support {

constexpr auto kTestWhere = "test";

/// By rank from 0.
inline std::string shard_name(int rank) {
  return "shard-0000" + std::to_string(rank + 1) + "-model-00001-of-00001.safetensors";
}
inline std::string optimizer_shard_name(int rank) { return "optimizer/" + shard_name(rank); }
inline std::string rank_file_name(int rank) { return "ranks/rank-0000" + std::to_string(rank + 1) + ".safetensors"; }

inline void truncate(const std::string& path, int64_t by) {
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - static_cast<uintmax_t>(by));
}

/// One bit, so that a digit stays one. Negative: from the end.
inline void flip(const std::string& path, int64_t offset) {
  auto bytes = read_bytes(path);
  auto& byte = bytes.at(offset < 0 ? bytes.size() - static_cast<size_t>(-offset) : static_cast<size_t>(offset));
  byte = static_cast<char>(byte ^ 1);
  write_bytes(path, bytes);
}

/// Throws unless `from` is there once.
inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  if (at == std::string::npos || text.find(from, at + 1) != std::string::npos) {
    throw std::runtime_error("\"" + from + "\" is not once in: " + text);
  }
  return text.replace(at, from.size(), to);
}
inline void replace_in(const std::string& path, const std::string& from, const std::string& to) {
  write_bytes(path, replaced(read_bytes(path), from, to));
}

inline std::string length_bytes(uint64_t length) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(length >> (8 * i));
  return bytes;
}
/// The first 8 bytes of a safetensors file.
inline void set_header_length(const std::string& path, uint64_t length) {
  write_bytes(path, read_bytes(path).replace(0, 8, length_bytes(length)));
}
/// Replaces a text within the header; values stay as they are.
inline void replace_in_header(const std::string& path, const std::string& from, const std::string& to) {
  const auto bytes = read_bytes(path);
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(bytes[i]);
  const auto header = replaced(bytes.substr(8, length), from, to);
  write_bytes(path, length_bytes(header.size()) + header + bytes.substr(8 + length));
}

using Pieces = std::vector<hsdp::ShardPiece>;

inline Pieces read_pieces(const std::string& path) {
  const hsdp::ReadableFile file(kTestWhere, path);
  Pieces pieces;
  for (const auto& entry : hsdp::read_safetensors_header(kTestWhere, file).entries) {
    auto values = at::empty(entry.sizes, at::TensorOptions(at::kCPU).dtype(entry.dtype));
    if (values.nbytes() > 0) file.read(entry.begin, values.mutable_data_ptr(), values.nbytes());
    pieces.push_back({entry.name, values, entry.offsets});
  }
  return pieces;
}
inline hsdp::ShardPiece& piece(Pieces& pieces, const std::string& name) {
  for (auto& each : pieces) {
    if (each.name == name) return each;
  }
  throw std::runtime_error("no piece of " + name);
}
/// Writes the file again after `change`. Files of ranks have no sharding information.
inline void change_pieces(const std::string& path, const std::function<void(Pieces&)>& change) {
  auto pieces = read_pieces(path);
  change(pieces);
  hsdp::write_shard_file(kTestWhere, path, pieces, path.find("/ranks/") == std::string::npos);
}
inline void drop_piece(const std::string& path, const std::string& name) {
  change_pieces(path, [&](Pieces& pieces) {
    piece(pieces, name);
    std::erase_if(pieces, [&](const auto& each) { return each.name == name; });
  });
}

/// Gives the folder a manifest with the sizes and checksums of the files that are there.
inline void seal(const std::string& folder, const std::function<void(hsdp::Manifest&)>& change = {}) {
  namespace fs = std::filesystem;
  auto manifest = hsdp::read_manifest(kTestWhere, folder);
  manifest.files.clear();
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const auto name = entry.path().lexically_relative(folder).string();
    if (!entry.is_regular_file() || name == hsdp::kManifestFile) continue;
    manifest.files.push_back({name, hsdp::measure(hsdp::ReadableFile(kTestWhere, entry.path().string()))});
  }
  if (change) change(manifest);
  hsdp::write_manifest(kTestWhere, folder, manifest);
}

/// All files below a folder, by path and content.
inline std::map<std::string, std::string> contents(const std::string& folder) {
  namespace fs = std::filesystem;
  std::map<std::string, std::string> result;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const auto name = entry.path().lexically_relative(folder).string();
    result[name] = entry.is_regular_file() ? read_bytes(entry.path().string()) : "";
  }
  return result;
}

}  // namespace testing_support

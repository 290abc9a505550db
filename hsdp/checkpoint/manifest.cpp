#include "hsdp/checkpoint/manifest.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/checkpoint/json_reader.h"
#include "hsdp/checkpoint/safetensors.h"

namespace hsdp {
namespace {

namespace fs = std::filesystem;
using dtensor::raise;
using dtensor::ValueError;
using Json = nlohmann::json;

constexpr auto kFormat = "hsdp-checkpoint";
constexpr int64_t kVersion = 1;
// 16 bytes a block of a file, some 100 a tensor.
constexpr size_t kMostBytes = 1'000'000'000;
constexpr size_t kHexDigits = 16;

// ---- writing ----

std::string dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// A line each, so that people can read and compare manifests.
std::string lines(const std::vector<std::string>& rows, char open, char close) {
  return rows.empty() ? std::string{open, close} : c10::str(open, "\n", c10::Join(",\n", rows), "\n", close);
}

std::string to_json(const std::map<std::string, TensorFacts>& tensors) {
  std::vector<std::string> rows;
  for (const auto& [name, facts] : tensors) {
    const auto* dtype = safetensors_name(facts.dtype);
    TORCH_INTERNAL_ASSERT(dtype != nullptr, name);
    rows.push_back(dump(name) + ":" + dump({{"dtype", dtype}, {"shape", facts.sizes}}));
  }
  return lines(rows, '{', '}');
}

std::string to_json(const FileRecord& file) {
  std::string blocks;
  for (const auto sum : file.written.block_checksums) blocks += to_hex(sum);
  return dump({{"path", file.path},
               {"bytes", file.written.bytes},
               {"xxh3", to_hex(file.written.checksum)},
               {"blocks", std::move(blocks)}});
}

// ---- reading ----

// Takes a text apart. `entry` says in messages which part of it a value is.
class ManifestReader {
 public:
  ManifestReader(const char* where, const std::string& path) : json_(where, path, "a manifest") {}

  Manifest read(const std::string& text) const {
    constexpr int kDeepest = 4;
    const auto json = json_.parse(text, kFormat, kVersion, kDeepest);
    json_.check_object(
        json, "it",
        {"format", "version", "step", "world_size", "mesh", "torch", "block_bytes", "files", "model", "optimizer"});
    const auto block_bytes = number(json["block_bytes"], "block_bytes");
    if (block_bytes != kChecksumBlock) json_.refuse("block_bytes is ", block_bytes, ", expected ", kChecksumBlock);
    Manifest manifest;
    manifest.step = number(json["step"], "step");
    manifest.world_size = number(json["world_size"], "world_size");
    if (manifest.world_size == 0) json_.refuse("world_size is 0, expected at least 1");
    manifest.mesh = json_.text(json["mesh"], "mesh");
    manifest.torch_version = json_.text(json["torch"], "torch");
    manifest.files = files(json["files"]);
    manifest.model = tensors(json["model"], "model");
    manifest.optimizer = tensors(json["optimizer"], "optimizer");
    return manifest;
  }

 private:
  int64_t number(const Json& value, const std::string& entry) const {
    const auto result = json_.integer(value, entry);
    if (result < 0) json_.refuse(entry, " is ", result, ", expected 0 or more");
    return result;
  }

  // Those that follow each other without anything between them.
  std::vector<uint64_t> checksums(const Json& value, const std::string& entry, uint64_t count) const {
    const auto& text = json_.text(value, entry);
    if (text.size() % kHexDigits != 0 || text.size() / kHexDigits != count ||
        text.find_first_not_of("0123456789abcdef") != std::string::npos) {
      json_.refuse(entry, " is ", shown(value), ", expected ", count, " times ", kHexDigits,
                   " digits of 0 to 9 and a to f");
    }
    std::vector<uint64_t> sums;
    for (size_t at = 0; at < text.size(); at += kHexDigits) {
      sums.push_back(std::stoull(text.substr(at, kHexDigits), nullptr, 16));
    }
    return sums;
  }

  // Nothing that could lead out of the folder, and one text for one file.
  std::string file_path(const Json& value, const std::string& entry) const {
    const auto& text = json_.text(value, entry);
    const fs::path path(text);
    const bool safe = text.find('\0') == std::string::npos && path.is_relative() && path.has_filename() &&
                      path.lexically_normal().string() == text && text != "." && *path.begin() != "..";
    if (!safe || text == kManifestFile)
      json_.refuse(entry, " is ", shown(value), ", expected the path of a file within");
    return text;
  }

  std::vector<FileRecord> files(const Json& value) const {
    json_.check_list(value, "files");
    std::vector<FileRecord> result;
    std::set<std::string> paths;
    for (size_t i = 0; i < value.size(); ++i) {
      const auto& json = value[i];
      const auto entry = c10::str("files[", i, "]");
      json_.check_object(json, entry, {"path", "bytes", "xxh3", "blocks"});
      FileRecord file{file_path(json["path"], entry + ".path"), {}};
      if (!paths.insert(file.path).second)
        json_.refuse(entry, ".path ", file.path, " is there twice, expected it once");
      auto& written = file.written;
      written.bytes = static_cast<uint64_t>(number(json["bytes"], entry + ".bytes"));
      written.checksum = checksums(json["xxh3"], entry + ".xxh3", 1).front();
      written.block_checksums =
          checksums(json["blocks"], entry + ".blocks", (written.bytes + kChecksumBlock - 1) / kChecksumBlock);
      result.push_back(std::move(file));
    }
    return result;
  }

  std::map<std::string, TensorFacts> tensors(const Json& value, const std::string& entry) const {
    json_.check_object(value, entry);
    std::map<std::string, TensorFacts> result;
    for (const auto& item : value.items()) {
      const auto label = c10::str(entry, "[", shown(item.key()), "]");
      json_.check_object(item.value(), label, {"dtype", "shape"});
      const auto& name = json_.text(item.value()["dtype"], label + ".dtype");
      const auto dtype = safetensors_dtype(name);
      if (!dtype) json_.refuse(label, ".dtype is ", shown(name), ", expected a name of safetensors, such as F32");
      const auto& shape = item.value()["shape"];
      json_.check_list(shape, label + ".shape");
      TensorFacts facts{*dtype, {}};
      for (const auto& size : shape) facts.sizes.push_back(number(size, label + ".shape"));
      if (!tensor_bytes(facts.sizes, *dtype))
        json_.refuse(label, ".shape is ", shown(shape), ", expected less than 2^63 bytes");
      result.emplace(item.key(), std::move(facts));
    }
    return result;
  }

  JsonReader json_;
};

// ---- files ----

void check_written(const char* where, const std::string& path, const WrittenFile& expected, bool checksums) {
  const ReadableFile file(where, path);
  if (file.size() != expected.bytes) {
    raise<ValueError>(where, path, " has ", file.size(), " bytes, expected ", expected.bytes, " as in ", kManifestFile,
                      "; it was truncated or replaced");
  }
  if (!checksums) return;
  const auto found = measure(file);
  const auto compare = [&](uint64_t begin, uint64_t end, uint64_t sum, uint64_t expected_sum) {
    if (sum == expected_sum) return;
    raise<ValueError>(where, "bytes ", begin, " to ", end, " of ", path, " have checksum ", to_hex(sum), ", expected ",
                      to_hex(expected_sum), " as in ", kManifestFile, "; the file is damaged");
  };
  for (size_t i = 0; i < found.block_checksums.size(); ++i) {
    const auto begin = i * kChecksumBlock;
    compare(begin, std::min(begin + kChecksumBlock, found.bytes), found.block_checksums[i],
            expected.block_checksums[i]);
  }
  compare(0, found.bytes, found.checksum, expected.checksum);
}

}  // namespace

std::string to_json(const Manifest& manifest) {
  std::vector<std::string> files;
  for (const auto& file : manifest.files) files.push_back(to_json(file));
  const std::vector<std::string> rows = {
      c10::str("\"format\":", dump(kFormat)),
      c10::str("\"version\":", kVersion),
      c10::str("\"step\":", manifest.step),
      c10::str("\"world_size\":", manifest.world_size),
      c10::str("\"mesh\":", dump(manifest.mesh)),
      c10::str("\"torch\":", dump(manifest.torch_version)),
      c10::str("\"block_bytes\":", kChecksumBlock),
      c10::str("\"files\":", lines(files, '[', ']')),
      c10::str("\"model\":", to_json(manifest.model)),
      c10::str("\"optimizer\":", to_json(manifest.optimizer)),
  };
  return lines(rows, '{', '}') + "\n";
}

Manifest parse_manifest(const char* where, const std::string& text, const std::string& path) {
  return ManifestReader(where, path).read(text);
}

Manifest read_manifest(const char* where, const std::string& folder) {
  constexpr auto kExpected = ", expected the folder of a checkpoint";
  std::error_code error;
  const auto status = fs::status(folder, error);
  if (!fs::status_known(status)) raise<ValueError>(where, folder, " cannot be read: ", error.message(), kExpected);
  if (!fs::exists(status)) raise<ValueError>(where, folder, " does not exist", kExpected);
  if (!fs::is_directory(status)) raise<ValueError>(where, folder, " is a file", kExpected);
  const auto path = (fs::path(folder) / kManifestFile).string();
  if (!fs::exists(fs::symlink_status(path, error))) {
    raise<ValueError>(where, folder, " has no ", kManifestFile, ", expected a complete checkpoint; one that was not ",
                      "written to its end cannot be loaded");
  }
  return parse_manifest(where, read_text(where, path, kMostBytes), path);
}

void write_manifest(const char* where, const std::string& folder, const Manifest& manifest) {
  const auto text = to_json(manifest);
  FileWriter file(where, (fs::path(folder) / kManifestFile).string());
  file.write(text.data(), text.size());
  file.complete();
}

void verify_files(const char* where, const std::string& folder, const Manifest& manifest, bool checksums) {
  std::set<std::string> listed{kManifestFile};
  for (const auto& file : manifest.files) {
    listed.insert(file.path);
    check_written(where, (fs::path(folder) / file.path).string(), file.written, checksums);
  }
  std::error_code error;
  std::set<std::string> unlisted;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const auto path = entry->path().lexically_relative(folder).string();
    if (entry->path().extension() == ".safetensors" && !listed.contains(path)) unlisted.insert(path);
  }
  if (error) raise<ValueError>(where, folder, " cannot be read: ", error.message(), ", expected a checkpoint's folder");
  if (!unlisted.empty()) {
    raise<ValueError>(
        where, (fs::path(folder) / *unlisted.begin()).string(), " is not in ", kManifestFile,
        ", expected no other .safetensors files in a checkpoint, which other readers would take for parts of "
        "it; remove it");
  }
}

}  // namespace hsdp

#include "hsdp/checkpoint/stored_tensors.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/checkpoint/stored_bytes.h"
#include "hsdp/checkpoint/stored_reader.h"

namespace hsdp {
namespace {

namespace fs = std::filesystem;
using dtensor::Box;
using dtensor::raise;
using dtensor::ValueError;

constexpr auto kSuffix = ".safetensors";
constexpr auto kIndexFile = "model.safetensors.index.json";
// An index has some 100 bytes a tensor.
constexpr size_t kMostIndexBytes = 1'000'000'000;

std::string to_string(const Box& box) {
  return c10::str("offsets ", c10::IntArrayRef(box.offsets), " sizes ", c10::IntArrayRef(box.sizes));
}

// Sizes that only say where parts end may multiply to anything: the largest number then, which no parts cover.
int64_t volume(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  bool overflows = false;
  for (const auto size : sizes) {
    if (size == 0) return 0;
    overflows |= __builtin_mul_overflow(count, size, &count);
  }
  return overflows ? std::numeric_limits<int64_t>::max() : count;
}

bool overlap(const Box& first, const Box& second) {
  for (size_t dim = 0; dim < first.sizes.size(); ++dim) {
    if (first.offsets[dim] + first.sizes[dim] <= second.offsets[dim]) return false;
    if (second.offsets[dim] + second.sizes[dim] <= first.offsets[dim]) return false;
  }
  return true;
}

// The dim along which most parts begin at another place: there they are compared with neighbours alone.
size_t most_divided_dim(const std::vector<StoredPart>& parts, size_t dims) {
  size_t best = 0, most = 0;
  for (size_t dim = 0; dim < dims; ++dim) {
    std::set<int64_t> begins;
    for (const auto& part : parts) begins.insert(part.box.offsets[dim]);
    if (begins.size() > most) {
      most = begins.size();
      best = dim;
    }
  }
  return best;
}

std::vector<std::string> safetensors_files(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == kSuffix) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Of `model-00001-of-00003.safetensors` and so on, as a writer that was killed leaves some without an index.
void check_all_there(const char* where, const std::string& path, const std::vector<std::string>& files) {
  std::map<int, int> found;  // by the number that there should be
  for (const auto& file : files) {
    int number = 0, of = 0, end = 0;
    const auto name = fs::path(file).filename().string();
    const bool numbered = std::sscanf(name.c_str(), "model-%d-of-%d.safetensors%n", &number, &of, &end) == 2;
    if (numbered && end == static_cast<int>(name.size())) ++found[of];
  }
  for (const auto& [of, count] : found) {
    if (count == of) continue;
    raise<ValueError>(where, path, " has ", count, " files model-...-of-", of, " and no ", kIndexFile,
                      ", expected all ", of, "; they were not written to the end");
  }
}

// A header is believed before any value is read, and has its checksums, too.
void verify_header(const char* where, const ReadableFile& file, const SafetensorsHeader& header,
                   const std::vector<uint64_t>& block_checksums) {
  const auto end = header.entries.empty() ? file.size() : header.entries.front().begin;
  std::string bytes;
  for (uint64_t block = 0; block * kChecksumBlock < end; ++block) {
    bytes.resize(std::min<uint64_t>(kChecksumBlock, file.size() - block * kChecksumBlock));
    file.read(block * kChecksumBlock, bytes.data(), bytes.size());
    std::string subject = "with its header";
    const auto values_begin = [&](const auto& entry) { return entry.begin < block * kChecksumBlock + bytes.size(); };
    const auto first = header.entries.begin(), last = std::partition_point(first, header.entries.end(), values_begin);
    if (first != last) {
      subject += " and values of tensors \"" + first->name + "\" to \"" + std::prev(last)->name + "\"";
    }
    verify_block(where, file.path(), block_checksums, block, bytes.data(), bytes.size(), subject);
  }
}

// Which file holds which tensor, by an index.
std::map<std::string, std::set<std::string>> read_index(const char* where, const std::string& path) {
  std::map<std::string, std::set<std::string>> names_of_files;
  const auto text = read_text(where, path, kMostIndexBytes);
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto refuse = [&](const std::string& what) {
    raise<ValueError>(where, path, " ", what, ", expected {\"weight_map\": {tensor: file}}");
  };
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) refuse("is no index");
  for (const auto& [name, file] : json["weight_map"].items()) {
    if (!file.is_string()) refuse("names no file for \"" + name + "\"");
    const auto text_of_file = file.get<std::string>();
    if (fs::path(text_of_file).filename() != text_of_file || text_of_file.empty()) {
      refuse("places \"" + name + "\" in \"" + text_of_file + "\", which is no file beside it");
    }
    names_of_files[text_of_file].insert(name);
  }
  return names_of_files;
}

}  // namespace

void StoredTensors::add_file(const char* where, StoredFile file, const SafetensorsHeader& header) {
  const auto number = static_cast<int64_t>(files_.size());
  for (const auto& entry : header.entries) {
    const auto [place, fresh] = places_.try_emplace(entry.name, tensors_.size());
    if (fresh) tensors_.push_back({entry.name, entry.dtype, std::vector<int64_t>(entry.sizes.size(), 0), {}});
    auto& tensor = tensors_[place->second];
    const auto refuse = [&](const auto&... what) {
      raise<ValueError>(where, file.path, ": tensor \"", entry.name, "\" ", what..., "; files of two models are mixed");
    };
    if (entry.dtype != tensor.dtype)
      refuse("is ", entry.dtype, " here, expected ", tensor.dtype, " as in another file");
    if (entry.sizes.size() != tensor.sizes.size()) {
      refuse("has ", entry.sizes.size(), " dims here, expected ", tensor.sizes.size(), " as in another file");
    }
    for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
      tensor.sizes[dim] = std::max(tensor.sizes[dim], entry.offsets[dim] + entry.sizes[dim]);
    }
    if (volume(entry.sizes) > 0) tensor.parts.push_back({number, {entry.offsets, entry.sizes}, entry.begin});
  }
  files_.push_back(std::move(file));
}

void StoredTensors::check_cover(const char* where) {
  std::sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  for (size_t i = 0; i < tensors_.size(); ++i) places_[tensors_[i].name] = i;
  for (auto& tensor : tensors_) {
    auto& parts = tensor.parts;
    const auto path_of = [&](const StoredPart& part) { return files_[static_cast<size_t>(part.file)].path; };
    int64_t covered = 0;
    for (const auto& part : parts) {
      for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
        if (part.box.offsets[dim] <= tensor.sizes[dim] - part.box.sizes[dim]) continue;
        raise<ValueError>(where, path_of(part), ": tensor \"", tensor.name, "\" has a part at ", to_string(part.box),
                          ", expected one within its sizes ", c10::IntArrayRef(tensor.sizes));
      }
      covered += volume(part.box.sizes);
    }
    const auto dim = most_divided_dim(parts, tensor.sizes.size());
    const auto begin = [&](const StoredPart& part) { return tensor.sizes.empty() ? 0 : part.box.offsets[dim]; };
    std::sort(parts.begin(), parts.end(), [&](const auto& a, const auto& b) { return begin(a) < begin(b); });
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto end = begin(parts[i]) + (tensor.sizes.empty() ? 1 : parts[i].box.sizes[dim]);
      for (size_t j = i + 1; j < parts.size() && begin(parts[j]) < end; ++j) {
        if (!overlap(parts[i].box, parts[j].box)) continue;
        raise<ValueError>(where, "tensor \"", tensor.name, "\": the part at ", to_string(parts[i].box), " in ",
                          path_of(parts[i]), " overlaps that at ", to_string(parts[j].box), " in ", path_of(parts[j]),
                          ", expected each element once");
      }
    }
    if (covered == volume(tensor.sizes)) continue;
    raise<ValueError>(where, "tensor \"", tensor.name, "\" of sizes ", c10::IntArrayRef(tensor.sizes), ": the ",
                      parts.size(), " parts in the files",
                      parts.empty() ? "" : " (" + path_of(parts.front()) + ", ...)", " hold ", covered,
                      " elements, expected ", volume(tensor.sizes), "; a file is missing");
  }
}

StoredTensors StoredTensors::of_checkpoint(const char* where, const std::string& folder, const Manifest& manifest,
                                           Kind kind) {
  StoredTensors result;
  const auto& facts = kind == Kind::model ? manifest.model : manifest.optimizer;
  const std::string subfolder = kind == Kind::model ? "" : kOptimizerFolder;
  for (const auto& record : manifest.files) {
    const fs::path path(record.path);
    if (path.extension() != kSuffix || path.parent_path() != subfolder) continue;
    const ReadableFile file(where, (fs::path(folder) / path).string());
    if (file.size() != record.written.bytes) {
      raise<ValueError>(where, file.path(), " has ", file.size(), " bytes, expected ", record.written.bytes,
                        " as the manifest says; the file is damaged");
    }
    const auto header = read_safetensors_header(where, file);
    verify_header(where, file, header, record.written.block_checksums);
    for (const auto& entry : header.entries) {
      const auto known = facts.find(entry.name);
      if (known != facts.end() && known->second.dtype == entry.dtype &&
          known->second.sizes.size() == entry.sizes.size()) {
        continue;
      }
      raise<ValueError>(where, file.path(), ": tensor \"", entry.name, "\" of dtype ", entry.dtype, " and ",
                        entry.sizes.size(), " dims, expected ",
                        known == facts.end() ? std::string("none of that name")
                                             : c10::str(known->second.dtype, " and ", known->second.sizes.size()),
                        " as the manifest says");
    }
    result.add_file(where, {file.path(), record.written.bytes, record.written.block_checksums}, header);
  }
  for (const auto& [name, fact] : facts) {
    const auto [place, fresh] = result.places_.try_emplace(name, result.tensors_.size());
    if (fresh) result.tensors_.push_back({name, fact.dtype, {}, {}});
    result.tensors_[place->second].sizes = fact.sizes;
  }
  result.check_cover(where);
  return result;
}

StoredTensors StoredTensors::of_file(const char* where, StoredFile stored) {
  StoredTensors result;
  const ReadableFile file(where, stored.path);
  if (file.size() != stored.bytes) {
    raise<ValueError>(where, file.path(), " has ", file.size(), " bytes, expected ", stored.bytes,
                      "; the file is damaged");
  }
  const auto header = read_safetensors_header(where, file);
  verify_header(where, file, header, stored.block_checksums);
  result.add_file(where, std::move(stored), header);
  result.check_cover(where);
  return result;
}

StoredTensors StoredTensors::of_hugging_face(const char* where, const std::string& path) {
  StoredTensors result;
  const auto add = [&](const std::string& name, const std::set<std::string>* wanted) {
    const ReadableFile file(where, name);
    auto header = read_safetensors_header(where, file);
    if (wanted != nullptr) {
      std::erase_if(header.entries, [&](const auto& entry) { return !wanted->contains(entry.name); });
      for (const auto& tensor : *wanted) {
        const auto is_it = [&](const auto& entry) { return entry.name == tensor; };
        if (std::any_of(header.entries.begin(), header.entries.end(), is_it)) continue;
        raise<ValueError>(where, file.path(), " lacks tensor \"", tensor, "\", which ", kIndexFile, " places there");
      }
    }
    result.add_file(where, {file.path(), file.size(), {}}, header);
  };
  if (!fs::is_directory(path)) {
    add(path, nullptr);
  } else if (const auto index = fs::path(path) / kIndexFile; fs::exists(index)) {
    for (const auto& [file, names] : read_index(where, index.string())) {
      add((fs::path(path) / file).string(), &names);
    }
  } else {
    // A run that was killed may have left all shards, and not yet known it.
    if (fs::is_directory(fs::path(path) / kOptimizerFolder) && fs::is_directory(fs::path(path) / kRanksFolder)) {
      read_manifest(where, path);
    }
    const auto files = safetensors_files(path);
    if (files.empty()) {
      raise<ValueError>(where, path, " has no ", kSuffix,
                        " files, expected those of a model, or a complete checkpoint");
    }
    check_all_there(where, path, files);
    for (const auto& file : files) add(file, nullptr);
  }
  result.check_cover(where);
  return result;
}

std::string StoredTensors::serialize() const {
  BytesWriter out;
  out.number(files_.size());
  for (const auto& file : files_) {
    out.text(file.path);
    out.number(file.bytes);
    out.numbers(file.block_checksums);
  }
  out.number(tensors_.size());
  for (const auto& tensor : tensors_) {
    out.text(tensor.name);
    out.number(static_cast<uint64_t>(tensor.dtype));
    out.numbers(tensor.sizes);
    out.number(tensor.parts.size());
    for (const auto& part : tensor.parts) {
      out.number(static_cast<uint64_t>(part.file));
      out.numbers(part.box.offsets);
      out.numbers(part.box.sizes);
      out.number(part.begin);
    }
  }
  return out.take();
}

StoredTensors StoredTensors::deserialize(const std::string& text) {
  StoredTensors result;
  BytesReader in(text);
  for (uint64_t files = in.number(); files > 0; --files) {
    StoredFile file;
    file.path = in.text();
    file.bytes = in.number();
    file.block_checksums = in.numbers<uint64_t>();
    result.files_.push_back(std::move(file));
  }
  for (uint64_t tensors = in.number(); tensors > 0; --tensors) {
    StoredTensor tensor;
    tensor.name = in.text();
    tensor.dtype = static_cast<c10::ScalarType>(in.number());
    tensor.sizes = in.numbers<int64_t>();
    for (uint64_t parts = in.number(); parts > 0; --parts) {
      StoredPart part;
      part.file = static_cast<int64_t>(in.number());
      part.box.offsets = in.numbers<int64_t>();
      part.box.sizes = in.numbers<int64_t>();
      part.begin = in.number();
      tensor.parts.push_back(std::move(part));
    }
    result.places_[tensor.name] = result.tensors_.size();
    result.tensors_.push_back(std::move(tensor));
  }
  return result;
}

const StoredTensor* StoredTensors::find(const std::string& name) const {
  const auto place = places_.find(name);
  return place == places_.end() ? nullptr : &tensors_[place->second];
}

}  // namespace hsdp

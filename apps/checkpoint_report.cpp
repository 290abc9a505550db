#include "apps/checkpoint_report.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <set>
#include <vector>

#include "apps/checkpoint_lookup.h"
#include "dtensor/error.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/stored_reader.h"
#include "hsdp/checkpoint/stored_tensors.h"
#include "hsdp/checkpoint/training_state_json.h"

namespace apps {
namespace {

namespace fs = std::filesystem;
using hsdp::StoredTensor;
using hsdp::StoredTensors;

/// A checkpoint or a whole model, opened: names and places of its tensors.
struct Source {
  std::string path;
  StoredTensors model;
  /// The rest is that of a checkpoint.
  std::optional<hsdp::Manifest> manifest = std::nullopt;
  StoredTensors optimizer = {};
  hsdp::TrainingScalars scalars = {};
};

/// As a checkpoint, whether it is complete or not.
bool is_checkpoint(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path / hsdp::kManifestFile, ignored) || fs::exists(path / hsdp::kTrainingStateFile, ignored);
}

std::string found_at(const std::string& path, std::ostream& out) {
  const auto found = checkpoint_at(path);
  if (found != path) out << path << ": the newest checkpoint is " << found << "\n";
  return found;
}

Source open_checkpoint(const char* where, const std::string& path) {
  Source source{.path = path, .model = {}};
  source.manifest = hsdp::read_manifest(where, path);
  source.model = StoredTensors::of_checkpoint(where, path, *source.manifest, StoredTensors::Kind::model);
  source.optimizer = StoredTensors::of_checkpoint(where, path, *source.manifest, StoredTensors::Kind::optimizer);
  source.scalars = read_scalars(where, path);
  return source;
}

Source open(const char* where, const std::string& path, std::ostream& out) {
  const auto found = found_at(path, out);
  if (is_checkpoint(found)) return open_checkpoint(where, found);
  return {.path = found, .model = StoredTensors::of_hugging_face(where, found)};
}

/// The files of the ranks' own tensors, in the order of the ranks.
std::vector<hsdp::StoredFile> rank_files(const std::string& folder, const hsdp::Manifest& manifest) {
  std::vector<hsdp::StoredFile> files;
  for (const auto& file : manifest.files) {
    if (fs::path(file.path).parent_path() != hsdp::kRanksFolder) continue;
    files.push_back({(fs::path(folder) / file.path).string(), file.written.bytes, file.written.block_checksums});
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return files;
}

// ---- words ----

std::string dtype_name(c10::ScalarType dtype) {
  const char* name = hsdp::safetensors_name(dtype);
  return name ? name : c10::toString(dtype);
}

std::string to_text(const std::vector<int64_t>& numbers) { return c10::str("(", c10::Join(", ", numbers), ")"); }

std::string in_units(uint64_t bytes) {
  constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB"};
  if (bytes < 1000) return c10::str(bytes, " bytes");
  double value = double(bytes) / 1000.0;
  size_t unit = 0;
  for (; value >= 999.95 && unit + 1 < std::size(kUnits); ++unit) value /= 1000.0;
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f %s", value, kUnits[unit]);
  return text;
}

template <class Number>
std::string shortest(Number value) {
  char buffer[32];
  return std::string(buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr);
}

int64_t elements(const StoredTensor& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.sizes) count *= size;
  return count;
}

std::string summary(const StoredTensors& tensors) {
  int64_t count = 0;
  uint64_t bytes = 0;
  std::set<std::string> dtypes;
  for (const auto& tensor : tensors.tensors()) {
    count += elements(tensor);
    bytes += uint64_t(elements(tensor)) * c10::elementSize(tensor.dtype);
    dtypes.insert(dtype_name(tensor.dtype));
  }
  return c10::str(tensors.tensors().size(), " tensors, ", count, " elements",
                  dtypes.empty() ? "" : c10::str(" of ", c10::Join(", ", dtypes)), ", ", in_units(bytes));
}

void list(const char* title, const StoredTensors& tensors, std::ostream& out) {
  out << title << ":\n";
  for (const auto& tensor : tensors.tensors()) {
    out << "  " << tensor.name << " " << dtype_name(tensor.dtype) << " " << to_text(tensor.sizes);
    if (tensor.parts.size() > 1) out << " in " << tensor.parts.size() << " parts";
    out << "\n";
  }
}

// ---- comparison ----

/// What differs between the equally shaped values of a tensor.
struct Differences {
  int64_t count = 0;
  /// Absolute; NaN where one of two that differ is.
  double largest = 0.0;
  /// Number of the first in row-major order, and its two values.
  int64_t first = 0;
  std::string first_a = {}, first_b = {};
};

at::Tensor absolute_differences(const at::Tensor& a, const at::Tensor& b) {
  const auto dtype = a.scalar_type();
  if (at::isComplexType(dtype)) return (a.to(at::kComplexDouble) - b.to(at::kComplexDouble)).abs();
  // Integers of 64 bits have differences that doubles would lose.
  if (at::isIntegralType(dtype, /*includeBool=*/true)) return (a.to(at::kLong) - b.to(at::kLong)).abs().to(at::kDouble);
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs();
}

std::string to_text(const at::Tensor& element) {
  const auto dtype = element.scalar_type();
  if (at::isComplexType(dtype)) return c10::str(element.to(at::kComplexDouble).item<c10::complex<double>>());
  if (dtype == at::kDouble) return shortest(element.item<double>());
  if (at::isFloatingType(dtype)) return shortest(element.to(at::kFloat).item<float>());
  const auto integer = element.to(at::kLong).item<int64_t>();
  return dtype == at::kUInt64 ? std::to_string(uint64_t(integer)) : std::to_string(integer);
}

/// Compares `count` values of the dtype, of which the first is number `begin` of the tensor.
void compare_values(char* a, char* b, c10::ScalarType dtype, int64_t count, int64_t begin, Differences& result) {
  const auto size = int64_t(c10::elementSize(dtype));
  if (std::memcmp(a, b, size_t(count * size)) == 0) return;
  const auto bytes = [&](char* values) { return at::from_blob(values, {count, size}, at::kByte); };
  const auto differ = bytes(a).ne(bytes(b)).any(/*dim=*/1);
  const auto typed_a = at::from_blob(a, {count}, dtype), typed_b = at::from_blob(b, {count}, dtype);
  if (result.count == 0) {
    const auto first = differ.to(at::kByte).argmax().item<int64_t>();
    result.first = begin + first;
    result.first_a = to_text(typed_a[first]);
    result.first_b = to_text(typed_b[first]);
  }
  result.count += differ.sum().item<int64_t>();
  const auto largest = absolute_differences(typed_a, typed_b).masked_select(differ).max().item<double>();
  // Once NaN, it stays so.
  if (largest > result.largest || std::isnan(largest)) result.largest = std::fabs(largest);
}

Differences compare(const StoredTensor& a, hsdp::StoredReader& reader_a, const StoredTensor& b,
                    hsdp::StoredReader& reader_b) {
  constexpr int64_t kSlabBytes = int64_t(32) << 20;
  Differences result;
  if (elements(a) == 0) return result;
  // Slabs along the first dim, so that a large tensor is never whole in memory.
  const int64_t rows = a.sizes.empty() ? 1 : a.sizes.front();
  const int64_t row = elements(a) / rows;
  const auto row_bytes = row * int64_t(c10::elementSize(a.dtype));
  const int64_t step = std::max<int64_t>(1, kSlabBytes / row_bytes);
  std::vector<char> values_a, values_b;
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    dtensor::Box box{std::vector<int64_t>(a.sizes.size(), 0), a.sizes};
    if (!a.sizes.empty()) {
      box.offsets.front() = begin;
      box.sizes.front() = count;
    }
    values_a.resize(size_t(count * row_bytes));
    values_b.resize(values_a.size());
    reader_a.read(a, box, values_a.data());
    reader_b.read(b, box, values_b.data());
    compare_values(values_a.data(), values_b.data(), a.dtype, count * row, begin * row, result);
  }
  return result;
}

std::string position(int64_t number, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> indices(sizes.size());
  for (size_t dim = sizes.size(); dim-- > 0; number /= sizes[dim]) indices[dim] = number % sizes[dim];
  return to_text(indices);
}

/// Prints differences and counts them.
class Comparison {
 public:
  Comparison(const char* where, std::ostream& out) : where_(where), out_(out) {}

  int64_t differences() const { return differences_; }

  void tensors(const std::string& kind, const StoredTensors& a, const StoredTensors& b) {
    hsdp::StoredReader reader_a(where_, a), reader_b(where_, b);
    for (const auto& tensor : a.tensors()) {
      const auto* other = b.find(tensor.name);
      const auto name = c10::str(kind, " ", tensor.name);
      if (!other) {
        say(name, " is only in the first");
      } else if (tensor.sizes != other->sizes) {
        say(name, " has shape ", to_text(tensor.sizes), " and ", to_text(other->sizes));
      } else if (tensor.dtype != other->dtype) {
        say(name, " has dtype ", dtype_name(tensor.dtype), " and ", dtype_name(other->dtype));
      } else {
        const auto found = compare(tensor, reader_a, *other, reader_b);
        if (found.count == 0) continue;
        say(name, " differs in ", found.count, " of ", elements(tensor), " elements, by at most ",
            shortest(found.largest), ", first at ", position(found.first, tensor.sizes), ": ", found.first_a, " and ",
            found.first_b);
      }
    }
    for (const auto& tensor : b.tensors()) {
      if (!a.find(tensor.name)) say(kind, " ", tensor.name, " is only in the second");
    }
  }

  void scalars(const hsdp::TrainingScalars& a, const hsdp::TrainingScalars& b) {
    const auto first = flattened(a), second = flattened(b);
    for (const auto& [name, value] : first) {
      const auto other = second.find(name);
      if (other == second.end()) {
        say("scalar ", name, " is only in the first: ", value);
      } else if (value != other->second) {
        say("scalar ", name, " is ", value, " and ", other->second);
      }
    }
    for (const auto& [name, value] : second) {
      if (!first.contains(name)) say("scalar ", name, " is only in the second: ", value);
    }
  }

 private:
  /// Each number or text by its path, written so that unlike ones have unlike texts.
  static std::map<std::string, std::string> flattened(const hsdp::TrainingScalars& scalars) {
    std::map<std::string, std::string> texts;
    const auto flat = nlohmann::json::parse(hsdp::to_json(scalars)).flatten();
    for (const auto& [name, value] : flat.items()) {
      texts[name] = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
    return texts;
  }

  template <class... Parts>
  void say(const Parts&... parts) {
    ++differences_;
    out_ << c10::str(parts...) << "\n";
  }

  const char* where_;
  std::ostream& out_;
  int64_t differences_ = 0;
};

}  // namespace

void inspect(const std::string& path, bool tensors, std::ostream& out) {
  const Source source = open("inspect", path, out);
  out << source.path << ": " << (source.manifest ? "a complete checkpoint" : "a whole model") << "\n";
  if (source.manifest) {
    const auto& manifest = *source.manifest;
    const auto& scalars = source.scalars;
    uint64_t bytes = 0;
    for (const auto& file : manifest.files) bytes += file.written.bytes;
    out << "step: " << scalars.progress.step << ", " << scalars.progress.tokens << " tokens, data position "
        << scalars.progress.data_position << "\nwritten by: " << manifest.world_size
        << (manifest.world_size == 1 ? " rank" : " ranks") << " on " << manifest.mesh << ", torch "
        << manifest.torch_version << "\nfiles: " << manifest.files.size() << ", " << in_units(bytes) << "\n";
  }
  out << "model: " << summary(source.model) << "\n";
  if (source.manifest) {
    std::set<std::string> kinds;
    for (const auto& [name, state] : source.scalars.optimizers) kinds.insert(state.kind);
    out << "optimizer: " << (kinds.empty() ? "none" : c10::Join(", ", kinds)) << ", " << summary(source.optimizer)
        << "\n";
    // The rest of the scalars, but for the options of each parameter.
    auto rest = source.scalars;
    rest.optimizers.clear();
    const auto json = nlohmann::json::parse(hsdp::to_json(rest));
    for (const char* key : {"lr_schedulers", "grad_scaler"}) {
      if (json.contains(key) && !json[key].empty()) out << key << ": " << json[key].dump() << "\n";
    }
    for (const auto& [name, value] : json["values"].items()) out << name << ": " << value["value"].dump() << "\n";
  }
  if (!tensors) return;
  list("model tensors", source.model, out);
  if (source.manifest) list("optimizer tensors", source.optimizer, out);
}

void verify(const std::string& path, std::ostream& out) {
  constexpr auto kWhere = "verify";
  const auto found = found_at(path, out);
  const auto manifest = hsdp::read_manifest(kWhere, found);
  hsdp::verify_files(kWhere, found, manifest, /*checksums=*/true);
  const Source source = open_checkpoint(kWhere, found);
  for (const auto& file : rank_files(found, manifest)) StoredTensors::of_file(kWhere, file);
  uint64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.written.bytes;
  out << found << ": complete, and all " << bytes << " bytes of " << manifest.files.size()
      << " files are as they were written: " << source.model.tensors().size() << " tensors of the model, "
      << source.optimizer.tensors().size() << " of the optimizer\n";
}

void consolidate(const std::string& from, const std::string& to, const hsdp::HuggingFaceOptions& options,
                 std::ostream& out) {
  const auto found = found_at(from, out);
  // Refused here while it is incomplete: its files alone could pass for those of a model.
  if (is_checkpoint(found)) hsdp::read_manifest("consolidate", found);
  hsdp::consolidate(found, to, options);
  out << to << ": " << summary(StoredTensors::of_hugging_face("consolidate", to)) << ", from " << found << "\n";
}

bool diff(const std::string& a, const std::string& b, std::ostream& out) {
  constexpr auto kWhere = "diff";
  const Source first = open(kWhere, a, out), second = open(kWhere, b, out);
  Comparison comparison(kWhere, out);
  comparison.tensors("model", first.model, second.model);
  std::string compared = "model";
  if (first.manifest && second.manifest) {
    comparison.tensors("optimizer", first.optimizer, second.optimizer);
    comparison.scalars(first.scalars, second.scalars);
    compared += ", optimizer and scalars";
    const auto files_a = rank_files(first.path, *first.manifest), files_b = rank_files(second.path, *second.manifest);
    if (files_a.size() == files_b.size()) {
      for (size_t rank = 0; rank < files_a.size(); ++rank) {
        comparison.tensors(c10::str("rank ", rank), StoredTensors::of_file(kWhere, files_a[rank]),
                           StoredTensors::of_file(kWhere, files_b[rank]));
      }
      compared += ", and what is each rank's own";
    }
  }
  if (comparison.differences() == 0) {
    out << "equal: " << compared << " of " << first.path << " and " << second.path << "\n";
  } else {
    out << "different: " << comparison.differences() << " lines between " << first.path << " and " << second.path
        << "\n";
  }
  return comparison.differences() == 0;
}

}  // namespace apps

#include "hsdp/checkpoint/hugging_face.h"

#include <ATen/ATen.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/checkpoint/files.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/stored_reader.h"
#include "hsdp/checkpoint/stored_tensors.h"
#include "hsdp/host.h"

namespace hsdp {
namespace {

namespace fs = std::filesystem;
using dtensor::raise;
using dtensor::ValueError;

constexpr auto kConsolidate = "consolidate";
constexpr auto kIndexFile = "model.safetensors.index.json";

uint64_t bytes_of(const HuggingFaceTensor& tensor) {
  return static_cast<uint64_t>(c10::multiply_integers(tensor.sizes)) * c10::elementSize(tensor.dtype);
}

std::vector<SafetensorsEntry> entries_of(const std::vector<HuggingFaceTensor>& tensors,
                                         const std::vector<size_t>& indices) {
  std::vector<SafetensorsEntry> entries;
  for (const auto index : indices) {
    const auto& tensor = tensors[index];
    entries.push_back({tensor.name, tensor.dtype, tensor.sizes, std::vector<int64_t>(tensor.sizes.size(), 0), 0, 0});
  }
  return entries;
}

std::string file_name(size_t file, size_t files) {
  if (files == 1) return "model.safetensors";
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", file + 1, files);
  return name.data();
}

}  // namespace

c10::ScalarType exported_dtype(c10::ScalarType dtype, const HuggingFaceOptions& options) {
  if (options.dtype && !c10::isFloatingType(*options.dtype)) {
    raise<ValueError>("HuggingFaceOptions", "dtype ", *options.dtype, ", expected one of floating-point numbers");
  }
  return c10::isFloatingType(dtype) ? options.dtype.value_or(dtype) : dtype;
}

std::vector<std::vector<size_t>> plan_hugging_face(const char* where, const std::vector<HuggingFaceTensor>& tensors,
                                                   uint64_t max_file_bytes) {
  if (max_file_bytes == 0) raise<ValueError>(where, "max_file_bytes 0, expected a positive number");
  std::set<std::string> names;
  for (const auto& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      raise<ValueError>(where, "two tensors are named \"", tensor.name, "\", expected names of their own");
    }
  }
  std::vector<std::vector<size_t>> files(1);
  uint64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (bytes + bytes_of(tensors[i]) > max_file_bytes && !files.back().empty()) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(i);
    bytes += bytes_of(tensors[i]);
  }
  for (auto& file : files) {
    auto entries = entries_of(tensors, file);
    std::map<std::string, size_t> places;
    for (const auto index : file) places[tensors[index].name] = index;
    layout_safetensors(where, entries, /*sharded=*/false);
    for (size_t i = 0; i < file.size(); ++i) file[i] = places[entries[i].name];
  }
  return files;
}

struct HuggingFaceWriter::State {
  const char* where;
  std::string folder;
  std::vector<HuggingFaceTensor> tensors;
  std::vector<std::vector<size_t>> plan;
  size_t file = 0, in_file = 0;  // the next tensor
  std::unique_ptr<FileWriter> writer;
  std::vector<std::string> written;
  bool complete = false;

  ~State() {
    std::error_code ignored;
    if (complete) return;
    for (const auto& path : written) fs::remove(path, ignored);
  }
  void open() {
    const auto path = (fs::path(folder) / file_name(file, plan.size())).string();
    auto entries = entries_of(tensors, plan[file]);
    const auto header = layout_safetensors(where, entries, /*sharded=*/false);
    writer = std::make_unique<FileWriter>(where, path);
    writer->write(header.data(), header.size());
  }
  void close() {
    writer->complete();
    writer.reset();
    written.push_back((fs::path(folder) / file_name(file, plan.size())).string());
  }
};

HuggingFaceWriter::HuggingFaceWriter(const char* where, std::string folder, std::vector<HuggingFaceTensor> tensors,
                                     uint64_t max_file_bytes)
    : state_(std::make_unique<State>()) {
  state_->where = where;
  state_->folder = std::move(folder);
  state_->tensors = std::move(tensors);
  state_->plan = plan_hugging_face(where, state_->tensors, max_file_bytes);
  make_folders(where, state_->folder);
  for (const auto& entry : fs::directory_iterator(state_->folder)) {
    if (entry.path().extension() != ".safetensors" && entry.path().filename() != kIndexFile) continue;
    raise<ValueError>(where, state_->folder, " has ", entry.path().filename().string(),
                      ", expected no model files; choose another folder");
  }
  state_->open();
}

HuggingFaceWriter::~HuggingFaceWriter() = default;

void HuggingFaceWriter::write(const void* bytes, size_t count) {
  auto& state = *state_;
  TORCH_INTERNAL_ASSERT(state.file < state.plan.size() && state.in_file < state.plan[state.file].size());
  TORCH_INTERNAL_ASSERT(count == bytes_of(state.tensors[state.plan[state.file][state.in_file]]));
  state.writer->write(bytes, count);
  if (++state.in_file < state.plan[state.file].size()) return;
  state.close();
  state.in_file = 0;
  if (++state.file < state.plan.size()) state.open();
}

void HuggingFaceWriter::complete() {
  auto& state = *state_;
  if (state.tensors.empty()) state.close();  // A file without tensors is a file.
  if (state.plan.size() > 1) {
    uint64_t total = 0;
    nlohmann::json places = nlohmann::json::object();
    for (size_t file = 0; file < state.plan.size(); ++file) {
      for (const auto index : state.plan[file]) {
        places[state.tensors[index].name] = file_name(file, state.plan.size());
        total += bytes_of(state.tensors[index]);
      }
    }
    const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(places)}};
    const auto text = index.dump(2) + "\n";
    FileWriter file(state.where, (fs::path(state.folder) / kIndexFile).string());
    file.write(text.data(), text.size());
    file.complete();
  }
  state.complete = true;
}

void consolidate(const std::string& from, const std::string& to, const HuggingFaceOptions& options) {
  const bool is_checkpoint = fs::exists(fs::path(from) / kManifestFile);
  const auto stored = is_checkpoint
                          ? StoredTensors::of_checkpoint(kConsolidate, from, read_manifest(kConsolidate, from),
                                                         StoredTensors::Kind::model)
                          : StoredTensors::of_hugging_face(kConsolidate, from);
  std::vector<HuggingFaceTensor> tensors;
  for (const auto& tensor : stored.tensors()) {
    tensors.push_back({tensor.name, exported_dtype(tensor.dtype, options), tensor.sizes});
  }
  StoredReader reader(kConsolidate, stored);
  HuggingFaceWriter writer(kConsolidate, to, tensors, options.max_file_bytes);
  for (const auto& file : plan_hugging_face(kConsolidate, tensors, options.max_file_bytes)) {
    for (const auto index : file) {
      const auto& tensor = stored.tensors()[index];
      auto values = at::empty(tensor.sizes, at::TensorOptions(kHost).dtype(tensor.dtype));
      reader.read(tensor, {std::vector<int64_t>(tensor.sizes.size(), 0), tensor.sizes}, values.mutable_data_ptr());
      values = values.to(tensors[index].dtype);
      writer.write(values.const_data_ptr(), values.nbytes());
    }
  }
  writer.complete();
}

}  // namespace hsdp

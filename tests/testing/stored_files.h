#pragma once

#include <c10/core/ScalarType.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dtensor/layout.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/safetensors.h"
#include "hsdp/checkpoint/stored_reader.h"
#include "hsdp/checkpoint/stored_tensors.h"
#include "tests/testing/scratch_folder.h"

/// Safetensors files written by hand, for the tests of what reads them. The bytes of an element follow from its index
/// in the whole tensor.
namespace testing_support {

/// A box of a tensor, to be written.
struct FilePart {
  std::string name;
  c10::ScalarType dtype;
  dtensor::Box box;
};

inline dtensor::Box whole_box(const std::vector<int64_t>& sizes) {
  return {std::vector<int64_t>(sizes.size(), 0), sizes};
}
inline FilePart whole_part(const std::string& name, c10::ScalarType dtype, const std::vector<int64_t>& sizes) {
  return {name, dtype, whole_box(sizes)};
}

/// In row-major order, with the index in the whole tensor.
template <class Visit>
void for_each_element(const dtensor::Box& box, const Visit& visit) {
  for (const auto size : box.sizes) {
    if (size == 0) return;
  }
  for (auto index = box.offsets;;) {
    visit(index);
    auto dim = box.sizes.size();
    while (dim > 0 && ++index[dim - 1] == box.offsets[dim - 1] + box.sizes[dim - 1]) {
      index[dim - 1] = box.offsets[dim - 1];
      --dim;
    }
    if (dim == 0) return;
  }
}

inline uint64_t element_at(const std::vector<int64_t>& index) {
  uint64_t value = 0x243f6a8885a308d3u;
  for (const auto i : index) {
    value = (value ^ static_cast<uint64_t>(i)) * 0xbf58476d1ce4e5b9u;
    value ^= value >> 29;
  }
  return value;
}

inline std::string bytes_of_box(c10::ScalarType dtype, const dtensor::Box& box) {
  const auto size = c10::elementSize(dtype);
  std::string bytes(static_cast<size_t>(c10::multiply_integers(box.sizes)) * size, '\0');
  auto* at = bytes.data();
  for_each_element(box, [&](const std::vector<int64_t>& index) {
    const auto value = element_at(index);
    std::memcpy(at, &value, size);
    at += size;
  });
  return bytes;
}

/// A file of these parts, in this order.
inline std::string safetensors_bytes(const std::vector<FilePart>& parts, bool sharded) {
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  nlohmann::ordered_json offsets = nlohmann::ordered_json::object();
  std::string values;
  for (const auto& part : parts) {
    const auto begin = values.size();
    values += bytes_of_box(part.dtype, part.box);
    header[part.name] = {{"dtype", hsdp::safetensors_name(part.dtype)},
                         {"shape", part.box.sizes},
                         {"data_offsets", {begin, values.size()}}};
    offsets[part.name] = {{"saved_offsets", part.box.offsets}};
  }
  if (sharded) {
    header["__metadata__"]["DCP_VERSION"] = "1.0";
    header["__metadata__"]["DCP_SHARDING_INFO"] = offsets.dump();
  }
  const auto text = header.dump();
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(text.size() >> (8 * i) & 0xff);
  return bytes + text + values;
}

/// Where the values of a file begin.
inline uint64_t values_begin(const std::string& path) {
  uint64_t length = 0;
  std::memcpy(&length, read_bytes(path).data(), sizeof(length));
  return sizeof(length) + length;
}

inline void flip_byte(const std::string& path, uint64_t at) {
  auto bytes = read_bytes(path);
  bytes.at(at) = static_cast<char>(bytes.at(at) ^ 1);
  write_bytes(path, bytes);
}

/// All tensors of a file or a folder of Hugging Face's layout, by name.
inline std::map<std::string, torch::Tensor> values_in(const std::string& path) {
  const auto stored = hsdp::StoredTensors::of_hugging_face("test", path);
  hsdp::StoredReader reader("test", stored);
  std::map<std::string, torch::Tensor> values;
  for (const auto& tensor : stored.tensors()) {
    values[tensor.name] = torch::empty(tensor.sizes, tensor.dtype);
    reader.read(tensor, whole_box(tensor.sizes), values[tensor.name].mutable_data_ptr());
  }
  return values;
}

/// Shards of a checkpoint below a folder, and its manifest, which is not written.
class HandMadeCheckpoint {
 public:
  explicit HandMadeCheckpoint(const ScratchFolder& folder) : folder_(folder) {}

  /// A file `shard-NNNNN-model-00001-of-00001.safetensors`, and in the manifest.
  std::string add(const std::vector<FilePart>& parts) {
    const auto number = std::to_string(manifest.files.size() + 1);
    const auto name = "shard-" + std::string(5 - number.size(), '0') + number + "-model-00001-of-00001.safetensors";
    write_bytes(folder_ / name, safetensors_bytes(parts, /*sharded=*/true));
    manifest.files.push_back({name, hsdp::measure(hsdp::ReadableFile("test", folder_ / name))});
    return folder_ / name;
  }
  void fact(const std::string& name, c10::ScalarType dtype, const std::vector<int64_t>& sizes) {
    manifest.model[name] = {dtype, sizes};
  }

  hsdp::Manifest manifest;

 private:
  const ScratchFolder& folder_;
};

}  // namespace testing_support

#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace caffe2::serialize {
class PyTorchStreamReader;
}

namespace hsdp {

/// A tensor in a file of PyTorch's zip format: what its pickle says of it.
struct TensorRecord {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  int64_t storage_offset;
  /// Which entry below `data/` holds its storage, and how much; empty for a tensor without elements. Tensors may share
  /// one.
  std::string record;
  size_t storage_bytes;
};

/// The tensors of a pickle `data.pkl`, by name: those of nested archives, modules and dicts are joined with dots; what
/// is no tensor is passed over. `label` names the file in messages. Throws ValueError, and NotSupportedError for sparse
/// and quantized tensors.
std::vector<TensorRecord> list_tensors(const std::string& pickle, const std::string& label);

/// A file of named tensors, as written by torch::save(module, path), by Python's torch.save(state_dict) and by
/// torch.jit.save. Opening it reads names and shapes only. One thread at a time.
class WeightsFile {
 public:
  /// Throws ValueError naming the path for what cannot be opened, is no such file, lacks values that it lists, or lists
  /// tensors that reach beyond theirs.
  explicit WeightsFile(const std::string& path);
  ~WeightsFile();
  WeightsFile(const WeightsFile&) = delete;
  WeightsFile& operator=(const WeightsFile&) = delete;

  const std::vector<TensorRecord>& tensors() const { return tensors_; }
  /// The values, on the host. Only the record that was read last is kept in memory. Throws ValueError where it is
  /// damaged or the disk fails.
  at::Tensor read(const TensorRecord& tensor);

 private:
  void check(const TensorRecord& tensor);
  [[noreturn]] void refuse(const TensorRecord& tensor, const std::string& reason) const;

  std::string path_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
  std::vector<TensorRecord> tensors_;
  std::string last_record_;
  at::Tensor last_bytes_;
};

}  // namespace hsdp

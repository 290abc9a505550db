// The file of torch::save(module, path), written without ever holding the module: libtorch writes an archive of tensors
// that have no memory, and its records are copied around values that are gathered one after another.
#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/nn/module.h>
#include <torch/serialize/output-archive.h>

#include <exception>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/agreement.h"
#include "hsdp/checkpoint/files.h"
#include "hsdp/host.h"
#include "hsdp/python_pickle.h"
#include "hsdp/registered_tensors.h"
#include "hsdp/weights.h"
#include "hsdp/weights_file.h"

namespace hsdp {
namespace {

using dtensor::raise;

constexpr auto kWhere = "export_pt";

// The file that the zip writer writes to. A failure is remembered, and the rest taken without writing: the zip writer
// ends the process where it cannot finish.
class ArchiveFile {
 public:
  explicit ArchiveFile(const std::string& path) : file_(kWhere, path) {}

  size_t write(const void* data, size_t size) {
    try {
      if (!failure_) file_.write(data, size);
    } catch (...) {
      failure_ = std::current_exception();
    }
    return size;
  }
  void check() const {
    if (failure_) std::rethrow_exception(failure_);
  }
  void complete() {
    check();
    file_.complete();
  }

 private:
  FileWriter file_;
  std::exception_ptr failure_;
};

// Placeholders that libtorch writes as records of no bytes, on a device that no real name can be mistaken for.
constexpr auto kPlaceholderDevice = "meta:77";

at::Tensor placeholder(const at::Tensor& tensor) {
  const auto bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  const at::Device device(kPlaceholderDevice);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(nullptr, device), nullptr, false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_contiguous(tensor.sizes());
  return result;
}

using Placeholders = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

// What Module::save does, tied tensors as one.
void write_skeleton(const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
                    Placeholders& placeholders) {
  const auto write = [&](const std::string& name, const at::Tensor& tensor, bool is_buffer) {
    auto& entry = placeholders[tensor.unsafeGetTensorImpl()];
    if (!entry.defined()) entry = placeholder(tensor);
    archive.write(name, entry, is_buffer);
  };
  for (auto& entry : module.named_parameters(/*recurse=*/false)) write(entry.key(), entry.value(), false);
  for (auto& entry : module.named_buffers(/*recurse=*/false)) write(entry.key(), entry.value(), true);
  for (auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    write_skeleton(*child.value(), nested, placeholders);
    archive.write(child.key(), nested);
  }
}

// Rank 0's side.
class Export {
 public:
  Export(const torch::nn::Module& module, const std::string& path) : file_(path) {
    std::stringstream skeleton;
    {
      torch::serialize::OutputArchive archive(std::make_shared<torch::jit::CompilationUnit>());
      Placeholders placeholders;
      write_skeleton(module, archive, placeholders);
      archive.save_to(skeleton);
    }
    caffe2::serialize::PyTorchStreamReader reader(&skeleton);
    writer_.emplace([this](const void* data, size_t size) { return file_.write(data, size); });
    for (auto& name : reader.getAllRecords()) {
      // The last are the writer's own.
      if (name.starts_with("data/") || name == caffe2::serialize::kSerializationIdRecordName) continue;
      auto [bytes, size] = reader.getRecord(name);
      std::string text(static_cast<const char*>(bytes.get()), size);
      if (name == "version") {
        writer_->setMinVersion(std::stoull(text));
        continue;
      }
      if (name == "data.pkl") {
        text = with_string_replaced(text, kPlaceholderDevice, at::Device(kHost).str());
        for (auto& tensor : list_tensors(text, path)) records_[tensor.name] = tensor.record;
      }
      writer_->writeRecord(name, text.data(), text.size());
    }
    file_.check();
  }

  void write(const RegisteredTensor& target, const at::Tensor& whole) {
    // Of tied parameters some names may lie below children that are passed over.
    auto record = records_.end();
    for (auto& name : target.names) {
      if (record == records_.end()) record = records_.find(name);
    }
    TORCH_INTERNAL_ASSERT(record != records_.end(), "no record for ", target.names.front());
    if (record->second.empty()) return;
    const auto values = whole.detach().to(kHost).resolve_conj().resolve_neg().contiguous();
    writer_->writeRecord("data/" + record->second, values.const_data_ptr(), values.nbytes());
    file_.check();
  }
  void complete() {
    writer_->writeEndOfFile();
    file_.complete();
  }

 private:
  ArchiveFile file_;
  std::unordered_map<std::string, std::string> records_;
  std::optional<caffe2::serialize::PyTorchStreamWriter> writer_;
};

}  // namespace

void export_pt(const std::shared_ptr<ShardedModule>& sharded, const std::string& path) {
  const auto& mesh = mesh_of(*sharded, kWhere);
  const auto device = device_of(*sharded);
  sharded->scheduler()->compare_writes(mesh);
  std::optional<Export> out;
  agree(mesh, device, kWhere, [&] {
    check_values(kWhere, *sharded);
    if (mesh.rank() == 0) out.emplace(sharded->module(), path);
  });
  // After a failure the others still gather: rank 0 goes along.
  std::exception_ptr failure;
  for (auto& target : registered_tensors(*sharded)) {
    if (!target.in_files) continue;
    const auto whole = whole_for_rank_0(target);
    if (!out || failure) continue;
    try {
      out->write(target, whole);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  agree(mesh, device, kWhere, [&] {
    try {
      if (failure) std::rethrow_exception(failure);
      if (out) out->complete();
    } catch (...) {
      out.reset();  // Its temporary file is gone before the others go on.
      throw;
    }
  });
}

}  // namespace hsdp

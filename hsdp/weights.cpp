#include "hsdp/weights.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/collective.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/agreement.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/model_loading.h"
#include "hsdp/checkpoint/stored_tensors.h"
#include "hsdp/checkpoint/target_folder.h"
#include "hsdp/checkpoint/tensor_loading.h"
#include "hsdp/registered_tensors.h"
#include "hsdp/weights_file.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;

bool on_meta(const RegisteredTensor& target) {
  return target.parameter != nullptr ? !target.parameter->is_materialized()
                                     : dtensor::dtensor_impl(target.tensor) != nullptr;
}

void broadcast_from_rank_0(const dtensor::DeviceMesh& mesh, const at::Tensor& tensor, const std::string& subject) {
  dtensor::CollectiveGuard guard;
  dtensor::broadcast(mesh, tensor.view({-1}).view(at::kByte), 0, {"broadcast", subject});
}

}  // namespace

void copy_values(const std::shared_ptr<ShardedModule>& sharded, const torch::nn::Module& plain) {
  constexpr auto kWhere = "copy_values";
  sharded->scheduler()->check_not_summoned(kWhere);
  const auto targets = registered_tensors(*sharded);
  for (auto& target : targets) {
    if (!on_meta(target)) continue;
    raise<StateError>(kWhere, "tensor \"", target.names.front(),
                      "\" is on meta, expected memory; call to_empty(device) or materialize(device) first");
  }
  std::vector<ValueSource> sources;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (dtensor::dtensor_impl(tensor) != nullptr) {
      raise<ValueError>(kWhere, "tensor \"", name, "\" of the source is ", dtensor::describe(tensor),
                        ", expected a plain one; between two sharded modules copy_ each parameter");
    }
    sources.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), [tensor] { return tensor.detach(); }});
  };
  for (auto& entry : plain.named_parameters()) add(entry.key(), entry.value());
  for (auto& entry : plain.named_buffers()) add(entry.key(), entry.value());
  const auto plan = match_sources(kWhere, "the source", targets, sources);
  for (size_t i = 0; i < targets.size(); ++i) set_value(targets[i], sources[plan[i].value()].read());
}

namespace {

constexpr auto kLoad = "load";

enum class Format : int64_t { archive, safetensors, checkpoint };

// An archive is a zip file.
Format format_of(const std::string& path) {
  std::error_code ignored;  // reading says what is wrong
  if (std::filesystem::is_directory(path, ignored)) {
    const bool is_checkpoint = std::filesystem::exists(std::filesystem::path(path) / kManifestFile, ignored);
    return is_checkpoint ? Format::checkpoint : Format::safetensors;
  }
  return path.ends_with(".safetensors") ? Format::safetensors : Format::archive;
}

// Rank 0 reads whole tensors, one after another.
void load_archive(const std::shared_ptr<ShardedModule>& sharded, const std::string& path) {
  const auto& mesh = *sharded->mesh();
  const auto device = device_of(*sharded);
  const auto targets = registered_tensors(*sharded);
  std::optional<WeightsFile> file;
  std::vector<const TensorRecord*> records(targets.size());  // rank 0's; null: keeps its value
  constexpr int64_t kNotInFile = -1;
  auto dtypes = at::full({static_cast<int64_t>(targets.size())}, kNotInFile, at::kLong);
  agree(mesh, device, kLoad, [&] {
    if (mesh.rank() != 0) return;
    file.emplace(path);
    std::vector<ValueSource> sources;
    for (auto& tensor : file->tensors()) {
      sources.push_back({tensor.name, tensor.dtype, tensor.sizes, [&] { return file->read(tensor); }});
    }
    const auto plan = match_sources(kLoad, path, targets, sources, {.unsaved_may_be_missing = true});
    for (size_t i = 0; i < plan.size(); ++i) {
      if (!plan[i]) continue;
      records[i] = &file->tensors()[*plan[i]];
      dtypes[static_cast<int64_t>(i)] = static_cast<int64_t>(records[i]->dtype);
    }
  });
  auto shared_dtypes = dtypes.to(device);
  broadcast_from_rank_0(mesh, shared_dtypes, kLoad);
  dtypes = shared_dtypes.to(dtypes.device());
  if (std::any_of(targets.begin(), targets.end(), on_meta)) {
    agree(mesh, device, kLoad, [&] { sharded->to_empty(device); });
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto dtype = dtypes[static_cast<int64_t>(i)].item<int64_t>();
    if (dtype == kNotInFile) continue;
    at::Tensor whole;
    agree(mesh, device, kLoad, [&] {
      const auto options = at::TensorOptions(device).dtype(static_cast<at::ScalarType>(dtype));
      whole = file ? file->read(*records[i]).to(device).contiguous() : at::empty(targets[i].tensor.sizes(), options);
    });
    broadcast_from_rank_0(mesh, whole, targets[i].names.front());
    set_value(targets[i], whole);
  }
}

// Each rank reads its boxes.
void load_stored(const std::shared_ptr<ShardedModule>& sharded, const std::string& path, Format format) {
  const auto& mesh = *sharded->mesh();
  const auto device = device_of(*sharded);
  std::string bytes;
  agree(mesh, device, kLoad, [&] {
    if (mesh.rank() != 0) return;
    const auto open = [&] {
      if (format == Format::safetensors) return StoredTensors::of_hugging_face(kLoad, path);
      return StoredTensors::of_checkpoint(kLoad, path, read_manifest(kLoad, path), StoredTensors::Kind::model);
    };
    with_paths(kLoad, [&] { bytes = open().serialize(); });
  });
  const auto stored = StoredTensors::deserialize(broadcast_text(mesh, device, kLoad, bytes, 0));
  const auto targets = registered_tensors(*sharded);
  LoadReport report;
  std::optional<ModelLoading> model;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  TensorLoading values(kLoad, stored, mesh);
  agree(mesh, device, kLoad, [&] {
    model.emplace(kLoad, path, *sharded, targets, stored, ModelLoading::Options{.convert_dtypes = true}, report);
  });
  agree(mesh, device, kLoad, [&] { model->allocate(device, values); });
  {
    c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
    agree(mesh, device, kLoad, [&] { values.read(); });
    values.send();
  }
  model->commit({});
}

}  // namespace

void load(const std::shared_ptr<ShardedModule>& sharded, const std::string& path) {
  const auto& mesh = mesh_of(*sharded, kLoad);
  const auto device = device_of(*sharded);
  auto format = at::zeros({1}, at::TensorOptions(device).dtype(at::kLong));
  agree(mesh, device, kLoad, [&] {
    sharded->scheduler()->check_not_summoned(kLoad);
    if (mesh.rank() == 0) format.fill_(static_cast<int64_t>(format_of(path)));
  });
  dtensor::broadcast(mesh, format, 0, {"broadcast", kLoad});
  switch (const auto found = static_cast<Format>(format.item<int64_t>())) {
    case Format::archive:
      load_archive(sharded, path);
      break;
    case Format::safetensors:
    case Format::checkpoint:
      load_stored(sharded, path, found);
      break;
  }
  sharded->replay_missing();
}

namespace detail {

void refuse_torch_save() {
  raise<dtensor::NotSupportedError>("torch::save",
                                    "of a sharded model, expected a plain module; hsdp::export_pt(model, path) writes "
                                    "a file that torch::load(module, path) opens");
}

void refuse_torch_load() {
  raise<dtensor::NotSupportedError>("torch::load",
                                    "into a sharded model, expected a plain module; hsdp::load(model, path) reads a "
                                    "file of torch::save(module, path)");
}

}  // namespace detail
}  // namespace hsdp

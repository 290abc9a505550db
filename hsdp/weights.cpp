#include "hsdp/weights.h"

#include <ATen/ATen.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dtensor/collective.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/agreement.h"
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
  for (size_t i = 0; i < targets.size(); ++i) set_value(targets[i], sources[plan[i]].read());
}

void load(const std::shared_ptr<ShardedModule>& sharded, const std::string& path) {
  constexpr auto kWhere = "load";
  const auto& mesh = mesh_of(*sharded, kWhere);
  const auto device = device_of(*sharded);
  const auto targets = registered_tensors(*sharded);
  std::optional<WeightsFile> file;
  std::vector<const TensorRecord*> records(targets.size());  // rank 0's; null: keeps its value
  constexpr int64_t kNotInFile = -1;
  auto dtypes = at::full({static_cast<int64_t>(targets.size())}, kNotInFile, at::kLong);
  agree(mesh, device, kWhere, [&] {
    sharded->scheduler()->check_not_summoned(kWhere);
    if (mesh.rank() != 0) return;
    file.emplace(path);
    std::vector<ValueSource> sources;
    std::set<std::string> names;
    for (auto& tensor : file->tensors()) {
      sources.push_back({tensor.name, tensor.dtype, tensor.sizes, [&] { return file->read(tensor); }});
      names.insert(tensor.name);
    }
    std::vector<RegisteredTensor> wanted;
    std::vector<size_t> places;
    for (size_t i = 0; i < targets.size(); ++i) {
      const auto in_file = [&](const std::string& name) { return names.contains(name); };
      if (!targets[i].in_files && std::none_of(targets[i].names.begin(), targets[i].names.end(), in_file)) continue;
      wanted.push_back(targets[i]);
      places.push_back(i);
    }
    const auto plan = match_sources(kWhere, path, wanted, sources);
    for (size_t i = 0; i < plan.size(); ++i) {
      records[places[i]] = &file->tensors()[plan[i]];
      dtypes[static_cast<int64_t>(places[i])] = static_cast<int64_t>(records[places[i]]->dtype);
    }
  });
  auto shared_dtypes = dtypes.to(device);
  broadcast_from_rank_0(mesh, shared_dtypes, kWhere);
  dtypes = shared_dtypes.to(dtypes.device());
  if (std::any_of(targets.begin(), targets.end(), on_meta)) {
    agree(mesh, device, kWhere, [&] { sharded->to_empty(device); });
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto dtype = dtypes[static_cast<int64_t>(i)].item<int64_t>();
    if (dtype == kNotInFile) continue;
    at::Tensor whole;
    agree(mesh, device, kWhere, [&] {
      const auto options = at::TensorOptions(device).dtype(static_cast<at::ScalarType>(dtype));
      whole = file ? file->read(*records[i]).to(device).contiguous() : at::empty(targets[i].tensor.sizes(), options);
    });
    broadcast_from_rank_0(mesh, whole, targets[i].names.front());
    set_value(targets[i], whole);
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

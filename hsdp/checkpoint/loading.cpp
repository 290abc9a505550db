// Rank 0 opens a checkpoint and tells the others what is where; each then reads its own boxes into memory of their own,
// and nothing that the program has changes before all ranks have all values.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/agreement.h"
#include "hsdp/checkpoint/checkpoint.h"
#include "hsdp/checkpoint/checkpointed_tensors.h"
#include "hsdp/checkpoint/folder_names.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/model_loading.h"
#include "hsdp/checkpoint/stored_bytes.h"
#include "hsdp/checkpoint/stored_tensors.h"
#include "hsdp/checkpoint/tensor_loading.h"
#include "hsdp/checkpoint/training_state_json.h"
#include "hsdp/host.h"
#include "hsdp/rank_generators.h"
#include "hsdp/registered_tensors.h"

namespace hsdp {
namespace {

namespace fs = std::filesystem;
using dtensor::raise;
using dtensor::ValueError;

constexpr auto kWhere = "load";
constexpr size_t kMostScalarBytes = 1'000'000'000;

// What rank 0 found in the folder.
struct OpenCheckpoint {
  std::string path;
  int64_t world_size = 1;
  StoredTensors model, optimizer;
  std::vector<StoredFile> rank_files;  // those that are there, in the order of the ranks
  TrainingScalars scalars;
};

std::string open(const std::string& path) {
  const auto manifest = read_manifest(kWhere, path);
  verify_files(kWhere, path, manifest, /*checksums=*/false);
  BytesWriter out;
  out.number(static_cast<uint64_t>(manifest.world_size));
  out.text(StoredTensors::of_checkpoint(kWhere, path, manifest, StoredTensors::Kind::model).serialize());
  out.text(StoredTensors::of_checkpoint(kWhere, path, manifest, StoredTensors::Kind::optimizer).serialize());
  std::map<std::string, const FileRecord*> records;
  for (const auto& file : manifest.files) records[file.path] = &file;
  const auto record_of = [&](const std::string& name) -> const FileRecord& {
    const auto record = records.find(name);
    if (record != records.end()) return *record->second;
    raise<ValueError>(kWhere, (fs::path(path) / kManifestFile).string(), " does not list ", name,
                      ", expected it in every checkpoint; the folder was put together by other means");
  };
  out.number(static_cast<uint64_t>(manifest.world_size));
  for (int64_t rank = 0; rank < manifest.world_size; ++rank) {
    const auto& record = record_of((fs::path(kRanksFolder) / numbered("rank", rank, ".safetensors")).string());
    out.text((fs::path(path) / record.path).string());
    out.number(record.written.bytes);
    out.numbers(record.written.block_checksums);
  }
  const auto& scalars = record_of(kTrainingStateFile);
  const auto scalars_path = (fs::path(path) / scalars.path).string();
  const auto text = read_text(kWhere, scalars_path, kMostScalarBytes);
  if (const auto found = checksum(text.data(), text.size()); found != scalars.written.checksum) {
    raise<ValueError>(kWhere, scalars_path, " has checksum ", to_hex(found), ", expected ",
                      to_hex(scalars.written.checksum), "; the file is damaged: load another checkpoint");
  }
  out.text(scalars_path);
  out.text(text);
  return out.take();
}

OpenCheckpoint receive(const std::string& bytes) {
  BytesReader in(bytes);
  OpenCheckpoint result;
  result.world_size = static_cast<int64_t>(in.number());
  result.model = StoredTensors::deserialize(in.text());
  result.optimizer = StoredTensors::deserialize(in.text());
  for (auto files = in.number(); files > 0; --files) {
    StoredFile file;
    file.path = in.text();
    file.bytes = in.number();
    file.block_checksums = in.numbers<uint64_t>();
    result.rank_files.push_back(std::move(file));
  }
  const auto scalars_path = in.text();
  result.scalars = parse_training_scalars(kWhere, in.text(), scalars_path);
  return result;
}

// The optimizers' tensors to be: made like the parameters, so that they are sharded as they are.
class OptimizerLoading {
 public:
  OptimizerLoading(const OpenCheckpoint& checkpoint, const TrainingState& state, const ParameterNames& names,
                   const LoadOptions& options, LoadReport& report) {
    std::set<std::string> wanted;
    std::vector<std::string> missing, unexpected;
    for (const auto* optimizer : state.optimizers) {
      for (const auto& group : optimizer->param_groups()) {
        for (const auto& parameter : group.params()) {
          const auto name = names.find(parameter.unsafeGetTensorImpl());
          // prepare_optimizer_states refuses one without a name. Tied ones may be there twice.
          if (name == names.end() || !wanted.insert(name->second).second) continue;
          const auto entry = checkpoint.scalars.optimizers.find(name->second);
          if (entry == checkpoint.scalars.optimizers.end()) {
            missing.push_back(optimizer_key(name->second, "*"));
            continue;
          }
          states_[name->second] = entry->second;
          for (auto& [key, tensor] : entry->second.tensors) {
            const auto* stored = checkpoint.optimizer.find(optimizer_key(name->second, key));
            if (stored == nullptr) {
              raise<ValueError>(kWhere, "the checkpoint has no tensor \"", optimizer_key(name->second, key),
                                "\", which its ", kTrainingStateFile, " lists; the folder is damaged");
            }
            check_fits(checkpoint.path, *stored, parameter);
            // State that was kept in the parameter's dtype follows it.
            const auto* values = checkpoint.model.find(name->second);
            const bool follows = options.convert_dtypes && values != nullptr && values->dtype == stored->dtype;
            parts_.push_back({name->second, key, parameter, stored, follows ? parameter.scalar_type() : stored->dtype});
          }
        }
      }
    }
    for (const auto& [name, entry] : checkpoint.scalars.optimizers) {
      if (!wanted.contains(name)) unexpected.push_back(optimizer_key(name, "*"));
    }
    refuse_unless_listed(kWhere, checkpoint.path + "'s optimizer state", missing, unexpected, options.strict, report);
  }

  // Once the parameters have memory.
  void allocate(TensorLoading& loading) {
    for (const auto& part : parts_) {
      auto* impl = dtensor::distributed_impl(part.parameter);
      const auto device = impl != nullptr ? impl->local().device() : part.parameter.device();
      const auto& sizes = impl != nullptr ? impl->layout()->local().sizes : part.stored->sizes;
      auto local = at::empty(sizes, at::TensorOptions(device).dtype(part.dtype));
      const auto tensor = impl != nullptr ? dtensor::wrap_local(local, *impl) : local;
      auto target = checkpointed(kWhere, part.stored->name, tensor);
      target.local = local;
      loading.add(std::move(target), *part.stored);
      states_[part.name].tensors[part.key] = tensor;
    }
  }

  /// Takes this rank's own values of tensors that are not sharded.
  void commit(const std::map<std::string, at::Tensor>& own) {
    for (const auto& part : parts_) {
      const auto mine = own.find(part.stored->name);
      if (mine != own.end()) states_[part.name].tensors[part.key].copy_(mine->second);
    }
  }

  const OptimizerStates& states() const { return states_; }

 private:
  struct Part {
    std::string name, key;
    at::Tensor parameter;
    const StoredTensor* stored;
    at::ScalarType dtype;
  };

  // All tensors of all kinds have the shape of their parameter; their dtype may be one of higher precision.
  static void check_fits(const std::string& path, const StoredTensor& stored, const at::Tensor& parameter) {
    const auto refuse = [&](const char* what, const auto& found, const auto& expected) {
      raise<ValueError>(kWhere, path, "'s optimizer state does not fit: \"", stored.name, "\" of ", what, " ", found,
                        ", expected ", expected, " as its parameter");
    };
    if (!parameter.sizes().equals(stored.sizes)) refuse("shape", c10::IntArrayRef(stored.sizes), parameter.sizes());
    const auto dtype = parameter.scalar_type();
    if (c10::isComplexType(stored.dtype) == c10::isComplexType(dtype) &&
        c10::isFloatingType(stored.dtype) == c10::isFloatingType(dtype)) {
      return;
    }
    refuse("dtype", stored.dtype, dtype);
  }

  std::vector<Part> parts_;
  OptimizerStates states_;
};

// This rank's generators, and its values of tensors that are not sharded, where it had its own.
class OwnState {
 public:
  void read(const OpenCheckpoint& checkpoint, const dtensor::DeviceMesh& mesh) {
    same_ranks_ = checkpoint.world_size == mesh.size();
    rank_ = mesh.rank();
    const auto file = checkpoint.rank_files.at(same_ranks_ ? static_cast<size_t>(rank_) : 0);
    const auto stored = StoredTensors::of_file(kWhere, file);
    StoredReader reader(kWhere, stored);
    for (const auto& tensor : stored.tensors()) {
      auto values = at::empty(tensor.sizes, at::TensorOptions(kHost).dtype(tensor.dtype));
      const std::vector<int64_t> origin(tensor.sizes.size(), 0);
      reader.read(tensor, {origin, tensor.sizes}, values.mutable_data_ptr());
      if (tensor.name.starts_with(kGeneratorPrefix)) {
        generators_.emplace_back(tensor.name.substr(std::string(kGeneratorPrefix).size()), values);
        continue;
      }
      if (tensor.name == kGeneratorsSettled && values.numel() == 1) {
        generators_settled_ = values.item().toBool();
        continue;
      }
      const bool is_own = tensor.name.starts_with(kOwnTensorPrefix);
      const auto name = is_own ? tensor.name.substr(std::string(kOwnTensorPrefix).size()) : tensor.name;
      const auto* of_all = is_own ? checkpoint.model.find(name) : nullptr;
      if (is_own && of_all == nullptr) of_all = checkpoint.optimizer.find(name);
      if (of_all == nullptr || of_all->sizes != tensor.sizes || of_all->dtype != tensor.dtype) {
        raise<ValueError>(kWhere, file.path, ": tensor \"", tensor.name, "\" of dtype ", tensor.dtype, " and shape ",
                          c10::IntArrayRef(tensor.sizes), ", expected ",
                          of_all == nullptr
                              ? std::string("generators and tensors of all ranks alone")
                              : c10::str(of_all->dtype, " and ", c10::IntArrayRef(of_all->sizes), ", as on all ranks"));
      }
      if (same_ranks_) own_[name] = values;
    }
    path_ = file.path;
  }
  // Throws what restore() would. Nothing has changed afterwards.
  void check(at::Device device) const {
    const auto former = capture_generators({device});
    try {
      restore(device);
    } catch (const ValueError& error) {
      raise<ValueError>(kWhere, path_, " cannot be restored: ", error.what());
    }
    restore_generators(former, {device});
  }
  bool same_ranks() const { return same_ranks_; }
  bool generators_settled() const { return generators_settled_; }
  const std::map<std::string, at::Tensor>& tensors() const { return own_; }
  void restore(at::Device device) const {
    if (same_ranks_) {
      restore_generators(generators_, {device});
    } else {
      reseed_generators(generators_, rank_, {device});
    }
  }

 private:
  std::string path_;
  bool same_ranks_ = true;
  bool generators_settled_ = false;
  int64_t rank_ = 0;
  std::vector<std::pair<std::string, at::Tensor>> generators_;
  std::map<std::string, at::Tensor> own_;
};

}  // namespace

LoadReport load(TrainingState& state, const std::string& path, const LoadOptions& options) {
  check_model(kWhere, state);
  const auto& mesh = *state.model->mesh();
  const auto device = device_of(*state.model);
  std::string bytes;
  agree(mesh, device, kWhere, [&] {
    state.model->scheduler()->check_not_summoned(kWhere);
    if (mesh.rank() == 0) bytes = open(trimmed(path));
  });
  bytes = broadcast_text(mesh, device, kWhere, bytes, 0);

  LoadReport report;
  OpenCheckpoint checkpoint;
  const auto registered = registered_tensors(*state.model);
  const auto names = parameter_names(registered);
  std::optional<ModelLoading> model;
  std::optional<OptimizerLoading> optimizer;
  OwnState own;
  const bool weights_alone = state.optimizers.empty() && state.lr_schedulers.empty() && state.grad_scaler == nullptr;
  agree(mesh, device, kWhere, [&] {
    checkpoint = receive(bytes);
    checkpoint.path = trimmed(path);
    model.emplace(kWhere, trimmed(path), *state.model, registered, checkpoint.model,
                  ModelLoading::Options{options.strict, options.convert_dtypes}, report);
    if (!state.optimizers.empty()) optimizer.emplace(checkpoint, state, names, options, report);
    if (!weights_alone) check_restorable(kWhere, state, checkpoint.scalars);
    own.read(checkpoint, mesh);
    own.check(device);
  });
  report.same_ranks = own.same_ranks();

  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  TensorLoading model_values(kWhere, checkpoint.model, mesh);
  TensorLoading optimizer_values(kWhere, checkpoint.optimizer, mesh);
  // Of a model on meta, what the checkpoint lacks begins as it was constructed.
  if (!report.missing.empty() && model->on_meta()) state.model->materialize(device);
  agree(mesh, device, kWhere, [&] {
    model->allocate(device, model_values);
    if (optimizer) optimizer->allocate(optimizer_values);
  });
  {
    c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
    agree(mesh, device, kWhere, [&] {
      model_values.read();
      optimizer_values.read();
    });
    model_values.send();
    optimizer_values.send();
  }
  report.bytes_read = model_values.bytes_read() + optimizer_values.bytes_read();
  std::function<void()> take_optimizer_states = [] {};
  agree(mesh, device, kWhere, [&] {
    if (!optimizer) return;
    take_optimizer_states =
        prepare_optimizer_states(state.optimizers, names, optimizer->states(),
                                 {.options = options.optimizer_options, .allow_missing = !options.strict});
  });
  // Before anything that has values is given others: it fails where construction depended on unlike seeds.
  state.model->replay_missing();
  // From here on all ranks change what they have.
  if (optimizer) optimizer->commit(own.tensors());
  take_optimizer_states();
  if (weights_alone) {
    state.progress = checkpoint.scalars.progress;
    state.values = checkpoint.scalars.values;
  } else {
    restore(state, checkpoint.scalars);
  }
  model->commit(own.tensors());
  agree(mesh, device, kWhere, [&] { own.restore(device); });
  state.model->set_generators_settled(own.generators_settled());
  return report;
}

}  // namespace hsdp

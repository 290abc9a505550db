// Every rank writes its boxes into a folder under another name. When all have, rank 0 adds the manifest and gives the
// folder its name.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <torch/version.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "dtensor/dtensor_impl.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/agreement.h"
#include "hsdp/checkpoint/checkpoint.h"
#include "hsdp/checkpoint/checkpointed_tensors.h"
#include "hsdp/checkpoint/folder_names.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/safetensors.h"
#include "hsdp/checkpoint/shard_file.h"
#include "hsdp/checkpoint/target_folder.h"
#include "hsdp/checkpoint/training_state_json.h"
#include "hsdp/host.h"
#include "hsdp/rank_generators.h"
#include "hsdp/registered_tensors.h"

namespace hsdp {
namespace {

namespace fs = std::filesystem;
using dtensor::raise;
using dtensor::ValueError;

constexpr auto kWhere = "save";

// Where a rank leaves sizes and checksums for rank 0: files reach it at any number of ranks, and show that it sees
// theirs.
std::string record_path(int64_t rank) { return (fs::path(kRecordsFolder) / numbered("rank", rank, ".json")).string(); }

// Buffers, and parameters that fully_shard ignores with their optimizer's state, are each rank's own: those that differ
// from rank 0's, whose values are the checkpoint's.
std::vector<ShardPiece> own_tensors(const dtensor::DeviceMesh& mesh, at::Device device,
                                    const std::vector<CheckpointedTensor>& tensors) {
  std::vector<const CheckpointedTensor*> whole;
  for (const auto& tensor : tensors) {
    if (!tensor.layout) whole.push_back(&tensor);
  }
  if (whole.empty()) return {};
  auto mine = at::empty({static_cast<int64_t>(whole.size())}, at::TensorOptions(kHost).dtype(at::kLong));
  agree(mesh, device, kWhere, [&] {
    for (size_t i = 0; i < whole.size(); ++i) {
      const auto host = whole[i]->local.to(kHost).contiguous();
      mine.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(checksum(host.const_data_ptr(), host.nbytes()));
    }
  });
  auto first = mine.to(device, /*non_blocking=*/false, /*copy=*/true);
  dtensor::broadcast(mesh, first, 0, {"broadcast", kWhere});
  first = first.to(kHost);
  std::vector<ShardPiece> pieces;
  for (size_t i = 0; i < whole.size(); ++i) {
    if (mine.const_data_ptr<int64_t>()[i] == first.const_data_ptr<int64_t>()[i]) continue;
    pieces.push_back({kOwnTensorPrefix + whole[i]->name, whole[i]->local, whole[i]->box.offsets});
  }
  return pieces;
}

// Training goes first where there are fewer cores than threads.
void yield_to_others() {
  constexpr int kLowestPriority = 19;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kLowestPriority);
}

}  // namespace

class StagingMemory {
 public:
  // On the host, taken again by the next save.
  at::Tensor copy(const at::Tensor& tensor) {
    const auto options = tensor.options().device(kHost);
    if (used_ == copies_.size()) copies_.emplace_back();
    auto& slot = copies_[used_++];
    if (!slot.defined() || slot.scalar_type() != tensor.scalar_type() || !slot.sizes().equals(tensor.sizes())) {
      slot = at::empty(tensor.sizes(), options);
    }
    return slot.copy_(tensor);
  }
  void start_again() { used_ = 0; }

 private:
  std::vector<at::Tensor> copies_;  // a save copies the same tensors in the same order as the one before
  size_t used_ = 0;
};

struct PendingSave::Job {
  std::shared_ptr<const dtensor::DeviceMesh> mesh;
  at::Device device = kHost;
  std::string path, temporary;
  std::vector<ShardPiece> model, optimizer, own;
  std::string scalars;
  Manifest manifest;               // but for the files
  std::unique_ptr<FileLock> lock;  // rank 0's
  std::thread thread;
  std::atomic<bool> written = false;
  std::exception_ptr failure;

  Job(const TrainingState& state, const std::string& target) : path(trimmed(target)), temporary(path + kWritingSuffix) {
    check_model(kWhere, state);
    mesh = state.model->mesh();
    device = device_of(*state.model);
    state.model->scheduler()->compare_writes(*mesh);
    std::vector<CheckpointedTensor> tensors;
    agree(*mesh, device, kWhere, [&] { tensors = collect(state); });
    own = own_tensors(*mesh, device, tensors);
    agree(*mesh, device, kWhere, [&] {
      for (const auto& [name, tensor] : capture_generators({device})) {
        own.push_back({kGeneratorPrefix + name, tensor, std::vector<int64_t>(static_cast<size_t>(tensor.dim()), 0)});
      }
      const auto settled =
          at::full({1}, state.model->generators_settled() ? 1 : 0, at::TensorOptions(kHost).dtype(at::kByte));
      own.push_back({kGeneratorsSettled, settled, {0}});
    });
  }
  // When all ranks are here, and none still writes there for a job that was thrown away.
  void make_folder() {
    agree(*mesh, device, kWhere, [&] {
      if (mesh->rank() != 0) return;
      with_paths(kWhere, [&] {
        check_target(kWhere, path);
        lock = make_writing_folder(kWhere, temporary);
      });
    });
  }
  ~Job() {
    if (thread.joinable()) thread.join();
  }

  std::vector<CheckpointedTensor> collect(const TrainingState& state) {
    if (state.progress.step < 0)
      raise<ValueError>(kWhere, "progress.step is ", state.progress.step, ", expected 0 or more");
    check_values(kWhere, *state.model);
    const auto registered = registered_tensors(*state.model);
    const auto scalar_state = scalars_of(state, parameter_names(registered));
    ReplicaChoice choice(*mesh);
    const auto add = [&](const CheckpointedTensor& tensor, std::vector<ShardPiece>& pieces,
                         std::map<std::string, TensorFacts>& facts) {
      if (tensor.layout && tensor.layout->mesh() != mesh) {
        raise<dtensor::NotSupportedError>(kWhere, "tensor \"", tensor.name, "\" lies on ",
                                          tensor.layout->mesh()->to_string(), ", expected the model's ",
                                          mesh->to_string());
      }
      if (safetensors_name(tensor.local.scalar_type()) == nullptr) {
        raise<dtensor::NotSupportedError>(kWhere, "tensor \"", tensor.name, "\" is of dtype ",
                                          tensor.local.scalar_type(), ", expected one that safetensors files have");
      }
      facts[tensor.name] = {tensor.local.scalar_type(), tensor.sizes};
      const bool is_mine = tensor.layout ? choice.choose(tensor) == mesh->coordinate() : mesh->rank() == 0;
      if (is_mine && tensor.local.numel() > 0) pieces.push_back({tensor.name, tensor.local, tensor.box.offsets});
    };
    std::vector<CheckpointedTensor> tensors;
    for (const auto& entry : registered) {
      tensors.push_back(checkpointed(kWhere, entry.names.front(), entry.tensor));
      add(tensors.back(), model, manifest.model);
    }
    for (const auto& [parameter, optimizer_state] : scalar_state.optimizers) {
      for (const auto& [name, tensor] : optimizer_state.tensors) {
        tensors.push_back(checkpointed(kWhere, optimizer_key(parameter, name), tensor));
        add(tensors.back(), optimizer, manifest.optimizer);
      }
    }
    scalars = to_json(scalar_state);
    manifest.step = state.progress.step;
    manifest.world_size = mesh->size();
    manifest.mesh = mesh->to_string();
    manifest.torch_version = TORCH_VERSION;
    return tensors;
  }

  // Training may write the tensors while these are written to files.
  void copy_to_host(StagingMemory& memory) {
    memory.start_again();
    for (auto* pieces : {&model, &optimizer, &own}) {
      for (auto& piece : *pieces) piece.values = memory.copy(piece.values);
    }
  }

  // No communication: also on a thread of its own.
  void write() {
    c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
    c10::InferenceMode normal(false);
    at::NoGradGuard no_grad;
    const auto rank = mesh->rank();
    Manifest mine;
    const auto within = [&](const std::string& name) { return (fs::path(temporary) / name).string(); };
    const auto add = [&](const std::string& name, const std::vector<ShardPiece>& pieces, bool sharded) {
      if (pieces.empty()) return;
      mine.files.push_back({name, write_shard_file(kWhere, within(name), pieces, sharded)});
    };
    const auto shard = numbered("shard", rank, "-model-00001-of-00001.safetensors");
    add(shard, model, true);
    add((fs::path(kOptimizerFolder) / shard).string(), optimizer, true);
    add((fs::path(kRanksFolder) / numbered("rank", rank, ".safetensors")).string(), own, false);
    if (rank == 0) {
      FileWriter file(kWhere, within(kTrainingStateFile));
      file.write(scalars.data(), scalars.size());
      mine.files.push_back({kTrainingStateFile, file.complete()});
    }
    const auto text = to_json(mine);
    FileWriter record(kWhere, within(record_path(rank)));
    record.write(text.data(), text.size());
    record.complete();
  }

  void start(bool in_background) {
    try {
      thread = std::thread([this, in_background] {
        if (in_background) yield_to_others();
        try {
          write();
        } catch (...) {
          failure = std::current_exception();
        }
        written = true;
      });
    } catch (const std::system_error&) {
      // No more threads on this rank: the others learn of it when they have written.
      failure = std::current_exception();
      written = true;
    }
  }

  // A collective of one all-reduce.
  bool all_have_written() const {
    auto writing = at::full({1}, written ? 0 : 1, at::TensorOptions(device).dtype(at::kLong));
    dtensor::all_reduce(*mesh, writing, dtensor::ReduceOp::max, {"all_reduce", kWhere});
    return writing.item<int64_t>() == 0;
  }

  // Rank 0's, when all have written.
  void publish() {
    constexpr size_t kMostRecordBytes = size_t{1} << 30;
    for (int64_t rank = 0; rank < mesh->size(); ++rank) {
      const auto path_of_record = (fs::path(temporary) / record_path(rank)).string();
      auto record = parse_manifest(kWhere, read_text(kWhere, path_of_record, kMostRecordBytes), path_of_record);
      for (auto& file : record.files) manifest.files.push_back(std::move(file));
    }
    fs::remove_all(fs::path(temporary) / kRecordsFolder);
    verify_files(kWhere, temporary, manifest, /*checksums=*/false);
    write_manifest(kWhere, temporary, manifest);
    publish_folder(kWhere, temporary, path);
    std::error_code ignored;
    fs::remove(fs::path(path) / kLockFile, ignored);
  }

  // All ranks have written or failed.
  void finish() {
    if (thread.joinable()) thread.join();
    try {
      agree(*mesh, device, kWhere, [&] {
        if (failure) std::rethrow_exception(failure);
      });
      agree(*mesh, device, kWhere, [&] {
        if (mesh->rank() == 0) with_paths(kWhere, [&] { publish(); });
      });
    } catch (const dtensor::CommunicationError&) {
      throw;  // Others may still write there.
    } catch (...) {
      std::error_code ignored;
      if (mesh->rank() == 0) fs::remove_all(temporary, ignored);
      throw;
    }
  }
};

PendingSave::PendingSave() = default;
PendingSave::~PendingSave() = default;
PendingSave::PendingSave(PendingSave&&) noexcept = default;
PendingSave& PendingSave::operator=(PendingSave&&) noexcept = default;

bool PendingSave::poll() {
  if (!job_) return true;
  if (!job_->all_have_written()) return false;
  const auto job = std::exchange(job_, nullptr);
  job->finish();
  return true;
}

// The ranks ask each other again and again: one may write for longer than any collective may take.
void PendingSave::wait() {
  constexpr std::chrono::milliseconds kPause(5);
  while (!poll()) std::this_thread::sleep_for(kPause);
}

std::shared_ptr<StagingMemory> make_staging_memory() { return std::make_shared<StagingMemory>(); }

PendingSave save_async(const TrainingState& state, const std::string& path,
                       const std::shared_ptr<StagingMemory>& memory) {
  auto job = std::make_unique<PendingSave::Job>(state, path);
  agree(*job->mesh, job->device, kWhere, [&] {
    c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
    c10::InferenceMode normal(false);
    at::NoGradGuard no_grad;
    StagingMemory own_memory;
    job->copy_to_host(memory ? *memory : own_memory);
  });
  job->make_folder();
  job->start(/*in_background=*/true);
  PendingSave pending;
  pending.job_ = std::move(job);
  return pending;
}

void save(const TrainingState& state, const std::string& path) {
  auto job = std::make_unique<PendingSave::Job>(state, path);
  job->make_folder();
  job->start(/*in_background=*/false);
  PendingSave pending;
  pending.job_ = std::move(job);
  pending.wait();
}

}  // namespace hsdp

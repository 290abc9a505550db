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
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "dtensor/dtensor_impl.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/agreement.h"
#include "hsdp/checkpoint/checkpoint.h"
#include "hsdp/checkpoint/checkpointed_tensors.h"
#include "hsdp/checkpoint/file_lock.h"
#include "hsdp/checkpoint/folder_names.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/shard_file.h"
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
constexpr auto kLockFile = ".lock";
// Sizes and checksums that ranks leave for rank 0: files reach it at any number of ranks, and show that it sees theirs.
constexpr auto kRecordsFolder = ".records";

std::string record_path(int64_t rank) { return (fs::path(kRecordsFolder) / numbered("rank", rank, ".json")).string(); }

bool is_complete(const fs::path& folder) { return fs::exists(folder / kManifestFile); }

// What stands in the way of `path`, before anything is written.
void check_target(const std::string& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status)) raise<ValueError>(kWhere, path, " is a file, expected a folder or nothing");
  if (is_complete(path) || fs::is_empty(path, error)) return;
  raise<ValueError>(kWhere, path,
                    " is a folder with other contents, expected a complete checkpoint, which would be "
                    "replaced, or nothing; choose another path");
}

std::unique_ptr<FileLock> make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) {
    raise<ValueError>(kWhere, path, " cannot be made: ", error.message(), ", expected a folder that can be written");
  }
  auto lock = std::make_unique<FileLock>(kWhere, (fs::path(path) / kLockFile).string());
  // Left by a run that was killed.
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().filename() != kLockFile) fs::remove_all(entry.path());
  }
  for (const auto* folder : {kOptimizerFolder, kRanksFolder, kRecordsFolder}) {
    fs::create_directory(fs::path(path) / folder);
  }
  return lock;
}

// Gives the complete folder its name. What was there before is complete until then, and removed after.
void exchange_folders(const std::string& from, const std::string& path) {
  const auto parent = fs::path(path).parent_path();
  const auto fail = [&] { raise<ValueError>(kWhere, path, " cannot be replaced: ", std::strerror(errno)); };
  if (!fs::exists(path)) {
    if (std::rename(from.c_str(), path.c_str()) != 0) fail();
    sync_folder(kWhere, parent.empty() ? "." : parent.string());
    return;
  }
  auto former = from;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system that cannot exchange: find_checkpoints knows the other name, too.
    former = path + kReplacedSuffix;
    fs::remove_all(former);
    if (std::rename(path.c_str(), former.c_str()) != 0) fail();
    if (std::rename(from.c_str(), path.c_str()) != 0) fail();
  }
  sync_folder(kWhere, parent.empty() ? "." : parent.string());
  remove_checkpoint(former);
}

// Buffers, and parameters that fully_shard ignores, are each rank's own: those that differ from rank 0's, whose values
// are the checkpoint's.
std::vector<ShardPiece> own_tensors(const dtensor::DeviceMesh& mesh, at::Device device,
                                    const std::vector<CheckpointedTensor>& tensors) {
  std::vector<const CheckpointedTensor*> whole;
  for (const auto& tensor : tensors) {
    if (!tensor.layout) whole.push_back(&tensor);
  }
  if (whole.empty()) return {};
  auto mine = at::empty({static_cast<int64_t>(whole.size())}, at::TensorOptions(kHost).dtype(at::kLong));
  for (size_t i = 0; i < whole.size(); ++i) {
    const auto host = whole[i]->local.to(kHost).contiguous();
    mine.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(checksum(host.const_data_ptr(), host.nbytes()));
  }
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
    agree(*mesh, device, kWhere, [&] {
      tensors = collect(state);
      if (mesh->rank() == 0) {
        check_target(path);
        lock = make_folder(temporary);
      }
    });
    own = own_tensors(*mesh, device, tensors);
    for (const auto& [name, tensor] : capture_generators({device})) {
      own.push_back({kGeneratorPrefix + name, tensor, std::vector<int64_t>(static_cast<size_t>(tensor.dim()), 0)});
    }
  }
  ~Job() {
    if (thread.joinable()) thread.join();
  }

  std::vector<CheckpointedTensor> collect(const TrainingState& state) {
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
      facts[tensor.name] = {tensor.local.scalar_type(), tensor.sizes};
      const bool is_mine = tensor.layout ? choice.choose(tensor) == mesh->coordinate() : mesh->rank() == 0;
      if (is_mine && tensor.local.numel() > 0) pieces.push_back({tensor.name, tensor.local, tensor.box.offsets});
    };
    std::vector<CheckpointedTensor> model_tensors;
    for (const auto& entry : registered) {
      model_tensors.push_back(checkpointed(kWhere, entry.names.front(), entry.tensor));
      add(model_tensors.back(), model, manifest.model);
    }
    for (const auto& [parameter, optimizer_state] : scalar_state.optimizers) {
      for (const auto& [name, tensor] : optimizer_state.tensors) {
        add(checkpointed(kWhere, optimizer_key(parameter, name), tensor), optimizer, manifest.optimizer);
      }
    }
    scalars = to_json(scalar_state);
    manifest.step = state.progress.step;
    manifest.world_size = mesh->size();
    manifest.mesh = mesh->to_string();
    manifest.torch_version = TORCH_VERSION;
    return model_tensors;
  }

  // Training may write the tensors while these are written to files.
  void copy_to_host() {
    for (auto* pieces : {&model, &optimizer, &own}) {
      for (auto& piece : *pieces) {
        auto copy = at::empty(piece.values.sizes(), piece.values.options().device(kHost));
        copy.copy_(piece.values);
        piece.values = std::move(copy);
      }
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

  void start() {
    thread = std::thread([this] {
      yield_to_others();
      try {
        write();
      } catch (...) {
        failure = std::current_exception();
      }
      written = true;
    });
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
    fs::remove(fs::path(temporary) / kLockFile);
    verify_files(kWhere, temporary, manifest, /*checksums=*/false);
    write_manifest(kWhere, temporary, manifest);
    exchange_folders(temporary, path);
  }

  // All ranks have written or failed.
  void finish() {
    if (thread.joinable()) thread.join();
    try {
      agree(*mesh, device, kWhere, [&] {
        if (failure) std::rethrow_exception(failure);
      });
      agree(*mesh, device, kWhere, [&] {
        if (mesh->rank() == 0) publish();
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
  auto writing = at::full({1}, job_->written ? 0 : 1, at::TensorOptions(job_->device).dtype(at::kLong));
  dtensor::all_reduce(*job_->mesh, writing, dtensor::ReduceOp::max, {"all_reduce", kWhere});
  if (writing.item<int64_t>() != 0) return false;
  wait();
  return true;
}

void PendingSave::wait() {
  if (!job_) return;
  const auto job = std::exchange(job_, nullptr);
  job->finish();
}

PendingSave save_async(const TrainingState& state, const std::string& path) {
  auto job = std::make_unique<PendingSave::Job>(state, path);
  agree(*job->mesh, job->device, kWhere, [&] { job->copy_to_host(); });
  job->start();
  PendingSave pending;
  pending.job_ = std::move(job);
  return pending;
}

void save(const TrainingState& state, const std::string& path) {
  PendingSave::Job job(state, path);
  try {
    job.write();
  } catch (...) {
    job.failure = std::current_exception();
  }
  job.finish();
}

}  // namespace hsdp

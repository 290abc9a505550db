#include <c10/util/StringUtil.h>

#include <atomic>
#include <exception>
#include <filesystem>
#include <iostream>
#include <mutex>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/checkpoint/files.h"
#include "hsdp/init.h"
#include "hsdp/profiling.h"
#include "hsdp/profiling/memory_snapshot.h"

namespace hsdp {
namespace memory_snapshot {
namespace {

constexpr auto kSnapshotWhere = "memory snapshot";

void make_folder_of(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) make_folders(kSnapshotWhere, folder.string());
}

Source& source_for(c10::Device device) {
  auto* source = source_of(device);
  if (source == nullptr) {
    dtensor::raise<dtensor::NotSupportedError>(kSnapshotWhere, "of ", device,
                                               ", expected a device whose allocator keeps a history "
                                               "(docs/profiling.md); a Trace with profile_memory shows the "
                                               "allocations of any device");
  }
  return *source;
}

}  // namespace

void write(Source& source, const std::string& path) {
  make_folder_of(path);
  FileWriter file(kSnapshotWhere, path);  // refuses before what may take minutes
  const auto pickle = source.snapshot();
  file.write(pickle.data(), pickle.size());
  file.complete();
}

struct OutOfMemorySnapshots::State {
  explicit State(Source& of) : source(of) {}

  /// On the thread whose allocation has failed: its error must go on as it is.
  void out_of_memory(c10::Device device, size_t requested_bytes) noexcept {
    try {
      std::string target;
      {
        std::lock_guard lock(mutex);
        target = path;
      }
      // Two threads at once: one snapshot shows both.
      if (target.empty() || is_writing.exchange(true)) return;
      std::string outcome = "snapshot in " + target;
      try {
        write(source, target);
      } catch (const std::exception& error) {
        outcome = c10::str("no snapshot: ", error.what());
      } catch (...) {
        outcome = "no snapshot";
      }
      is_writing = false;
      // One write, so that the lines of several ranks do not mix.
      std::cerr << c10::str("hsdp: out of memory on ", device, ", ", requested_bytes, " bytes asked for; ", outcome,
                            "\n")
                << std::flush;
    } catch (...) {
      // Nothing is left to say it with.
    }
  }

  Source& source;
  std::mutex mutex;
  std::atomic<bool> is_writing{false};
  std::string path;
};

OutOfMemorySnapshots::OutOfMemorySnapshots(Source& source) : state_(std::make_shared<State>(source)) {
  source.observe_out_of_memory(
      [state = state_](c10::Device device, size_t requested_bytes) { state->out_of_memory(device, requested_bytes); });
}

OutOfMemorySnapshots::~OutOfMemorySnapshots() {
  std::lock_guard lock(state_->mutex);
  state_->path.clear();
}

void OutOfMemorySnapshots::set_folder(const std::string& folder, int64_t rank) {
  std::string path;
  if (!folder.empty()) {
    path = c10::str(folder, "/rank", rank, "_memory_snapshot.pickle");
    make_folder_of(path);
    FileWriter(kSnapshotWhere, path);  // and nothing written: can it be?
  }
  std::lock_guard lock(state_->mutex);
  state_->path = std::move(path);
}

}  // namespace memory_snapshot

void record_memory_history(c10::Device device, int64_t max_entries) {
  auto& source = memory_snapshot::source_for(device);
  if (max_entries < 1) {
    dtensor::raise<dtensor::ValueError>(memory_snapshot::kSnapshotWhere, "a history of ", max_entries,
                                        " entries, expected at least 1");
  }
  source.record_history(static_cast<size_t>(max_entries));
}

void stop_memory_history(c10::Device device) { memory_snapshot::source_for(device).stop_history(); }

void save_memory_snapshot(c10::Device device, const std::string& path) {
  memory_snapshot::write(memory_snapshot::source_for(device), path);
}

void save_memory_snapshot_when_out_of_memory(c10::Device device, const std::string& folder) {
  auto& source = memory_snapshot::source_for(device);
  // Never destroyed: allocations fail until the process ends. There is one source in a process.
  static auto* const snapshots = new memory_snapshot::OutOfMemorySnapshots(source);
  snapshots->set_folder(folder, is_initialized() ? current_environment().rank() : 0);
  if (!folder.empty() && !source.is_recording()) record_memory_history(device);
}

}  // namespace hsdp

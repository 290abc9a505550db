#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

/// What the allocators of libtorch know about a device's memory; asked through profiling.h.
namespace hsdp::memory_snapshot {

/// Called on the thread whose allocation has failed, before it throws, without the allocator's lock.
using OutOfMemoryObserver = std::function<void(c10::Device device, size_t requested_bytes)>;

/// One kind of allocator. Thread-safe.
class Source {
 public:
  virtual ~Source() = default;
  virtual void record_history(size_t max_entries) = 0;
  virtual void stop_history() = 0;
  virtual bool is_recording() = 0;
  /// As a pickle.
  virtual std::string snapshot() = 0;
  /// Adds one, for the life of the process.
  virtual void observe_out_of_memory(OutOfMemoryObserver observer) = 0;
};

/// That of the type of `device`; null where its allocator keeps no snapshots.
Source* source_of(c10::Device device);

/// Writes the file of save_memory_snapshot().
void write(Source& source, const std::string& path);

/// What save_memory_snapshot_when_out_of_memory() does, for one source. Thread-safe.
class OutOfMemorySnapshots {
 public:
  /// `source` must outlive the last allocation.
  explicit OutOfMemorySnapshots(Source& source);
  /// No snapshots from here on.
  ~OutOfMemorySnapshots();
  OutOfMemorySnapshots(const OutOfMemorySnapshots&) = delete;
  OutOfMemorySnapshots& operator=(const OutOfMemorySnapshots&) = delete;

  /// Where `rank` writes; empty: nowhere. Throws ValueError where the folder cannot be made or written, and changes
  /// nothing then.
  void set_folder(const std::string& folder, int64_t rank);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hsdp::memory_snapshot

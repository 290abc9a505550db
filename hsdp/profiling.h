#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

/// What a run did when, and where its memory went: traces of Kineto, NVTX ranges, snapshots of a device's memory.
///
/// The library marks its host time with the names that FSDP2 has, "FSDP::all_gather (blocks.3)" (docs/profiling.md
/// lists them); whatever listens to libtorch's user scopes sees them. Nothing is recorded unless asked for.
namespace hsdp {

struct TraceOptions {
  /// Shapes, strides and types of the inputs of each operator.
  bool record_shapes = false;
  /// Each allocation and each free.
  bool profile_memory = false;
};

/// Records what this process does and writes it as a Chrome trace (JSON), which https://ui.perfetto.dev shows:
/// operators and named ranges of the thread that starts it and of the threads of autograd that work for it, and the
/// kernels and copies of every device that the process can see. Other threads of the program are not recorded on the
/// host.
///
/// Making one takes Kineto's time of warming up (seconds, with devices); recording begins with start(). The devices are
/// waited for at both ends, so that a trace holds whole steps. One thread makes, starts, saves and destroys it.
class Trace {
 public:
  /// Makes the folder of `path` where needed; a file that is there is replaced when the trace is complete. Throws
  /// ValueError where no file can be written there, or for a name that ends in .gz, since the file is plain JSON;
  /// StateError while another trace, or another profiler of libtorch, is at work.
  explicit Trace(std::string path, TraceOptions options = {});
  /// What was not saved is dropped.
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// Once. Throws StateError a second time, or while another profiler of libtorch is at work.
  void start();
  bool is_started() const;
  /// Stops, and writes the file: complete, or not at all. Throws StateError before start() and after save(), ValueError
  /// where the file cannot be written; the recording is gone either way.
  void save();

  /// Throws what the constructor would throw of this path, at a time when nothing is lost yet.
  static void check_path(const std::string& path);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A named stretch of host time of the program itself, beside those of the library: a user scope of libtorch, as
/// RECORD_USER_SCOPE makes, and an NVTX range where those are switched on. Costs nanoseconds where nobody observes.
/// Lives on one thread's stack; ranges nest.
class NamedRange {
 public:
  explicit NamedRange(std::string_view name);
  ~NamedRange();
  NamedRange(const NamedRange&) = delete;
  NamedRange& operator=(const NamedRange&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whether the library's spans and NamedRange are NVTX ranges, too, in the default domain: what Nsight Systems shows.
/// Off to begin with. For the whole process, from each thread's next span on. Throws NotSupportedError where the
/// library was built without the headers of NVTX.
void set_nvtx(bool on);

/// Keeps the stacks and times of the last `max_entries` allocations and frees of the process on all devices of the type
/// of `device`, for snapshots; a second call begins anew. Costs microseconds an allocation. Throws NotSupportedError
/// for a device whose allocator keeps no history, as the host's, and ValueError for fewer than one entry.
void record_memory_history(c10::Device device, int64_t max_entries = 100'000);
/// Ends it. What was kept is gone.
void stop_memory_history(c10::Device device);

/// Writes what the allocator of the device holds now, and the history where one is recorded: the pickle that
/// PyTorch's _dump_snapshot writes, which https://pytorch.org/memory_viz shows. Complete, or not at all. Makes the
/// folder of `path` where needed. Finding the names of stacks can take minutes; TORCH_SYMBOLIZE_MODE=dladdr in the
/// environment is quicker, and knows functions without lines. Throws NotSupportedError as record_memory_history,
/// ValueError where the file cannot be written.
void save_memory_snapshot(c10::Device device, const std::string& path);

/// From now on an allocation on such a device that fails for want of memory writes a snapshot to
/// `folder`/rank<N>_memory_snapshot.pickle before it throws as always, and says so on stderr; a later one replaces it.
/// What goes wrong in writing is said, and never replaces the error. N is this process's rank, 0 before init(). An
/// empty folder ends it. Makes the folder. Records the history where that is not done yet. Throws as
/// save_memory_snapshot. Thread-safe.
void save_memory_snapshot_when_out_of_memory(c10::Device device, const std::string& folder);

}  // namespace hsdp

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "apps/config.h"
#include "hsdp/profiling.h"

namespace hsdp {
class Environment;
}

namespace apps {

/// Records one training run on this rank as config.profile says. Files are named as torchtitan names them:
///
///   <trace_folder>/iteration_<first step>/rank<r>_trace.json
///   <memory_snapshot_folder>/iteration_<step>/rank<r>_memory_snapshot.pickle
///   <memory_snapshot_folder>/out_of_memory/rank<r>_memory_snapshot.pickle
///
/// Every step is a range "ProfilerStep#N", as torch.profiler has it, N as in metrics.jsonl. A file that cannot be
/// written while training goes on is told on stderr, and training goes on. One thread.
class Profiling {
 public:
  /// Makes the folders, and starts what lasts for the whole run. `config` must outlive this. Throws
  /// dtensor::ValueError for ranks that the run has not and where a folder cannot be written, NotSupportedError for
  /// what build or device cannot do.
  Profiling(const ProfileConfig& config, const hsdp::Environment& environment);

  /// Around each step; `step` counts from 1.
  void begin(int64_t step);
  void end();
  /// After the last step: saves a trace that is cut short by a signal, and says what was not recorded.
  void finish();

 private:
  int64_t last_traced_step() const { return config_.trace_first_step + config_.trace_steps - 1; }
  void save_trace();
  void save_memory_snapshot();
  void say(const std::string& text) const;

  const ProfileConfig& config_;
  int64_t rank_;
  c10::Device device_;
  bool traces_;
  std::string trace_path_;
  std::optional<hsdp::Trace> trace_;
  int64_t step_ = 0;
  /// Of those to trace, how many were trained, whether this rank traces or not.
  int64_t traced_steps_ = 0;
  std::optional<hsdp::NamedRange> range_;
};

}  // namespace apps

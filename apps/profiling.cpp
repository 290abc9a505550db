#include "apps/profiling.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <iostream>

#include "dtensor/error.h"
#include "hsdp/init.h"

namespace apps {
namespace {

std::string in_iteration(const std::string& folder, int64_t step, int64_t rank, const char* name) {
  return c10::str(folder, "/iteration_", step, "/rank", rank, "_", name);
}

/// A file less is no reason to lose a run, nor to leave the other ranks waiting.
template <class Work>
bool succeeds(int64_t rank, const Work& work) {
  try {
    work();
    return true;
  } catch (const std::exception& error) {
    // One write, so that the lines of several ranks do not mix.
    std::cerr << c10::str(rank == 0 ? "" : c10::str("[rank ", rank, "] "), error.what(), "; training goes on\n")
              << std::flush;
    return false;
  }
}

}  // namespace

Profiling::Profiling(const ProfileConfig& config, const hsdp::Environment& environment)
    : config_(config), rank_(environment.rank()), device_(environment.device()), traces_(!config.trace_folder.empty()) {
  for (const auto rank : config.trace_ranks) {
    if (rank >= environment.world_size()) {
      dtensor::raise<dtensor::ValueError>("profile", "trace_ranks has ", rank, ", expected ranks below ",
                                          environment.world_size(), ", the number that was launched");
    }
  }
  if (!config.trace_ranks.empty()) {
    traces_ =
        traces_ && std::find(config.trace_ranks.begin(), config.trace_ranks.end(), rank_) != config.trace_ranks.end();
  }
  if (config.nvtx) hsdp::set_nvtx(true);
  if (traces_) {
    trace_path_ = in_iteration(config.trace_folder, config.trace_first_step, rank_, "trace.json");
    hsdp::Trace::check_path(trace_path_);
  }
  if (!config.memory_snapshot_folder.empty()) {
    hsdp::record_memory_history(device_);
    hsdp::save_memory_snapshot_when_out_of_memory(device_, config.memory_snapshot_folder + "/out_of_memory");
  }
}

void Profiling::begin(int64_t step) {
  step_ = step;
  if (traces_) {
    // The step before goes to Kineto's warming up, where there is one.
    if (!trace_ && step + 1 >= config_.trace_first_step && step <= last_traced_step()) {
      const hsdp::TraceOptions options{.record_shapes = config_.record_shapes,
                                       .profile_memory = config_.profile_memory};
      traces_ = succeeds(rank_, [&] { trace_.emplace(trace_path_, options); });
    }
    if (trace_ && !trace_->is_started() && step >= config_.trace_first_step) {
      traces_ = succeeds(rank_, [&] { trace_->start(); });
    }
  }
  range_.emplace(c10::str("ProfilerStep#", step));
}

void Profiling::end() {
  range_.reset();
  if (step_ >= config_.trace_first_step && step_ <= last_traced_step()) ++traced_steps_;
  if (trace_ && trace_->is_started() && step_ == last_traced_step()) save_trace();
  if (config_.memory_snapshot_step == step_) save_memory_snapshot();
}

void Profiling::finish() {
  if (trace_ && trace_->is_started()) save_trace();
  trace_.reset();
  if (!config_.trace_folder.empty() && config_.trace_steps > traced_steps_) {
    say(c10::str("steps ", config_.trace_first_step, " to ", last_traced_step(), " were not all trained here"));
  }
}

void Profiling::save_trace() {
  succeeds(rank_, [&] {
    trace_->save();
    say(c10::str("trace up to step ", step_, " in ", trace_path_));
  });
  trace_.reset();
}

void Profiling::save_memory_snapshot() {
  const auto path = in_iteration(config_.memory_snapshot_folder, step_, rank_, "memory_snapshot.pickle");
  succeeds(rank_, [&] {
    hsdp::save_memory_snapshot(device_, path);
    say(c10::str("memory snapshot after step ", step_, " in ", path));
  });
}

void Profiling::say(const std::string& text) const {
  if (rank_ == 0) std::cout << "profile: " << text << std::endl;
}

}  // namespace apps

#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

/// What a trace of Kineto says about work on a GPU: when it ran, on which stream, and what the host was about when it
/// launched it.
namespace testing_support {

/// A kernel, copy or fill. Times are in microseconds.
struct GpuWork {
  std::string name;
  int64_t stream = 0;
  double begin = 0, end = 0;
  /// Names of the host's ranges (user annotations) around the launch, outermost first: those of its thread, or of all
  /// where the trace has no range of that thread, as when it numbers the threads of launches in another way.
  std::vector<std::string> ranges;

  bool in_range(const std::string& prefix, const std::string& part = {}) const;
};

/// All work of the trace, by its begin. Work whose launch is not in the trace has no ranges.
std::vector<GpuWork> gpu_work(const nlohmann::json& trace);
/// Names of the host's ranges, with how often each is there.
std::map<std::string, int64_t> host_ranges(const nlohmann::json& trace);

/// First begin and last end of some work.
struct Extent {
  double begin = 0, end = 0;
};
/// Of at least one.
Extent extent_of(const std::vector<GpuWork>& works);

/// Whether a piece of `some` ran, on another stream, between the begin of the first and the end of the last of
/// `others`.
bool runs_beside(const std::vector<GpuWork>& some, const std::vector<GpuWork>& others);

}  // namespace testing_support

#include "tests/gpu/trace.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

namespace testing_support {
namespace {

using Json = nlohmann::json;

struct Range {
  std::string name, thread;
  double begin, end;
};

bool is_complete(const Json& event) { return event.value("ph", "") == "X" && event.contains("ts"); }

// Threads are numbers in some versions and texts in others.
std::string thread_of(const Json& event) { return event.at("pid").dump() + "/" + event.at("tid").dump(); }

double end_of(const Json& event) { return event.at("ts").get<double>() + event.value("dur", 0.0); }

std::vector<Range> ranges_of(const Json& trace) {
  std::vector<Range> ranges;
  for (const auto& event : trace.at("traceEvents")) {
    if (!is_complete(event) || event.value("cat", "") != "user_annotation") continue;
    ranges.push_back({event.at("name"), thread_of(event), event.at("ts"), end_of(event)});
  }
  std::stable_sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  return ranges;
}

}  // namespace

bool GpuWork::in_range(const std::string& prefix, const std::string& part) const {
  return std::any_of(ranges.begin(), ranges.end(), [&](const std::string& range) {
    return range.starts_with(prefix) && range.find(part) != std::string::npos;
  });
}

std::vector<GpuWork> gpu_work(const Json& trace) {
  const auto ranges = ranges_of(trace);
  std::set<std::string> threads;
  for (const auto& range : ranges) threads.insert(range.thread);
  const std::set<std::string> launches{"cuda_runtime", "cuda_driver"}, works{"kernel", "gpu_memcpy", "gpu_memset"};
  std::map<int64_t, std::vector<std::string>> ranges_of_launch;
  for (const auto& event : trace.at("traceEvents")) {
    if (!is_complete(event) || !launches.contains(event.value("cat", ""))) continue;
    const auto& arguments = event.at("args");
    if (!arguments.contains("correlation")) continue;
    auto& around = ranges_of_launch[arguments.at("correlation").get<int64_t>()];
    const double at = event.at("ts");
    const auto thread = thread_of(event);
    const bool known = threads.contains(thread);
    for (const auto& range : ranges) {
      if ((!known || range.thread == thread) && range.begin <= at && at < range.end) around.push_back(range.name);
    }
  }
  std::vector<GpuWork> found;
  for (const auto& event : trace.at("traceEvents")) {
    if (!is_complete(event) || !works.contains(event.value("cat", ""))) continue;
    const auto& arguments = event.at("args");
    GpuWork work{
        event.at("name"), arguments.at("stream").get<int64_t>(), event.at("ts").get<double>(), end_of(event), {}};
    const auto launch = ranges_of_launch.find(arguments.at("correlation").get<int64_t>());
    if (launch != ranges_of_launch.end()) work.ranges = launch->second;
    found.push_back(std::move(work));
  }
  std::sort(found.begin(), found.end(), [](const GpuWork& a, const GpuWork& b) { return a.begin < b.begin; });
  return found;
}

std::map<std::string, int64_t> host_ranges(const Json& trace) {
  std::map<std::string, int64_t> counts;
  for (const auto& range : ranges_of(trace)) ++counts[range.name];
  return counts;
}

Extent extent_of(const std::vector<GpuWork>& works) {
  Extent extent{works.front().begin, works.front().end};
  for (const auto& work : works) {
    extent.begin = std::min(extent.begin, work.begin);
    extent.end = std::max(extent.end, work.end);
  }
  return extent;
}

bool runs_beside(const std::vector<GpuWork>& some, const std::vector<GpuWork>& others) {
  if (others.empty()) return false;
  const auto extent = extent_of(others);
  return std::any_of(some.begin(), some.end(), [&](const GpuWork& work) {
    return work.stream != others.front().stream && work.begin < extent.end && extent.begin < work.end;
  });
}

}  // namespace testing_support

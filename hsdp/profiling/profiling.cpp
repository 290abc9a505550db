#include "hsdp/profiling.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/checkpoint/files.h"
#include "hsdp/init.h"
#include "hsdp/launch/device.h"
#include "hsdp/profiling/nvtx.h"
#include "hsdp/profiling/observed_range.h"
#include "hsdp/profiling/trace_activities.h"

namespace torch::autograd::profiler {
// Exported by libtorch; the header that declares it needs headers of Kineto, which no wheel has.
TORCH_API void addMetadataJson(const std::string& key, const std::string& value);
}  // namespace torch::autograd::profiler

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;
namespace kineto = torch::autograd::profiler;
namespace fs = std::filesystem;

constexpr auto kTraceWhere = "trace";

/// Kineto records one trace at a time in a process.
std::atomic<bool> trace_exists{false};

/// Of any kind on this thread, or of Kineto on another.
bool is_profiling() { return torch::profiler::impl::profilerEnabled() || kineto::isProfilerEnabledInMainThread(); }

[[noreturn]] void refuse_beside_another(const std::string& path) {
  raise<StateError>(kTraceWhere, path, " while a profiler of libtorch is at work, expected none; stop it first");
}

/// Does not make a context on a device that nothing has used.
bool is_in_use(c10::DeviceType type) {
  const auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(type));
  return allocator == nullptr || const_cast<c10::DeviceAllocator*>(allocator)->initialized();
}

void wait_for_devices() {
  for (const auto type : traced_device_types()) {
    if (!is_in_use(type)) continue;
    const c10::impl::VirtualGuardImpl guard(type);
    guard.synchronizeDevice(guard.getDevice().index());
  }
}

/// Kineto neither throws nor tells where it could not write; what ends its text is missing then.
bool is_whole_trace(const std::string& path) {
  constexpr std::streamoff kEnd = 16384;  // longer than any path
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file.tellg();
  if (!file || size <= 0) return false;
  file.seekg(std::max<std::streamoff>(0, size - kEnd));
  std::string text(std::istreambuf_iterator<char>(file), {});
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text.ends_with('}') && text.find("\"traceName\"") != std::string::npos;
}

/// Stops what this thread records; devices are done by then. Stops also where waiting for them throws.
std::unique_ptr<kineto::ProfilerResult> stop_recording() {
  std::exception_ptr failure;
  try {
    wait_for_devices();
  } catch (...) {
    failure = std::current_exception();
  }
  auto result = kineto::disableProfiler();
  if (failure) std::rethrow_exception(failure);
  return result;
}

}  // namespace

struct Trace::State {
  enum class Phase { prepared, started, stopped };

  State(std::string target, const TraceOptions& options)
      : path(std::move(target)),
        temporary(path + ".tmp" + std::to_string(::getpid())),
        activities(traced_activities()),
        config(torch::profiler::impl::ProfilerState::KINETO, options.record_shapes, options.profile_memory) {}

  void start() {
    wait_for_devices();
    kineto::enableProfiler(config, activities);
    phase = Phase::started;
  }
  void remove_temporary() const noexcept {
    // Kineto has a temporary file of its own.
    for (const auto& name : {temporary, temporary + ".tmp"}) ::unlink(name.c_str());
  }

  std::string path, temporary;
  std::set<torch::profiler::impl::ActivityType> activities;
  torch::profiler::impl::ProfilerConfig config;
  Phase phase = Phase::prepared;
  std::thread::id thread = std::this_thread::get_id();
};

void Trace::check_path(const std::string& path) {
  if (path.empty() || path.ends_with(".gz")) {
    raise<ValueError>(kTraceWhere, "the path '", path, "', expected one of a JSON file, such as trace.json",
                      path.empty() ? "" : "; viewers read what gzip makes of it");
  }
  if (const auto folder = fs::path(path).parent_path(); !folder.empty()) make_folders(kTraceWhere, folder.string());
  FileWriter(kTraceWhere, path);  // and nothing written: can it be?
}

Trace::Trace(std::string path, TraceOptions options) {
  check_path(path);
  if (trace_exists.exchange(true)) {
    raise<StateError>(kTraceWhere, path, " while another trace is recorded, expected one at a time; save it first");
  }
  try {
    if (is_profiling()) refuse_beside_another(path);
    state_ = std::make_unique<State>(std::move(path), options);
    kineto::prepareProfiler(state_->config, state_->activities);
  } catch (...) {
    trace_exists = false;
    throw;
  }
}

Trace::~Trace() {
  using Phase = State::Phase;
  if (state_->phase == Phase::stopped) return;
  if (state_->phase == Phase::started && state_->thread != std::this_thread::get_id()) {
    TORCH_WARN("[trace] ", state_->path,
               " is dropped on another thread than it records on, where it goes on recording");
    return;
  }
  try {
    // Kineto is left warm otherwise, which costs time, and complains the next time.
    if (state_->phase == Phase::prepared && !is_profiling()) state_->start();
    if (state_->phase == Phase::started) stop_recording();
  } catch (const std::exception& error) {
    TORCH_WARN("[trace] ", state_->path, " could not be dropped: ", error.what());
  }
  trace_exists = false;
}

void Trace::start() {
  auto& state = *state_;
  if (state.phase != State::Phase::prepared || state.thread != std::this_thread::get_id()) {
    raise<StateError>(kTraceWhere, state.path,
                      " is started a second time or on another thread, expected once, on the thread that made it");
  }
  if (is_profiling()) refuse_beside_another(state.path);
  state.start();
}

bool Trace::is_started() const { return state_->phase == State::Phase::started; }

void Trace::save() {
  auto& state = *state_;
  if (state.phase != State::Phase::started || state.thread != std::this_thread::get_id()) {
    raise<StateError>(kTraceWhere, state.path,
                      " is saved before its start, a second time, or on another thread, expected once, on the thread "
                      "that started it");
  }
  // What FSDP2's traces have, too: tools put the traces of several ranks together by it.
  if (is_initialized()) {
    const auto environment = current_environment();
    const nlohmann::json info{
        {"backend", environment.backend()}, {"rank", environment.rank()}, {"world_size", environment.world_size()}};
    kineto::addMetadataJson("distributedInfo", info.dump());
  }
  state.phase = State::Phase::stopped;
  std::unique_ptr<kineto::ProfilerResult> result;
  try {
    result = stop_recording();
  } catch (...) {
    trace_exists = false;
    throw;
  }
  trace_exists = false;
  try {
    result->save(state.temporary);
    if (!is_whole_trace(state.temporary)) {
      raise<ValueError>(kTraceWhere, state.path,
                        " cannot be written, expected a path in a folder that can be written, with room for the whole "
                        "file");
    }
    if (std::rename(state.temporary.c_str(), state.path.c_str()) != 0) {
      raise<ValueError>(kTraceWhere, state.path, " cannot be replaced: ", std::strerror(errno),
                        ", expected a path in a folder that can be written");
    }
  } catch (...) {
    state.remove_temporary();
    throw;
  }
}

struct NamedRange::State {
  explicit State(std::string_view name) : range(std::string(name)) {}
  ObservedRange range;
};

NamedRange::NamedRange(std::string_view name)
    : state_(ObservedRange::is_wanted() ? std::make_unique<State>(name) : nullptr) {}
NamedRange::~NamedRange() = default;

void set_nvtx(bool on) {
  if (on && !nvtx::is_available()) {
    raise<dtensor::NotSupportedError>(
        "nvtx",
        "this build of hsdp has no NVTX, expected one that found its headers; build it with "
        "-DHSDP_NVTX_INCLUDE_DIR=<folder that holds nvtx3/nvToolsExt.h>, which has come with every toolkit since 2018");
  }
  nvtx::set_on(on);
}

}  // namespace hsdp

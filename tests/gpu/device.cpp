#include "tests/gpu/device.h"

#include <ATen/cuda/Sleep.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>

#include "hsdp/backend.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/backend_builtin.h"
#include "hsdp/launch/device.h"
#include "tests/testing/private_device.h"
#include "tests/testing/staged_backend.h"

namespace testing_support {
namespace {

constexpr int kStandIns = 4;
constexpr const char* kStaged = "staged";

/// -1 where the child did not come to an end.
int count_in_a_child() {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid < 0) return -1;
  if (pid == 0) _exit(std::min<int>(c10::cuda::device_count(), 100));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// The device type that stands for GPUs, with a backend of the tests' own where Gloo does not reach it by itself.
c10::DeviceType register_devices(Place place) {
  static bool registered = false;
  const auto register_staged = [](c10::DeviceType type) {
    if (!std::exchange(registered, true)) hsdp::register_backend(kStaged, type, make_staged_backend);
    return type;
  };
  switch (stand_in()) {
    case StandIn::none:
      // "auto" would prefer it to NCCL.
      return place == Place::one_gpu ? register_staged(c10::kCUDA) : c10::kCUDA;
    case StandIn::device:
      register_private_device();
      return register_staged(c10::DeviceType::PrivateUse1);
    case StandIn::host:
      break;
  }
  return c10::kCPU;
}

const char* backend_name(Place place) {
  if (stand_in() == StandIn::host) return "gloo";
  return stand_in() == StandIn::none && place == Place::own_gpu ? "nccl" : kStaged;
}

}  // namespace

StandIn stand_in() {
  const char* value = std::getenv("HSDP_GPU_DRY_RUN");
  const std::string name = value == nullptr ? "" : value;
  if (name.empty()) return StandIn::none;
  if (name == "host") return StandIn::host;
  if (name == "device") return StandIn::device;
  throw std::runtime_error("HSDP_GPU_DRY_RUN is '" + name + "', expected host or device");
}

int gpu_count() {
  if (stand_in() != StandIn::none) return kStandIns;
  static const int count = count_in_a_child();
  return std::max(count, 0);
}

std::string lacking_gpus(int gpus) {
  const int visible = gpu_count();
  if (visible >= gpus) return "";
  if (visible == 0) return "no GPU: CUDA shows no device to this process";
  return "needs " + std::to_string(gpus) + " GPUs, and " + std::to_string(visible) + " can be seen";
}

void run_on_gpus(int ranks, Place place, const std::function<void(RankContext&)>& body, const GpuRunOptions& options) {
  const RunOptions run{.timeout = options.timeout,
                       .communication_timeout = options.communication_timeout,
                       .killed = options.killed,
                       .make_environment = false};
  run_ranks(
      ranks,
      [&](RankContext& context) {
        for (const auto& [name, value] : options.variables) setenv(name.c_str(), value.c_str(), 1);
        register_devices(place);
        hsdp::InitOptions init{.backend = backend_name(place), .timeout = options.communication_timeout};
        if (place == Place::one_gpu) init.local_rank = 0;
        auto store = c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", context.world_size());
        context.set_environment(hsdp::init_from(std::move(store), context.rank(), context.world_size(), init));
        body(context);
      },
      run);
}

c10::intrusive_ptr<c10d::Backend> make_gpu_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int ranks,
                                                   c10::Device device, std::chrono::milliseconds timeout) {
  c10::intrusive_ptr<c10d::Backend> backend;
  switch (stand_in()) {
    case StandIn::none:
      backend = hsdp::nccl_backend().make(store, rank, ranks, timeout, device);
      break;
    case StandIn::device:
      backend = make_staged_backend(store, rank, ranks, timeout, device);
      break;
    case StandIn::host:
      return hsdp::gloo_backend().make(store, rank, ranks, timeout, device);
  }
  backend->setBoundDeviceId(device);
  return backend;
}

c10::Device first_gpu() {
  const auto type = register_devices(Place::own_gpu);
  if (type == c10::kCPU) return type;
  const c10::Device device(type, 0);
  hsdp::set_device(device);
  return device;
}

void synchronize(c10::Device device) {
  if (device.type() == c10::kCPU) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

void keep_busy(std::chrono::milliseconds time) {
  if (stand_in() != StandIn::none) return;
  int cycles_a_ms = 0;  // the clock rate in kHz
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&cycles_a_ms, cudaDevAttrClockRate, c10::cuda::current_device()));
  constexpr int fast_gpu = 2'000'000;  // where the driver does not say
  at::cuda::sleep(time.count() * (cycles_a_ms > 0 ? cycles_a_ms : fast_gpu));
}

c10::Stream another_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (stand_in() != StandIn::none) return guard.getStream(device);
  return guard.getStreamFromGlobalPool(device);
}

Bytes bytes_on(c10::Device device) {
  if (stand_in() != StandIn::none) return {hsdp::memory_bytes(device), hsdp::peak_memory_bytes(device)};
  using c10::CachingAllocator::StatType;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  const auto& requested = stats.requested_bytes[static_cast<size_t>(StatType::AGGREGATE)];
  return {requested.current, requested.peak};
}

void count_bytes_on(c10::Device device) {
  if (device.type() == c10::kCPU) hsdp::count_host_memory();
}

void reset_bytes(c10::Device device) { hsdp::reset_peak_memory(device); }

}  // namespace testing_support

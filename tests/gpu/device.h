#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "tests/testing/multi_process.h"

/// What the tests on GPUs share: how many there are, ranks that compute there, and a way to run the same bodies without
/// any. The environment variable HSDP_GPU_DRY_RUN names what stands for GPUs: "host", or "device", the tests' own
/// accelerator whose memory is the host's (private_device.h); both talk over Gloo. What only a GPU can show is then
/// skipped. Unset or empty: GPUs.
namespace testing_support {

enum class StandIn { none, host, device };
/// Throws std::runtime_error where the variable has another value.
StandIn stand_in();

/// GPUs that this process may use, or four stand-ins. Counted in a process of its own, because CUDA cannot be used in a
/// process that was forked from one that has begun to use it. Call it before the test process starts threads.
int gpu_count();
/// Why a test that takes `gpus` GPUs cannot run; empty where it can.
std::string lacking_gpus(int gpus);

/// Skips the test where there are fewer GPUs.
#define HSDP_REQUIRE_GPUS(gpus) \
  if (const std::string lacking = ::testing_support::lacking_gpus(gpus); !lacking.empty()) GTEST_SKIP() << lacking
/// Skips the rest of the test in a dry run: `what` names what stand-ins do not have.
#define HSDP_REQUIRE_REAL_GPU(what) \
  if (::testing_support::stand_in() != StandIn::none) GTEST_SKIP() << "a dry run: " << (what) << " needs a GPU"

/// Where ranks compute.
enum class Place {
  own_gpu,  // one GPU a rank, over NCCL
  one_gpu,  // all on the first GPU, over Gloo by way of host memory
};

struct GpuRunOptions {
  std::chrono::seconds timeout{150};
  std::chrono::milliseconds communication_timeout{60000};
  /// As in RunOptions.
  std::set<int> killed = {};
  /// Environment variables of the ranks.
  std::map<std::string, std::string> variables = {};
};

/// run_ranks with an environment on GPUs; the body finds it in its context.
void run_on_gpus(int ranks, Place place, const std::function<void(RankContext&)>& body,
                 const GpuRunOptions& options = {});

/// The c10d backend that own_gpu uses, connected by itself over `store`: for tests that bring their own group. Bound to
/// `device`.
c10::intrusive_ptr<c10d::Backend> make_gpu_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int ranks,
                                                   c10::Device device,
                                                   std::chrono::milliseconds timeout = std::chrono::minutes(1));
/// The first GPU or what stands for it, made current. In a forked rank.
c10::Device first_gpu();

/// Waits until the device has done all that was queued. Nothing on the host.
void synchronize(c10::Device device);
/// Keeps the device's current stream busy for about that long. Nothing without a GPU.
void keep_busy(std::chrono::milliseconds time);
/// A stream that is not the default one; the default one where the device has no other.
c10::Stream another_stream(c10::Device device);

/// Bytes that tensors asked for, without what the allocator rounds up, now and at most since reset_bytes. On the host
/// and the tests' device: those of hsdp/launch/device.h.
struct Bytes {
  int64_t now = 0, peak = 0;
};
Bytes bytes_on(c10::Device device);
/// Starts to count where that has to be asked for.
void count_bytes_on(c10::Device device);
void reset_bytes(c10::Device device);

}  // namespace testing_support

// Traces hold the work of the GPU between start and save, and snapshots of its memory are what viewers read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tests/gpu/device.h"
#include "tests/gpu/trace.h"

namespace {

namespace fs = std::filesystem;
using namespace testing_support;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Json = nlohmann::json;

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Ranks that may use the first GPU, on which nothing has run; stacks are named quickly, without lines.
void on_one_gpu(const std::function<void(RankContext&)>& body) {
  run_on_gpus(1, Place::own_gpu, body, {.variables = {{"TORCH_SYMBOLIZE_MODE", "dladdr"}}});
}

/// Runs Python statements that find the unpickled file as `snapshot`; what they print, or nothing where there is no
/// Python.
std::string in_python(const std::string& path, const std::string& statements) {
  const std::string script = path + ".py", out = path + ".out";
  std::ofstream(script) << "import pickle\nsnapshot = pickle.load(open('" << path << "', 'rb'))\n" << statements;
  const int status = std::system(("python3 '" + script + "' > '" + out + "'").c_str());
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    std::printf("no python3: the pickle is not read\n");
    return "";
  }
  EXPECT_EQ(status, 0) << "python3 cannot read the snapshot";
  return bytes_of(out);
}

TEST(Trace, HoldsTheWorkBetweenStartAndSave) {
  HSDP_REQUIRE_GPUS(1);
  HSDP_REQUIRE_REAL_GPU("a trace of kernels");
  on_one_gpu([](RankContext& context) {
    const auto device = context.environment().device();
    const auto path = context.directory() + "/trace.json";
    const auto x = torch::ones({1000}, device);
    hsdp::Trace trace(path);
    // Still at work when the trace begins, and when it ends.
    x.cumsum(0);
    keep_busy(std::chrono::milliseconds(50));
    trace.start();
    {
      const hsdp::NamedRange range("ProfilerStep#1");
      keep_busy(std::chrono::milliseconds(50));
      x.sort();
    }
    trace.save();
    const auto json = Json::parse(bytes_of(path));
    EXPECT_EQ(json.at("distributedInfo").at("rank"), 0);
    const auto works = gpu_work(json);
    const auto named = [&](const std::string& part) {
      return std::count_if(works.begin(), works.end(), [&](const GpuWork& work) {
        std::string lower = work.name;
        std::transform(lower.begin(), lower.end(), lower.begin(),
                       [](unsigned char c) { return char(std::tolower(c)); });
        return lower.find(part) != std::string::npos;
      });
    };
    EXPECT_EQ(named("spin"), 1) << json.dump();
    EXPECT_GE(named("sort"), 1);
    EXPECT_EQ(named("scan"), 0);
    for (const auto& work : works) EXPECT_TRUE(work.in_range("ProfilerStep#1")) << work.name;
  });
}

TEST(Trace, HoldsTheStepsOfAShardedModel) {
  HSDP_REQUIRE_GPUS(1);
  HSDP_REQUIRE_REAL_GPU("a trace of kernels");
  on_one_gpu([](RankContext& context) {
    const auto device = context.environment().device();
    const auto path = context.directory() + "/trace.json";
    hsdp::FullyShardOptions options;
    options.units = hsdp::each<torch::nn::Linear>();
    auto net =
        hsdp::meta_init([] { return torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::Linear(64, 64)); });
    auto model = hsdp::fully_shard(net, options);
    model.materialize(device);
    const auto x = torch::ones({8, 64}, device);
    hsdp::Trace trace(path);
    trace.start();
    model->forward(x).square().mean().backward();
    trace.save();
    const auto json = Json::parse(bytes_of(path));
    // Of forward on this thread, of backward on one of autograd's.
    const auto ranges = host_ranges(json);
    for (const char* name : {"FSDP::pre_forward (0)", "FSDP::pre_forward (1)", "FSDP::post_backward_reduce (0)",
                             "FSDP::post_backward_reduce (1)"}) {
      EXPECT_EQ(ranges.count(name), 1u) << name;
    }
    EXPECT_FALSE(gpu_work(json).empty());
  });
}

TEST(Snapshot, HoldsAllocationsWithTheirStacks) {
  HSDP_REQUIRE_GPUS(1);
  HSDP_REQUIRE_REAL_GPU("a snapshot of memory");
  on_one_gpu([](RankContext& context) {
    const auto device = context.environment().device();
    const auto path = context.directory() + "/below/snapshot.pickle";
    hsdp::record_memory_history(device);
    const auto kept = torch::empty({3 << 20}, torch::TensorOptions(device).dtype(torch::kByte));
    torch::empty({5 << 20}, torch::TensorOptions(device).dtype(torch::kByte));
    hsdp::save_memory_snapshot(device, path);
    EXPECT_EQ(bytes_of(path).substr(0, 2), "\x80\x02");
    EXPECT_THAT(bytes_of(path), EndsWith("."));
    const auto read = in_python(path, R"(
trace = snapshot['device_traces'][0]
for size in (3 << 20, 5 << 20):
    ours = [e for e in trace if e['size'] == size and e['action'] in ('alloc', 'free_completed')]
    print(size >> 20, [e['action'] for e in ours], any('empty' in f['name'] for f in ours[0]['frames']))
blocks = [b for s in snapshot['segments'] for b in s['blocks'] if b['state'] == 'active_allocated']
print(sum(b['requested_size'] == 3 << 20 for b in blocks))
)");
    if (!read.empty()) {
      EXPECT_EQ(read, "3 ['alloc'] True\n5 ['alloc', 'free_completed'] True\n1\n");
    }
    hsdp::stop_memory_history(device);
    hsdp::save_memory_snapshot(device, path);
    const auto stopped = in_python(path, "print(sum(len(t) for t in snapshot['device_traces']))\n");
    if (!stopped.empty()) {
      EXPECT_EQ(stopped, "0\n");
    }
  });
}

TEST(Snapshot, IsWrittenWhenMemoryRunsOut) {
  HSDP_REQUIRE_GPUS(1);
  HSDP_REQUIRE_REAL_GPU("a snapshot of memory");
  on_one_gpu([](RankContext& context) {
    const auto device = context.environment().device();
    const auto folder = context.directory() + "/out_of_memory", path = folder + "/rank0_memory_snapshot.pickle";
    hsdp::save_memory_snapshot_when_out_of_memory(device, folder);
    EXPECT_TRUE(fs::is_empty(folder));
    const auto run_out = [&] {
      ::testing::internal::CaptureStderr();
      try {
        torch::empty({int64_t{1} << 50}, torch::TensorOptions(device).dtype(torch::kByte));
        ADD_FAILURE() << "a PiB was allocated";
      } catch (const c10::OutOfMemoryError& error) {
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr("out of memory"));
      }
      return ::testing::internal::GetCapturedStderr();
    };
    EXPECT_THAT(run_out(), HasSubstr("hsdp: out of memory on cuda:0, 1125899906842624 bytes asked for; snapshot in " +
                                     path + "\n"));
    const auto read =
        in_python(path, "print([e['size'] for e in snapshot['device_traces'][0] if e['action'] == 'oom'])\n");
    if (!read.empty()) {
      EXPECT_EQ(read, "[1125899906842624]\n");
    }
    EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 3);  // beside it what reading it takes
    hsdp::save_memory_snapshot_when_out_of_memory(device, "");
    fs::remove(path);
    EXPECT_EQ(run_out(), "");
    EXPECT_FALSE(fs::exists(path));
  });
}

}  // namespace

// The profiler's trace shows that the gather of the next unit runs beside the computing of this one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hsdp/hsdp.h"
#include "hsdp/profiling.h"
#include "tests/gpu/device.h"
#include "tests/gpu/trace.h"

namespace {

using namespace testing_support;
using Json = nlohmann::json;

/// Runs `body` and returns its trace, which it leaves in `path`.
Json traced(const std::string& path, const std::function<void()>& body) {
  hsdp::Trace trace(path);
  trace.start();
  body();
  trace.save();
  std::ifstream file(path);
  return Json::parse(file);
}

// ---- the reader of traces ----

Json event(const char* category, const std::string& name, double begin, double duration, const Json& thread,
           const Json& arguments = Json::object()) {
  return {{"ph", "X"},     {"cat", category}, {"name", name},    {"pid", 1},
          {"tid", thread}, {"ts", begin},     {"dur", duration}, {"args", arguments}};
}
Json kernel(const std::string& name, double begin, double duration, int stream, int correlation) {
  return event("kernel", name, begin, duration, stream, {{"stream", stream}, {"correlation", correlation}});
}
Json launch(double begin, int thread, int correlation) {
  return event("cuda_runtime", "cudaLaunchKernel", begin, 1, thread, {{"correlation", correlation}});
}
Json trace_of(const std::vector<Json>& events) { return {{"traceEvents", events}}; }

TEST(Trace, GivesEachKernelTheRangesAroundItsLaunch) {
  HSDP_REQUIRE_GPUS(1);
  const auto works = gpu_work(trace_of({
      event("user_annotation", "outer", 0, 100, 5),
      event("user_annotation", "inner", 10, 20, 5),
      event("user_annotation", "elsewhere", 0, 100, 6),
      event("cpu_op", "aten::mm", 10, 20, 5),
      launch(12, 5, 1),
      launch(30, 5, 2),  // where the inner range has just ended
      launch(40, 6, 3),
      launch(90, 77, 4),  // of a thread without ranges
      kernel("second", 200, 10, 7, 2),
      kernel("first", 150, 10, 9, 1),
      kernel("third", 300, 10, 7, 3),
      kernel("fourth", 350, 10, 7, 4),
      kernel("nobody's", 400, 10, 7, 99),
      event("gpu_memcpy", "Memcpy HtoD", 500, 5, 7, {{"stream", 7}, {"correlation", 98}}),
      {{"ph", "M"}, {"name", "process_name"}, {"pid", 1}, {"tid", 0}, {"ts", 0.0}},
  }));
  ASSERT_EQ(works.size(), 6u);
  EXPECT_EQ(works[0].name, "first");
  EXPECT_EQ(works[0].stream, 9);
  EXPECT_EQ(works[0].end, 160);
  EXPECT_EQ(works[0].ranges, (std::vector<std::string>{"outer", "inner"}));
  EXPECT_EQ(works[1].ranges, (std::vector<std::string>{"outer"}));
  EXPECT_EQ(works[2].ranges, (std::vector<std::string>{"elsewhere"}));
  EXPECT_EQ(works[3].ranges, (std::vector<std::string>{"outer", "elsewhere"}));
  EXPECT_TRUE(works[4].ranges.empty());
  EXPECT_EQ(works[5].name, "Memcpy HtoD");
  EXPECT_TRUE(works[0].in_range("inn"));
  EXPECT_TRUE(works[0].in_range("outer", "ut"));
  EXPECT_FALSE(works[0].in_range("outer", "inner"));
  EXPECT_FALSE(works[1].in_range("inner"));
}

TEST(Trace, SaysWhatRunsBesideWhat) {
  HSDP_REQUIRE_GPUS(1);
  const auto work = [](double begin, double end, int64_t stream) { return GpuWork{"k", stream, begin, end, {}}; };
  const std::vector<GpuWork> compute{work(10, 20, 7), work(40, 50, 7)};
  EXPECT_EQ(extent_of(compute).begin, 10);
  EXPECT_EQ(extent_of(compute).end, 50);
  EXPECT_TRUE(runs_beside({work(19, 21, 8)}, compute));
  EXPECT_TRUE(runs_beside({work(25, 30, 8)}, compute)) << "between two kernels of one unit";
  EXPECT_TRUE(runs_beside({work(0, 5, 8), work(0, 11, 8)}, compute));
  EXPECT_FALSE(runs_beside({work(0, 10, 8)}, compute)) << "before";
  EXPECT_FALSE(runs_beside({work(50, 60, 8)}, compute)) << "after";
  EXPECT_FALSE(runs_beside({work(15, 30, 7)}, compute)) << "on the same stream";
  EXPECT_FALSE(runs_beside({}, compute));
  EXPECT_FALSE(runs_beside({work(15, 30, 8)}, {}));
}

// ---- training ----

struct Sizes {
  int64_t width, rows, blocks;
};
// Blocks that compute long enough for the host to be ahead of the device.
Sizes sizes_here() { return stand_in() == StandIn::none ? Sizes{4096, 8192, 8} : Sizes{16, 4, 4}; }

std::string compute_range(size_t block) { return "compute " + std::to_string(block) + "."; }

struct WideImpl : torch::nn::Module {
  explicit WideImpl(const Sizes& sizes) {
    for (int64_t i = 0; i < sizes.blocks; ++i) {
      auto block = torch::nn::ModuleList();
      for (int k = 0; k < 2; ++k) {
        block->push_back(torch::nn::Linear(torch::nn::LinearOptions(sizes.width, sizes.width).bias(false)));
      }
      blocks->push_back(block);
    }
    register_module("blocks", blocks);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t i = 0; i < blocks->size(); ++i) {
      const hsdp::NamedRange range(compute_range(i));
      for (auto& layer : *blocks->ptr<torch::nn::ModuleListImpl>(i)) x = layer->as<torch::nn::Linear>()->forward(x);
    }
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Wide);

std::string in_brackets(size_t block) { return "(blocks." + std::to_string(block) + ")"; }

/// Work that the library queues for the gather of a block: casts and collectives, not the unpacking on the way out.
std::vector<GpuWork> gather_of(const std::vector<GpuWork>& all, size_t block, const std::string& kernel_part) {
  std::vector<GpuWork> found;
  for (const auto& work : all) {
    if (!work.in_range("FSDP::all_gather", in_brackets(block))) continue;
    if (work.in_range("FSDP::all_gather_copy_out") || work.name.find(kernel_part) == std::string::npos) continue;
    found.push_back(work);
  }
  return found;
}

/// Work of a block's own forward. The library's is queued inside the same range, where a parameter is first read.
std::vector<GpuWork> compute_of(const std::vector<GpuWork>& all, size_t block) {
  std::vector<GpuWork> found;
  for (const auto& work : all) {
    if (work.in_range(compute_range(block)) && !work.in_range("FSDP::")) found.push_back(work);
  }
  return found;
}

/// Trains a little, traces one more forward, and expects that gathers run beside the computing of the unit before.
void expect_overlap(RankContext& context, const std::string& gather_kernels) {
  const auto sizes = sizes_here();
  const auto device = context.environment().device();
  auto net = hsdp::meta_init([&] { return Wide(sizes); });
  hsdp::FullyShardOptions options;
  options.mesh = context.environment().mesh();
  options.units = hsdp::each("blocks.*");
  options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  auto model = hsdp::fully_shard(net, options);
  model.to_empty(device);
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) torch::nn::init::normal_(parameter, 0.0, 0.02);
  }
  const auto x = torch::randn({sizes.rows, sizes.width}, torch::TensorOptions(device).dtype(torch::kBFloat16));
  const auto forward_backward = [&] {
    model->forward(x).sum().backward();
    net->zero_grad();
  };
  for (int i = 0; i < 3; ++i) forward_backward();
  synchronize(device);
  const auto trace = traced(c10::str(context.directory(), "/trace_", context.rank(), ".json"), forward_backward);
  const auto ranges = host_ranges(trace);
  for (size_t block = 0; block < static_cast<size_t>(sizes.blocks); ++block) {
    EXPECT_EQ(ranges.count(compute_range(block)), 1u) << block;
    int64_t gathers = 0;
    for (const auto& [name, count] : ranges) {
      if (name.starts_with("FSDP::all_gather") && name.find(in_brackets(block)) != std::string::npos) gathers += count;
    }
    EXPECT_GT(gathers, 0) << "no range of the gather of block " << block;
  }
  if (stand_in() != StandIn::none) return;  // what runs on the host has no streams
  const auto works = gpu_work(trace);
  int64_t beside = 0;
  for (size_t block = 1; block < static_cast<size_t>(sizes.blocks); ++block) {
    const auto gather = gather_of(works, block, gather_kernels);
    const auto compute = compute_of(works, block - 1);
    ASSERT_FALSE(gather.empty()) << "no kernel " << gather_kernels << " for the gather of block " << block;
    ASSERT_FALSE(compute.empty()) << "no kernel computes block " << block - 1;
    EXPECT_NE(gather.front().stream, compute.front().stream) << block;
    const bool overlaps = runs_beside(gather, compute);
    beside += overlaps ? 1 : 0;
    if (context.rank() == 0) {
      const auto g = extent_of(gather), c = extent_of(compute);
      std::printf("block %zu computes %.0f to %.0f us on stream %lld, gather of the next %.0f to %.0f on %lld%s\n",
                  block - 1, c.begin - works.front().begin, c.end - works.front().begin,
                  static_cast<long long>(compute.front().stream), g.begin - works.front().begin,
                  g.end - works.front().begin, static_cast<long long>(gather.front().stream),
                  overlaps ? ", beside" : "");
    }
  }
  // Of the first ones there is nothing to run beside, and a machine may stumble.
  EXPECT_GE(2 * beside, sizes.blocks) << "of " << sizes.blocks - 1 << " gathers";
}

TEST(Overlap, CastsOfTheNextUnitRunBesideThisOne) {
  HSDP_REQUIRE_GPUS(1);
  run_on_gpus(1, Place::own_gpu, [](RankContext& context) { expect_overlap(context, ""); });
}

TEST(Overlap, TheAllGatherOfTheNextUnitRunsBesideThisOne) {
  HSDP_REQUIRE_GPUS(2);
  run_on_gpus(2, Place::own_gpu, [](RankContext& context) { expect_overlap(context, "nccl"); });
}

}  // namespace

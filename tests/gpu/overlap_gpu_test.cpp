// The profiler's trace shows that the gather of the next unit runs beside the computing of this one, and in backward
// the reduction of the one before as well.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
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
std::string backward_range(size_t block) { return "backward of " + std::to_string(block) + "."; }

/// Names what autograd's thread is about: a range from the hook of a block's output to that of its input, which is the
/// output of the block before. Nodes of autograd stand between hooks, never around them.
class BackwardRanges {
 public:
  /// `x` is what goes into `block`, or comes out of the last one.
  void hook(const torch::Tensor& x, size_t block) {
    if (!x.requires_grad()) return;
    x.register_hook([this, block](const torch::Tensor&) {
      range_.reset();
      if (block > 0) range_.emplace(backward_range(block - 1));
    });
  }

 private:
  std::optional<hsdp::NamedRange> range_;
};

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
      backward_ranges.hook(x, i);
      const hsdp::NamedRange range(compute_range(i));
      for (auto& layer : *blocks->ptr<torch::nn::ModuleListImpl>(i)) x = layer->as<torch::nn::Linear>()->forward(x);
    }
    backward_ranges.hook(x, blocks->size());
    return x;
  }
  torch::nn::ModuleList blocks;
  BackwardRanges backward_ranges;
};
TORCH_MODULE(Wide);

std::string in_brackets(size_t block) { return "(blocks." + std::to_string(block) + ")"; }

/// Work that the library queues for a block in ranges that begin with `range`, not the unpacking on the way out.
std::vector<GpuWork> library_work(const std::vector<GpuWork>& all, const std::string& range, size_t block,
                                  const std::string& kernel_part) {
  std::vector<GpuWork> found;
  for (const auto& work : all) {
    if (!work.in_range(range, in_brackets(block))) continue;
    if (work.in_range("FSDP::all_gather_copy_out") || work.name.find(kernel_part) == std::string::npos) continue;
    found.push_back(work);
  }
  return found;
}

/// Work of a block's own forward or backward, by its range. The library's is queued inside the same one.
std::vector<GpuWork> compute_of(const std::vector<GpuWork>& all, const std::string& range) {
  std::vector<GpuWork> found;
  for (const auto& work : all) {
    if (work.in_range(range) && !work.in_range("FSDP::")) found.push_back(work);
  }
  return found;
}

/// Whether `works`, what the library does for another unit, runs beside `compute`; printed where it is wanted.
bool is_beside(const std::vector<GpuWork>& works, const std::vector<GpuWork>& compute, const std::string& what,
               bool prints) {
  if (works.empty() || compute.empty()) {
    ADD_FAILURE() << what << ": no kernel of the " << (works.empty() ? "library" : "computing block");
    return false;
  }
  const bool overlaps = runs_beside(works, compute);
  if (prints) {
    const auto w = extent_of(works), c = extent_of(compute);
    std::printf("%s, which takes %.0f us on stream %lld: from %.0f us after its begin to %.0f on %lld%s\n",
                what.c_str(), c.end - c.begin, static_cast<long long>(compute.front().stream), w.begin - c.begin,
                w.end - c.begin, static_cast<long long>(works.front().stream), overlaps ? ", beside" : "");
  }
  return overlaps;
}

/// How much runs beside the computing of a neighbour, of the blocks that have one on that side.
struct Beside {
  int64_t gathers = 0, gathers_in_backward = 0, reductions = 0;
};
Beside beside_in(const std::vector<GpuWork>& all, size_t blocks, const std::string& collectives, bool reduces,
                 bool prints) {
  Beside beside;
  const auto last = compute_of(all, backward_range(blocks - 1));
  if (last.empty()) {
    ADD_FAILURE() << "no kernel of the last block's backward";
    return beside;
  }
  // Gathers of both directions have the same names, and forward's are over before the last block's backward.
  std::vector<GpuWork> forward, backward;
  for (const auto& work : all) (work.begin < last.front().begin ? forward : backward).push_back(work);
  for (size_t block = 1; block < blocks; ++block) {
    const auto counts = [&](const std::vector<GpuWork>& works, const char* range, size_t of,
                            const std::string& compute) {
      return is_beside(library_work(works, range, of, collectives), compute_of(works, compute),
                       c10::str(range, " ", in_brackets(of), " beside ", compute), prints)
                 ? 1
                 : 0;
    };
    beside.gathers += counts(forward, "FSDP::all_gather", block, compute_range(block - 1));
    if (reduces) {
      beside.reductions += counts(backward, "FSDP::post_backward_reduce", block, backward_range(block - 1));
    }
    if (block + 1 == blocks) continue;  // its backward is where the directions are told apart
    beside.gathers_in_backward += counts(backward, "FSDP::all_gather", block - 1, backward_range(block));
  }
  return beside;
}

TEST(Trace, SaysHowMuchOfAStepRunsBesideItsComputing) {
  HSDP_REQUIRE_GPUS(1);
  // Three blocks that compute for 10 us each, forward on 7 and back; what the library does for them is `lag` us late.
  const auto step = [](double lag) {
    std::vector<GpuWork> all;
    const auto add = [&](const char* name, int64_t stream, double begin, const std::string& range) {
      all.push_back({name, stream, begin, begin + 10, {range}});
    };
    for (size_t block = 0; block < 3; ++block) {
      const double forward = 10.0 * static_cast<double>(block), backward = 60 - forward;
      add("gemm", 7, forward, compute_range(block));
      add("gemm", 7, backward, backward_range(block));
      add("nccl", 8, forward - 10 + lag, "FSDP::all_gather " + in_brackets(block));
      if (block < 2) add("nccl", 8, backward - 10 + lag, "FSDP::all_gather " + in_brackets(block));
      add("nccl", 9, backward + 10 + lag, "FSDP::post_backward_reduce " + in_brackets(block));
      add("copy", 9, backward, "FSDP::post_backward_reduce " + in_brackets(block));
    }
    std::sort(all.begin(), all.end(), [](const GpuWork& a, const GpuWork& b) { return a.begin < b.begin; });
    return all;
  };
  const auto beside = beside_in(step(0), 3, "nccl", true, false);
  EXPECT_EQ(beside.gathers, 2);
  EXPECT_EQ(beside.gathers_in_backward, 1);
  EXPECT_EQ(beside.reductions, 2);
  const auto late = beside_in(step(10), 3, "nccl", true, false);
  EXPECT_EQ(late.gathers, 0);
  EXPECT_EQ(late.gathers_in_backward, 0);
  EXPECT_EQ(late.reductions, 0);
  EXPECT_EQ(beside_in(step(0), 3, "", false, false).reductions, 0) << "not looked for";
}

/// Trains a little, traces one more step, and expects that gathers of the next unit and, between ranks, reductions of
/// the last run beside the computing of this one.
void expect_overlap(RankContext& context, const std::string& collectives) {
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
  // With a gradient, so that the first block has something to compute in backward and its range an end.
  const auto x = torch::randn({sizes.rows, sizes.width}, torch::TensorOptions(device).dtype(torch::kBFloat16));
  const auto forward_backward = [&] {
    model->forward(x.detach().set_requires_grad(true)).sum().backward();
    net->zero_grad();
  };
  for (int i = 0; i < 3; ++i) forward_backward();
  synchronize(device);
  const auto trace = traced(c10::str(context.directory(), "/trace_", context.rank(), ".json"), forward_backward);
  const auto ranges = host_ranges(trace);
  const auto count = static_cast<size_t>(sizes.blocks);
  for (size_t block = 0; block < count; ++block) {
    for (const auto& range : {compute_range(block), backward_range(block)}) {
      EXPECT_EQ(ranges.count(range), 1u) << range;
    }
    const auto of_library = [&](const std::string& prefix) {
      int64_t found = 0;
      for (const auto& [name, times] : ranges) {
        if (name.starts_with(prefix) && name.find(in_brackets(block)) != std::string::npos) found += times;
      }
      return found;
    };
    // The last one is not freed between its forward and its backward.
    EXPECT_GE(of_library("FSDP::all_gather_copy_in"), block + 1 < count ? 2 : 1) << "gathers of block " << block;
    EXPECT_EQ(of_library("FSDP::post_backward_reduce"), 1) << "reductions of block " << block;
  }
  if (stand_in() != StandIn::none) return;        // what runs on the host has no streams
  const bool reduces = context.world_size() > 1;  // alone gradients are the shards
  const auto beside = beside_in(gpu_work(trace), count, collectives, reduces, /*prints=*/context.rank() == 0);
  // Of the first ones there is nothing to run beside, and a machine may stumble.
  EXPECT_GE(2 * beside.gathers, sizes.blocks) << "of " << count - 1 << " gathers in forward";
  EXPECT_GE(2 * beside.gathers_in_backward, sizes.blocks) << "of " << count - 2 << " gathers in backward";
  if (reduces) {
    EXPECT_GE(2 * beside.reductions, sizes.blocks) << "of " << count - 1 << " reductions";
  }
}

TEST(Overlap, CastsOfTheNextUnitRunBesideThisOne) {
  HSDP_REQUIRE_GPUS(1);
  run_on_gpus(1, Place::own_gpu, [](RankContext& context) { expect_overlap(context, ""); });
}

TEST(Overlap, CollectivesOfTheNextAndTheLastUnitRunBesideThisOne) {
  HSDP_REQUIRE_GPUS(2);
  run_on_gpus(2, Place::own_gpu, [](RankContext& context) { expect_overlap(context, "nccl"); });
}

}  // namespace

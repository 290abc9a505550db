// The gradient kernels on a GPU: the same cases as on the host, and what only a GPU has, streams and graphs.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "hsdp/kernels/gradient_kernels.h"
#include "tests/gpu/device.h"
#include "tests/testing/gradient_kernel_cases.h"

namespace {

using namespace testing_support;

// Skips the test where there is none; the answer is then of no use.
c10::Device gpu() {
  const auto lacking = lacking_gpus(1);
  if (lacking.empty()) return first_gpu();
  [&] { GTEST_SKIP() << lacking; }();
  return c10::Device(at::kCPU);
}

INSTANTIATE_TEST_SUITE_P(Device, GradientKernels, ::testing::Values(Way{"Gpu", gpu}),
                         [](const auto& which) { return which.param.name; });

TEST(GradientKernelsOnStreams, RunBehindTheCurrentStream) {
  HSDP_REQUIRE_GPUS(1);
  HSDP_REQUIRE_REAL_GPU("a stream");
  const auto device = first_gpu();
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  const auto destination = at::zeros({100000}, options), rows = at::zeros({2, 50000}, options);
  const auto words = at::zeros({4}, options.dtype(at::kLong));
  const auto source = at::zeros({100000}, options);
  synchronize(device);
  const c10::StreamGuard guard(another_stream(device));
  // What the stream is still to write when the kernels are launched.
  keep_busy(std::chrono::milliseconds(200));
  source.fill_(6);
  kernels::land_gradients({{destination, source}}, 3);
  kernels::pack_gradients({{source, rows}}, 2);
  words.fill_(9);
  kernels::write_words(words, {1, 2, 3, 4});
  const auto copied = destination.clone();  // on the same stream
  synchronize(device);
  EXPECT_TRUE(copied.cpu().eq(2).all().item<bool>());
  EXPECT_TRUE(rows.cpu().eq(3).all().item<bool>());
  EXPECT_TRUE(words.cpu().equal(at::tensor({1, 2, 3, 4}, at::kLong)));
}

TEST(GradientKernelsOnStreams, AreRecordedByGraphs) {
  HSDP_REQUIRE_GPUS(1);
  HSDP_REQUIRE_REAL_GPU("a CUDA graph");
  const auto device = first_gpu();
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  const auto destination = at::zeros({5000}, options), source = at::zeros({5000}, options.dtype(at::kBFloat16));
  const auto rows = at::zeros({3, 1700}, options), words = at::zeros({4}, options.dtype(at::kLong));
  const c10::StreamGuard guard(another_stream(device));
  const auto run = [&] {
    // Nothing that the launches are given has to live until the replay.
    std::vector<kernels::Landing> landings;
    for (int64_t i = 0; i < 200; ++i) {
      landings.push_back({destination.narrow(0, 25 * i, 25), source.narrow(0, 25 * i, 25), true});
    }
    kernels::land_gradients(landings, 4);
    kernels::pack_gradients({{destination, rows}}, 3);
    kernels::write_words(words, {5, 6, 7, 8});
  };
  run();  // loads the kernels
  synchronize(device);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  run();
  graph.capture_end();
  for (int i = 0; i < 3; ++i) {
    source.fill_(4 * (i + 1));
    words.zero_();
    graph.replay();
  }
  synchronize(device);
  EXPECT_TRUE(destination.cpu().eq(1 + 2 + 3).all().item<bool>());
  const auto line = rows.cpu().view({-1});
  EXPECT_TRUE(line.narrow(0, 0, 5000).eq(2).all().item<bool>());
  EXPECT_TRUE(line.narrow(0, 5000, 100).eq(0).all().item<bool>());
  EXPECT_TRUE(words.cpu().equal(at::tensor({5, 6, 7, 8}, at::kLong)));
}

}  // namespace

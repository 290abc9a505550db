// A steady step never makes the host wait for the GPU, and CUDA graphs can record it.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/checkpoint/checkpointed_tensors.h"
#include "hsdp/checkpoint/optimizer_state.h"
#include "hsdp/hsdp.h"
#include "tests/gpu/device.h"
#include "tests/testing/blocks.h"

namespace {

using namespace testing_support;

/// libtorch's own check: what makes the host wait for a stream throws.
class NoSync {
 public:
  NoSync() { set(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoSync() { set(c10::cuda::SyncDebugMode::L_DISABLED); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  static void set(c10::cuda::SyncDebugMode mode) {
    if (stand_in() == StandIn::none) c10::cuda::warning_state().set_sync_debug_mode(mode);
  }
};

struct Case {
  std::string name;
  int ranks;
  std::optional<torch::ScalarType> param_dtype = std::nullopt;
  std::vector<int64_t> mesh = {};
  bool optimizers_in_backward = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Steady : public ::testing::TestWithParam<Case> {};

hsdp::FullySharded<BlocksImpl> blocks(RankContext& context, const Case& c) {
  torch::manual_seed(7);
  auto net = hsdp::meta_init([] { return Blocks(2, 16); });
  hsdp::FullyShardOptions options;
  options.mesh = c.mesh.empty() ? context.environment().mesh() : mesh_of(context, c.mesh);
  options.units = hsdp::each("blocks.*");
  options.mixed_precision.param_dtype = c.param_dtype;
  if (c.param_dtype) options.mixed_precision.reduce_dtype = torch::kFloat;
  auto model = hsdp::fully_shard(net, options);
  model.materialize(context.environment().device());
  return model;
}

TEST_P(Steady, StepsNeverMakeTheHostWait) {
  HSDP_REQUIRE_GPUS(GetParam().ranks);
  run_on_gpus(GetParam().ranks, Place::own_gpu, [](RankContext& context) {
    const auto device = context.environment().device();
    auto model = blocks(context, GetParam());
    const torch::optim::AdamWOptions adamw(1e-3);
    std::optional<hsdp::FusedAdamW> optimizer;
    if (GetParam().optimizers_in_backward) {
      hsdp::apply_optimizer_in_backward(model, [&](const at::Tensor& parameter) {
        return std::make_unique<hsdp::FusedAdamW>(std::vector<at::Tensor>{parameter}, adamw);
      });
    } else {
      optimizer.emplace(model.module().parameters(), adamw);
    }
    const auto x = torch::ones({4, 16}, device);
    torch::Tensor loss, norm;
    const auto train = [&] {
      auto value = model->forward(x).to(torch::kFloat).square().mean();
      value.backward();
      loss = value.detach();
      if (!optimizer) return;
      norm = hsdp::clip_grad_norm_on_device_(model.module().parameters(), 0.1);
      optimizer->step();
      optimizer->zero_grad();
    };
    train();
    const double first_loss = loss.item<double>();
    for (int i = 0; i < 3; ++i) train();
    synchronize(device);
    // Whether the host is through a step before the device has begun it.
    const auto is_ahead_of_a_busy_device = [&](std::chrono::milliseconds time) {
      c10::Event busy(device.type());
      keep_busy(time);
      busy.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
      train();
      const bool is_ahead = !busy.query();
      synchronize(device);
      return is_ahead;
    };
    // The signatures that gathers compare lie in page-locked memory until the device has copied them. A step that the
    // host is ahead of needs as many blocks as it gathers, and the driver may hold the host up while it makes one,
    // which no check reports: they are made here, and go round from then on.
    if (stand_in() == StandIn::none) is_ahead_of_a_busy_device(std::chrono::milliseconds(100));
    {
      const NoSync none;
      for (int i = 0; i < 10; ++i) train();
    }
    synchronize(device);
    // What libtorch's check does not know of, such as events, shows when the stream is busy.
    if (stand_in() == StandIn::none) {
      EXPECT_TRUE(is_ahead_of_a_busy_device(std::chrono::milliseconds(2000)))
          << "a step held the host up until the device had come to it";
    }
    EXPECT_TRUE(std::isfinite(loss.item<double>()));
    EXPECT_LT(loss.item<double>(), first_loss) << "no step was done";
    if (optimizer) {
      EXPECT_GT(norm.item<double>(), 0);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Steady,
                         ::testing::Values(Case{"Alone", 1}, Case{"AloneBf16", 1, torch::kBFloat16}, Case{"OwnGpus", 2},
                                           Case{"OwnGpusBf16", 2, torch::kBFloat16},
                                           Case{"OwnGpusReplicated", 2, std::nullopt, {2, 1}},
                                           Case{"OwnGpusHybrid", 4, torch::kBFloat16, {2, 2}},
                                           Case{"AloneInBackward", 1, std::nullopt, {}, true},
                                           Case{"OwnGpusInBackwardBf16", 2, torch::kBFloat16, {}, true}),
                         [](const auto& which) { return which.param.name; });

// ---- CUDA graphs ----

std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<hsdp::FusedSGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}
std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<hsdp::FusedAdamW>(parameters, torch::optim::AdamWOptions(0.01).amsgrad(true));
}

/// By parameter name, as a checkpoint has them.
std::map<std::string, std::map<std::string, int64_t>> counts_of(const hsdp::FullySharded<BlocksImpl>& model,
                                                                torch::optim::Optimizer& optimizer) {
  std::map<std::string, std::map<std::string, int64_t>> counts;
  const auto names = hsdp::parameter_names(hsdp::registered_tensors(*model.core()));
  for (const auto& [name, entry] : hsdp::optimizer_states({&optimizer}, names)) counts[name] = entry.counts;
  return counts;
}

/// Records a step after a few others, replays it, and compares with a twin whose steps are done one by one. Both use
/// the same groups, so that collectives of replays and of steps take turns there.
void expect_replays_equal_steps(RankContext& context, const Case& c, bool first_on_default_stream,
                                const decltype(&sgd)& make_optimizer) {
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
  const auto device = context.environment().device();
  const Share share(context);
  const auto batch = [&](int64_t step) { return rows_of(step, 1, {12, 16}, share.begin, share.end).to(device); };
  struct Trained {
    hsdp::FullySharded<BlocksImpl> model;
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    torch::Tensor x;
    void step() {
      model->forward(x).square().mean().backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  };
  const auto make = [&] {
    auto model = blocks(context, c);
    auto optimizer = make_optimizer(model.module().parameters());
    return std::make_unique<Trained>(Trained{std::move(model), std::move(optimizer), batch(0)});
  };
  const auto recorded = make(), eager = make();
  const auto expect_same_counts = [&] {
    EXPECT_EQ(counts_of(recorded->model, *recorded->optimizer), counts_of(eager->model, *eager->optimizer));
  };
  if (first_on_default_stream) {
    for (auto* trained : {recorded.get(), eager.get()}) trained->step();
    synchronize(device);
  }
  // Recording takes a stream that is not the default one, and memory that is warm.
  const c10::StreamGuard guard(another_stream(device));
  for (auto* trained : {recorded.get(), eager.get()}) {
    for (int64_t step = 0; step < 3; ++step) {
      trained->x.copy_(batch(step));
      trained->step();
    }
  }
  synchronize(device);
  std::optional<at::cuda::CUDAGraph> graph;  // in a dry run a step stands for a replay
  if (stand_in() == StandIn::none) {
    graph.emplace();
    graph->capture_begin();
    recorded->step();
    graph->capture_end();
  }
  expect_same_counts();
  const auto replay = [&](int64_t step) {
    recorded->x.copy_(batch(step));
    if (graph) {
      graph->replay();
    } else {
      recorded->step();
    }
    eager->x.copy_(batch(step));
    eager->step();
  };
  for (int64_t step = 3; step < 6; ++step) replay(step);
  synchronize(device);
  const auto expected = eager->model.module().named_parameters();
  for (auto& parameter : recorded->model.module().named_parameters()) {
    EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value()), hsdp::unsharded(expected[parameter.key()])), 1e-12)
        << parameter.key();
  }
  expect_same_counts();
  // A step outside of the graph goes on from there, and a replay from that.
  recorded->x.copy_(batch(6));
  recorded->step();
  eager->x.copy_(batch(6));
  eager->step();
  replay(7);
  EXPECT_LE(largest_difference(hsdp::unsharded(recorded->model.module().head->weight),
                               hsdp::unsharded(eager->model.module().head->weight)),
            1e-12);
  expect_same_counts();
}

class Graph : public ::testing::TestWithParam<Case> {};

TEST_P(Graph, ReplaysOfAStepEqualStepsDoneOneByOne) {
  HSDP_REQUIRE_GPUS(GetParam().ranks);
  run_on_gpus(GetParam().ranks, Place::own_gpu, [](RankContext& context) {
    for (const auto& optimizer : {sgd, adamw}) expect_replays_equal_steps(context, GetParam(), false, optimizer);
  });
}

TEST_P(Graph, IsRecordedAlsoAfterStepsOnTheDefaultStream) {
  HSDP_REQUIRE_GPUS(GetParam().ranks);
  run_on_gpus(GetParam().ranks, Place::own_gpu,
              [](RankContext& context) { expect_replays_equal_steps(context, GetParam(), true, sgd); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Graph,
                         ::testing::Values(Case{"Alone", 1}, Case{"OwnGpus", 2},
                                           Case{"OwnGpusHybrid", 4, std::nullopt, {2, 2}}),
                         [](const auto& which) { return which.param.name; });

}  // namespace

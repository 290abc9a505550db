// bf16, fp16 with a scaler, pinned shards, optimizers in backward and generators, on GPUs.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "tests/gpu/device.h"
#include "tests/testing/blocks.h"

namespace {

using namespace testing_support;
using dtensor::DTensor;
using Tensors = std::map<std::string, torch::Tensor>;

/// Ranks and place of a test: alone, two that share a GPU, two with one each.
struct Ranks {
  std::string name;
  int count;
  Place place;
  int gpus() const { return place == Place::own_gpu ? count : 1; }
};
std::ostream& operator<<(std::ostream& out, const Ranks& ranks) { return out << ranks.name; }
std::string ranks_name(const ::testing::TestParamInfo<Ranks>& info) { return info.param.name; }

class Precision : public ::testing::TestWithParam<Ranks> {
 protected:
  static void run(const std::function<void(RankContext&)>& body) {
    run_on_gpus(GetParam().count, GetParam().place, body);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Precision,
                         ::testing::Values(Ranks{"Alone", 1, Place::own_gpu}, Ranks{"Sharing", 2, Place::one_gpu},
                                           Ranks{"OwnGpus", 2, Place::own_gpu}),
                         ranks_name);

// Small whole numbers, of which every product and sum of a step is a number of bf16 and of fp16: whatever order a GPU
// adds in, the results are exact, and one rounding too many shows.
constexpr int64_t kWidth = 8, kRows = 4;

struct WholeNumbersImpl : torch::nn::Module {
  WholeNumbersImpl() {
    for (int64_t i = 0; i < 2; ++i) {
      auto layer = torch::nn::Linear(kWidth, kWidth);
      {
        torch::NoGradGuard no_grad;
        layer->weight.copy_(torch::randint(-1, 2, {kWidth, kWidth}));
        layer->bias.copy_(torch::randint(-1, 2, {kWidth}));
      }
      layers->push_back(layer);
    }
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : *layers) x = layer->as<torch::nn::Linear>()->forward(x);
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(WholeNumbers);

WholeNumbers seeded_net() {
  torch::manual_seed(7);
  return WholeNumbers();
}

torch::Tensor whole_rows(int64_t rank) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 + rank));
  return torch::randint(-1, 2, {kRows, kWidth}, generator, torch::kFloat);
}

/// Gradients of the sum of the outputs, times `of_first` on rank 0, averaged over the ranks; in double on the host.
Tensors expected_gradients(int64_t ranks, double of_first = 1) {
  auto net = seeded_net();
  net->to(torch::kDouble);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const double weight = (rank == 0 ? of_first : 1) / static_cast<double>(ranks);
    (net->forward(whole_rows(rank).to(torch::kDouble)).sum() * weight).backward();
  }
  Tensors gradients;
  for (auto& parameter : net->named_parameters()) {
    gradients[parameter.key()] = parameter.value().grad().to(torch::kFloat);
  }
  return gradients;
}

Tensors initial_values() {
  Tensors values;
  for (auto& parameter : seeded_net()->named_parameters()) values[parameter.key()] = parameter.value().detach().clone();
  return values;
}

hsdp::FullySharded<WholeNumbersImpl> whole_numbers(RankContext& context, torch::ScalarType param_dtype) {
  auto net = hsdp::meta_init(seeded_net);
  hsdp::FullyShardOptions options;
  options.mesh = context.environment().mesh();
  options.units = hsdp::each("layers.*");
  options.mixed_precision = {.param_dtype = param_dtype, .reduce_dtype = torch::kFloat};
  auto model = hsdp::fully_shard(net, options);
  model.materialize(context.environment().device());
  return model;
}

void expect_values(const torch::nn::Module& module, const Tensors& expected, const std::string& when) {
  for (auto& parameter : module.named_parameters()) {
    EXPECT_EQ(parameter.value().scalar_type(), torch::kFloat) << parameter.key();
    EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value()).cpu(), expected.at(parameter.key())))
        << parameter.key() << " " << when;
  }
}

TEST_P(Precision, Bf16ComputesInBf16AndReducesAndStepsInFloat) {
  HSDP_REQUIRE_GPUS(GetParam().gpus());
  run([](RankContext& context) {
    const auto device = context.environment().device();
    auto model = whole_numbers(context, torch::kBFloat16);
    auto values = initial_values();
    expect_values(model.module(), values, "at the start");
    // 257 is no number of bf16, whose neighbour is 256.
    {
      torch::NoGradGuard no_grad;
      const auto x = torch::full({kRows, kWidth}, 257.0f, device);
      EXPECT_TRUE(torch::equal(model->forward(x), model->forward(torch::full_like(x, 256.0f))));
    }
    const auto y = model->forward(whole_rows(context.rank()).to(device));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    // 64 times a gradient of one rank and a gradient of another are numbers of bf16, and their sum mostly is none.
    constexpr double first = 64;
    (y.sum() * (context.rank() == 0 ? first : 1)).backward();
    const auto gradients = expected_gradients(context.world_size(), first);
    hsdp::FusedSGD optimizer(model.module().parameters(), torch::optim::SGDOptions(0.25));
    for (auto& parameter : model.module().named_parameters()) {
      const auto& gradient = parameter.value().grad();
      EXPECT_EQ(gradient.scalar_type(), torch::kFloat);
      EXPECT_EQ(gradient.device(), device);
      EXPECT_TRUE(torch::equal(hsdp::unsharded(gradient).cpu(), gradients.at(parameter.key()))) << parameter.key();
    }
    optimizer.step();
    for (auto& [name, value] : values) value.sub_(gradients.at(name), 0.25);
    expect_values(model.module(), values, "after a step");
  });
}

TEST_P(Precision, Fp16WithAScalerIsExactAndSkipsStepsOnAllRanks) {
  HSDP_REQUIRE_GPUS(GetParam().gpus());
  run([](RankContext& context) {
    const auto device = context.environment().device();
    auto model = whole_numbers(context, torch::kHalf);
    auto values = initial_values();
    const auto gradients = expected_gradients(context.world_size());
    hsdp::FusedSGD optimizer(model.module().parameters(), torch::optim::SGDOptions(0.25));
    // Times the largest gradient, 36, still a number of fp16.
    hsdp::GradScaler scaler({.scale = 1024});
    const auto iterate = [&] {
      optimizer.zero_grad();
      const auto y = model->forward(whole_rows(context.rank()).to(device));
      EXPECT_EQ(y.scalar_type(), torch::kHalf);
      scaler.scale(y.to(torch::kFloat).sum()).backward();
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      return stepped;
    };
    // 2^20 is none, and what comes of it in fp16 is infinite.
    scaler.update(0x1p20);
    EXPECT_FALSE(iterate());
    EXPECT_EQ(scaler.get_scale(), 0x1p19);
    expect_values(model.module(), values, "after a step that was skipped");
    scaler.update(1024);
    EXPECT_TRUE(iterate());
    EXPECT_EQ(scaler.get_scale(), 1024);
    for (auto& [name, value] : values) value.sub_(gradients.at(name), 0.25);
    expect_values(model.module(), values, "after a step");
    // An infinity of one rank is all ranks'.
    optimizer.zero_grad();
    auto x = whole_rows(context.rank()).to(device);
    if (context.rank() == 0) x.fill_(std::numeric_limits<float>::infinity());
    scaler.scale(model->forward(x).to(torch::kFloat).sum()).backward();
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 512);
    expect_values(model.module(), values, "after an infinity of rank 0");
  });
}

/// Trains `model` for some steps and returns its values.
Tensors trained(
    RankContext& context, const hsdp::FullySharded<BlocksImpl>& model, const std::function<void()>& step_done = [] {}) {
  hsdp::FusedAdamW optimizer(model.module().parameters(), torch::optim::AdamWOptions(0.01).eps(1e-4));
  const Share share(context);
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto x = rows_of(step, 1, {12, 6}, share.begin, share.end).to(context.environment().device());
    model->forward(x).square().mean().backward();
    hsdp::clip_grad_norm_(model.module().parameters(), 0.5);
    optimizer.step();
    step_done();
  }
  Tensors values;
  for (auto& parameter : model.module().named_parameters()) {
    values[parameter.key()] = hsdp::unsharded(parameter.value()).cpu();
  }
  return values;
}

hsdp::FullySharded<BlocksImpl> blocks(RankContext& context, bool offload, bool pin) {
  torch::manual_seed(7);
  auto net = hsdp::meta_init([] { return Blocks(3, 6); });
  auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                       .units = hsdp::each("blocks.*"),
                                       .offload = {.to_host = offload, .pin_memory = pin}});
  model.materialize(context.environment().device());
  return model;
}

TEST_P(Precision, OffloadedShardsArePinnedAndTrainTheSame) {
  HSDP_REQUIRE_GPUS(GetParam().gpus());
  run([](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    const auto plain = trained(context, blocks(context, false, false));
    for (const bool pin : {true, false}) {
      auto model = blocks(context, true, pin);
      const auto check = [&] {
        for (auto& parameter : model.module().named_parameters()) {
          const auto local = DTensor(parameter.value()).to_local();
          EXPECT_EQ(local.device(), c10::Device(c10::kCPU)) << parameter.key();
          if (stand_in() == StandIn::none) {
            EXPECT_EQ(local.is_pinned(), pin) << parameter.key();
          }
          if (parameter.value().grad().defined()) {
            EXPECT_EQ(parameter.value().grad().device(), c10::Device(c10::kCPU)) << parameter.key();
          }
        }
      };
      check();
      const auto values = trained(context, model, check);
      for (const auto& [name, value] : values) {
        EXPECT_LE(largest_difference(value, plain.at(name)), 1e-11) << name << (pin ? ", pinned" : ", pageable");
      }
    }
  });
}

TEST_P(Precision, OptimizersInBackwardGiveTheNumbersOfAnOrdinaryLoop) {
  HSDP_REQUIRE_GPUS(GetParam().gpus());
  run([](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    const torch::optim::AdamWOptions adamw(0.01);
    const Share share(context);
    const auto x_of = [&](int64_t step) {
      return rows_of(step, 1, {12, 6}, share.begin, share.end).to(context.environment().device());
    };
    auto ordinary = blocks(context, false, false), inside = blocks(context, false, false);
    hsdp::FusedAdamW optimizer(ordinary.module().parameters(), adamw);
    hsdp::apply_optimizer_in_backward(inside, [&](const at::Tensor& parameter) {
      return std::make_unique<hsdp::FusedAdamW>(std::vector<at::Tensor>{parameter}, adamw);
    });
    for (int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ordinary->forward(x_of(step)).square().mean().backward();
      optimizer.step();
      inside->forward(x_of(step)).square().mean().backward();
    }
    for (auto& parameter : inside.module().named_parameters()) {
      EXPECT_FALSE(parameter.value().grad().defined()) << parameter.key();
      const auto expected = hsdp::unsharded(ordinary.module().named_parameters()[parameter.key()]);
      EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value()), expected), 1e-12) << parameter.key();
    }
  });
}

struct DroppingImpl : torch::nn::Module {
  DroppingImpl()
      : first(register_module("first", torch::nn::Linear(16, 16))),
        dropout(register_module("dropout", torch::nn::Dropout(0.5))),
        last(register_module("last", torch::nn::Linear(16, 16))) {
    scale = register_parameter("scale", torch::randn({16}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(dropout(first(x))) * scale; }
  torch::nn::Linear first{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear last{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Dropping);

TEST_P(Precision, GeneratorsPartBetweenRanksAndRepeatBitForBit) {
  HSDP_REQUIRE_GPUS(GetParam().gpus());
  run([](RankContext& context) {
    const auto device = context.environment().device();
    torch::manual_seed(7);
    Dropping plain;  // on the host
    const auto constructed = plain->named_parameters();
    std::vector<torch::Tensor> losses, drawn;
    std::vector<Tensors> values;
    for (int repetition = 0; repetition < 2; ++repetition) {
      torch::manual_seed(7);
      auto net = hsdp::meta_init([] { return Dropping(); });
      auto model =
          hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()});
      model.materialize(device);
      for (auto& parameter : net->named_parameters()) {
        EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value()).cpu(), constructed[parameter.key()]))
            << parameter.key() << " has not the bits of construction on the host";
      }
      hsdp::FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 3; ++step) {
        const auto loss = model->forward(torch::ones({16, 16}, device)).square().mean();
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        losses.push_back(loss.detach().cpu());
      }
      drawn.push_back(torch::rand({64}, torch::TensorOptions(device).dtype(torch::kFloat)));
      auto& last = values.emplace_back();
      for (auto& parameter : net->named_parameters()) {
        last[parameter.key()] = hsdp::unsharded(parameter.value()).cpu();
      }
    }
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(torch::equal(losses[i], losses[i + 3])) << "loss of step " << i;
    EXPECT_TRUE(torch::equal(drawn[0], drawn[1]));
    for (const auto& [name, value] : values[0]) EXPECT_TRUE(torch::equal(value, values[1].at(name))) << name;
    const auto all = torch::empty({context.world_size() * 64}, drawn[0].options());
    context.environment().communicator()->all_gather(all, drawn[0], {"all_gather", "test"})->wait();
    for (int rank = 0; rank < context.world_size(); ++rank) {
      EXPECT_EQ(torch::equal(all.narrow(0, rank * 64, 64), drawn[0]), rank == context.rank()) << "rank " << rank;
    }
  });
}

}  // namespace

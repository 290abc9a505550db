// Parameters, gradients and outputs in dtypes of their own, against the same done by hand: a cast copy of the plain
// module computes, its gradients are cast, added over the ranks, and stepped into the masters.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "tests/testing/blocks.h"
#include "tests/testing/expect.h"
#include "tests/testing/fake_communicator.h"
#include "tests/testing/offline_mesh.h"

namespace mixed_precision_test {

using namespace testing_support;
using dtensor::DTensor;
using Dtype = std::optional<torch::ScalarType>;

torch::Tensor inputs(int64_t step, const Share& share) { return rows_of(step, 1, {12, 5}, share.begin, share.end); }

/// The largest power of two that fp16 gradients are divided by before they are added; the rest comes afterwards.
double before_of(int64_t ranks, torch::ScalarType dtype) { return dtype != torch::kHalf ? 1 : ranks == 1 ? 1 : 2; }

/// One parameter's gradient on its way from this rank's copy to the masters.
torch::Tensor reduced_by_hand(hsdp::Environment& environment, const torch::Tensor& gradient, Dtype reduce) {
  auto sum = gradient.to(reduce.value_or(gradient.scalar_type()), false, /*copy=*/true);
  const auto before = before_of(environment.world_size(), sum.scalar_type());
  sum.div_(before);
  environment.communicator()->all_reduce(sum, dtensor::ReduceOp::sum, {"all_reduce", "gradient"})->wait();
  return sum.div_(static_cast<double>(environment.world_size()) / before);
}

/// The masters, and the cast copy that computes.
template <class Net>
struct ByHand {
  ByHand(Net with_masters, Net cast_copy, torch::ScalarType param) : masters(with_masters), copy(cast_copy) {
    for (auto& parameter : copy->parameters()) parameter.set_data(parameter.detach().to(param));
    refresh();
  }
  void refresh() {
    torch::NoGradGuard no_grad;
    auto from = masters->parameters(), to = copy->parameters();
    for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  }
  void reduce(hsdp::Environment& environment, Dtype reduce_dtype) {
    for (auto& entry : copy->named_parameters()) {
      auto& gradient = entry.value().mutable_grad();
      if (!gradient.defined()) continue;
      masters->named_parameters()[entry.key()].mutable_grad() =
          reduced_by_hand(environment, gradient, reduce_dtype).to(torch::kFloat);
      gradient = torch::Tensor();
    }
  }
  Net masters, copy;
};

template <class Net>
void expect_same_bits_as(const Net& net, const Net& masters, const std::string& when) {
  const auto expected = masters->named_parameters();
  for (auto& parameter : net->named_parameters()) {
    EXPECT_EQ(parameter.value().scalar_type(), torch::kFloat) << parameter.key();
    ASSERT_TRUE(torch::equal(hsdp::unsharded(parameter.value()), expected[parameter.key()])) << parameter.key() << when;
    const auto& theirs = expected[parameter.key()].grad();
    ASSERT_EQ(parameter.value().grad().defined(), theirs.defined()) << parameter.key() << when;
    if (!theirs.defined()) continue;
    EXPECT_EQ(parameter.value().grad().scalar_type(), torch::kFloat) << parameter.key();
    ASSERT_TRUE(torch::equal(hsdp::unsharded(parameter.value().grad()), theirs)) << parameter.key() << ".grad" << when;
  }
}

// ---- dtypes of parameters and of reductions ----

class Dtypes : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(Dtypes, OfParametersAndReductionsTrainAsByHand) {
  const auto sizes = GetParam();
  int64_t ranks = 1;
  for (auto size : sizes) ranks *= size;
  run_ranks(static_cast<int>(ranks), [&](RankContext& context) {
    auto& environment = context.environment();
    const Share share(context);
    const auto mesh = mesh_of(context, sizes);
    const std::vector<std::pair<Dtype, Dtype>> pairs{
        {torch::kBFloat16, std::nullopt}, {torch::kBFloat16, torch::kFloat}, {torch::kBFloat16, torch::kBFloat16},
        {torch::kHalf, std::nullopt},     {torch::kHalf, torch::kFloat},     {torch::kHalf, torch::kBFloat16},
        {std::nullopt, torch::kBFloat16}, {std::nullopt, torch::kHalf},      {torch::kBFloat16, torch::kHalf}};
    const auto make = [] { return Blocks(3, 5); };
    for (auto& [param, reduce] : pairs) {
      for (int variant = 0; variant < 4; ++variant) {
        SCOPED_TRACE(c10::str("param ", param.value_or(torch::kFloat), ", reduce ",
                              reduce ? c10::toString(*reduce) : "as it comes", ", variant ", variant));
        hsdp::FullyShardOptions options{.mesh = mesh,
                                        .units = hsdp::each("blocks.*"),
                                        .mixed_precision = {.param_dtype = param, .reduce_dtype = reduce}};
        if (variant == 1) options.reshard_after_forward = true;
        if (variant == 2) options.reshard_after_forward = false;
        if (variant == 3) {
          options.shard_placement_fn = [](const std::string&, const at::Tensor& parameter) {
            return std::optional<int64_t>(parameter.dim() - 1);
          };
        }
        Twins<Blocks> twins(make, options);
        ByHand<Blocks> by_hand(twins.plain, make(), param.value_or(torch::kFloat));
        const auto optimizer = [](std::vector<torch::Tensor> parameters) {
          return torch::optim::Adam(parameters, torch::optim::AdamOptions(0.05));
        };
        auto ours = optimizer(twins.net->parameters()), theirs = optimizer(by_hand.masters->parameters());
        for (int64_t step = 0; step < 4; ++step) {
          const auto x = inputs(step, share);
          ours.zero_grad();
          auto y = twins.model->forward(x);
          EXPECT_EQ(y.scalar_type(), param.value_or(torch::kFloat));
          auto loss = y.to(torch::kFloat).square().mean();
          loss.backward();
          by_hand.refresh();
          auto expected = by_hand.copy->forward(x.to(param.value_or(torch::kFloat))).to(torch::kFloat).square().mean();
          expected.backward();
          by_hand.reduce(environment, reduce);
          EXPECT_EQ(loss.item<float>(), expected.item<float>());
          EXPECT_GT(loss.item<float>(), 0);
          ours.step();
          theirs.step();
          expect_same_bits_as(twins.net, by_hand.masters, " after step " + std::to_string(step));
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Dtypes,
                         ::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2},
                                           std::vector<int64_t>{2, 1}),
                         [](const auto& which) {
                           std::string name = "Mesh";
                           for (auto size : which.param) name += "_" + std::to_string(size);
                           return name;
                         });

TEST(HybridDtypes, AreRoundedAfterEachOfTheTwoReductions) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = mesh_of(context, {2, 2});
    for (auto reduce : {torch::kBFloat16, torch::kFloat}) {
      Twins<Blocks> twins([] { return Blocks(2, 5); },
                          {.mesh = mesh,
                           .units = hsdp::each("blocks.*"),
                           .mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = reduce}});
      const Share share(context);
      const auto x = inputs(0, share);
      twins.model->forward(x).square().mean().backward();
      twins.plain->to(torch::kBFloat16);
      twins.plain->forward(x.to(torch::kBFloat16)).square().mean().backward();
      for (auto& parameter : twins.net->named_parameters()) {
        auto sum = twins.plain->named_parameters()[parameter.key()].grad().to(reduce);
        for (int64_t axis : {1, 0}) {
          mesh->communicator(axis).all_reduce(sum, dtensor::ReduceOp::sum, {"all_reduce", "sum"})->wait();
        }
        EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value().grad()), (sum / 4).to(torch::kFloat)))
            << parameter.key();
      }
    }
  });
}

// ---- fp16: half of the division before the sum, half after it ----

TEST(HalfPrecision, IsDividedByPowersOfTwoBeforeTheSumAndByTheRestAfterIt) {
  run_ranks(1, [](RankContext&) {
    struct Expectation {
      int64_t ranks;
      std::optional<double> factor;
      double before;
    };
    for (auto& expected : std::vector<Expectation>{
             {8, {}, 4}, {6, {}, 4}, {4, {}, 2}, {3, {}, 2}, {2, {}, 2}, {8, 1.0, 1}, {8, 16.0, 4}, {4, 6.0, 4}}) {
      SCOPED_TRACE(expected.ranks);
      for (int replicas : {1, 2}) {
        if (replicas == 2 && expected.ranks % 2 != 0) continue;
        std::vector<at::Tensor> sent;
        // Every other rank holds and sends what this one does.
        const auto contribution = [&](int64_t rank, const at::Tensor& own) {
          if (rank == 1 && own.scalar_type() == torch::kHalf && own.numel() % 3 == 0) sent.push_back(own.clone());
          return own.clone();
        };
        const auto mesh = dtensor::DeviceMesh::create(
            at::kCPU, {replicas, expected.ranks / replicas}, {"replicate", "shard"}, 0,
            [&](const std::vector<int64_t>& ranks, const std::string&) -> std::shared_ptr<dtensor::Communicator> {
              return std::make_shared<FakeCommunicator>(0, static_cast<int64_t>(ranks.size()), false, contribution);
            });
        const int64_t rows = expected.ranks / replicas;
        auto net = hsdp::meta_init([&] { return OneParameter(torch::IntArrayRef{rows, 3}); });
        auto model = hsdp::fully_shard(net, {.mesh = mesh, .mixed_precision = {.reduce_dtype = torch::kHalf}});
        model.materialize(at::kCPU);
        if (expected.factor) model.set_gradient_divide_factor(*expected.factor);
        // Of more than two ranks the sum of these gradients is beyond the range of fp16.
        const double gradient = expected.factor == 1.0 ? 8000 : 24576;
        sent.clear();
        model->forward(torch::full({rows, 3}, gradient)).sum().backward();
        ASSERT_FALSE(sent.empty());
        EXPECT_EQ(sent.front().flatten()[0].item<double>(), gradient / expected.before);
        const double mean = gradient * static_cast<double>(expected.ranks) /
                            expected.factor.value_or(static_cast<double>(expected.ranks));
        const auto local = DTensor(net->weight.grad()).to_local();
        EXPECT_EQ(local.scalar_type(), torch::kFloat);
        EXPECT_TRUE(torch::equal(local, torch::full({1, 3}, mean))) << local;
      }
    }
  });
}

// ---- dtypes of inputs and outputs ----

TEST(Inputs, AreCastWhereAParameterIsReadOrRefusedByTheOperator) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.environment().mesh();
    const auto sharded = [&](bool casts) {
      auto net = hsdp::meta_init([] { return Blocks(2, 5); });
      auto model =
          hsdp::fully_shard(net, {.mesh = mesh,
                                  .units = hsdp::each("blocks.*"),
                                  .mixed_precision = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = casts}});
      model.materialize(at::kCPU);
      return model;
    };
    const auto casting = sharded(true), strict = sharded(false);
    for (auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
      auto x = torch::ones({3, 5}, dtype).set_requires_grad(true);
      const auto y = casting->forward(x);
      EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
      y.sum().backward();
      EXPECT_EQ(x.grad().scalar_type(), dtype) << "gradients of inputs come back in their dtype";
    }
    EXPECT_EQ(strict->forward(torch::ones({3, 5}, torch::kBFloat16)).scalar_type(), torch::kBFloat16);
    expect_error<c10::Error>([&] { strict->forward(torch::ones({3, 5})); }, "must have the same dtype");
    // An fp32 value in the middle of a forward, between two units and before the root's own parameter.
    {
      hsdp::ForwardScope scope(casting.core());
      auto& net = casting.module();
      auto x = net.block(0, torch::ones({3, 5})).to(torch::kFloat) * 2;
      EXPECT_EQ(net.block(1, x).scalar_type(), torch::kBFloat16);
      EXPECT_EQ(net.head(x).scalar_type(), torch::kBFloat16);
      EXPECT_EQ((x + net.head->weight.sum()).scalar_type(), torch::kFloat)
          << "a result of a parameter is a plain tensor";
    }
    {
      hsdp::ForwardScope scope(strict.core());
      auto& net = strict.module();
      expect_error<c10::Error>(
          [&] {
            net.block(1, net.block(0, torch::ones({3, 5}, torch::kBFloat16)).to(torch::kFloat));
          },
          "must have the same dtype");
    }
    // Integers are no inputs to cast.
    auto lookup = hsdp::meta_init([] { return torch::nn::Embedding(9, 4); });
    auto table = hsdp::fully_shard(lookup, {.mesh = mesh, .mixed_precision = {.param_dtype = torch::kBFloat16}});
    table.materialize(at::kCPU);
    const auto rows = table->forward(torch::arange(6));
    EXPECT_EQ(rows.scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(torch::equal(rows, hsdp::unsharded(lookup->weight).narrow(0, 0, 6).to(torch::kBFloat16)));
  });
}

TEST(Outputs, AreCastByTheCallOperatorAlone) {
  run_ranks(2, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Blocks(2, 5); });
    auto model =
        hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                .units = hsdp::each("blocks.*"),
                                .mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}});
    model.materialize(at::kCPU);
    const auto x = torch::ones({3, 5});
    const auto inner = model->forward(x), outer = model(x);
    EXPECT_EQ(inner.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(outer.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(outer, inner.to(torch::kFloat)));
    outer.sum().backward();
    for (auto& parameter : net->parameters()) EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
  });
}

// ---- what lives beside parameters ----

/// A table, norms with running statistics, a buffer, frozen parameters of other dtypes.
struct MixedImpl : torch::nn::Module {
  MixedImpl()
      : table(register_module("table", torch::nn::Embedding(11, 6))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))),
        first(register_module("first", torch::nn::Linear(6, 7))),
        last(register_module("last", torch::nn::Linear(7, 4))) {
    offsets = register_parameter("offsets", torch::arange(7), /*requires_grad=*/false);
    mask = register_parameter("mask", torch::arange(7) % 2 == 0, /*requires_grad=*/false);
    coarse = register_parameter("coarse", (torch::arange(7) / 4.0).to(torch::kHalf), /*requires_grad=*/false);
    tiny = register_parameter("tiny", torch::ones({7}).to(torch::kFloat8_e4m3fn), /*requires_grad=*/false);
    scales = register_parameter("scales", torch::full({3}, 0.5).to(torch::kFloat8_e4m3fn), /*requires_grad=*/false);
    ramp = register_buffer("ramp", torch::arange(6) / 10.0);
  }
  torch::Tensor forward(torch::Tensor tokens) {
    auto x = norm(table(tokens)) + ramp.to(table->weight.scalar_type());
    x = torch::tanh(first(x));
    x = x + (offsets * mask).to(x.scalar_type()) + coarse.to(x.scalar_type()) + tiny.to(x.scalar_type());
    return last(x) * scales.to(x.scalar_type()).sum();
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::Tensor offsets, mask, coarse, tiny, scales, ramp;
};
TORCH_MODULE(Mixed);

TEST(Beside, FrozenParametersOfOtherDtypesAndBuffersStayWhatTheyAre) {
  run_ranks(2, [](RankContext& context) {
    auto& environment = context.environment();
    const Share share(context);
    Twins<Mixed> twins([] { return Mixed(); },
                       {.mesh = environment.mesh(),
                        .mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
    auto copy = Mixed();
    for (auto& parameter : copy->named_parameters()) {
      auto value = twins.plain->named_parameters()[parameter.key()].detach().clone();
      parameter.value().set_data(parameter.value().requires_grad() ? value.to(torch::kBFloat16) : value);
    }
    const auto tokens = torch::arange(12).remainder(11).narrow(0, share.begin, share.end - share.begin);
    twins.model->forward(tokens).to(torch::kFloat).square().mean().backward();
    // By hand: fp16 parameters are read as bf16, integers and 8 bits as they are.
    auto x = copy->norm(copy->table(tokens)) + copy->ramp.to(torch::kFloat);
    x = torch::tanh(copy->first(x.to(torch::kBFloat16)));
    x = x + (copy->offsets * copy->mask).to(x.scalar_type()) + copy->coarse.to(torch::kBFloat16) +
        copy->tiny.to(x.scalar_type());
    (copy->last(x) * copy->scales.to(x.scalar_type()).sum()).to(torch::kFloat).square().mean().backward();
    for (auto& parameter : twins.net->named_parameters()) {
      const auto plain = twins.plain->named_parameters()[parameter.key()];
      EXPECT_EQ(parameter.value().scalar_type(), plain.scalar_type()) << parameter.key();
      EXPECT_EQ(hsdp::unsharded(parameter.value()).scalar_type(), plain.scalar_type()) << parameter.key();
      if (!plain.requires_grad()) {
        EXPECT_FALSE(parameter.value().grad().defined()) << parameter.key();
        EXPECT_TRUE(hsdp::unsharded(parameter.value()).to(torch::kFloat).equal(plain.to(torch::kFloat)));
        continue;
      }
      const auto expected =
          reduced_by_hand(environment, copy->named_parameters()[parameter.key()].grad(), torch::kFloat);
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value().grad()), expected)) << parameter.key();
    }
    EXPECT_EQ(twins.net->ramp.scalar_type(), torch::kFloat);
  });
}

TEST(Beside, RunningStatisticsKeepTheirDtype) {
  run_ranks(2, [](RankContext& context) {
    struct NetImpl : torch::nn::Module {
      NetImpl()
          : linear(register_module("linear", torch::nn::Linear(5, 4))),
            norm(register_module("norm", torch::nn::BatchNorm1d(4))) {}
      torch::Tensor forward(const torch::Tensor& x) { return norm(linear(x)); }
      torch::nn::Linear linear{nullptr};
      torch::nn::BatchNorm1d norm{nullptr};
    };
    const Share share(context);
    // Kept out of the units the norm has parameters and statistics of one dtype, which every kernel takes.
    auto net = hsdp::meta_init([] { return std::make_shared<NetImpl>(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                         .mixed_precision = {.param_dtype = torch::kBFloat16},
                                         .ignored = {"norm.*"}});
    model.materialize(at::kCPU);
    torch::manual_seed(3);
    auto plain = std::make_shared<NetImpl>();
    hsdp::copy_values(model, plain);
    plain->linear->to(torch::kBFloat16);
    const auto x = inputs(0, share);
    const auto y = model->forward(x), expected = plain->forward(x.to(torch::kBFloat16));
    EXPECT_TRUE(torch::equal(y, expected));
    EXPECT_EQ(net->norm->running_mean.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(net->norm->running_mean, plain->norm->running_mean));
    EXPECT_TRUE(torch::equal(net->norm->running_var, plain->norm->running_var));
    // Inside a unit its parameters are cast, and the statistics are not: what the kernel of the device says to that is
    // its own affair.
    auto inside = hsdp::meta_init([] { return std::make_shared<NetImpl>(); });
    auto cast = hsdp::fully_shard(
        inside, {.mesh = context.environment().mesh(), .mixed_precision = {.param_dtype = torch::kBFloat16}});
    cast.materialize(at::kCPU);
    expect_error<c10::Error>([&] { cast->forward(x); }, "expected scalar type BFloat16 but found Float");
    EXPECT_EQ(inside->norm->running_mean.scalar_type(), torch::kFloat);
    cast.reset_iteration_state();
    inside->eval();
    inside->norm->running_mean.set_data(inside->norm->running_mean.to(torch::kBFloat16));
    inside->norm->running_var.set_data(inside->norm->running_var.to(torch::kBFloat16));
    EXPECT_EQ(cast->forward(x).scalar_type(), torch::kBFloat16) << "as libtorch asks for it, in bf16 throughout";
  });
}

// ---- fp32 gradients of bf16 parameters ----

TEST(GradDtype, OfBf16ParametersIsFloat) {
  run_ranks(2, [](RankContext& context) {
    auto& environment = context.environment();
    const Share share(context);
    const auto make = [] {
      auto net = Blocks(2, 5);
      net->to(torch::kBFloat16);
      return net;
    };
    Twins<Blocks> twins(make, {.mesh = environment.mesh(),
                               .units = hsdp::each("blocks.*"),
                               .mixed_precision = {.reduce_dtype = torch::kFloat, .grad_dtype = torch::kFloat}});
    const auto x = inputs(0, share).to(torch::kBFloat16);
    std::map<std::string, torch::Tensor> sums;
    for (int backward = 0; backward < 3; ++backward) {
      twins.model->forward(x * (backward + 1)).square().mean().backward();
      twins.plain->zero_grad();
      twins.plain->forward(x * (backward + 1)).square().mean().backward();
      for (auto& parameter : twins.plain->named_parameters()) {
        auto& sum = sums[parameter.key()];
        const auto reduced = reduced_by_hand(environment, parameter.value().grad(), torch::kFloat);
        sum = sum.defined() ? sum + reduced : reduced;
      }
    }
    for (auto& parameter : twins.net->named_parameters()) {
      EXPECT_EQ(parameter.value().scalar_type(), torch::kBFloat16);
      const auto gradient = hsdp::unsharded(parameter.value().grad());
      EXPECT_EQ(gradient.scalar_type(), torch::kFloat);
      EXPECT_TRUE(torch::equal(gradient, sums[parameter.key()])) << parameter.key() << " summed in fp32";
      EXPECT_FALSE(torch::equal(gradient, gradient.to(torch::kBFloat16).to(torch::kFloat))) << parameter.key();
    }
    torch::optim::SGD optimizer(twins.net->parameters(), 0.5);
    const auto before = hsdp::unsharded(twins.net->head->weight),
               gradient = hsdp::unsharded(twins.net->head->weight.grad());
    optimizer.step();
    EXPECT_TRUE(torch::equal(hsdp::unsharded(twins.net->head->weight), before.clone().add_(gradient, -0.5)));
  });
}

TEST(ReduceDtype, StaysThatOfThePolicyWhenTheModelMovesOrWasFrozenAtFirst) {
  run_ranks(2, [](RankContext& context) {
    auto& environment = context.environment();
    const Share share(context);
    for (bool moves : {false, true}) {
      const auto make = [&] {
        auto net = Blocks(2, 5);
        if (moves) net->to(torch::kBFloat16);
        return net;
      };
      Twins<Blocks> twins(make, {.mesh = environment.mesh(),
                                 .units = hsdp::each("blocks.*"),
                                 .mixed_precision = {.reduce_dtype = torch::kBFloat16}});
      if (moves) {
        twins.net->to(torch::kFloat);
        twins.plain->to(torch::kFloat);
      } else {
        for (auto& parameter : twins.net->parameters()) parameter.set_requires_grad(false);
        EXPECT_FALSE(twins.model->forward(inputs(0, share)).requires_grad());
        for (auto& parameter : twins.net->parameters()) parameter.set_requires_grad(true);
      }
      twins.model->forward(inputs(0, share)).square().mean().backward();
      twins.plain->forward(inputs(0, share)).square().mean().backward();
      for (auto& parameter : twins.net->named_parameters()) {
        const auto expected =
            reduced_by_hand(environment, twins.plain->named_parameters()[parameter.key()].grad(), torch::kBFloat16);
        EXPECT_EQ(parameter.value().grad().scalar_type(), torch::kFloat);
        EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value().grad()), expected.to(torch::kFloat)))
            << parameter.key();
      }
    }
  });
}

// ---- units of unlike policies ----

TEST(Policies, OfCallsForPartsAreTheirOwn) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.environment().mesh();
    auto net = hsdp::meta_init([] { return Blocks(3, 5); });
    auto half = hsdp::fully_shard(net->blocks->ptr<torch::nn::LinearImpl>(0),
                                  {.mesh = mesh, .mixed_precision = {.param_dtype = torch::kHalf}});
    auto brain = hsdp::fully_shard(net->blocks->ptr<torch::nn::LinearImpl>(1),
                                   {.mesh = mesh, .mixed_precision = {.param_dtype = torch::kBFloat16}});
    auto model = hsdp::fully_shard(net, {.mesh = mesh, .units = hsdp::each("blocks.2")});
    model.materialize(at::kCPU);
    std::vector<torch::ScalarType> dtypes;
    {
      hsdp::ForwardScope scope(model.core());
      auto x = torch::ones({3, 5});
      for (int64_t i : {0, 1}) dtypes.push_back((x = net->block(i, x)).scalar_type());
      dtypes.push_back((x = net->block(2, x.to(torch::kFloat))).scalar_type());
      dtypes.push_back((x = net->head(x)).scalar_type());
      x.sum().backward();
    }
    EXPECT_EQ(dtypes, (std::vector<torch::ScalarType>{torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kFloat}));
    for (auto& parameter : net->named_parameters()) {
      EXPECT_EQ(parameter.value().grad().scalar_type(), torch::kFloat) << parameter.key();
    }
  });
}

// ---- forwards, their second runs, and writes ----

TEST(Forwards, TwoOfThemAndRecomputedOnesGiveTheBitsOfOne) {
  run_ranks(2, [](RankContext& context) {
    auto& environment = context.environment();
    const Share share(context);
    for (bool checkpointed : {false, true}) {
      hsdp::FullyShardOptions options{.mesh = environment.mesh(),
                                      .units = hsdp::each("blocks.*"),
                                      .mixed_precision = {.param_dtype = torch::kBFloat16}};
      if (checkpointed) options.activation_checkpoint = hsdp::each("blocks.*");
      Twins<Blocks> twins([] { return Blocks(2, 5); }, options);
      ByHand<Blocks> by_hand(twins.plain, Blocks(2, 5), torch::kBFloat16);
      const auto use = [&](auto&& forward) {
        auto first = forward(inputs(0, share)), second = forward(inputs(1, share));
        (first.to(torch::kFloat).square().mean() + second.to(torch::kFloat).square().mean()).backward();
      };
      use([&](const torch::Tensor& x) { return twins.model->forward(x); });
      use([&](const torch::Tensor& x) { return by_hand.copy->forward(x.to(torch::kBFloat16)); });
      // Of two forwards the gradients meet in autograd for the copy, and in the fp32 of `.grad` here.
      for (auto& parameter : twins.net->named_parameters()) {
        const auto expected =
            reduced_by_hand(environment, by_hand.copy->named_parameters()[parameter.key()].grad(), {});
        EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value().grad()), expected.to(torch::kFloat)), 1.6e-2)
            << parameter.key();
      }
      twins.net->zero_grad();
      by_hand.copy->zero_grad();
      twins.model->forward(inputs(2, share)).to(torch::kFloat).square().mean().backward();
      by_hand.copy->forward(inputs(2, share).to(torch::kBFloat16)).to(torch::kFloat).square().mean().backward();
      by_hand.reduce(environment, {});
      expect_same_bits_as(twins.net, by_hand.masters, checkpointed ? ", checkpointed" : "");
    }
  });
}

TEST(Writes, IntoCastParametersAreRefusedAndChangeNothing) {
  run_ranks(2, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Blocks(2, 5); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                         .units = hsdp::each("blocks.*"),
                                         .mixed_precision = {.param_dtype = torch::kBFloat16}});
    model.materialize(at::kCPU);
    const auto& weight = net->blocks->ptr<torch::nn::LinearImpl>(0)->weight;
    const auto before = hsdp::unsharded(weight);
    {
      hsdp::ForwardScope scope(model.core());
      torch::NoGradGuard no_grad;
      EXPECT_EQ(weight.scalar_type(), torch::kFloat) << "the handle tells what is kept";
      EXPECT_EQ(weight.view({25}).scalar_type(), torch::kBFloat16) << "and an operator gives what is computed with";
      const std::string text =
          "[forward] parameter \"blocks.0.weight\" is kept as Float and changed in a forward, where it is a BFloat16 "
          "copy, expected reads only; change it outside, under NoGradGuard";
      net->block(0, torch::ones({1, 5}));
      for (auto& write :
           std::vector<std::function<void()>>{[&] {
                                                weight.copy_(torch::ones({5, 5}));
                                              },
                                              [&] { weight.index_put_({torch::tensor({0})}, torch::ones({5})); },
                                              [&] { weight.view({25}).fill_(1); }, [&] { weight[0].zero_(); }}) {
        std::string thrown;
        try {
          write();
        } catch (const dtensor::StateError& error) {
          thrown = error.what();
        }
        EXPECT_EQ(thrown, text);
      }
    }
    EXPECT_TRUE(torch::equal(hsdp::unsharded(weight), before));
    {
      torch::NoGradGuard no_grad;
      weight.mul_(2);
    }
    EXPECT_TRUE(torch::equal(hsdp::unsharded(weight), before * 2)) << "outside it is the fp32 shard that changes";
  });
}

// ---- whole weights of a mixed-precision model ----

TEST(WholeWeights, AreThoseThatAreKept) {
  run_ranks(2, [](RankContext& context) {
    Twins<Blocks> twins([] { return Blocks(2, 5); },
                        {.mesh = context.environment().mesh(),
                         .units = hsdp::each("blocks.*"),
                         .mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}});
    auto& model = twins.model;
    const auto x = torch::ones({3, 5});
    const auto path = context.directory() + "/model.pt";
    hsdp::export_pt(model, path);
    Blocks loaded(2, 5);
    torch::load(loaded, path);
    for (auto& parameter : loaded->named_parameters()) {
      EXPECT_TRUE(torch::equal(parameter.value(), twins.plain->named_parameters()[parameter.key()])) << parameter.key();
    }
    torch::NoGradGuard no_grad;
    const auto y = model(x);
    twins.plain->to(torch::kBFloat16);
    EXPECT_TRUE(torch::equal(y, twins.plain->forward(x.to(torch::kBFloat16)).to(torch::kFloat)));
    hsdp::SummonFull summoned(model);
    EXPECT_TRUE(torch::equal(model(x), y)) << "summoned parameters are those of a forward";
    EXPECT_EQ(model->head->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(model->forward(x).scalar_type(), torch::kBFloat16);
  });
}

}  // namespace mixed_precision_test

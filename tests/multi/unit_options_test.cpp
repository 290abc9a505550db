// What fully_shard may be told about single units and parameters, and what modules may return: the numbers stay those
// of the plain module.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "hsdp/transport.h"
#include "tests/testing/blocks.h"
#include "tests/testing/expect.h"

namespace unit_options_test {

using namespace testing_support;
using dtensor::DTensor;

constexpr int64_t kWidth = 5;

void use_doubles() { torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64)); }

torch::Tensor inputs(int64_t step, int64_t begin, int64_t end) { return rows_of(step, 1, {12, kWidth}, begin, end); }

std::vector<std::vector<int64_t>> meshes_of_four() { return {{4}, {2, 2}, {4, 1}}; }

/// Trains both with `loss(net, step, begin, end)` and expects equal gradients and parameters.
template <class Net, class Loss>
void expect_equal_training(Twins<Net>& twins, const Share& share, Loss&& loss, int64_t steps = 3,
                           double tolerance = 1e-12) {
  const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
  torch::optim::SGD ours(twins.net->parameters(), options), theirs(twins.plain->parameters(), options);
  for (int64_t step = 0; step < steps; ++step) {
    twins.zero_grad();
    torch::Tensor value;
    {
      hsdp::ForwardScope scope(twins.model.core());
      value = loss(twins.model.module(), step, share.begin, share.end);
    }
    value.backward();
    loss(*twins.plain, step, 0, 12).backward();
    twins.expect_equal_gradients(tolerance);
    ours.step();
    theirs.step();
    twins.expect_equal_parameters(tolerance);
    if (::testing::Test::HasFailure()) return;
  }
}

torch::Tensor chain_loss(BlocksImpl& net, int64_t step, int64_t begin, int64_t end) {
  return net.forward(inputs(step, begin, end)).square().mean();
}

// ---- one unit of several modules ----

TEST(Together, UsedInPartsAloneAndNotAtAll) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto& sizes : meshes_of_four()) {
      for (auto reshard : {std::optional<hsdp::ReshardAfterForward>(), std::optional(hsdp::ReshardAfterForward(true)),
                           std::optional(hsdp::ReshardAfterForward(false))}) {
        Twins<Blocks> twins(
            [] { return Blocks(4, kWidth); },
            {.mesh = mesh_of(context, sizes),
             .units = hsdp::together(hsdp::each("blocks.0") | hsdp::each("blocks.2") | hsdp::each("blocks.3")) |
                      hsdp::each("blocks.1"),
             .reshard_after_forward = reshard});
        EXPECT_EQ(twins.model.units("blocks.0, blocks.2, blocks.3").units().front()->modules().size(), 3u);
        // Step 0: all of them but the last, between others; step 1: one alone; step 2: another one, twice.
        expect_equal_training(twins, share, [](BlocksImpl& net, int64_t step, int64_t begin, int64_t end) {
          auto x = inputs(step, begin, end);
          if (step == 0) return net.head(net.block(2, net.block(1, net.block(0, x)))).square().mean();
          if (step == 1) return net.block(2, x).square().mean();
          return net.block(0, net.block(1, net.block(0, x))).square().mean();
        });
        EXPECT_FALSE(twins.net->blocks->ptr<torch::nn::LinearImpl>(3)->weight.grad().defined());
        for (auto& unit : twins.model.core()->units()) {
          EXPECT_EQ(unit->is_gathered(), false) << unit->name();
        }
      }
    }
  });
}

struct HeadedImpl : torch::nn::Module {
  HeadedImpl()
      : body(register_module("body", torch::nn::Linear(kWidth, 6))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))),
        head(register_module("head", torch::nn::Linear(6, 9))) {}
  torch::Tensor forward(const torch::Tensor& x) { return head(norm(body(x))); }
  /// The head chunk by chunk, each with a backward of its own into what came before it, which is run last.
  torch::Tensor chunked_backward(const torch::Tensor& x) {
    const auto hidden = norm(body(x));
    auto cut = hidden.detach().set_requires_grad(true);
    auto total = torch::zeros({});
    for (auto& chunk : cut.chunk(3)) {
      auto loss = head(chunk).square().sum() / (x.size(0) * 9);
      loss.backward();
      total = total + loss.detach();
    }
    hidden.backward(cut.grad());
    return total;
  }
  torch::nn::Linear body{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Headed);

TEST(Together, AHeadThatIsCalledForEachChunkWithMicroBatches) {
  run_ranks(2, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    const auto mesh = context.environment().mesh();
    for (bool grouped : {false, true}) {
      for (bool keeps : {false, true}) {
        Twins<Headed> twins(
            [] { return Headed(); },
            {.mesh = mesh,
             .units = grouped ? hsdp::each("body") | hsdp::together(hsdp::each("norm") | hsdp::each("head"))
                              : hsdp::each("*")});
        auto& model = twins.model;
        const auto head = grouped ? model.units("norm, head") : model.units("head");
        for (int64_t micro = 0; micro < 3; ++micro) {
          if (keeps) {
            head.set_reshard_after_forward(false);
            head.set_reshard_after_backward(false);
          }
          const auto before = dtensor::collective_counts().all_gathers;
          {
            hsdp::ForwardScope scope(model.core());
            model.module().chunked_backward(inputs(micro, share.begin, share.end));
          }
          if (keeps) {
            EXPECT_TRUE(head.units().front()->is_gathered());
            // The body once, a norm of its own for each direction, and the head when it is not there yet.
            EXPECT_EQ(dtensor::collective_counts().all_gathers - before, (grouped ? 1 : 3) + (micro == 0 ? 1 : 0));
            head.reshard();
            EXPECT_FALSE(head.units().front()->is_gathered());
            head.unshard();
          }
          twins.plain->chunked_backward(inputs(micro, 0, 12));
          twins.expect_equal_gradients(1e-12);
        }
      }
    }
  });
}

// ---- ignored and replicated parameters ----

TEST(Ignored, StayOrdinaryTensorsOfTheSameValuesAndTrainLocally) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto& sizes : meshes_of_four()) {
      Twins<Blocks> twins(
          [] { return Blocks(3, kWidth); },
          {.mesh = mesh_of(context, sizes), .units = hsdp::each("blocks.*"), .ignored = {"blocks.1.*", "head.*"}});
      auto& model = twins.model;
      auto& ignored = *twins.net->blocks->ptr<torch::nn::LinearImpl>(1);
      EXPECT_FALSE(DTensor::is_dtensor(ignored.weight));
      EXPECT_TRUE(ignored.weight.is_leaf() && ignored.weight.requires_grad());
      for (auto& parameter : twins.net->named_parameters()) {
        EXPECT_TRUE(torch::equal(twins.whole(parameter.value()), twins.plain->named_parameters()[parameter.key()]))
            << parameter.key();
      }
      for (auto& unit : model.core()->units()) EXPECT_NE(unit->name(), "blocks.1");
      // Local gradients, which the program may reduce as it likes: with a mean they are those of the plain module.
      torch::optim::SGD ours(twins.net->parameters(), 0.1), theirs(twins.plain->parameters(), 0.1);
      for (int64_t step = 0; step < 3; ++step) {
        twins.zero_grad();
        dtensor::reset_collective_counts();
        model->forward(inputs(step, share.begin, share.end)).square().mean().backward();
        if (step > 0 && sizes == std::vector<int64_t>{4}) {
          EXPECT_EQ(dtensor::collective_counts().reduce_scatters, 2) << "blocks.0 and blocks.2";
          EXPECT_EQ(dtensor::collective_counts().all_reduces, 0);
        }
        chain_loss(*twins.plain, step, 0, 12).backward();
        for (auto tensor : {ignored.weight, ignored.bias, twins.net->head->weight}) {
          auto gradient = tensor.grad();
          EXPECT_FALSE(DTensor::is_dtensor(gradient));
          auto other = gradient.clone();
          context.environment().communicator()->broadcast(other, 0, {"broadcast", "gradient"})->wait();
          if (context.rank() > 0) {
            EXPECT_FALSE(torch::equal(other, gradient)) << "it is this rank's own";
          }
          context.environment()
              .communicator()
              ->all_reduce(gradient, dtensor::ReduceOp::sum, {"all_reduce", "grad"})
              ->wait();
          gradient.div_(4);
        }
        twins.expect_equal_gradients(1e-12);
        ours.step();
        theirs.step();
        twins.expect_equal_parameters(1e-12);
      }
      // Files hold them with the others.
      const auto path = context.directory() + "/ignored.pt";
      hsdp::export_pt(model, path);
      Blocks plain(3, kWidth);
      torch::load(plain, path);
      for (auto& parameter : plain->named_parameters()) {
        EXPECT_LE(largest_difference(parameter.value(), twins.plain->named_parameters()[parameter.key()]), 1e-12);
      }
      {
        torch::NoGradGuard no_grad;
        for (auto& parameter : twins.net->parameters()) parameter.zero_();
      }
      hsdp::load(model, path);
      twins.expect_equal_parameters(1e-12);
      context.environment().barrier();
    }
  });
}

struct ScaledImpl : torch::nn::Module {
  ScaledImpl() : linear(register_module("linear", torch::nn::Linear(kWidth, 4))) {
    scale = register_parameter("scale", torch::full({}, 1.5));
    shift = register_parameter("shift", torch::randn({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x) * scale + shift.sum(); }
  torch::nn::Linear linear{nullptr};
  torch::Tensor scale, shift;
};
TORCH_MODULE(Scaled);

TEST(Replicated, ScalarsAndSmallOnesAreWholeOnEveryRank) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto& sizes : meshes_of_four()) {
      for (bool accumulates : {false, true}) {
        Twins<Scaled> twins([] { return Scaled(); }, {.mesh = mesh_of(context, sizes),
                                                      .units = hsdp::each("linear"),
                                                      .replicated = {"scale", "shift", "**.bias"}});
        const DTensor scale(twins.net->scale), bias(twins.net->linear->bias);
        EXPECT_EQ(scale.to_local().dim(), 0);
        EXPECT_EQ(bias.to_local().sizes(), (std::vector<int64_t>{4}));
        for (auto& placement : scale.placements()) EXPECT_TRUE(placement.is_replicate());
        if (accumulates) {
          twins.model.set_requires_gradient_sync(false);
          twins.model->forward(inputs(7, share.begin, share.end)).square().mean().backward();
          twins.model.set_requires_gradient_sync(true);
          twins.model.set_requires_all_reduce(false);
          twins.model->forward(inputs(8, share.begin, share.end)).square().mean().backward();
          twins.model.set_requires_all_reduce(true);
          twins.model->forward(inputs(9, share.begin, share.end)).square().mean().backward();
          for (int64_t step : {7, 8, 9}) twins.plain->forward(inputs(step, 0, 12)).square().mean().backward();
          twins.expect_equal_gradients(1e-12);
        }
        expect_equal_training(twins, share, [](ScaledImpl& net, int64_t step, int64_t begin, int64_t end) {
          return net.forward(inputs(step, begin, end)).square().mean();
        });
        EXPECT_EQ(DTensor(twins.net->scale.grad()).to_local().dim(), 0);
      }
    }
  });
}

// ---- dims and dtypes ----

TEST(Placement, OfAnyDimGivesContiguousPartsAndGradients) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto& sizes : meshes_of_four()) {
      std::vector<std::string> asked;
      Twins<Blocks> twins([] { return Blocks(2, 6); },
                          {.mesh = mesh_of(context, sizes),
                           .units = hsdp::each("blocks.*"),
                           .shard_placement_fn = [&](const std::string& path, const at::Tensor& parameter) {
                             asked.push_back(path);
                             return parameter.dim() == 2 ? std::optional<int64_t>(-1) : std::nullopt;
                           }});
      EXPECT_EQ(asked.size(), 5u);
      twins.model->forward(rows_of(0, 1, {12, 6}, share.begin, share.end)).square().mean().backward();
      for (auto& parameter : twins.net->named_parameters()) {
        const DTensor tensor(parameter.value()), gradient(parameter.value().grad());
        const auto dim = parameter.value().dim() - 1;
        EXPECT_EQ(tensor.placements().back().dim(), dim) << parameter.key();
        const auto shards = sizes.back();
        const auto expected = hsdp::unsharded(parameter.value()).chunk(shards, dim);
        const auto part = static_cast<size_t>(context.rank() % shards);
        EXPECT_TRUE(parameter.value().is_contiguous() && tensor.to_local().is_contiguous()) << parameter.key();
        EXPECT_TRUE(gradient.to_local().is_contiguous() && parameter.value().grad().is_contiguous()) << parameter.key();
        const auto mine = part < expected.size() ? expected[part] : torch::empty({0});
        EXPECT_TRUE(tensor.to_local().flatten().equal(mine.flatten())) << parameter.key();
      }
    }
  });
}

struct UnlikeImpl : torch::nn::Module {
  UnlikeImpl() {
    wide = register_parameter("wide", torch::randn({5, 3}, torch::kFloat64));
    plain = register_parameter("plain", torch::randn({3, 7}, torch::kFloat));
    narrow = register_parameter("narrow", torch::randn({7, 2}).to(torch::kBFloat16));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x.to(torch::kFloat64).mm(wide).to(torch::kFloat).mm(plain).to(torch::kBFloat16).mm(narrow).to(torch::kFloat);
  }
  torch::Tensor wide, plain, narrow;
};
TORCH_MODULE(Unlike);

TEST(UnlikeDtypes, InOneUnitAreEachReducedInTheirOwn) {
  run_ranks(2, [](RankContext& context) {
    auto& environment = context.environment();
    Twins<Unlike> twins([] { return Unlike(); }, {.mesh = environment.mesh()});
    const auto x = torch::arange(10).view({2, 5}).to(torch::kFloat) / 10 + context.rank();
    dtensor::reset_collective_counts();
    twins.model->forward(x).square().mean().backward();
    EXPECT_EQ(dtensor::collective_counts().reduce_scatters, 3);
    EXPECT_EQ(dtensor::collective_counts().all_gathers, 3) << "one a dtype; nothing is gathered twice";
    twins.plain->forward(x).square().mean().backward();
    for (auto& parameter : twins.net->named_parameters()) {
      auto sum = twins.plain->named_parameters()[parameter.key()].grad().clone();
      environment.communicator()->all_reduce(sum, dtensor::ReduceOp::sum, {"all_reduce", "gradient"})->wait();
      EXPECT_EQ(parameter.value().grad().scalar_type(), parameter.value().scalar_type());
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value().grad()), sum / 2)) << parameter.key();
    }
  });
}

// ---- tied parameters ----

/// The table of one unit is the projection of another.
struct ProjectionImpl : torch::nn::Module {
  explicit ProjectionImpl(const torch::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight); }
  torch::Tensor weight;
};
TORCH_MODULE(Projection);

struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(int64_t words)
      : table(register_module("table", torch::nn::Embedding(words, kWidth))),
        middle(register_module("middle", torch::nn::Linear(kWidth, kWidth))),
        head(register_module("head", Projection(table->weight))) {}
  torch::Tensor forward(const torch::Tensor& tokens) { return head(torch::tanh(middle(table(tokens)))); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear middle{nullptr};
  Projection head{nullptr};
};
TORCH_MODULE(Tied);

constexpr int64_t kWords = 4 * 4 + 1;

TEST(TiedParameters, AcrossUnitsAndInOneOfUnevenParts) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto& sizes : meshes_of_four()) {
      for (bool grouped : {false, true}) {
        for (bool checkpointed : {false, true}) {
          SCOPED_TRACE(std::string(grouped ? "grouped" : "apart") + (checkpointed ? ", checkpointed" : ""));
          hsdp::FullyShardOptions options{
              .mesh = mesh_of(context, sizes),
              .units = grouped ? hsdp::each("middle") | hsdp::together(hsdp::each("table") | hsdp::each("head"))
                               : hsdp::each("*")};
          if (checkpointed) options.activation_checkpoint = hsdp::each("middle");
          Twins<Tied> twins([] { return Tied(kWords); }, options);
          EXPECT_TRUE(twins.net->table->weight.is_same(twins.net->head->weight));
          const auto before = twins.plain->table->weight.detach().clone();
          expect_equal_training(twins, share, [](TiedImpl& net, int64_t step, int64_t begin, int64_t end) {
            const auto tokens = (torch::arange(12) * 5 + step).remainder(kWords).narrow(0, begin, end - begin);
            return torch::nn::functional::cross_entropy(net.forward(tokens), (tokens + 1).remainder(kWords));
          });
          const auto changed = (hsdp::unsharded(twins.net->table->weight) - before).abs().amax(1);
          EXPECT_GT(changed.min().item<double>(), 0) << "every row has a gradient from the projection";
        }
      }
    }
  });
}

// ---- parts that were wrapped before ----

TEST(WrappedBefore, APartRunsAloneAfterAndBeforeTheWhole) {
  run_ranks(2, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    const auto mesh = context.environment().mesh();
    for (bool part_first : {false, true}) {
      torch::manual_seed(7);
      auto plain = Blocks(3, kWidth);
      torch::manual_seed(7);
      auto net = hsdp::meta_init([] { return Blocks(3, kWidth); });
      auto part = hsdp::fully_shard(net->blocks->ptr<torch::nn::LinearImpl>(1), {.mesh = mesh});
      auto model = hsdp::fully_shard(net, {.mesh = mesh, .units = hsdp::each("blocks.0")});
      model.materialize(at::kCPU);
      torch::optim::SGD ours(net->parameters(), 0.1), theirs(plain->parameters(), 0.1);
      const auto whole_step = [&](int64_t step) {
        auto loss = model->forward(inputs(step, share.begin, share.end)).square().mean();
        auto expected = plain->forward(inputs(step, 0, 12)).square().mean();
        EXPECT_NEAR(mean_over_ranks(loss.item<double>(), context.environment()), expected.item<double>(), 1e-12);
        loss.backward();
        expected.backward();
      };
      const auto part_step = [&](int64_t step) {
        auto loss = part->forward(inputs(step, share.begin, share.end)).square().mean();
        auto expected = plain->blocks->ptr<torch::nn::LinearImpl>(1)->forward(inputs(step, 0, 12)).square().mean();
        EXPECT_NEAR(mean_over_ranks(loss.item<double>(), context.environment()), expected.item<double>(), 1e-12);
        loss.backward();
        expected.backward();
      };
      for (int64_t step = 0; step < 4; ++step) {
        ours.zero_grad();
        theirs.zero_grad();
        ((step % 2 == 0) == part_first) ? part_step(step) : whole_step(step);
        for (auto& parameter : net->named_parameters()) {
          const auto expected = plain->named_parameters()[parameter.key()];
          ASSERT_EQ(parameter.value().grad().defined(), expected.grad().defined()) << parameter.key();
          if (!expected.grad().defined()) continue;
          EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value().grad()), expected.grad()), 1e-12);
        }
        ours.step();
        theirs.step();
      }
      for (auto& parameter : net->named_parameters()) {
        EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value()), plain->named_parameters()[parameter.key()]),
                  1e-12);
      }
    }
  });
}

// ---- how parameters travel ----

/// Eight bits an element, and a scale a rank.
class Quantised : public hsdp::AllGatherExtension {
 public:
  std::vector<at::Tensor> pre_all_gather(const at::Tensor& shard) const override {
    const auto scale = scale_of(shard);
    return {(shard / scale).round().to(torch::kChar), scale.to(torch::kFloat)};
  }
  void post_all_gather(const std::vector<at::Tensor>& gathered, const at::Tensor& unsharded) const override {
    const auto scales = gathered[1].to(unsharded.scalar_type()).unsqueeze(1);
    unsharded.view({scales.size(0), -1}).copy_(gathered[0].view({scales.size(0), -1}) * scales);
  }
  static at::Tensor scale_of(const at::Tensor& part) {
    return (part.abs().max() / 127).clamp_min(1e-6).to(torch::kFloat).to(part.scalar_type()).view({1});
  }
  /// What arrives of a whole parameter that is sharded along `dim`.
  static at::Tensor arrives(const at::Tensor& whole, int64_t ranks, int64_t dim) {
    std::vector<at::Tensor> parts;
    for (auto& part : whole.chunk(ranks, dim)) parts.push_back((part / scale_of(part)).round() * scale_of(part));
    return torch::cat(parts, dim);
  }
};

/// Another dtype on the way, in two tensors.
class InTwoHalves : public hsdp::AllGatherExtension {
 public:
  std::vector<at::Tensor> pre_all_gather(const at::Tensor& shard) const override {
    const auto coarse = shard.to(torch::kBFloat16);
    return {coarse, (shard - coarse).to(torch::kBFloat16)};
  }
  void post_all_gather(const std::vector<at::Tensor>& gathered, const at::Tensor& unsharded) const override {
    unsharded.copy_(gathered[0].to(unsharded.scalar_type()) + gathered[1].to(unsharded.scalar_type()));
  }
  static at::Tensor arrives(const at::Tensor& whole) {
    const auto coarse = whole.to(torch::kBFloat16);
    return coarse.to(whole.scalar_type()) + (whole - coarse).to(torch::kBFloat16).to(whole.scalar_type());
  }
};

TEST(Extensions, SendWhatTheyLikeAndComputeWithWhatArrives) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto& sizes : meshes_of_four()) {
      for (int64_t dim : {0, 1}) {
        for (auto reshard : {hsdp::ReshardAfterForward(true), hsdp::ReshardAfterForward(sizes.back() == 4 ? 2 : 1)}) {
          SCOPED_TRACE("shards " + std::to_string(sizes.back()) + ", dim " + std::to_string(dim));
          Twins<Blocks> twins([] { return Blocks(3, kWidth); },
                              {.mesh = mesh_of(context, sizes),
                               .units = hsdp::each("blocks.*"),
                               .reshard_after_forward = reshard,
                               .shard_placement_fn = [dim](const std::string&,
                                                           const at::Tensor& p) { return std::min(dim, p.dim() - 1); },
                               .all_gather_extensions = {{"blocks.*.weight", std::make_shared<Quantised>()},
                                                         {"**", std::make_shared<InTwoHalves>()}}});
          Blocks arrived(3, kWidth);
          torch::optim::SGD ours(twins.net->parameters(), 0.1), theirs(twins.plain->parameters(), 0.1);
          for (int64_t step = 0; step < 3; ++step) {
            {
              torch::NoGradGuard no_grad;
              for (auto& parameter : arrived->named_parameters()) {
                const auto kept = twins.plain->named_parameters()[parameter.key()];
                const bool quantised =
                    parameter.key().find("blocks") == 0 && parameter.key().find("weight") != std::string::npos;
                parameter.value().copy_(quantised
                                            ? Quantised::arrives(kept, sizes.back(), std::min(dim, kept.dim() - 1))
                                            : InTwoHalves::arrives(kept));
              }
            }
            twins.zero_grad();
            arrived->zero_grad();
            const auto y = twins.model->forward(inputs(step, share.begin, share.end));
            const auto expected = arrived->forward(inputs(step, 0, 12));
            EXPECT_LE(largest_difference(y, expected.narrow(0, share.begin, share.end - share.begin)), 1e-12);
            y.square().mean().backward();
            expected.square().mean().backward();
            for (auto& parameter : arrived->named_parameters()) {
              EXPECT_FALSE(torch::equal(parameter.value(), twins.plain->named_parameters()[parameter.key()]));
              twins.plain->named_parameters()[parameter.key()].mutable_grad() = parameter.value().grad().clone();
            }
            twins.expect_equal_gradients(1e-12);
            ours.step();
            theirs.step();
            twins.expect_equal_parameters(1e-12);  // kept whole: nothing is lost by travelling
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  });
}

TEST(Extensions, TakeTheirBytesOnTheWayAndRefuseWrites) {
  run_ranks(2, [](RankContext& context) {
    auto net = hsdp::meta_init([] { return Blocks(2, 8); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh(),
                                         .units = hsdp::each("blocks.*"),
                                         .all_gather_extensions = {{"**.weight", std::make_shared<Quantised>()}}});
    model.materialize(at::kCPU);
    torch::NoGradGuard no_grad;
    dtensor::reset_collective_counts();
    hsdp::ForwardScope scope(model.core());
    net->head(torch::ones({1, 8}));
    // 64 elements of one byte, two scales, and 2 x 32 bytes that say what this is.
    EXPECT_EQ(dtensor::collective_counts().all_gather_bytes, 64 + 2 * 4 + 2 * 32);
    expect_error<dtensor::StateError>([&] { net->head->weight.view({64}).fill_(1); },
                                      "[forward] parameter \"head.weight\"", "expected reads only");
  });
}

/// Passes everything on, and counts.
class Counting : public hsdp::Transport {
 public:
  struct Calls {
    int gathers = 0, reductions = 0;
  };
  Counting(std::shared_ptr<dtensor::Communicator> communicator, std::shared_ptr<Calls> calls, bool packs)
      : inner_(hsdp::make_transport(std::move(communicator))), calls_(std::move(calls)), packs_(packs) {}
  std::shared_ptr<dtensor::Work> all_gather(c10::ArrayRef<hsdp::TensorPair> pairs,
                                            dtensor::OperationName name) override {
    ++calls_->gathers;
    return inner_->all_gather(pairs, name);
  }
  std::shared_ptr<dtensor::Work> reduce_scatter(c10::ArrayRef<hsdp::TensorPair> pairs,
                                                dtensor::OperationName name) override {
    ++calls_->reductions;
    return inner_->reduce_scatter(pairs, name);
  }
  bool packs() const override { return packs_; }
  dtensor::Communicator& communicator() const override { return inner_->communicator(); }

 private:
  std::shared_ptr<hsdp::Transport> inner_;
  std::shared_ptr<Calls> calls_;
  bool packs_;
};

TEST(CustomTransport, CarriesEveryGatherAndReduceScatter) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto& sizes : {std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}}) {
      for (bool packs : {true, false}) {
        auto calls = std::make_shared<Counting::Calls>();
        int made = 0;
        Twins<Blocks> twins([] { return Blocks(3, kWidth); },
                            {.mesh = mesh_of(context, sizes),
                             .units = hsdp::each("blocks.*"),
                             .reshard_after_forward =
                                 sizes.back() == 4 ? hsdp::ReshardAfterForward(2) : hsdp::ReshardAfterForward(true),
                             .transport = [&](std::shared_ptr<dtensor::Communicator> communicator) {
                               ++made;
                               return std::make_shared<Counting>(std::move(communicator), calls, packs);
                             }});
        EXPECT_EQ(made, sizes.back() == 4 ? 1 + 4 : 1) << "over the shard axis, and for each unit that keeps a part";
        expect_equal_training(twins, share, chain_loss);
        EXPECT_EQ(calls->reductions, 3 * 4);
        // x needs no gradient, so that blocks.0 is not gathered for backward.
        EXPECT_EQ(calls->gathers, 3 * (4 + 3));
      }
    }
  });
}

TEST(AllReduceHook, SeesSumsOverAllRanksBeforeTheyAreDivided) {
  run_ranks(4, [](RankContext& context) {
    for (auto& sizes : meshes_of_four()) {
      auto net = hsdp::meta_init([] { return Blocks(2, 4); });
      auto model = hsdp::fully_shard(net, {.mesh = mesh_of(context, sizes), .units = hsdp::each("blocks.*")});
      model.materialize(at::kCPU);
      std::vector<int64_t> seen;
      model.set_all_reduce_hook([&](const at::Tensor& buffer) {
        EXPECT_EQ(buffer.dim(), 1);
        seen.push_back(buffer.numel());
        buffer.mul_(9);
      });
      // Rank r has gradients r + 1 in every element of a bias, and j times that in column j of a weight.
      const auto backward = [&] {
        net->zero_grad();
        hsdp::ForwardScope scope(model.core());
        auto& linear = *net->blocks->ptr<torch::nn::LinearImpl>(0);
        const auto ramp = torch::arange(4).to(torch::kFloat).expand({4, 4});
        ((linear.bias.sum() + (linear.weight * ramp).sum()) * (context.rank() + 1.0)).backward();
      };
      backward();
      EXPECT_EQ(seen, std::vector<int64_t>{(4 * 4 + 4) / sizes.back()}) << "one buffer a unit";
      const auto& linear = *net->blocks->ptr<torch::nn::LinearImpl>(0);
      EXPECT_TRUE(
          torch::equal(hsdp::unsharded(linear.bias.grad()), torch::full({4}, 22.5)));  // (1 + 2 + 3 + 4) * 9 / 4
      EXPECT_TRUE(torch::equal(hsdp::unsharded(linear.weight.grad()),
                               (torch::arange(4).to(torch::kFloat) * 22.5).expand({4, 4})));
      model.set_gradient_divide_factor(1);
      backward();
      EXPECT_TRUE(torch::equal(hsdp::unsharded(linear.bias.grad()), torch::full({4}, 90.0)));
      model.units("blocks.0").set_all_reduce_hook(nullptr);
      backward();
      EXPECT_TRUE(torch::equal(hsdp::unsharded(linear.bias.grad()), torch::full({4}, 10.0)));
      EXPECT_EQ(seen.size(), 2u);
    }
  });
}

// ---- what forwards take and return ----

struct OwnTableImpl : torch::nn::Module {
  OwnTableImpl() : weight(register_parameter("weight", torch::randn({5, 3}))) {}
  torch::Tensor forward() { return weight.mm(weight.t()); }
  torch::Tensor weight;
};
TORCH_MODULE(OwnTable);

TEST(Forward, WithoutInputsTrainsItsParameters) {
  run_ranks(2, [](RankContext& context) {
    use_doubles();
    Twins<OwnTable> twins([] { return OwnTable(); }, {.mesh = context.environment().mesh()});
    EXPECT_EQ(twins.model->forward().sizes(), (std::vector<int64_t>{5, 5}));
    twins.model().square().mean().backward();
    twins.plain->forward().square().mean().backward();
    twins.expect_equal_gradients(1e-12);
  });
}

struct ListsImpl : torch::nn::Module {
  ListsImpl()
      : a(register_module("a", torch::nn::Linear(kWidth, kWidth))),
        b(register_module("b", torch::nn::Linear(kWidth, kWidth))) {}
  std::vector<torch::Tensor> forward(const std::vector<torch::Tensor>& xs) { return {a(xs[0]), b(xs[1]), xs[0]}; }
  std::map<std::string, torch::Tensor> named(const std::map<std::string, torch::Tensor>& xs) {
    return {{"a", a(xs.at("x"))}, {"ba", b(a(xs.at("x")))}};
  }
  std::tuple<torch::Tensor, std::optional<torch::Tensor>, int64_t> both(const std::pair<torch::Tensor, bool>& x) {
    return {a(x.first), x.second ? std::optional(b(x.first)) : std::nullopt, 3};
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Lists);

TEST(Forward, OfListsMapsAndTuplesOfWhichSomeAreNotUsed) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto& sizes : meshes_of_four()) {
      Twins<Lists> twins([] { return Lists(); }, {.mesh = mesh_of(context, sizes), .units = hsdp::each("*")});
      expect_equal_training(
          twins, share,
          [](ListsImpl& net, int64_t step, int64_t begin, int64_t end) {
            const auto x = inputs(step, begin, end);
            switch (step) {
              case 0: {  // a list, one of its entries unused: b trains, a does not
                return net.forward({x, x * 2})[1].square().mean();
              }
              case 1: {
                auto named = net.named({{"x", x}});
                return named["ba"].square().mean() + named["a"].mean();
              }
              case 2: {
                const auto [y, none, number] = net.both({x, false});
                return y.square().mean() * number;
              }
              default: {
                const auto [y, z, number] = net.both({x, true});
                return (*z).square().mean();
              }
            }
          },
          4);
    }
  });
}

TEST(Forward, TwoOfWhichOneIsPartialAndOneBackward) {
  run_ranks(2, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto reshard : {std::optional<hsdp::ReshardAfterForward>(), std::optional(hsdp::ReshardAfterForward(true)),
                         std::optional(hsdp::ReshardAfterForward(false))}) {
      for (bool checkpointed : {false, true}) {
        hsdp::FullyShardOptions options{
            .mesh = context.environment().mesh(), .units = hsdp::each("blocks.*"), .reshard_after_forward = reshard};
        if (checkpointed) options.activation_checkpoint = hsdp::each("blocks.*");
        Twins<Blocks> twins([] { return Blocks(3, kWidth); }, options);
        const auto loss = [](BlocksImpl& net, auto&& forward, int64_t begin, int64_t end) {
          auto chosen = forward([&] { return net.forward(inputs(0, begin, end)); });
          auto rejected = forward([&] { return net.forward(inputs(1, begin, end)); });
          auto part = forward([&] { return net.block(1, net.block(0, inputs(2, begin, end))); });
          return -torch::log_sigmoid((chosen - rejected).sum(1)).mean() + part.square().mean();
        };
        loss(
            twins.model.module(),
            [&](auto&& call) {
              hsdp::ForwardScope scope(twins.model.core());
              return call();
            },
            share.begin, share.end)
            .backward();
        loss(
            *twins.plain, [](auto&& call) { return call(); }, 0, 12)
            .backward();
        twins.expect_equal_gradients(1e-12);
        // Both partial: what neither uses has no gradient.
        twins.zero_grad();
        torch::Tensor first, second;
        {
          hsdp::ForwardScope scope(twins.model.core());
          first = twins.model.module().block(0, inputs(0, share.begin, share.end));
        }
        {
          hsdp::ForwardScope scope(twins.model.core());
          second = twins.model.module().block(1, inputs(1, share.begin, share.end));
        }
        (first.square().mean() + second.square().mean()).backward();
        (twins.plain->block(0, inputs(0, 0, 12)).square().mean() +
         twins.plain->block(1, inputs(1, 0, 12)).square().mean())
            .backward();
        twins.expect_equal_gradients(1e-12);
      }
    }
  });
}

TEST(Forward, OfOneUnitWithAndWithoutGradients) {
  run_ranks(2, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    for (auto reshard : {std::optional<hsdp::ReshardAfterForward>(), std::optional(hsdp::ReshardAfterForward(true)),
                         std::optional(hsdp::ReshardAfterForward(false))}) {
      Twins<Blocks> twins(
          [] { return Blocks(3, kWidth); },
          {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*"), .reshard_after_forward = reshard});
      // A bias is frozen for the first two steps.
      expect_equal_training(
          twins, share,
          [](BlocksImpl& net, int64_t step, int64_t begin, int64_t end) {
            net.blocks[1]->as<torch::nn::Linear>()->bias.set_requires_grad(step >= 2);
            auto x = inputs(step, begin, end);
            {
              torch::NoGradGuard no_grad;
              x = net.block(1, net.block(0, x));
            }
            x = net.block(0, x);
            const auto target = [&] {
              torch::NoGradGuard no_grad;
              return net.block(1, x);
            }();
            return (net.head(net.block(1, x)) - target).square().mean();
          },
          4);
    }
  });
}

// ---- a shard axis of one ----

TEST(DataParallel, GivesTheBitsOfReplicasWhoseGradientsAreAllReduced) {
  run_ranks(3, [](RankContext& context) {
    auto& environment = context.environment();
    const Share share(context);
    Twins<Blocks> twins([] { return Blocks(3, kWidth); },
                        {.mesh = mesh_of(context, {3, 1}), .units = hsdp::each("blocks.*")});
    torch::optim::AdamW ours(twins.net->parameters(), 0.05), theirs(twins.plain->parameters(), 0.05);
    for (int64_t step = 0; step < 5; ++step) {
      twins.zero_grad();
      twins.model->forward(inputs(step, share.begin, share.end)).square().mean().backward();
      twins.plain->forward(inputs(step, share.begin, share.end)).square().mean().backward();
      // One buffer for each unit, as there.
      for (auto& names :
           {std::vector<std::string>{"head.weight"}, std::vector<std::string>{"blocks.0.weight", "blocks.0.bias"},
            std::vector<std::string>{"blocks.1.weight", "blocks.1.bias"},
            std::vector<std::string>{"blocks.2.weight", "blocks.2.bias"}}) {
        std::vector<torch::Tensor> flat;
        for (auto& name : names) flat.push_back(twins.plain->named_parameters()[name].grad().flatten());
        auto buffer = torch::cat(flat);
        environment.communicator()->all_reduce(buffer, dtensor::ReduceOp::sum, {"all_reduce", "gradients"})->wait();
        buffer.div_(3);
        int64_t offset = 0;
        for (auto& name : names) {
          auto gradient = twins.plain->named_parameters()[name].grad();
          gradient.copy_(buffer.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
          offset += gradient.numel();
        }
      }
      twins.expect_equal_gradients(0);
      ours.step();
      theirs.step();
      twins.expect_equal_parameters(0);
      for (auto& parameter : twins.net->parameters()) {
        EXPECT_EQ(DTensor(parameter).to_local().sizes(), parameter.sizes());
      }
    }
  });
}

}  // namespace unit_options_test

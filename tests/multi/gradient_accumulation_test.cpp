// Several backwards before a step: who communicates when, what it costs, and that the sum is that of one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "tests/testing/blocks.h"
#include "tests/testing/expect.h"

namespace gradient_accumulation_test {

using namespace testing_support;

constexpr int64_t kMicroBatches = 3, kWidth = 5, kUnits = 4;

void use_doubles() { torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64)); }

torch::Tensor inputs(int64_t step, int64_t begin, int64_t end) {
  // An input that requires grad makes backward need the first unit's weight as well.
  return rows_of(step, 1, {12, kWidth}, begin, end).set_requires_grad(true);
}
torch::Tensor loss_of(const torch::Tensor& y, int64_t step, int64_t begin, int64_t end) {
  return torch::mse_loss(y, rows_of(step, 2, {12, kWidth}, begin, end));
}

void plain_backward(BlocksImpl& plain, int64_t step) {
  loss_of(plain.forward(inputs(step, 0, 12)), step, 0, 12).backward();
}
void sharded_backward(const hsdp::FullySharded<BlocksImpl>& model, int64_t step, const Share& share) {
  // On a line of its own: inside the forward's expression the last units would not have been freed before backward.
  auto loss = loss_of(model->forward(inputs(step, share.begin, share.end)), step, share.begin, share.end);
  loss.backward();
}

// ---- counts and sums for each setting ----

struct Setting {
  std::string name;
  std::optional<hsdp::ReshardAfterForward> reshard;
  int64_t backward_gathers;  // of a backward after which units are freed
};

/// Which units wait with their gradients until the last micro-batch, and with what.
struct Waiting {
  std::string name;
  std::vector<std::string> patterns;
  int64_t units;
};

class Accumulation : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(Accumulation, CostsWhatTheSettingsSayAndGivesTheSum) {
  const auto sizes = GetParam();
  const int64_t replicas = sizes.size() == 2 ? sizes[0] : 1, shards = sizes.back();
  std::vector<Setting> settings{{"always", hsdp::ReshardAfterForward(true), kUnits},
                                {"default", std::nullopt, kUnits - 1},
                                {"never", hsdp::ReshardAfterForward(false), 0}};
  if (shards == 4) settings.push_back({"2", hsdp::ReshardAfterForward(2), kUnits});
  // What was kept over a step is stale; with four processes that costs more time than it shows anything new.
  const int64_t iterations = replicas * shards == 4 ? 1 : 2;
  const std::vector<Waiting> waitings{
      {"none", {}, 0}, {"all", {"**"}, 4}, {"root", {"root"}, 1}, {"some", {"blocks.0", "blocks.2"}, 2}};
  run_ranks(static_cast<int>(replicas * shards), [&](RankContext& context) {
    use_doubles();
    const Share share(context);
    const auto mesh = mesh_of(context, sizes);
    for (auto& setting : settings) {
      for (bool keeps_gathered : {false, true}) {
        for (bool scatters : {false, true}) {  // while waiting: reduce-scatter only, or no communication at all
          if (scatters && replicas == 1) continue;
          for (auto& waiting : waitings) {
            SCOPED_TRACE("reshard after forward " + setting.name + (keeps_gathered ? ", kept gathered" : "") + ", " +
                         waiting.name + (scatters ? " without all-reduce" : " without gradient sync"));
            Twins<Blocks> twins(
                [] { return Blocks(3, kWidth); },
                {.mesh = mesh, .units = hsdp::each("blocks.*"), .reshard_after_forward = setting.reshard});
            auto& model = twins.model;
            torch::optim::SGD ours(twins.net->parameters(), 0.1), theirs(twins.plain->parameters(), 0.1);
            {
              torch::NoGradGuard no_grad;
              model->forward(inputs(0, 0, 1));  // the first forward compares the replicas
              model.reshard();
            }
            for (int64_t iteration = 0; iteration < iterations; ++iteration) {
              twins.zero_grad();
              dtensor::reset_collective_counts();
              for (int64_t micro = 0; micro < kMicroBatches; ++micro) {
                const bool last = micro + 1 == kMicroBatches;
                for (auto& pattern : waiting.patterns) {
                  const auto units = pattern == "**" ? model.units() : model.units(pattern);
                  scatters ? units.set_requires_all_reduce(last) : units.set_requires_gradient_sync(last);
                }
                if (keeps_gathered) model.set_reshard_after_backward(last);
                sharded_backward(model, kMicroBatches * iteration + micro, share);
                plain_backward(*twins.plain, kMicroBatches * iteration + micro);
                for (auto& unit : model.core()->units()) {
                  if (!unit->needs_gather()) continue;
                  EXPECT_EQ(unit->is_gathered(), keeps_gathered && !last) << unit->name();
                }
              }
              const auto counts = dtensor::collective_counts();
              const auto backward = setting.backward_gathers;
              int64_t gathers = kMicroBatches * (kUnits + backward);
              // Kept from the first forward (where that keeps them) or backward on.
              if (keeps_gathered) gathers = kUnits + kMicroBatches * backward;
              const int64_t each_time = kMicroBatches * (kUnits - waiting.units) + waiting.units;
              EXPECT_EQ(counts.all_gathers, shards == 1 ? 0 : gathers);
              EXPECT_EQ(counts.reduce_scatters, shards == 1 ? 0 : scatters ? kMicroBatches * kUnits : each_time);
              EXPECT_EQ(counts.all_reduces, replicas == 1 ? 0 : each_time);
              twins.expect_equal_gradients(1e-12);
              ours.step();
              theirs.step();
              twins.expect_equal_parameters(1e-12);
            }
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Accumulation,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{4}, std::vector<int64_t>{2, 2},
                                           std::vector<int64_t>{2, 1}),
                         [](const auto& which) {
                           std::string name = "Mesh";
                           for (auto size : which.param) name += "_" + std::to_string(size);
                           return name;
                         });

TEST(Waiting, GradientsAppearWithTheBackwardThatCommunicates) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    Twins<Blocks> twins([] { return Blocks(3, kWidth); },
                        {.mesh = mesh_of(context, {2, 2}), .units = hsdp::each("blocks.*")});
    auto& model = twins.model;
    const auto defined = [&] {
      int64_t count = 0;
      for (auto& parameter : twins.net->parameters()) count += parameter.grad().defined();
      return count;
    };
    model.set_requires_gradient_sync(false);
    sharded_backward(model, 0, share);
    EXPECT_EQ(defined(), 0) << "nothing has been reduced";
    model.set_requires_gradient_sync(true);
    model.set_requires_all_reduce(false);
    sharded_backward(model, 1, share);
    EXPECT_EQ(defined(), 0) << "replicas have not been added";
    model.set_requires_all_reduce(true);
    sharded_backward(model, 2, share);
    EXPECT_EQ(defined(), 7);
    for (int64_t step = 0; step < 3; ++step) plain_backward(*twins.plain, step);
    twins.expect_equal_gradients(1e-12);
    // What waits goes out with the next backward, of whatever unit that is.
    twins.zero_grad();
    model.set_requires_all_reduce(false);
    sharded_backward(model, 3, share);
    model.set_requires_all_reduce(true);
    dtensor::reset_collective_counts();
    model->block(1, inputs(4, share.begin, share.end)).square().mean().backward();
    EXPECT_EQ(dtensor::collective_counts().reduce_scatters, 1);
    EXPECT_EQ(dtensor::collective_counts().all_reduces, 1 + 2 + 2 + 1)
        << "blocks.1, and each parameter that waited alone";
    plain_backward(*twins.plain, 3);
    twins.plain->block(1, inputs(4, 0, 12)).square().mean().backward();
    twins.expect_equal_gradients(1e-12);
  });
}

// ---- schedules that interleave micro-batches ----

TEST(Interleaved, ForwardsFirstThenBackwardsOfWhichOneIsTheLast) {
  for (const auto& sizes : {std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}}) {
    run_ranks(sizes.size() == 2 ? 4 : 2, [&](RankContext& context) {
      use_doubles();
      const Share share(context);
      const auto mesh = mesh_of(context, sizes);
      for (bool reshard : {false, true}) {
        for (bool syncs_each : {false, true}) {
          SCOPED_TRACE(std::string(reshard ? "reshard" : "keep") + (syncs_each ? ", every backward syncs" : ""));
          Twins<Blocks> twins([] { return Blocks(3, kWidth); },
                              {.mesh = mesh, .units = hsdp::each("blocks.*"), .reshard_after_forward = reshard});
          auto& model = twins.model;
          torch::optim::SGD ours(twins.net->parameters(), 0.1), theirs(twins.plain->parameters(), 0.1);
          for (int64_t iteration = 0; iteration < 3; ++iteration) {
            twins.zero_grad();
            auto ahead = model.unshard(/*async=*/true);
            std::vector<torch::Tensor> losses;
            model.set_is_last_backward(false);
            model.set_reshard_after_backward(false);
            if (!syncs_each) model.set_requires_gradient_sync(false);
            for (int64_t micro = 0; micro < kMicroBatches; ++micro) {
              const auto step = kMicroBatches * iteration + micro;
              losses.push_back(
                  loss_of(model->forward(inputs(step, share.begin, share.end)), step, share.begin, share.end));
              plain_backward(*twins.plain, step);
            }
            ahead.wait();
            for (int64_t micro = 0; micro < kMicroBatches; ++micro) {
              const bool last = micro + 1 == kMicroBatches;
              if (last) {
                model.set_is_last_backward(true);
                model.set_reshard_after_backward(true);
                model.set_requires_gradient_sync(true);
              }
              losses[static_cast<size_t>(micro)].backward();
            }
            for (auto& unit : model.core()->units()) EXPECT_FALSE(unit->is_gathered()) << unit->name();
            twins.expect_equal_gradients(1e-12);
            ours.step();
            theirs.step();
            twins.expect_equal_parameters(1e-12);
          }
        }
      }
    });
  }
}

TEST(Interleaved, OneForwardOneBackward) {
  run_ranks(2, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    Twins<Blocks> twins([] { return Blocks(3, kWidth); },
                        {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*")});
    auto& model = twins.model;
    const auto forward = [&](int64_t step) {
      return loss_of(model->forward(inputs(step, share.begin, share.end)), step, share.begin, share.end);
    };
    model.set_is_last_backward(false);
    auto waiting = forward(0);
    for (int64_t step = 1; step < 4; ++step) {
      auto next = forward(step);
      waiting.backward();
      waiting = next;
    }
    model.set_is_last_backward(true);
    waiting.backward();
    for (int64_t step = 0; step < 4; ++step) plain_backward(*twins.plain, step);
    twins.expect_equal_gradients(1e-12);
    for (auto& unit : model.core()->units()) EXPECT_FALSE(unit->is_gathered() || unit->holds() > 0) << unit->name();
  });
}

// ---- the dtype of what waits ----

TEST(ReduceDtype, OfFourMicroBatchesIsThatOfTheirSum) {
  for (const auto& sizes : {std::vector<int64_t>{2}, std::vector<int64_t>{2, 1}}) {
    run_ranks(2, [&](RankContext& context) {
      const Share share(context);
      const auto mesh = mesh_of(context, sizes);
      for (std::optional<torch::ScalarType> reduce :
           {std::optional(torch::kFloat), std::optional(torch::kBFloat16), std::optional<torch::ScalarType>()}) {
        Twins<Blocks> twins([] { return Blocks(3, kWidth); },
                            {.mesh = mesh,
                             .units = hsdp::each("blocks.*"),
                             .mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = reduce}});
        auto& model = twins.model;
        twins.plain->to(torch::kBFloat16);
        std::map<std::string, torch::Tensor> sums;  // of this rank, by hand
        for (int64_t micro = 0; micro < 4; ++micro) {
          model.set_requires_gradient_sync(micro == 3);
          const auto x = inputs(micro, share.begin, share.end);
          model->forward(x).square().mean().backward();
          twins.plain->zero_grad();
          twins.plain->forward(x.to(torch::kBFloat16)).square().mean().backward();
          for (auto& parameter : twins.plain->named_parameters()) {
            const auto gradient = parameter.value().grad().to(reduce.value_or(torch::kBFloat16));
            auto& sum = sums[parameter.key()];
            sum = sum.defined() ? sum + gradient : gradient;
          }
        }
        for (auto& parameter : twins.net->named_parameters()) {
          auto sum = sums[parameter.key()];
          context.environment().communicator()->all_reduce(sum, dtensor::ReduceOp::sum, {"all_reduce", "sum"})->wait();
          EXPECT_EQ(parameter.value().grad().scalar_type(), torch::kFloat);
          EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value().grad()), (sum / 2).to(torch::kFloat)))
              << parameter.key() << " reduced in " << reduce.value_or(torch::kBFloat16);
        }
      }
    });
  }
}

// ---- exceptions between micro-batches ----

TEST(Exceptions, DropWhatWaitsAndKeepWhatLanded) {
  run_ranks(4, [](RankContext& context) {
    use_doubles();
    const Share share(context);
    Twins<Blocks> twins([] { return Blocks(3, kWidth); },
                        {.mesh = mesh_of(context, {2, 2}), .units = hsdp::each("blocks.*")});
    auto& model = twins.model;
    const auto fail_in_forward = [&](int64_t step) {
      hsdp::ForwardScope scope(model.core());
      auto x = model.module().block(0, inputs(step, share.begin, share.end));
      model.module().block(1, x);
      throw std::runtime_error("in the middle of a forward");
    };
    const auto fail_in_backward = [&](int64_t step) {
      hsdp::ForwardScope scope(model.core());
      auto x = model.module().block(0, inputs(step, share.begin, share.end));
      x.register_hook(
          [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("in the middle of a backward"); });
      model.module().head(model.module().block(2, model.module().block(1, x))).sum().backward();
    };
    for (bool in_backward : {false, true}) {
      for (bool scatters : {false, true}) {
        SCOPED_TRACE(std::string(in_backward ? "in backward" : "in forward") +
                     (scatters ? ", scattered" : ", unsynced"));
        twins.zero_grad();
        sharded_backward(model, 0, share);  // lands
        scatters ? model.set_requires_all_reduce(false) : model.set_requires_gradient_sync(false);
        sharded_backward(model, 1, share);  // waits
        EXPECT_THROW(in_backward ? fail_in_backward(2) : fail_in_forward(2), std::runtime_error);
        model.reset_iteration_state();
        for (auto& unit : model.core()->units()) {
          EXPECT_FALSE(unit->is_gathered() || unit->is_gathering() || unit->has_unsynced()) << unit->name();
        }
        model.set_requires_all_reduce(true);
        model.set_requires_gradient_sync(true);
        plain_backward(*twins.plain, 0);
        twins.expect_equal_gradients(1e-12);
        sharded_backward(model, 3, share);
        plain_backward(*twins.plain, 3);
        twins.expect_equal_gradients(1e-12);
      }
    }
    // Without a reset what waited is still to come.
    twins.zero_grad();
    model.set_requires_gradient_sync(false);
    sharded_backward(model, 0, share);
    EXPECT_THROW(fail_in_forward(1), std::runtime_error);
    model.set_requires_gradient_sync(true);
    sharded_backward(model, 2, share);
    plain_backward(*twins.plain, 0);
    plain_backward(*twins.plain, 2);
    twins.expect_equal_gradients(1e-12);
  });
}

// ---- units that are not all alike ----

TEST(Unlike, FrozenParametersAndUnusedUnitsBetweenMicroBatches) {
  for (const auto& sizes : {std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}}) {
    run_ranks(sizes.size() == 2 ? 4 : 2, [&](RankContext& context) {
      use_doubles();
      const Share share(context);
      const auto mesh = mesh_of(context, sizes);
      // Only biases train in the blocks; blocks.1 is skipped by all but the second micro-batch, blocks.3 by all.
      const auto backward = [](BlocksImpl& net, int64_t step, int64_t begin, int64_t end) {
        auto x = net.block(0, inputs(step, begin, end));
        if (step % kMicroBatches == 1) x = net.block(1, x);
        loss_of(net.head(net.block(2, x)), step, begin, end).backward();
      };
      for (auto reshard : {std::optional<hsdp::ReshardAfterForward>(), std::optional(hsdp::ReshardAfterForward(true)),
                           std::optional(hsdp::ReshardAfterForward(false))}) {
        for (int waits : {0, 1, 2}) {
          if (waits == 2 && sizes.size() == 1) continue;
          SCOPED_TRACE(std::string(reshard ? reshard->frees() ? "always" : "never" : "default") + ", waits " +
                       std::to_string(waits));
          Twins<Blocks> twins([] { return Blocks(4, kWidth); },
                              {.mesh = mesh, .units = hsdp::each("blocks.*"), .reshard_after_forward = reshard});
          auto& model = twins.model;
          for (auto* module : {twins.plain.get(), twins.net.get()}) {
            for (auto& parameter : module->named_parameters()) {
              const bool is_block = parameter.key().find("blocks") == 0;
              if (is_block && parameter.key().find("weight") != std::string::npos) {
                parameter.value().set_requires_grad(false);
              }
            }
          }
          torch::optim::SGD ours(twins.net->parameters(), 0.1), theirs(twins.plain->parameters(), 0.1);
          for (int64_t iteration = 0; iteration < 2; ++iteration) {
            twins.zero_grad();
            for (int64_t micro = 0; micro < kMicroBatches; ++micro) {
              const bool last = micro + 1 == kMicroBatches;
              if (waits == 1) model.set_requires_gradient_sync(last);
              if (waits == 2) model.set_requires_all_reduce(last);
              dtensor::reset_collective_counts();
              {
                hsdp::ForwardScope scope(model.core());
                backward(model.module(), kMicroBatches * iteration + micro, share.begin, share.end);
              }
              if (waits == 0 && micro == 0) {
                // Two biases and the head: frozen weights add no bytes.
                const int64_t rows = mesh->sizes().back() == 2 ? 6 : 5;
                EXPECT_EQ(dtensor::collective_counts().reduce_scatter_bytes, (2 * rows + rows * kWidth) * 8);
              }
              backward(*twins.plain, kMicroBatches * iteration + micro, 0, 12);
            }
            twins.expect_equal_gradients(1e-12);
            ours.step();
            theirs.step();
            twins.expect_equal_parameters(1e-12);
          }
          EXPECT_FALSE(twins.net->blocks->ptr<torch::nn::LinearImpl>(3)->bias.grad().defined());
        }
      }
    });
  }
}

}  // namespace gradient_accumulation_test

// Replicas are compared before they train together, and can be made equal.
#include "hsdp/replica_check.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace {

using namespace testing_support;
using hsdp::NamedLocals;

// What a rank of shard position `position` holds: the same on all replicas, another part on every position.
NamedLocals parts(int64_t position) {
  const auto values = torch::arange(6, torch::kFloat64).view({2, 3}) + 10 * position + 0.5;
  return {{"double", values},
          {"float", values.to(torch::kFloat)},
          {"half", values.to(torch::kHalf)},
          {"bfloat16", values.to(torch::kBFloat16)},
          {"complex", torch::complex(values, -values)},
          {"long", values.to(torch::kLong)},
          {"byte", values.to(torch::kByte)},
          {"truth", values.gt(13)},
          {"empty", torch::empty({0, 3})},
          {"strided", (values + 1).t()},
          {"last", torch::ones({4})}};
}

size_t index_of(const NamedLocals& locals, const std::string& name) {
  size_t index = 0;
  while (locals.at(index).first != name) ++index;
  return index;
}

void on_mesh(std::vector<int64_t> sizes,
             const std::function<void(RankContext&, const dtensor::DeviceMesh&, NamedLocals)>& body) {
  run_ranks(static_cast<int>(c10::multiply_integers(sizes)), [&](RankContext& context) {
    const auto mesh = context.environment().make_mesh(sizes, {"replicate", "shard"});
    body(context, *mesh, parts(mesh->coordinate()[1]));
  });
}

TEST(ReplicaCheck, PassesEqualPartsAfterTwoCollectives) {
  on_mesh({2, 2}, [](RankContext&, const dtensor::DeviceMesh& mesh, const NamedLocals& locals) {
    dtensor::reset_collective_counts();
    hsdp::check_replicas_equal(locals, mesh, 0);
    // Over the replicas, and over both axes what they found.
    EXPECT_EQ(dtensor::collective_counts().all_gathers, 3);
    EXPECT_EQ(dtensor::collective_counts().all_gather_bytes,
              static_cast<int64_t>(2 * locals.size() * sizeof(int64_t) + 2 * 16 + 4 * 16));
  });
}

TEST(ReplicaCheck, CostsNothingWithoutReplicas) {
  on_mesh({1, 3}, [](RankContext& context, const dtensor::DeviceMesh& mesh, NamedLocals locals) {
    locals[0].second.add_(context.rank());
    dtensor::reset_collective_counts();
    hsdp::check_replicas_equal(locals, mesh, 0);
    hsdp::broadcast_replicas(locals, mesh, 0);
    EXPECT_EQ(dtensor::collective_counts().all_gathers + dtensor::collective_counts().broadcasts, 0);
  });
}

struct Difference {
  std::string name, parameter;
  std::function<void(at::Tensor&)> change;
};

class Unlike : public ::testing::TestWithParam<Difference> {};

TEST_P(Unlike, PartOfOneRankIsToldByAll) {
  const auto& difference = GetParam();
  for (const int64_t other : {2, 3}) {
    on_mesh({2, 2}, [&](RankContext& context, const dtensor::DeviceMesh& mesh, NamedLocals locals) {
      if (context.rank() == other) difference.change(locals[index_of(locals, difference.parameter)].second);
      expect_error<dtensor::StateError>([&] { hsdp::check_replicas_equal(locals, mesh, 0); },
                                        "[forward] parameter \"" + difference.parameter + "\" differs between rank " +
                                            std::to_string(other - 2) + " and rank " + std::to_string(other) +
                                            " of mesh(cpu, replicate=2, shard=2), expected equal replicas; use one "
                                            "seed and one file on all ranks, or call hsdp::broadcast_replicas(model)");
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Parameters, Unlike,
    ::testing::Values(
        Difference{"ByTheLastBit", "double",
                   [](at::Tensor& values) { values[1][2] = std::nextafter(values[1][2].item<double>(), 1e9); }},
        Difference{"ByASign", "float", [](at::Tensor& values) { values[0][0].neg_(); }},
        Difference{"OfHalves", "half", [](at::Tensor& values) { values[0][1] += 1; }},
        Difference{"OfBfloats", "bfloat16", [](at::Tensor& values) { values[0][1] += 1; }},
        Difference{"InAnImaginaryPart", "complex", [](at::Tensor& values) { at::imag(values)[0][0] += 1; }},
        Difference{"OfNumbers", "long", [](at::Tensor& values) { values[1][1] += 1; }},
        Difference{"OfBytes", "byte", [](at::Tensor& values) { values[1][1] += 1; }},
        Difference{"OfTruthValues", "truth", [](at::Tensor& values) { values[1][1].logical_not_(); }},
        Difference{"OfStridedValues", "strided", [](at::Tensor& values) { values[0][1] += 1; }},
        // An even number of equal values: in a xor they would cancel.
        Difference{"OfConstants", "last", [](at::Tensor& values) { values.fill_(2); }}),
    [](const auto& which) { return which.param.name; });

TEST(ReplicaCheck, NamesTheFirstParameterWhereverItDiffers) {
  on_mesh({2, 2}, [](RankContext& context, const dtensor::DeviceMesh& mesh, NamedLocals locals) {
    if (context.rank() == 2) locals[index_of(locals, "long")].second.add_(1);
    if (context.rank() == 3) locals[index_of(locals, "half")].second.add_(1);
    expect_error<dtensor::StateError>([&] { hsdp::check_replicas_equal(locals, mesh, 0); },
                                      "parameter \"half\" differs between rank 1 and rank 3 of");
  });
  on_mesh({4, 1}, [](RankContext& context, const dtensor::DeviceMesh& mesh, NamedLocals locals) {
    if (context.rank() >= 2) locals[context.rank() == 2 ? 3 : 1].second.add_(1);
    expect_error<dtensor::StateError>([&] { hsdp::check_replicas_equal(locals, mesh, 0); },
                                      "parameter \"float\" differs between rank 0 and rank 3 of mesh(cpu, replicate=4");
  });
}

struct SmallImpl : torch::nn::Module {
  SmallImpl()
      : first(register_module("first", torch::nn::Linear(3, 5))),
        second(register_module("second", torch::nn::Linear(5, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Small);

// Rank 3 is given another value than rank 1, of whose part it is the replica.
hsdp::FullySharded<SmallImpl> unlike_replicas(RankContext& context, const hsdp::FullyShardOptions& options) {
  auto model = hsdp::fully_shard(hsdp::meta_init([] { return Small(); }), options);
  model.materialize(at::kCPU);
  torch::manual_seed(5);
  Small plain;
  if (context.rank() == 3) plain->second->bias.data().add_(1);
  hsdp::copy_values(model, plain);
  return model;
}

TEST(ReplicaCheck, IsMadeByTheFirstForwardOfAModel) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.environment().make_mesh({2, 2}, {"replicate", "shard"});
    const auto x = torch::ones({2, 3});
    auto model = unlike_replicas(context, {.mesh = mesh, .reshard_after_forward = true});
    expect_error<dtensor::StateError>([&] { model->forward(x); },
                                      "[forward] parameter \"second.bias\" differs between rank 1 and rank 3 of "
                                      "mesh(cpu, replicate=2, shard=2)");
    hsdp::broadcast_replicas(model);
    dtensor::reset_collective_counts();
    const auto y = model->forward(x);
    const auto first = dtensor::collective_counts().all_gathers;
    torch::manual_seed(5);
    EXPECT_TRUE(torch::allclose(y, Small()->forward(x)));
    dtensor::reset_collective_counts();
    model->forward(x);
    EXPECT_EQ(dtensor::collective_counts().all_gathers, first - 3) << "once";
  });
}

// Of parameters that the shard axis replicates, its first rank speaks for the others.
TEST(BroadcastReplicas, OfAModelFollowsThePlacements) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.environment().make_mesh({2, 2}, {"replicate", "shard"});
    auto model =
        hsdp::fully_shard(hsdp::meta_init([] { return Small(); }), {.mesh = mesh, .replicated = {"first.bias"}});
    expect_error<dtensor::StateError>([&] { hsdp::broadcast_replicas(model); },
                                      "[broadcast_replicas] parameter \"first.weight\" has no values");
    model.materialize(at::kCPU);
    torch::NoGradGuard no_grad;
    for (auto& entry : model.module().named_parameters())
      dtensor::DTensor(entry.value()).to_local().fill_(context.rank());
    hsdp::broadcast_replicas(model);
    for (auto& entry : model.module().named_parameters()) {
      const auto local = dtensor::DTensor(entry.value()).to_local();
      const int64_t source = entry.key() == "first.bias" ? 0 : context.rank() % 2;
      EXPECT_TRUE(local.eq(source).all().item<bool>()) << entry.key();
    }
  });
}

TEST(BroadcastReplicas, GivesThePartsOfTheFirstToAll) {
  on_mesh({2, 2}, [](RankContext& context, const dtensor::DeviceMesh& mesh, NamedLocals locals) {
    const auto expected = parts(mesh.coordinate()[1]);
    const auto version = locals[0].second._version();
    if (context.rank() >= 2) {
      for (auto& [name, local] : locals) local.zero_();
    }
    hsdp::broadcast_replicas(locals, mesh, 0);
    for (size_t i = 0; i < locals.size(); ++i) {
      EXPECT_TRUE(locals[i].second.equal(expected[i].second)) << locals[i].first;
    }
    EXPECT_GT(locals[0].second._version(), version) << "whoever gathered the former values must see it";
    hsdp::check_replicas_equal(locals, mesh, 0);
  });
}

}  // namespace

// Distributed tensors whose parts are kept on the host while their mesh is one of accelerators, as offloaded parameters
// are: they compute on the host and communicate on the device.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "dtensor/communicator.h"
#include "dtensor/dtensor.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/backend.h"
#include "hsdp/hsdp.h"
#include "hsdp/replica_check.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/private_device.h"
#include "tests/testing/staged_backend.h"

namespace {

using namespace testing_support;
using dtensor::DTensor;
using dtensor::Partial;
using dtensor::Placements;
using dtensor::Replicate;
using dtensor::Shard;

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kHost(c10::kCPU);

class Registered : public ::testing::Environment {
 public:
  void SetUp() override {
    register_private_device();
    hsdp::register_backend("staged", kType, make_staged_backend);
  }
};
[[maybe_unused]] const auto* const registered = ::testing::AddGlobalTestEnvironment(new Registered);

struct Case {
  std::string name;
  std::vector<int64_t> mesh;
  Placements placements;
  std::vector<int64_t> shape;
};

// Ranks on devices npu:0, npu:1, ...
void on_mesh(const std::vector<int64_t>& sizes,
             const std::function<void(RankContext&, const std::shared_ptr<const dtensor::DeviceMesh>&)>& body) {
  const auto ranks = static_cast<int>(c10::multiply_integers(sizes));
  run_ranks(ranks,
            [&](RankContext& context) {
              auto store = c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", ranks);
              context.set_environment(
                  hsdp::init_from(std::move(store), context.rank(), ranks, {.timeout = std::chrono::seconds(20)}));
              std::vector<std::string> names{"shard"};
              if (sizes.size() == 2) names.insert(names.begin(), "replicate");
              body(context, context.environment().make_mesh(sizes, names));
            },
            {.make_environment = false});
}

class HostLocals : public ::testing::TestWithParam<Case> {};

TEST_P(HostLocals, ComputeThereAndCommunicateOnTheDevice) {
  const auto& c = GetParam();
  on_mesh(c.mesh, [&](RankContext& context, const std::shared_ptr<const dtensor::DeviceMesh>& mesh) {
    const auto device = context.environment().device();
    const auto whole = torch::arange(c10::multiply_integers(c.shape), torch::kFloat64).view(c.shape) - 3;
    const auto tensor = DTensor::distribute(whole, mesh, c.placements);
    EXPECT_EQ(tensor.tensor().device(), kHost);
    EXPECT_EQ(mesh->device_type(), kType);
    const auto full = tensor.full_tensor();
    EXPECT_EQ(full.device(), device) << "where the ranks meet";
    EXPECT_TRUE(full.cpu().equal(whole));
    const auto again = DTensor::from_local(tensor.to_local().clone(), mesh, c.placements);
    EXPECT_EQ(again.layout(), tensor.layout());
    EXPECT_EQ(again.to_local().device(), kHost);

    for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      dtensor::reset_collective_counts();
      const auto norm = tensor.tensor().norm(p) + 0;
      EXPECT_EQ(norm.device(), kHost);
      EXPECT_NEAR(norm.item<double>(), whole.norm(p).item<double>(), 1e-12);
      EXPECT_EQ(dtensor::collective_counts().all_reduces, mesh->size(mesh->ndim() - 1) > 1 ? 1 : 0);
    }
    EXPECT_EQ(tensor.tensor().sum().item<double>(), whole.sum().item<double>());
    EXPECT_EQ(tensor.tensor().max().item<double>(), whole.max().item<double>());
    EXPECT_EQ(tensor.tensor().isnan().any().item<bool>(), false);

    const auto expect = [&](const at::Tensor& result, const at::Tensor& value) {
      EXPECT_EQ(result.device(), kHost);
      EXPECT_EQ(DTensor(result).to_local().device(), kHost);
      EXPECT_TRUE(DTensor(result).full_tensor().cpu().equal(value));
    };
    expect(tensor.tensor() * 2 + again.tensor(), whole * 3);
    expect(torch::zeros_like(tensor.tensor()).copy_(whole.to(device)), whole);
    std::vector<at::Tensor> list{again.tensor()};
    torch::_foreach_mul_(list, 3);
    expect(again.tensor(), whole * 3);
    again.set_data(whole);
    expect(again.tensor(), whole);
    torch::manual_seed(4);
    const auto drawn = torch::empty(c.shape, torch::kFloat64).normal_();
    torch::manual_seed(4);
    expect(torch::zeros_like(tensor.tensor()).normal_(), drawn);

    const auto moved = tensor.tensor().to(device);
    EXPECT_EQ(moved.device(), device);
    EXPECT_TRUE(DTensor(moved).full_tensor().cpu().equal(whole));
    EXPECT_EQ(moved.norm().device(), device);
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, HostLocals,
                         ::testing::Values(Case{"Alone", {1}, {Shard(0)}, {5, 3}},
                                           Case{"Uneven", {2}, {Shard(0)}, {5, 3}},
                                           Case{"EmptyPart", {3}, {Shard(0)}, {2, 3}},
                                           Case{"OtherDim", {2}, {Shard(1)}, {4, 3}},
                                           Case{"Hybrid", {2, 2}, {Replicate(), Shard(0)}, {5, 3}},
                                           Case{"HybridOtherDim", {2, 2}, {Replicate(), Shard(1)}, {5, 3}},
                                           Case{"Replicas", {2, 1}, {Replicate(), Shard(0)}, {5, 3}}),
                         [](const auto& which) { return which.param.name; });

TEST(HostLocals, OfPartialValuesAreReducedOnTheDevice) {
  on_mesh({3}, [](RankContext& context, const std::shared_ptr<const dtensor::DeviceMesh>& mesh) {
    const auto mine = torch::full({2}, context.rank() + 1.0, torch::kFloat64);
    const auto sum = DTensor::from_local(mine, mesh, {Partial()}).full_tensor();
    EXPECT_EQ(sum.device(), context.environment().device());
    EXPECT_TRUE(sum.cpu().equal(torch::full({2}, 6.0, torch::kFloat64)));
  });
}

// Offloaded gradients beside whole ones on the device.
TEST(HostLocals, AreClippedTogetherWithTensorsOnTheDevice) {
  on_mesh({2}, [](RankContext& context, const std::shared_ptr<const dtensor::DeviceMesh>& mesh) {
    const auto device = context.environment().device();
    const auto values = torch::arange(15, torch::kFloat64).view({5, 3});
    const auto make = [&](const at::Tensor& value) {
      auto parameter = value.clone().set_requires_grad(true);
      parameter.mutable_grad() = value.clone();
      return parameter;
    };
    std::vector<at::Tensor> plain{make(values), make(values + 1), make(values + 2)};
    const double expected = torch::nn::utils::clip_grad_norm_(plain, 0.5);
    std::vector<at::Tensor> mixed{make(values.to(device))};
    for (const auto& value : {values + 1, (values + 2).to(device)}) {
      mixed.push_back(DTensor::distribute(value, mesh, {Shard(0)}).as_parameter(true).tensor());
      mixed.back().mutable_grad() = DTensor::distribute(value, mesh, {Shard(0)}).tensor();
    }
    EXPECT_NEAR(hsdp::clip_grad_norm_(mixed, 0.5), expected, 1e-12 * expected);
    EXPECT_TRUE(torch::allclose(mixed[0].grad().cpu(), plain[0].grad()));
    for (size_t i = 1; i < 3; ++i) {
      EXPECT_TRUE(torch::allclose(DTensor(mixed[i].grad()).full_tensor().cpu(), plain[i].grad()));
    }
  });
}

TEST(HostLocals, OfReplicasAreComparedAndBroadcast) {
  on_mesh({2, 1}, [](RankContext& context, const std::shared_ptr<const dtensor::DeviceMesh>& mesh) {
    hsdp::NamedLocals locals{{"host", torch::ones({3})}, {"device", torch::ones({2}, context.environment().device())}};
    hsdp::check_replicas_equal(locals, *mesh, 0);
    locals[0].second.add_(context.rank());
    expect_error<dtensor::StateError>([&] { hsdp::check_replicas_equal(locals, *mesh, 0); },
                                      "[forward] parameter \"host\" differs between rank 0 and rank 1");
    hsdp::broadcast_replicas(locals, *mesh, 0);
    EXPECT_TRUE(locals[0].second.equal(torch::ones({3})));
    EXPECT_EQ(locals[0].second.device(), kHost);
    hsdp::check_replicas_equal(locals, *mesh, 0);
  });
}

// ---- a model with offloaded parameters ----

TEST(OffloadedModel, WeightsComeAndGo) {
  on_mesh({2, 2}, [](RankContext& context, const std::shared_ptr<const dtensor::DeviceMesh>& mesh) {
    const auto make = [&] {
      return hsdp::fully_shard(hsdp::meta_init([] { return torch::nn::Linear(3, 5); }),
                               {.mesh = mesh, .offload = {.to_host = true, .pin_memory = false}});
    };
    torch::manual_seed(8);
    torch::nn::Linear plain(3, 5);
    auto model = make();
    model.to_empty(context.environment().device());
    hsdp::copy_values(model, plain);
    EXPECT_EQ(model.module().weight.device(), kHost);
    const auto path = context.directory() + "/offloaded.pt";
    hsdp::export_pt(model, path);
    torch::nn::Linear read(3, 5);
    torch::load(read, path);
    EXPECT_TRUE(read->weight.equal(plain->weight));
    EXPECT_TRUE(read->bias.equal(plain->bias));
    auto again = make();
    hsdp::load(again, path);
    EXPECT_EQ(again.module().bias.device(), kHost);
    EXPECT_TRUE(hsdp::unsharded(again.module().weight).cpu().equal(plain->weight));
    hsdp::broadcast_replicas(again);
    const auto x = torch::ones({2, 3}, context.environment().device());
    EXPECT_TRUE(torch::allclose(again->forward(x).cpu(), plain->forward(x.cpu())));
    // The shards stay on the host.
    torch::NoGradGuard no_grad;
    expect_error<dtensor::ValueError>([&] { again.module().weight.set_data(plain->weight.to(x.device())); },
                                      "[set_data] parameter \"weight\" of shape [5, 3]", "given a tensor on npu",
                                      "expected cpu, where its shards are kept");
    again.module().weight.set_data(plain->weight * 2);
    EXPECT_TRUE(hsdp::unsharded(again.module().weight).cpu().equal(plain->weight * 2));
  });
}

}  // namespace

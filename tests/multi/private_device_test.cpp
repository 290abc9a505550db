// The library on an accelerator that neither it nor libtorch knows: devices named "npu" behind PrivateUse1 and a c10d
// backend of their own, registered here as an out-of-tree library would.
#include "tests/testing/private_device.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dtensor/dtensor.h"
#include "dtensor/inspect.h"
#include "hsdp/backend.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "hsdp/rank_generators.h"
#include "hsdp/transport.h"
#include "models/transformer.h"
#include "tests/testing/expect.h"
#include "tests/testing/modules.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/offline_mesh.h"
#include "tests/testing/on_device.h"
#include "tests/testing/parity.h"
#include "tests/testing/small_transformer.h"
#include "tests/testing/staged_backend.h"

namespace {

using namespace testing_support;
using dtensor::DTensor;
using dtensor::Shard;

constexpr auto kType = c10::DeviceType::PrivateUse1;

[[maybe_unused]] const auto* const registered = ::testing::AddGlobalTestEnvironment(new PrivateDeviceRegistered);

torch::Tensor counting(torch::IntArrayRef sizes) {
  return torch::arange(c10::multiply_integers(sizes), torch::kFloat64).view(sizes) + 1;
}

// ---- the device itself, and how init finds it ----

TEST(PrivateDevice, IsOneOfLibtorchsOwn) {
  run_on_device(1, [](RankContext&) {
    const c10::Device device(kType, 2);
    const auto before = private_bytes(2);
    auto t = torch::arange(6, torch::TensorOptions(device).dtype(torch::kFloat64)).view({2, 3});
    EXPECT_EQ(t.device().str(), "npu:2");
    EXPECT_EQ(private_bytes(2), before + 48);
    EXPECT_EQ(t.t()[2][1].item<double>(), 5);
    EXPECT_TRUE(torch::equal(t.mul(2).cpu(), torch::arange(6).to(torch::kFloat64).view({2, 3}) * 2));
    EXPECT_GT(private_fallbacks(), 0);
    // What a sharded module must do without there: libtorch exchanges no data between meta and such a device.
    auto meta = torch::empty({2}, torch::kMeta);
    EXPECT_THROW(meta.set_data(torch::empty({2}, device)), c10::Error);
    // Backward of this device runs on a thread of its own.
    auto x = torch::ones({2}, device).set_requires_grad(true);
    std::thread::id thread;
    auto y = x * 2;
    y.register_hook([&](const torch::Tensor&) { thread = std::this_thread::get_id(); });
    y.sum().backward();
    EXPECT_NE(thread, std::this_thread::get_id());
    EXPECT_TRUE(torch::equal(x.grad().cpu(), torch::full({2}, 2.0)));
  });
}

TEST(PrivateDevice, IsWhatInitChoosesAndNames) {
  RunOptions options;
  options.make_environment = false;
  run_ranks(
      1,
      [](RankContext&) {
        for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK"}) unsetenv(name);
        ::testing::internal::CaptureStderr();
        const auto environment = hsdp::init();
        EXPECT_EQ(::testing::internal::GetCapturedStderr(), "hsdp: 1 rank, alone, npu\n");
        EXPECT_EQ(environment.device(), c10::Device(kType, 0));
        EXPECT_EQ(environment.mesh()->to_string(), "mesh(npu, shard=1)");
        hsdp::shutdown();
        EXPECT_EQ(hsdp::init({.backend = "gloo"}).device(), c10::Device(c10::kCPU));
        hsdp::shutdown();
        EXPECT_EQ(hsdp::init({.backend = "staged"}).device(), c10::Device(kType, 0));
        hsdp::shutdown();
        expect_error<dtensor::ValueError>([] { hsdp::init({.backend = "hccl"}); },
                                          "[init] backend 'hccl', expected auto, gloo, nccl or staged");
        auto store = c10::make_intrusive<c10d::HashStore>();
        expect_error<dtensor::ValueError>(
            [&] { hsdp::init_from(store, kPrivateDevices, kPrivateDevices + 1, {.backend = "staged"}); },
            "[init] local rank 4 but 4 visible NPU devices, expected one device a rank; start fewer ranks on this "
            "host, "
            "or use gloo");
      },
      options);
}

TEST(PrivateDevice, BackendsAreRegisteredOnceAndByAName) {
  const auto refused = [](const std::string& name, hsdp::BackendFactory make, const char* text) {
    expect_error<dtensor::ValueError>([&] { hsdp::register_backend(name, kType, std::move(make)); }, text);
  };
  refused("staged", make_staged_backend, "[register_backend] backend 'staged' is known already, expected another name");
  refused("gloo", make_staged_backend, "[register_backend] backend 'gloo' is known already, expected another name");
  refused("auto", make_staged_backend, "[register_backend] the name 'auto', expected one of its own");
  refused("", make_staged_backend, "[register_backend] the name '', expected one of its own");
  refused("other", nullptr, "[register_backend] backend 'other' has no factory, expected one");
}

TEST(PrivateDevice, AFactoryThatMakesNothingIsRefused) {
  RunOptions options;
  options.make_environment = false;
  run_ranks(
      1,
      [](RankContext&) {
        hsdp::register_backend("empty", kType, [](auto&&...) { return c10::intrusive_ptr<c10d::Backend>(); });
        expect_error<dtensor::ValueError>(
            [] { hsdp::init_from(c10::make_intrusive<c10d::HashStore>(), 0, 2, {.backend = "empty"}); },
            "[init] the factory of backend empty returned nothing, expected a c10d backend");
      },
      options);
}

class OnDevice : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OnDevice, ::testing::Values(1, 2, 3));

TEST_P(OnDevice, RanksMeetOnTheirDevices) {
  run_on_device(GetParam(), [](RankContext& context) {
    const auto& environment = context.environment();
    EXPECT_EQ(environment.device(), c10::Device(kType, static_cast<c10::DeviceIndex>(context.rank())));
    EXPECT_EQ(torch::empty({1}, kType).device(), environment.device());  // it is the current one
    if (context.world_size() == 1) return;
    EXPECT_EQ(environment.backend(), "staged");
    EXPECT_EQ(environment.communicator()->describe(), "staged, axis shard, rank " + std::to_string(context.rank()) +
                                                          " of " + std::to_string(context.world_size()));
    environment.barrier();
  });
}

TEST_P(OnDevice, EveryCollective) {
  run_on_device(GetParam(), [](RankContext& context) {
    auto& group = *context.environment().communicator();
    const auto ranks = group.size(), rank = group.rank();
    const auto options = torch::TensorOptions(context.environment().device()).dtype(torch::kFloat64);
    auto all = torch::empty({3 * ranks}, options);
    group.all_gather(all, torch::full({3}, rank, options), {"all_gather"})->wait();
    EXPECT_TRUE(torch::equal(all.cpu(), torch::arange(ranks).to(torch::kFloat64).repeat_interleave(3)));
    auto own = torch::empty({2}, options);
    group.reduce_scatter(own, torch::arange(2 * ranks, options), {"reduce_scatter"})->wait();
    EXPECT_TRUE(torch::equal(own.cpu(), (torch::arange(2, torch::kFloat64) + 2.0 * rank) * ranks));
    auto largest = torch::full({1}, rank, options);
    group.all_reduce(largest, dtensor::ReduceOp::max, {"all_reduce"})->wait();
    EXPECT_EQ(largest.item<double>(), ranks - 1);
    auto root = torch::full({2}, rank + 5, options);
    group.broadcast(root, ranks - 1, {"broadcast"})->wait();
    EXPECT_TRUE(torch::equal(root.cpu(), torch::full({2}, ranks + 4.0)));
    // Two dtypes in one transport: packed, unpacked, and padded apart.
    auto transport = hsdp::make_transport(context.environment().mesh()->shared_communicator(0));
    std::vector<hsdp::TensorPair> pairs;
    for (auto dtype : {torch::kFloat64, torch::kFloat32, torch::kFloat64}) {
      pairs.push_back({torch::empty({2 * ranks}, options.dtype(dtype)), torch::full({2}, rank, options.dtype(dtype))});
    }
    transport->all_gather(pairs, {"all_gather", "pairs"})->wait();
    for (auto& pair : pairs) {
      EXPECT_TRUE(torch::equal(pair.full.cpu().to(torch::kFloat64),
                               torch::arange(ranks).to(torch::kFloat64).repeat_interleave(2)));
    }
  });
}

// ---- distributed tensors ----

TEST_P(OnDevice, DistributedTensors) {
  run_on_device(GetParam(), [](RankContext& context) {
    const auto mesh = context.environment().mesh();
    const auto whole = counting({5, 3}).to(context.environment().device());
    auto tensor = DTensor::distribute(whole, mesh, {Shard(0)});
    EXPECT_EQ(tensor.tensor().device(), context.environment().device());
    EXPECT_TRUE(torch::equal(tensor.full_tensor().cpu(), whole.cpu()));
    auto again = DTensor::from_local(tensor.to_local().clone(), mesh, {Shard(0)});
    EXPECT_EQ(again.tensor().sizes(), whole.sizes());
    EXPECT_NEAR(tensor.tensor().norm().item<double>(), whole.cpu().norm().item<double>(), 1e-12);
    EXPECT_EQ(tensor.tensor().max().item<double>(), 15);
    EXPECT_EQ(tensor.tensor().sum().item<double>(), 120);
    auto sum = tensor.tensor() * 2 + again.tensor();
    EXPECT_TRUE(torch::equal(DTensor(sum).full_tensor().cpu(), whole.cpu() * 3));
    // One draw for the whole tensor, of which each rank keeps its part.
    torch::manual_seed(11);
    auto drawn = torch::zeros_like(tensor.tensor()).normal_();
    torch::manual_seed(11);
    EXPECT_TRUE(torch::equal(DTensor(drawn).full_tensor().cpu(), torch::empty({5, 3}).normal_()));
  });
}

TEST_P(OnDevice, ToInAllOverloadsAndFloat) {
  run_on_device(GetParam(), [](RankContext& context) {
    const auto device = context.environment().device();
    const auto mesh = context.environment().mesh();
    const auto whole = counting({5, 3});
    const auto tensor = DTensor::distribute(whole.to(device), mesh, {Shard(0)});
    const auto expect = [&](const DTensor& result, c10::Device where, torch::ScalarType dtype, const char* what) {
      EXPECT_EQ(result.tensor().device(), where) << what;
      EXPECT_EQ(result.tensor().scalar_type(), dtype) << what;
      EXPECT_EQ(result.to_local().device(), where) << what;
      EXPECT_EQ(result.to_local().scalar_type(), dtype) << what;
      EXPECT_EQ(result.placements(), tensor.placements()) << what;
      const auto local = result.to_local().cpu().to(torch::kFloat64);
      EXPECT_TRUE(torch::equal(local, dtensor::narrow_to_box(whole, tensor.layout()->local()))) << what;
    };
    const c10::Device host(c10::kCPU);
    expect(tensor.to(torch::TensorOptions(host)), host, torch::kFloat64, "options: to the host");
    expect(tensor.to(torch::TensorOptions(host)).to(torch::TensorOptions(device).dtype(torch::kFloat32)), device,
           torch::kFloat32, "options: and back");
    expect(tensor.to(device, torch::kFloat32), device, torch::kFloat32, "device and dtype");
    expect(tensor.to(host, torch::kFloat32, /*non_blocking=*/false, /*copy=*/true), host, torch::kFloat32,
           "host, dtype");
    expect(tensor.to(torch::kFloat32), device, torch::kFloat32, "dtype");
    expect(tensor.to(torch::zeros({1}, torch::kFloat32)), host, torch::kFloat32, "as a plain tensor");
    expect(tensor.to(DTensor::from_local(torch::zeros({1}, device), mesh, {Shard(0)}).tensor()), device,
           torch::kFloat64, "as a distributed tensor");
    expect(tensor.to_float(), device, torch::kFloat32, "float");
    // The same through at::Tensor.
    expect(DTensor(tensor.tensor().to(host)), host, torch::kFloat64, "Tensor::to(device)");
    expect(DTensor(tensor.tensor().to(torch::kFloat32)), device, torch::kFloat32, "Tensor::to(dtype)");
    expect(DTensor(tensor.tensor().cpu()), host, torch::kFloat64, "Tensor::cpu");
    EXPECT_TRUE(tensor.tensor().to(device).is_same(tensor.tensor()));
    EXPECT_FALSE(tensor.to(device, torch::kFloat64, false, /*copy=*/true).to_local().is_alias_of(tensor.to_local()));
    // Data of other tensors, whole or sharded: the identity stays.
    const auto target = DTensor::distribute(torch::zeros({5, 3}, device), mesh, {Shard(0)});
    const auto* identity = target.tensor().unsafeGetTensorImpl();
    target.set_data(tensor.tensor());
    EXPECT_TRUE(torch::equal(target.full_tensor().cpu(), whole));
    target.set_data(whole.to(device) * 2);
    EXPECT_TRUE(torch::equal(target.full_tensor().cpu(), whole * 2));
    EXPECT_EQ(target.tensor().unsafeGetTensorImpl(), identity);
    EXPECT_TRUE(dtensor::same_memory(target.impl().body(), target.impl().local()));
  });
}

// ---- from meta to values ----

TEST_P(OnDevice, ToEmptyRepairsTheBodyWithoutSetData) {
  run_on_device(GetParam(), [](RankContext& context) {
    const auto device = context.environment().device();
    const auto ranks = context.world_size();
    auto net = hsdp::meta_init([] { return OneParameter(torch::IntArrayRef{5, 3}, torch::kFloat64); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    auto& parameter = model.core()->units().front()->parameters().front();
    auto& impl = parameter.impl();
    const auto* identity = net->weight.unsafeGetTensorImpl();
    const auto before = private_bytes(device.index());
    EXPECT_TRUE(impl.local().is_meta() && impl.body().is_meta());
    model.to_empty(device);
    const auto padded = (5 + ranks - 1) / ranks;
    EXPECT_EQ(private_bytes(device.index()) - before, padded * 3 * 8);  // one memory for both, and no other
    EXPECT_EQ(net->weight.unsafeGetTensorImpl(), identity);
    EXPECT_TRUE(net->named_parameters()["weight"].is_same(net->weight));
    EXPECT_EQ(net->weight.device(), device);
    EXPECT_EQ(impl.local().device(), device);
    EXPECT_TRUE(dtensor::same_memory(impl.body(), impl.local()));
    EXPECT_NE(impl.body().unsafeGetTensorImpl(), impl.local().unsafeGetTensorImpl());
    EXPECT_TRUE(impl.body().key_set().has_backend(c10::BackendComponent::PrivateUse1Bit));
    EXPECT_TRUE(net->weight.key_set().has_backend(c10::BackendComponent::PrivateUse1Bit));
    EXPECT_TRUE(parameter.is_healthy());
    EXPECT_EQ(model.reset_sharded_param(), 0);
    // A plain tensor of the device, registered by somebody, is adopted; the identity takes its place again.
    const auto& box = parameter.layout().local();
    hsdp::ModuleAccess::parameters(*net)["weight"] = torch::full(box.sizes, 3.0, device);
    EXPECT_EQ(model.reset_sharded_param(), 1);
    EXPECT_TRUE(net->named_parameters()["weight"].is_same(net->weight));
    EXPECT_TRUE(torch::equal(hsdp::unsharded(net->weight).cpu(), torch::full({5, 3}, 3.0)));
    // Other data under the identity: the next read repairs the shard.
    {
      torch::NoGradGuard no_grad;
      net->weight.set_data(torch::full({5, 3}, 4.0, device));
      EXPECT_TRUE(torch::equal(model->forward(torch::ones({5, 3}, device)).cpu(), torch::full({5, 3}, 4.0)));
    }
    EXPECT_TRUE(parameter.is_healthy());
    expect_error<dtensor::ValueError>([&] { model.to_empty(c10::kCPU); }, "asked for cpu", "expected a npu device");
  });
}

struct BufferedImpl : torch::nn::Module {
  BufferedImpl() : linear(register_module("linear", torch::nn::Linear(6, 5))) {
    scale = register_buffer("scale", torch::rand({5}) + 1);
    steps = register_buffer("steps", torch::arange(25).view({5, 5}).triu().select(0, 0).unsqueeze(0));
    shift = torch::randn({1, 5});
  }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x) * scale + steps + shift; }
  torch::nn::Linear linear{nullptr};
  torch::Tensor scale, steps, shift;
};

TEST_P(OnDevice, ReplayGivesTheBitsOfPlainConstruction) {
  run_on_device(GetParam(), [](RankContext& context) {
    const auto device = context.environment().device();
    torch::manual_seed(7);
    const auto plain = std::make_shared<BufferedImpl>();
    const auto next = torch::rand({3});
    torch::manual_seed(7);
    auto net = hsdp::meta_init([] { return std::make_shared<BufferedImpl>(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    for (int round = 0; round < 2; ++round) {
      model.materialize(device);
      EXPECT_TRUE(torch::equal(hsdp::unsharded(net->linear->weight).cpu(), plain->linear->weight));
      EXPECT_TRUE(torch::equal(hsdp::unsharded(net->linear->bias).cpu(), plain->linear->bias));
      for (auto [ours, theirs] :
           {std::pair{net->scale, plain->scale}, {net->steps, plain->steps}, {net->shift, plain->shift}}) {
        EXPECT_EQ(ours.device(), device);
        EXPECT_TRUE(torch::equal(ours.cpu(), theirs));
      }
      // The host's generator goes on from where plain construction would have left it.
      if (round == 0 && context.rank() == 0) {
        EXPECT_TRUE(torch::equal(torch::rand({3}), next));
      }
    }
  });
}

TEST_P(OnDevice, GeneratorsGoOnFromTheirStates) {
  run_on_device(GetParam(), [](RankContext& context) {
    const auto device = context.environment().device();
    auto generator = at::globalContext().defaultGenerator(device);
    const auto draw = [&] { return torch::rand({8}, generator); };
    const auto of_all_ranks = [&](const torch::Tensor& own) {
      auto all = torch::empty({context.world_size() * 8}, own.options().device(device));
      context.environment().communicator()->all_gather(all, own.to(device), {"all_gather"})->wait();
      return all.cpu().view({context.world_size(), 8});
    };
    const auto expect_all_unlike = [&](const torch::Tensor& own) {
      const auto all = of_all_ranks(own);
      for (int64_t rank = 1; rank < all.size(0); ++rank) EXPECT_FALSE(torch::equal(all[rank], all[rank - 1])) << rank;
    };
    torch::manual_seed(7);
    generator.set_current_seed(7);
    hsdp::part_generators(context.rank(), device);
    const auto first = draw();
    expect_all_unlike(first);
    auto states = hsdp::capture_generators();
    ASSERT_EQ(states.size(), 6);  // own, common and mark of two
    EXPECT_TRUE(states[3].first.starts_with("device.")) << states[3].first;
    const auto expected = draw();

    hsdp::part_generators(context.rank(), c10::kCPU);  // which forgets the device
    generator.set_current_seed(3);
    hsdp::restore_generators(states, device);
    EXPECT_TRUE(torch::equal(draw(), expected));
    const auto again = hsdp::capture_generators();
    ASSERT_EQ(again.size(), 6);
    for (const size_t i : {0, 1, 2, 4, 5}) {
      EXPECT_EQ(again[i].first, states[i].first);
      EXPECT_TRUE(torch::equal(again[i].second, states[i].second)) << states[i].first;
    }
    // The common state is known as such: at the next parting it is what the ranks part from.
    hsdp::part_generators(context.rank(), device);
    EXPECT_TRUE(torch::equal(hsdp::capture_generators()[4].second, states[4].second));

    hsdp::GeneratorStates rank_0;
    for (const auto& [name, state] : states) {
      auto values = state.to(device);
      context.environment().communicator()->broadcast(values, 0, {"broadcast"})->wait();
      rank_0.emplace_back(name, values.cpu());
    }
    hsdp::reseed_generators(rank_0, context.rank(), device);
    const auto reseeded = draw();
    EXPECT_EQ(torch::equal(reseeded, expected), context.rank() == 0);
    EXPECT_FALSE(torch::equal(reseeded, first));
    expect_all_unlike(reseeded);
    EXPECT_TRUE(torch::equal(hsdp::capture_generators()[4].second, states[4].second));

    // Of a run that had no such device.
    for (auto* each : {&states, &rank_0}) each->resize(3);
    generator.set_current_seed(3);
    hsdp::restore_generators(states, device);
    expect_all_unlike(draw());
    generator.set_current_seed(3);
    hsdp::reseed_generators(rank_0, context.rank(), device);
    expect_all_unlike(draw());
  });
}

TEST_P(OnDevice, OwnInitialValues) {
  run_on_device(GetParam(), [](RankContext& context) {
    auto net = hsdp::meta_init([] { return std::make_shared<BufferedImpl>(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    model.to_empty(context.environment().device());
    torch::manual_seed(3);
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) torch::nn::init::normal_(parameter, 0.0, 0.02);
    torch::manual_seed(3);
    for (auto& parameter : model->parameters()) {
      const auto expected = torch::empty(parameter.sizes()).normal_(0.0, 0.02);
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter).cpu(), expected));
    }
  });
}

TEST_P(OnDevice, WholeWeightsInAndOut) {
  run_on_device(GetParam(), [](RankContext& context) {
    const auto device = context.environment().device();
    torch::manual_seed(5);
    const auto plain = std::make_shared<BufferedImpl>();
    auto net = hsdp::meta_init([] { return std::make_shared<BufferedImpl>(); });
    auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    model.materialize(device);
    hsdp::copy_values(model, plain);
    const auto expect_plain = [&](const BufferedImpl& loaded) {
      EXPECT_TRUE(torch::equal(loaded.linear->weight, plain->linear->weight));
      EXPECT_TRUE(torch::equal(loaded.linear->bias, plain->linear->bias));
      EXPECT_TRUE(torch::equal(loaded.scale, plain->scale));
    };
    const auto path = context.directory() + "/model.pt";
    hsdp::export_pt(model, path);
    auto unsharded = std::make_shared<BufferedImpl>();
    torch::load(unsharded, path);
    expect_plain(*unsharded);
    auto again = hsdp::meta_init([] { return std::make_shared<BufferedImpl>(); });
    auto other = hsdp::fully_shard(again, {.mesh = context.environment().mesh()});
    other.to_empty(device);
    hsdp::load(other, path);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(again->linear->weight).cpu(), plain->linear->weight));
    EXPECT_EQ(again->scale.device(), device);
    EXPECT_TRUE(torch::equal(again->scale.cpu(), plain->scale));
  });
}

// ---- training ----

c10::Device device_of(torch::nn::Module& module) { return module.parameters().front().device(); }

torch::Tensor rows_of(int64_t step, int64_t salt, torch::IntArrayRef sizes, int64_t begin, int64_t end) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 * salt + step));
  return torch::randn(sizes, generator).narrow(0, begin, end - begin);
}

/// torch::mse_loss warns once a call where its backward falls back.
torch::Tensor mean_square(const torch::Tensor& a, const torch::Tensor& b) { return (a - b).square().mean(); }

template <class Net>
void train(int ranks, ParityCase<Net> c) {
  c.steps = 4;
  for (bool adam : {false, true}) {
    c.optimizer = [adam](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
      if (!adam) return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
      return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01).eps(1e-4));
    };
    run_on_device(ranks, [&](RankContext& context) {
      expect_parity(context, c);
      EXPECT_GT(private_fallbacks(), 100);  // and that is where it ran
    });
  }
}

TEST_P(OnDevice, TrainsOddMlpBitForBitWhenAlone) {
  ParityCase<OddMlp> c;
  c.make = [] { return OddMlp(); };
  c.options.units = hsdp::each<torch::nn::Linear>();
  c.loss = [](OddMlpImpl& net, int64_t step, int64_t begin, int64_t end) {
    const auto device = device_of(net);
    return mean_square(net.forward(rows_of(step, 1, {12, 5}, begin, end).to(device)),
                       rows_of(step, 2, {12, 2}, begin, end).to(device));
  };
  if (GetParam() == 1) c.loss_tolerance = c.parameter_tolerance = 0;
  train(GetParam(), c);
  c.max_norm = 0.5;
  train(GetParam(), c);
}

TEST_P(OnDevice, TrainsWeightsReadThroughViews) {
  ParityCase<ViewChain> c;
  c.make = [] { return ViewChain(); };
  c.options.units = hsdp::each("*");
  c.loss = [](ViewChainImpl& net, int64_t step, int64_t begin, int64_t end) {
    const auto device = device_of(net);
    return mean_square(net.forward(rows_of(step, 1, {12, 4, 6}, begin, end).to(device)),
                       rows_of(step, 2, {12, 4, 3}, begin, end).to(device));
  };
  if (GetParam() == 1) c.loss_tolerance = c.parameter_tolerance = 0;
  train(GetParam(), c);
}

/// Stock modules but LSTM, for which libtorch calls a fused cell that the host has not.
struct StockImpl : torch::nn::Module {
  StockImpl()
      : conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 7, 3).padding(1)))),
        bn(register_module("bn", torch::nn::BatchNorm2d(7))),
        linear(register_module("linear", torch::nn::Linear(7 * 16, 10))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({10})))),
        embedding(register_module("embedding", torch::nn::Embedding(11, 10))),
        attention(register_module("attention", torch::nn::MultiheadAttention(10, 2))),
        head(register_module("head", torch::nn::Linear(10, 4))) {
    scale = register_parameter("scale", torch::rand({1}) * 2 + 1);
    ramp = register_buffer("ramp", torch::arange(10) / 10.0);
  }
  torch::Tensor forward(const torch::Tensor& images, const torch::Tensor& tokens) {
    auto x = linear(torch::relu(bn(conv(images))).flatten(1)) + ramp * scale;
    x = (norm(x) + embedding(tokens)).unsqueeze(0);
    return head(std::get<0>(attention(x, x, x)).squeeze(0));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d bn{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Embedding embedding{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::Linear head{nullptr};
  torch::Tensor scale, ramp;
};
TORCH_MODULE(Stock);

TEST_P(OnDevice, TrainsStockModules) {
  ParityCase<Stock> c;
  c.make = [] { return Stock(); };
  c.options.units = hsdp::each<torch::nn::Linear>() | hsdp::each<torch::nn::MultiheadAttention>();
  c.whole_batch_everywhere = true;
  c.loss = [](StockImpl& net, int64_t step, int64_t begin, int64_t end) {
    const auto device = device_of(net);
    auto tokens = rows_of(step, 3, {12}, begin, end).abs().mul(10).to(torch::kLong).clamp(0, 10).to(device);
    return mean_square(net.forward(rows_of(step, 1, {12, 1, 4, 4}, begin, end).to(device), tokens),
                       rows_of(step, 2, {12, 4}, begin, end).to(device));
  };
  train(GetParam(), c);
}

TEST_P(OnDevice, TrainsATransformerWithTiedEmbeddings) {
  ParityCase<models::Transformer> c;
  c.make = [] { return small_transformer(/*layers=*/2, /*tied=*/true); };
  c.options.units = hsdp::each<models::TransformerBlock>();
  c.max_norm = 1.0;
  c.loss = [](models::TransformerImpl& net, int64_t step, int64_t begin, int64_t end) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
    const auto ids =
        torch::randint(0, 17, {12, 9}, generator, torch::kLong).narrow(0, begin, end - begin).to(device_of(net));
    auto logits = net.forward(ids.narrow(1, 0, 8));
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.narrow(1, 1, 8).flatten());
  };
  train(GetParam(), c);
}

TEST_P(OnDevice, KeepsShardsOnlyBetweenSteps) {
  run_on_device(GetParam(), [](RankContext& context) {
    const auto device = context.environment().device();
    const auto ranks = context.world_size();
    auto net = hsdp::meta_init([] {
      return torch::nn::Sequential(torch::nn::Linear(60, 60), torch::nn::Linear(60, 60), torch::nn::Linear(60, 60));
    });
    auto model =
        hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()});
    const auto before = private_bytes(device.index());
    model.materialize(device);
    const auto shards = private_bytes(device.index()) - before;
    EXPECT_EQ(shards, 3 * 61 * 60 * 8 / ranks);
    hsdp::reset_peak_memory(device);
    model->forward(torch::ones({1, 60}, device)).sum().backward();
    for (auto& parameter : model->parameters()) EXPECT_EQ(parameter.grad().device(), device);
    const auto peak = hsdp::peak_memory_bytes(device);
    // Weights and gradients of a shard stay, what was gathered is gone.
    EXPECT_LE(private_bytes(device.index()) - before, 2 * shards + 4096);
    EXPECT_GT(peak, private_bytes(device.index()));
    if (ranks > 1) {
      EXPECT_LT(peak - before, 2 * shards + 8 * 61 * 60 * 8);
    }
    net->zero_grad();
  });
}

TEST(PrivateDevice, AFailedRankIsNamedByTheOthers) {
  RunOptions options;
  options.killed = {1};
  options.communication_timeout = std::chrono::milliseconds(5000);
  run_on_device(
      2,
      [](RankContext& context) {
        auto tensor = torch::ones({4}, context.environment().device());
        if (context.rank() == 1) context.kill_self();
        expect_error<dtensor::CommunicationError>(
            [&] {
              context.environment()
                  .communicator()
                  ->all_reduce(tensor, dtensor::ReduceOp::sum, {"all_reduce", "loss"})
                  ->wait();
            },
            "[all_reduce] loss, 32 bytes over staged group \"shard\" (rank 0 of 2) failed after",
            "every rank must call it");
      },
      options);
}

}  // namespace

// fully_shard: how parameters are grouped and placed, and what it and the forward refuse. No process group.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "tests/testing/expect.h"
#include "tests/testing/modules.h"
#include "tests/testing/offline_mesh.h"

namespace fully_shard_test {

using namespace testing_support;
using dtensor::DTensor;

struct BlockImpl : torch::nn::Module {
  BlockImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {
    scale = register_parameter("scale", torch::ones({4}));
  }
  torch::Tensor forward(torch::Tensor x) { return linear(x) * scale; }
  torch::nn::Linear linear{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 2; ++i) layers->push_back(Block());
    register_module("layers", layers);
    head = register_module("head", torch::nn::Linear(4, 2));
    offset = register_buffer("offset", torch::full({2}, 0.5));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : *layers) x = layer->as<BlockImpl>()->forward(x);
    return head(x) + offset;
  }
  int64_t parameter_count() { return static_cast<int64_t>(parameters().size()); }
  torch::nn::ModuleList layers;
  torch::nn::Linear head{nullptr};
  torch::Tensor offset;
};
TORCH_MODULE(Net);

std::vector<std::string> unit_names(const hsdp::ShardedModule& core) {
  std::vector<std::string> names;
  for (auto& unit : core.units()) {
    std::string text = unit->name() + ":";
    for (auto& parameter : unit->parameters()) text += " " + parameter.name();
    names.push_back(text);
  }
  return names;
}

const std::string kRoot = "root: head.weight head.bias";
const std::string kLayer0 = "layers.0: layers.0.scale layers.0.linear.weight layers.0.linear.bias";
const std::string kLayer1 = "layers.1: layers.1.scale layers.1.linear.weight layers.1.linear.bias";

TEST(Units, ByTypeByHolderAndByPattern) {
  for (auto selector : {hsdp::each<Block>(), hsdp::each<BlockImpl>(), hsdp::each("layers.*")}) {
    auto net = hsdp::meta_init([] { return Net(); });
    auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0), .units = selector});
    EXPECT_EQ(unit_names(*model.core()), (std::vector<std::string>{kRoot, kLayer0, kLayer1}));
    EXPECT_FALSE(model.core()->units()[0]->reshard_after_forward());
    EXPECT_TRUE(model.core()->units()[1]->reshard_after_forward());
  }
}

TEST(Units, NestedMatchesAreUnitsOfTheirOwn) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0),
                                       .units = hsdp::each<Block>() | hsdp::each("layers.0.**"),
                                       .reshard_after_forward = true});
  EXPECT_EQ(unit_names(*model.core()),
            (std::vector<std::string>{kRoot, "layers.0: layers.0.scale",
                                      "layers.0.linear: layers.0.linear.weight layers.0.linear.bias", kLayer1}));
  EXPECT_TRUE(model.core()->units()[0]->reshard_after_forward());
  auto& units = model.core()->units();
  EXPECT_TRUE(units[2]->is_relative_of(*units[1]));
  EXPECT_TRUE(units[0]->is_relative_of(*units[2]));
  EXPECT_FALSE(units[3]->is_relative_of(*units[1]));
}

TEST(Units, WithoutASelectorTheRootHoldsAll) {
  auto net = hsdp::meta_init([] { return std::make_shared<NetImpl>(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(3, 1)});
  ASSERT_EQ(model.core()->units().size(), 1u);
  EXPECT_EQ(model.core()->units()[0]->parameters().size(), 8u);
  EXPECT_EQ(model->parameter_count(), 8);
}

TEST(Units, AModuleByValue) {
  auto model = hsdp::fully_shard(hsdp::meta_init([] { return NetImpl(); }), {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  EXPECT_EQ(model(torch::ones({1, 4})).sizes(), (std::vector<int64_t>{1, 2}));
}

TEST(Sharding, PlacesParametersOnMetaInPlace) {
  auto net = hsdp::meta_init([] { return Net(); });
  const auto before = net->named_parameters();
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(3, 1)});
  for (auto& parameter : net->named_parameters()) {
    EXPECT_TRUE(parameter.value().is_same(before[parameter.key()]));
    ASSERT_TRUE(DTensor::is_dtensor(parameter.value()));
    EXPECT_TRUE(DTensor(parameter.value()).is_parameter());
    EXPECT_TRUE(parameter.value().requires_grad());
    EXPECT_TRUE(parameter.value().is_meta());
  }
  EXPECT_EQ(net->head->weight.sizes(), (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(net->head->weight.size(0), 2);
  EXPECT_EQ(DTensor(net->head->weight).impl().local().sizes(), (std::vector<int64_t>{1, 4}));
}

TEST(Refuses, ModulesBuiltOutsideMetaInit) {
  Net plain;
  expect_error<dtensor::NotSupportedError>([&] { hsdp::fully_shard(plain, {.mesh = offline_mesh(2, 0)}); },
                                           "[fully_shard]", "parameter \"layers.0.scale\" is plain Float [4] cpu",
                                           "expected one made by meta_init",
                                           "hsdp::meta_init([&] { return Net(...); })");
}

TEST(Refuses, SelectorsThatMatchNothingAndChangesNothing) {
  auto net = hsdp::meta_init([] { return Net(); });
  expect_error<dtensor::ValueError>(
      [&] { hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0), .units = hsdp::each<torch::nn::LSTM>()}); },
      "selector each<torch::nn::LSTMImpl>()", "matches none", "BlockImpl", "layers.0.linear");
  expect_error<dtensor::ValueError>(
      [&] {
        hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0), .units = hsdp::each<Block>() | hsdp::each("blocks.*")});
      },
      "selector each(\"blocks.*\")", "head");
  EXPECT_FALSE(DTensor::is_dtensor(net->head->weight));
  EXPECT_NO_THROW(hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0), .units = hsdp::each<Block>()}));
}

TEST(Refuses, WhatCannotBeSharded) {
  const auto make = [](auto register_all) {
    return hsdp::meta_init([&] {
      auto module = std::make_shared<torch::nn::Module>();
      register_all(*module);
      return module;
    });
  };
  auto mesh = offline_mesh(2, 0);
  auto scalar = make([](auto& m) { m.register_parameter("alpha", torch::rand({})); });
  expect_error<dtensor::NotSupportedError>([&] { hsdp::fully_shard(scalar, {.mesh = mesh}); }, "\"alpha\" is a scalar",
                                           "{1}");
  auto strided = make([](auto& m) { m.register_parameter("w", torch::rand({100, 200}).t()); });
  expect_error<dtensor::NotSupportedError>([&] { hsdp::fully_shard(strided, {.mesh = mesh}); }, "\"w\"",
                                           "strides [1, 200]");
  auto empty = make([](auto&) {});
  expect_error<dtensor::ValueError>([&] { hsdp::fully_shard(empty, {.mesh = mesh}); }, "no parameters");
  auto views = make([](auto& m) {
    auto whole = torch::rand({100, 200});
    m.register_parameter("a", whole.narrow(0, 0, 50).detach());
    m.register_parameter("b", whole.narrow(0, 50, 50).detach());
  });
  expect_error<dtensor::NotSupportedError>([&] { hsdp::fully_shard(views, {.mesh = mesh}); },
                                           "\"a\" and \"b\" are views of one memory");
  auto three_axes = dtensor::DeviceMesh::create(at::kCPU, {2, 2, 2}, {"a", "b", "c"}, 0);
  auto fine = make([](auto& m) { m.register_parameter("w", torch::rand({4})); });
  expect_error<dtensor::NotSupportedError>([&] { hsdp::fully_shard(fine, {.mesh = three_axes}); }, "has 3 axes");
  expect_error<dtensor::ValueError>([&] { hsdp::fully_shard(Net(nullptr), {.mesh = mesh}); }, "module is null");
}

TEST(Refuses, ASecondCallOnTheSameModule) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0)});
  expect_error<dtensor::StateError>([&] { hsdp::fully_shard(net, {.mesh = offline_mesh(2, 0)}); },
                                    "is sharded already");
}

TEST(ForwardRefuses, TensorsOnMetaAndWithoutValuesByName) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0), .units = hsdp::each<Block>()});
  auto x = torch::ones({1, 4});
  expect_error<dtensor::StateError>([&] { model->forward(x); }, "[forward] 9 tensors have no values",
                                    "\"head.weight\" (on meta)", "\"layers.1.linear.bias\" (on meta)",
                                    "\"offset\" (on meta)", "materialize(device)");
  model.to_empty(at::kCPU);
  expect_error<dtensor::StateError>([&] { model->forward(x); }, "9 tensors", "\"head.weight\" (never set)",
                                    "replay_init()");
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->named_parameters()) {
      if (parameter.key() == "head.weight") continue;
      if (parameter.key() == "head.bias")
        parameter.value().zero_();
      else
        torch::nn::init::constant_(parameter.value(), 0.1);
    }
    net->offset.fill_(0.5);
  }
  expect_error<dtensor::StateError>([&] { model->forward(x); },
                                    "1 tensors have no values: \"head.weight\" (never set);");
  {
    torch::NoGradGuard no_grad;
    net->head->weight.copy_(torch::ones({2, 4}));
  }
  EXPECT_NO_THROW(model->forward(x));
  expect_error<dtensor::ValueError>([&] { model.materialize(at::kCUDA); }, "cuda", "expected a cpu device");
}

TEST(ForwardRefuses, TheBareModuleOutsideAScope) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  auto x = torch::ones({1, 4});
  expect_error<dtensor::NotSupportedError>([&] { net->forward(x); }, "\"layers.0.linear.weight\"",
                                           "use model->forward(x)");
  torch::NoGradGuard no_grad;
  expect_error<dtensor::NotSupportedError>([&] { net->forward(x); }, "\"layers.0.linear.weight\"",
                                           "use model->forward(x)");
}

TEST(ForwardRefuses, ReplayBeforeMemory) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  expect_error<dtensor::StateError>([&] { model.replay_init(); }, "[replay_init]", "is on meta", "to_empty(device)");
}

TEST(ForwardRefuses, ASecondThread) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  hsdp::ForwardScope scope(model.core());
  std::async(std::launch::async, [&] {
    expect_error<dtensor::StateError>([&] { hsdp::ForwardScope other(model.core()); },
                                      "another thread is inside a forward");
  }).get();
}

TEST(ForwardRefuses, AViewThatIsReadOutside) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  at::Tensor view;
  {
    hsdp::ForwardScope scope(model.core());
    view = net->head->weight.t();
  }
  expect_error<dtensor::StateError>([&] { (void)(view * 2); },
                                    "a view of a sharded parameter is read outside a forward");
}

TEST(ForwardRefuses, InPlaceChangesOfALeafWithGradModeOn) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  hsdp::ForwardScope scope(model.core());
  expect_error<dtensor::StateError>([&] { net->head->weight.mul_(2); }, "[aten::mul_] parameter \"head.weight\"",
                                    "changed in place with grad mode on", "torch::NoGradGuard");
  expect_error<dtensor::StateError>([&] { net->head->weight.narrow(0, 0, 1).zero_(); }, "a view of a parameter");
}

TEST(ForwardRefuses, ReturningGradientsOfParameters) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  auto loss = model->forward(torch::ones({1, 4})).sum();
  expect_error<dtensor::NotSupportedError>(
      [&] { torch::autograd::grad({loss}, {net->head->weight}); },
      "[autograd::grad] asked for the gradient of sharded parameter \"head.weight\"", "read p.grad()");
}

TEST(ForwardRefuses, SecondOrderGradientsOfParameters) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  auto loss = model->forward(torch::ones({1, 4})).pow(2).sum();
  expect_error<dtensor::NotSupportedError>([&] { loss.backward({}, true, /*create_graph=*/true); },
                                           "[backward] create_graph=true for the parameters of unit \"root\"",
                                           "torch::autograd::grad({y}, {x}");
}

TEST(ForwardRefuses, ParametersRegisteredAfterwards) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  net->register_parameter("late", torch::ones({2}));
  expect_error<dtensor::StateError>(
      [&] {
        model->forward(torch::ones({1, 4}));
      },
      "parameter \"late\" was registered after fully_shard");
}

TEST(ForwardRefuses, SparseGradients) {
  auto net = hsdp::meta_init([] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true)); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  auto loss = model->forward(torch::zeros({3}, torch::kLong)).sum();
  expect_error<dtensor::NotSupportedError>(
      [&] { loss.backward(); }, "[reduce_scatter] parameter \"weight\" received a Sparse", "expected a dense one");
}

TEST(Refuses, ComplexParameters) {
  auto module = hsdp::meta_init([] {
    auto made = std::make_shared<torch::nn::Module>();
    made->register_parameter("w", torch::zeros({4}, torch::kComplexFloat));
    return made;
  });
  expect_error<dtensor::NotSupportedError>([&] { hsdp::fully_shard(module, {.mesh = offline_mesh(2, 0)}); },
                                           "parameter \"w\" is complex");
}

TEST(ForwardRefuses, BackwardAfterTheWeightsChanged) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  auto loss = model->forward(torch::ones({1, 4}).set_requires_grad(true)).sum();
  {
    torch::NoGradGuard no_grad;
    net->head->weight.mul_(2);
  }
  expect_error<dtensor::StateError>([&] { loss.backward(); }, "parameter \"head.weight\"",
                                    "modified by an inplace operation", "run backward before optimizer.step()");
}

TEST(ScopeProxy, KeepsTheScopeForTheFullExpression) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0)});
  model.materialize(at::kCPU);
  const auto norm_of = [](const std::vector<at::Tensor>& parameters) {
    torch::NoGradGuard no_grad;
    double sum = 0;
    for (auto& parameter : parameters) sum += parameter.pow(2).sum().item<double>();
    return sum;
  };
  const double inside = norm_of(model->parameters());
  const auto parameters = model->parameters();
  const double outside = norm_of(parameters);
  EXPECT_NEAR(inside, outside, 1e-5);
  // In-place initialisation inside the expression reaches the shards.
  const auto init = [](const std::vector<at::Tensor>& all) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : all) torch::nn::init::constant_(parameter, 0.25);
  };
  init(model->parameters());
  EXPECT_TRUE(torch::equal(hsdp::unsharded(net->head->weight), torch::full({2, 4}, 0.25)));
}

TEST(AfterAnException, TheModelIsUsable) {
  auto net = hsdp::meta_init([] { return Net(); });
  auto model = hsdp::fully_shard(net, {.mesh = offline_mesh(1, 0), .units = hsdp::each<Block>()});
  model.materialize(at::kCPU);
  EXPECT_ANY_THROW(model->forward(torch::ones({1, 5})));
  auto x = torch::ones({1, 4}).set_requires_grad(true);
  auto y = model->forward(x);
  struct Thrower : torch::autograd::Function<Thrower> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor t) { return t.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
      throw std::runtime_error("planted");
    }
  };
  auto bad = model->forward(Thrower::apply(x));
  EXPECT_THROW(bad.sum().backward(), std::runtime_error);
  model.reset_iteration_state();
  for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
  Net reference;
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : reference->named_parameters()) {
      parameter.value().copy_(hsdp::unsharded(net->named_parameters()[parameter.key()]));
    }
  }
  auto z = torch::ones({1, 4});
  model->forward(z).sum().backward();
  reference->forward(z).sum().backward();
  EXPECT_TRUE(torch::allclose(hsdp::unsharded(net->head->weight.grad()), reference->head->weight.grad()));
}

}  // namespace fully_shard_test

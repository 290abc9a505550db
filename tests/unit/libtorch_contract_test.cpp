// Every internal of libtorch that this library relies on, named: an upgrade of libtorch fails here first.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <cstring>

#include "dtensor/dtensor_impl.h"
#include "hsdp/hsdp.h"
#include "hsdp/module_access.h"
#include "tests/testing/offline_mesh.h"

namespace libtorch_contract_test {

using c10::DispatchKey;
using c10::DispatchKeySet;

TEST(LibtorchContract, Version) {
  EXPECT_EQ(TORCH_VERSION_MAJOR, 2);
  EXPECT_EQ(TORCH_VERSION_MINOR, 11);
}

TEST(LibtorchContract, OurKeyRunsAboveAutogradAutocastAndTheBackends) {
  for (auto below : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA, DispatchKey::ADInplaceOrView,
                     DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::Meta, DispatchKey::AutocastCPU,
                     DispatchKey::AutocastCUDA, DispatchKey::AutogradPrivateUse1}) {
    const auto keys = DispatchKeySet(dtensor::kDTensorKey) | DispatchKeySet(below);
    EXPECT_EQ(keys.highestPriorityTypeId(), dtensor::kDTensorKey) << c10::toString(below);
  }
}

TEST(LibtorchContract, NoOperatorOfLibtorchHasAKernelForOurKey) {
  size_t own = 0;
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (op && op->hasKernelForDispatchKey(dtensor::kDTensorKey)) ++own;
  }
  EXPECT_EQ(own, 0u);
}

TEST(LibtorchContract, PointwiseTagsAreThere) {
  const std::vector<c10::OperatorName> names{
      {"aten::add", "Tensor"},   {"aten::add", "Scalar"}, {"aten::mul_", "Tensor"}, {"aten::addcmul_", ""},
      {"aten::sqrt", ""},        {"aten::addcdiv_", ""},  {"aten::where", "self"},  {"aten::abs", ""},
      {"aten::lerp_", "Scalar"}, {"aten::div", "Tensor"}, {"aten::clamp", ""},      {"aten::pow", "Tensor_Scalar"}};
  for (auto& name : names) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    ASSERT_TRUE(op) << name;
    EXPECT_TRUE(op->hasTag(at::Tag::pointwise)) << name;
  }
}

TEST(LibtorchContract, TensorImplVirtualsAreConsulted) {
  struct Probe : c10::TensorImpl {
    Probe() : c10::TensorImpl(DispatchKeySet(DispatchKey::CPU), caffe2::TypeMeta::Make<float>(), at::kCPU) {
      set_custom_device(true);
    }
    bool has_storage() const override { return ++storage_questions, false; }
    c10::Device device_custom() const override { return c10::Device(at::kMeta); }
    mutable int storage_questions = 0;
  };
  auto impl = c10::make_intrusive<Probe>();
  at::Tensor tensor(impl);
  EXPECT_THROW(tensor.data_ptr(), c10::Error);
  EXPECT_GT(impl->storage_questions, 0);
  EXPECT_TRUE(tensor.is_meta());
}

TEST(LibtorchContract, DataAndSetDataGoThroughTheImpl) {
  auto mesh = testing_support::offline_mesh(2, 0);
  auto tensor = dtensor::DTensor::from_local(torch::ones({2}), mesh, {dtensor::Shard(0)}).tensor();
  EXPECT_NE(dynamic_cast<dtensor::DTensorImpl*>(tensor.data().unsafeGetTensorImpl()), nullptr);
  EXPECT_NE(dynamic_cast<dtensor::DTensorImpl*>(tensor.tensor_data().unsafeGetTensorImpl()), nullptr);
  EXPECT_NE(dynamic_cast<dtensor::DTensorImpl*>(tensor.variable_data().unsafeGetTensorImpl()), nullptr);
  const auto* impl = tensor.unsafeGetTensorImpl();
  tensor.set_data(dtensor::DTensor::from_local(torch::zeros({2}), mesh, {dtensor::Shard(0)}).tensor());
  EXPECT_EQ(tensor.unsafeGetTensorImpl(), impl);
}

TEST(LibtorchContract, MetaToCpuIsStillNotACompatibleShallowCopy) {
  // The reason for the repair. Should libtorch ever allow it, the repair may become simpler.
  auto meta = torch::empty({2}, at::kMeta);
  EXPECT_THROW(meta.set_data(torch::empty({2})), c10::Error);
}

TEST(LibtorchContract, OurEngineIsTheDefaultAndAsksForHooks) {
  auto& engine = torch::autograd::Engine::get_default_engine();
  EXPECT_NE(&engine, &torch::autograd::Engine::get_base_engine());
  EXPECT_EQ(engine.get_default_saved_variable_hooks(), nullptr);
  hsdp::SavedTensorScope scope;
  EXPECT_NE(engine.get_default_saved_variable_hooks(), nullptr);
}

TEST(LibtorchContract, GraphTaskIdTellsBackwardApart) {
  EXPECT_EQ(torch::autograd::get_current_graph_task_id(), -1);
  int seen = -1;
  auto x = torch::ones({2}).set_requires_grad(true);
  auto y = x * 2;
  y.register_hook([&](const at::Tensor&) { seen = torch::autograd::get_current_graph_task_id(); });
  y.sum().backward();
  EXPECT_NE(seen, -1);
  EXPECT_EQ(torch::autograd::get_current_graph_task_id(), -1);
}

TEST(LibtorchContract, BackwardTellsWhatItWantsAndCallsBackAtItsEnd) {
  // Which parameters backward(inputs) wants, whether the graph is kept, and a callback when the pass is over.
  bool kept = false, wanted = false, called = false;
  auto x = torch::ones({2}).set_requires_grad(true);
  auto y = x * 2;
  y.register_hook([&](const at::Tensor&) {
    kept = torch::autograd::get_current_graph_task_keep_graph();
    const auto* info = torch::autograd::get_current_graph_task_exec_info();
    auto found = info->find(torch::autograd::impl::try_get_grad_accumulator(x).get());
    wanted = found != info->end() && found->second.should_execute();
    torch::autograd::Engine::get_default_engine().queue_callback([&] { called = true; });
  });
  y.sum().backward({}, /*retain_graph=*/true, false, std::vector<torch::Tensor>{x});
  EXPECT_TRUE(kept && wanted && called);
}

TEST(LibtorchContract, AStorageCanLoseItsMemoryAndSaySo) {
  auto t = torch::ones({4});
  auto* storage = t.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->set_nbytes(0);
  EXPECT_EQ(t.storage().nbytes(), 0u);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_("planted text");
  try {
    (void)t.storage().data();
    ADD_FAILURE() << "was not refused";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("planted text"), std::string::npos) << error.what();
  }
}

TEST(LibtorchContract, LeafHooksWaitInTheTensorForWhoeverAccumulates) {
  auto x = torch::ones({2}).set_requires_grad(true);
  x.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
  auto& hooks = torch::autograd::impl::hooks(x);
  ASSERT_EQ(hooks.size(), 1u);
  EXPECT_TRUE(torch::equal((*hooks[0])({torch::ones({2})})[0], torch::full({2}, 3.f)));
}

TEST(LibtorchContract, AGradAccumulatorOfOurOwnReceivesTheGradient) {
  struct Accumulator : torch::autograd::Node {
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
      received = gradients[0];
      return {};
    }
    at::Tensor received;
  };
  auto x = torch::ones({2}).set_requires_grad(true);
  auto accumulator = std::make_shared<Accumulator>();
  accumulator->add_input_metadata(x);
  torch::autograd::impl::set_grad_accumulator(x, accumulator);
  (x * 3).sum().backward();
  EXPECT_TRUE(torch::equal(accumulator->received, torch::full({2}, 3.f)));
  EXPECT_FALSE(x.grad().defined());
}

TEST(LibtorchContract, SavedTensorHooksAreUsedAndVersionChecksSkipped) {
  // Torch leaves the version check to whoever packs, so ours does it.
  hsdp::SavedTensorScope scope;
  auto x = torch::ones({2}).set_requires_grad(true);
  auto w = torch::full({2}, 2.f);
  auto y = x * w;
  w.add_(1);
  try {
    y.sum().backward();
    ADD_FAILURE() << "the change went unnoticed";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"), std::string::npos) << error.what();
  }
}

TEST(LibtorchContract, ModulesKeepParametersInTheDictionaryWeReach) {
  torch::nn::Linear linear(2, 3);
  EXPECT_EQ(hsdp::ModuleAccess::parameters(*linear).size(), 2u);
  EXPECT_TRUE(hsdp::ModuleAccess::parameters(*linear)["weight"].is_same(linear->weight));
}

TEST(LibtorchContract, TheHostGeneratorsStateBeginsWithItsSeedWhichItsNumbersDoNotDependOn) {
  torch::manual_seed(5);
  (void)torch::rand({3});
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  auto state = generator.get_state();
  const auto expected = torch::rand({700});
  uint64_t seed = 0;
  std::memcpy(&seed, state.data_ptr(), sizeof(seed));
  EXPECT_EQ(seed, 5u);
  seed = 77;
  std::memcpy(state.data_ptr(), &seed, sizeof(seed));
  generator.set_state(state);
  EXPECT_EQ(generator.current_seed(), 77u);
  EXPECT_TRUE(torch::equal(torch::rand({700}), expected));
}

TEST(LibtorchContract, ViewsOfKernelsCopyTheKeySet) {
  auto base = torch::ones({2, 2});
  struct Access : c10::TensorImpl {
    static auto member() { return &Access::key_set_; }
  };
  auto* impl = base.unsafeGetTensorImpl();
  impl->*Access::member() = impl->key_set().add(dtensor::kDTensorKey);
  c10::impl::ExcludeDispatchKeyGuard below(dtensor::kDTensorKey);
  EXPECT_TRUE(base.t().key_set().has(dtensor::kDTensorKey));
  EXPECT_FALSE((base + 1).key_set().has(dtensor::kDTensorKey));
}

}  // namespace libtorch_contract_test

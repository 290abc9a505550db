#include "hsdp/meta_init.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "dtensor/error.h"
#include "hsdp/construction/tape.h"
#include "tests/testing/expect.h"
#include "tests/testing/materialize.h"

namespace meta_init_test {

using dtensor::dtensor_impl;
using dtensor::NotSupportedError;
using dtensor::StateError;
using hsdp::meta_init;
using testing_support::expect_error;
using torch::Tensor;

at::Generator default_generator() { return at::globalContext().defaultGenerator(at::kCPU); }

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width = 100) {
    linear = register_module("linear", torch::nn::Linear(width, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    scale = torch::full({3}, 2.0);
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  Tensor scale;
};
TORCH_MODULE(Net);

// ---- what it returns ----

TEST(MetaInit, ReturnsWhatTheFactoryReturns) {
  Net holder = meta_init([] { return Net(10); });
  std::shared_ptr<NetImpl> pointer = meta_init([] { return std::make_shared<NetImpl>(10); });
  std::unique_ptr<NetImpl> unique = meta_init([] { return std::make_unique<NetImpl>(10); });
  NetImpl by_value = meta_init([] { return NetImpl(10); });
  std::optional<NetImpl> filled;
  static_assert(std::is_void_v<decltype(meta_init([&] { filled.emplace(10); }))>);
  meta_init([&] { filled.emplace(10); });
  for (const NetImpl* net : {holder.get(), pointer.get(), unique.get(), &by_value, &*filled}) {
    EXPECT_TRUE(net->linear->weight.is_meta());
    EXPECT_NE(hsdp::tape_of(net->linear->weight), nullptr);
  }
}

TEST(MetaInit, TakesNoMemoryForParameters) {
  // 1.6 TB in float32.
  auto net = meta_init([] { return torch::nn::Linear(torch::nn::LinearOptions(2'000'000, 200'000).bias(false)); });
  EXPECT_TRUE(net->weight.is_meta());
  EXPECT_EQ(net->weight.sizes(), (std::vector<int64_t>{200'000, 2'000'000}));
}

TEST(MetaInit, KeepsIdentityAndMetadata) {
  auto net = meta_init([] { return Net(10); });
  auto& weight = net->linear->weight;
  EXPECT_TRUE(weight.is_same(net->linear->named_parameters()["weight"]));
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_TRUE(weight.is_leaf());
  EXPECT_EQ(weight.dtype(), torch::kFloat);
  EXPECT_EQ(weight.strides(), (std::vector<int64_t>{10, 1}));
  EXPECT_EQ(net->norm->num_batches_tracked.dtype(), torch::kLong);
  EXPECT_FALSE(net->norm->running_mean.requires_grad());
  EXPECT_EQ(dtensor_impl(weight)->state(), dtensor::DTensorImpl::State::deferred);
}

// ---- what is left ----

TEST(MetaInit, FindsEveryTensorThatIsLeft) {
  auto net = meta_init([] {
    torch::rand({50, 50});  // dies
    return Net(10);
  });
  const auto tape = hsdp::tape_of(net->scale);
  // 4 parameters, 3 buffers, 1 member.
  ASSERT_EQ(tape->live().size(), 8u);
  EXPECT_TRUE(tape->live().front().tensor.is_same(net->linear->weight));
  EXPECT_TRUE(tape->live().back().tensor.is_same(net->scale));
  for (auto& value : tape->live()) EXPECT_EQ(value.id, hsdp::value_id_of(value.tensor));
  net->scale = Tensor();
  EXPECT_EQ(tape->live().size(), 7u);
  net = nullptr;
  EXPECT_TRUE(tape->live().empty());
}

TEST(MetaInit, AliasesShareAValue) {
  std::vector<Tensor> kept;
  meta_init([&] {
    auto w = torch::rand({80, 80}), c = torch::zeros({4});
    kept = {w, w.data(), c, c.data()};
    kept.push_back(torch::empty({1}));
    kept.back().set_data(w);
  });
  EXPECT_EQ(hsdp::tape_of(kept[0])->live().size(), 5u);
  EXPECT_EQ(hsdp::value_id_of(kept[0]), hsdp::value_id_of(kept[1]));
  EXPECT_EQ(hsdp::value_id_of(kept[0]), hsdp::value_id_of(kept[4]));
  EXPECT_EQ(hsdp::value_id_of(kept[2]), hsdp::value_id_of(kept[3]));
  // Also those made afterwards.
  const auto later = kept[2].data();
  EXPECT_EQ(hsdp::value_id_of(later), hsdp::value_id_of(kept[2]));
  EXPECT_EQ(hsdp::tape_of(kept[0])->live().size(), 6u);
}

TEST(MetaInit, OtherTensorsHaveNoTape) {
  EXPECT_EQ(hsdp::tape_of(torch::ones({2})), nullptr);
  EXPECT_EQ(hsdp::tape_of(Tensor()), nullptr);
  EXPECT_EQ(hsdp::value_id_of(torch::ones({2})), hsdp::kNoValue);
  auto net = meta_init([] { return Net(10); });
  EXPECT_EQ(testing_support::materialize_whole(net->scale), 8u);
  EXPECT_EQ(hsdp::tape_of(net->scale), nullptr);
  EXPECT_TRUE(torch::equal(net->scale, torch::full({3}, 2.0)));
}

TEST(MetaInit, OrdinaryTensorsTrain) {
  auto net = meta_init([] { return Net(10); });
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  testing_support::materialize_whole(net->scale);
  const auto before = net->linear->weight.detach().clone();
  net->norm(net->linear(torch::rand({4, 10}))).pow(2).sum().backward();
  optimizer.step();
  EXPECT_FALSE(torch::equal(net->linear->weight, before));
  EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);
}

// ---- what is restored ----

TEST(MetaInit, LeavesTheGeneratorAtAStateOfItsOwnThatTheEntryDecides) {
  const auto state_after = [](uint64_t seed) {
    torch::manual_seed(seed);
    torch::rand({7});
    meta_init([] { return Net(10); });
    return default_generator().get_state();
  };
  torch::manual_seed(3);
  torch::rand({7});
  const auto before = default_generator().get_state();
  EXPECT_FALSE(torch::equal(state_after(3), before)) << "a second construction would repeat the numbers of the first";
  EXPECT_TRUE(torch::equal(state_after(3), state_after(3)));
  EXPECT_FALSE(torch::equal(state_after(3), state_after(4)));
  // Nothing drawn, nothing changed.
  torch::manual_seed(3);
  const auto untouched = default_generator().get_state();
  meta_init([] { return torch::ones({3}); });
  EXPECT_TRUE(torch::equal(default_generator().get_state(), untouched));
}

TEST(MetaInit, ExceptionsPassThroughAndLeaveNothingBehind) {
  const auto before = default_generator().get_state();
  Tensor leaked;
  EXPECT_THROW(meta_init([&] {
                 leaked = torch::rand({3});
                 throw std::out_of_range("mine");
                 return Net(10);
               }),
               std::out_of_range);
  EXPECT_TRUE(torch::equal(default_generator().get_state(), before));
  EXPECT_EQ(dtensor_impl(torch::ones({2})), nullptr);
  EXPECT_EQ(hsdp::tape_of(leaked), nullptr);
  EXPECT_EQ(hsdp::value_id_of(leaked), hsdp::kNoValue);
  EXPECT_EQ(dtensor_impl(meta_init([] { return torch::ones({2}); }))->state(), dtensor::DTensorImpl::State::deferred);
}

TEST(MetaInit, InnerScopesJoinTheOuter) {
  auto nets = meta_init([] {
    auto inner = meta_init([] { return Net(10); });
    EXPECT_NE(dtensor_impl(torch::ones({2})), nullptr) << "the outer scope ended with the inner";
    torch::NoGradGuard no_grad;
    inner->linear->weight.mul_(2);
    return std::vector<Net>{inner, Net(10)};
  });
  EXPECT_EQ(hsdp::tape_of(nets[0]->linear->weight), hsdp::tape_of(nets[1]->linear->weight));
}

TEST(MetaInit, OtherThreadsArePlain) {
  Tensor made;
  auto used = meta_init([&] {
    std::thread([&] { made = torch::ones({5}); }).join();
    return made + 1;
  });
  EXPECT_EQ(dtensor_impl(made), nullptr);
  testing_support::materialize_whole(used);
  EXPECT_TRUE(torch::equal(used, torch::full({5}, 2.0)));
}

TEST(MetaInit, TensorsMayDieOnAnotherThread) {
  auto net = meta_init([] { return Net(10); });
  const auto tape = hsdp::tape_of(net->scale);
  std::thread([&] { net = nullptr; }).join();
  EXPECT_TRUE(tape->live().empty());
}

// ---- what a constructor may look at ----

TEST(MetaInit, ConstantsCanBeRead) {
  meta_init([] {
    EXPECT_EQ(torch::linspace(0, 1, 5)[1].item<double>(), 0.25);
    EXPECT_TRUE(torch::arange(3).equal(torch::tensor({0, 1, 2})));
    EXPECT_EQ(torch::ones({100, 100}).sum().item<int>(), 10000);
    EXPECT_EQ(torch::ones({100, 100}).triu().nonzero().size(0), 5050);
    auto large = torch::arange(9000);
    EXPECT_EQ(large.data_ptr<int64_t>()[8999], 8999);
    EXPECT_EQ(torch::rand({100, 3}).size(0), 100);
    // Not random: only the shape is that of something random.
    EXPECT_EQ(torch::zeros_like(torch::rand({100, 100})).sum().item<float>(), 0);
    auto bias = torch::rand({6});
    bias.zero_();
    EXPECT_EQ(bias[3].item<float>(), 0);
  });
}

TEST(MetaInit, MistakesReadAsInPlainConstruction) {
  const auto mistake = [] { return torch::mm(torch::rand({100, 100}), torch::rand({99, 100})); };
  std::string plain, deferred;
  try {
    mistake();
  } catch (const c10::Error& error) {
    plain = error.what_without_backtrace();
  }
  try {
    meta_init(mistake);
  } catch (const c10::Error& error) {
    deferred = error.what_without_backtrace();
  }
  EXPECT_EQ(plain, deferred);
  EXPECT_NE(plain, "");
}

// ---- refusals ----

template <class F>
void expect_refused(F factory, const std::string& text) {
  expect_error<NotSupportedError>([&] { meta_init(factory); }, text);
}

TEST(MetaInitRefuses, ReadingARandomValue) {
  const std::string rest =
      ", expected one that is known while the module is constructed; read it after materialize(device), or compute it "
      "without random numbers";
  expect_refused([] { return torch::rand({3})[1].item<float>(); },
                 "[meta_init] aten::item reads a value that depends on random numbers (shape [])" + rest);
  expect_refused([] { return torch::rand({3}).equal(torch::zeros({3})); },
                 "[meta_init] aten::equal reads a value that depends on random numbers (shape [3])" + rest);
  expect_refused(
      [] {
        return torch::randn({100, 100}).mean().is_nonzero();
      },
      "[meta_init] aten::is_nonzero reads a value that depends on random numbers (shape [])" + rest);
  expect_refused([] { return torch::allclose(torch::ones({3}), torch::rand({3})); },
                 "[meta_init] aten::allclose reads");
}

TEST(MetaInitRefuses, RawAccessToARandomValue) {
  const std::string text =
      "[meta_init] raw access to a tensor of shape [3, 4], which depends on random numbers, expected a value that is "
      "known during construction; change it with operators, or after materialize(device)";
  expect_refused(
      [] {
        auto t = torch::rand({3, 4});
        t.accessor<float, 2>()[0][0] = 1;
      },
      text);
  expect_refused([] { return *torch::rand({3, 4}).data_ptr<float>(); }, text);
  expect_refused(
      [] {
        auto t = torch::zeros({3, 4});
        t[1].uniform_();
        return *t.data_ptr<float>();
      },
      text);
}

TEST(MetaInitRefuses, RawAccessAfterConstruction) {
  auto net = meta_init([] { return Net(10); });
  const std::string text =
      "[raw access] a tensor of shape [3] was made by meta_init and has no memory yet, expected materialized values; "
      "call fully_shard(...) and materialize(device) first";
  expect_error<StateError>([&] { net->scale.data_ptr<float>(); }, text);
  expect_error<StateError>([&] { net->scale.storage(); }, text);
}

TEST(MetaInitRefuses, ShapesThatDependOnRandomValues) {
  expect_refused([] { return (torch::rand({90}) > 0.5).nonzero(); },
                 "[meta_init] aten::nonzero cannot run on tensors without memory (");
  expect_refused([] { return torch::rand({90}).masked_select(torch::rand({90}) > 0.5); },
                 "[meta_init] aten::masked_select cannot run on tensors without memory (");
}

TEST(MetaInitRefuses, OperatorsThatNeedMemory) {
  expect_refused([] { return torch::multinomial(torch::rand({90}), 2); },
                 "[meta_init] aten::multinomial cannot run on tensors without memory (");
}

TEST(MetaInitRefuses, OwnGeneratorsWhereValuesSayHowManyNumbersTheyGive) {
  auto own = at::detail::createCPUGenerator(5);
  const auto before = own.get_state();
  expect_refused([&] { return torch::poisson(torch::rand({100}), own); },
                 "[meta_init] aten::poisson was given a generator of its own, and how many numbers it takes depends on "
                 "values, expected the default generator; leave the argument out");
  EXPECT_TRUE(torch::equal(own.get_state(), before));
  meta_init([] { return torch::rand({3}, default_generator()); });
  meta_init([&] { return torch::rand({3}, own); });
}

TEST(MetaInitRefuses, NumbersDrawnPastTheOperators) {
  expect_refused(
      [] {
        at::check_generator<at::CPUGeneratorImpl>(default_generator())->random();
        return Net(10);
      },
      "[meta_init] the default generator was used directly while the module was constructed, expected random numbers "
      "to "
      "come from operators, which can be replayed; draw them with torch::rand and the like");
}

TEST(MetaInitRefuses, TensorsOfAnotherConstruction) {
  auto first = meta_init([] { return Net(10); });
  expect_refused(
      [&] { return first->scale + 1; },
      "[meta_init] aten::add uses a tensor of shape [3] that another meta_init made, expected tensors of this "
      "one; construct both modules in one meta_init");
  // Holding it is no use.
  auto second = meta_init([&] { return std::vector<Net>{first, Net(10)}; });
  EXPECT_NE(hsdp::tape_of(second[0]->scale), hsdp::tape_of(second[1]->scale));
}

TEST(MetaInitRefuses, RandomValuesInMemoryFromOutside) {
  auto outside = torch::zeros({4});
  const std::string text =
      " writes into a tensor of shape [4] from outside, expected tensors made in meta_init; clone it first";
  expect_refused([&] { return outside.normal_(); }, "[meta_init] aten::normal_" + text);
  expect_refused([&] { return outside.view({4}).normal_(); }, "[meta_init] aten::normal_" + text);
  EXPECT_TRUE(torch::equal(outside, torch::zeros({4})));
  // Constants are written as in plain construction.
  meta_init([&] { outside.add_(1); });
  EXPECT_TRUE(torch::equal(outside, torch::ones({4})));
}

TEST(MetaInitRefuses, TensorsWithoutValuesFromOutside) {
  auto meta = torch::empty({4}, torch::kMeta);
  expect_refused(
      [&] { return meta + 1; },
      "[meta_init] aten::add uses a meta tensor of shape [4] from outside, expected tensors that have values; "
      "construct the module without it");
}

TEST(MetaInitRefuses, SparseTensors) {
  expect_refused([] { return torch::eye(4).to_sparse(); },
                 "makes a tensor of layout Sparse, expected strided tensors; make it after materialize(device)");
}

TEST(MetaInitRefuses, SetDataFromOutside) {
  auto outside = torch::zeros({10});
  expect_refused([&] { torch::rand({10}).set_data(outside); },
                 "was made by meta_init, expected another tensor made inside");
}

}  // namespace meta_init_test

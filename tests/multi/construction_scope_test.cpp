// What surrounds constructors: how factories hand modules over, devices, generators, tensors that outlive a
// construction, failures, tied members; and what is refused, word for word.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/construction_parity.h"
#include "tests/testing/expect.h"

namespace construction_scope_test {

using namespace testing_support;
using dtensor::NotSupportedError;
using torch::Tensor;
namespace nn = torch::nn;

void use_float64() { torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64)); }

/// The module, constructed plainly and in meta_init, on one rank and on three; then trained.
void expect_alike(const std::function<Made()>& make, const std::function<Made()>& make_plain = {}) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [&](RankContext& context) {
      use_float64();
      expect_constructed_alike<Made>(context, make, {}, make_plain);
      auto c = training_case<Made>(make);
      if (!make_plain) expect_parity(context, c);
    });
  }
}

void expect_alike(const std::function<void(MadeImpl&)>& construct) {
  expect_alike(std::function<Made()>([construct] { return Made(construct); }));
}

// ---- how factories hand modules over ----

struct NetImpl : Listed {
  explicit NetImpl(int64_t width = 5) {
    linear = register_module("linear", nn::Linear(6, width));
    table = register_buffer("table", torch::rand({width}));
  }
  Tensor forward(Tensor x) { return linear(x) + table; }
  nn::Linear linear{nullptr};
  Tensor table;
};
TORCH_MODULE(Net);

struct Program {
  Net member{7};
  std::shared_ptr<NetImpl> shared = std::make_shared<NetImpl>(4);
  std::unique_ptr<NetImpl> unique = std::make_unique<NetImpl>(3);
  NetImpl value{2};
};

template <class F>
void expect_handed_over(RankContext& context, F&& make_sharded, const NetImpl& plain) {
  auto model = make_sharded();
  model.materialize(context.environment().device());
  EXPECT_TRUE(torch::equal(hsdp::unsharded(model.module().linear->weight), plain.linear->weight.detach()));
  EXPECT_TRUE(torch::equal(model.module().table, plain.table));
  const auto x = rows_of_step(0, 0, 12);
  auto net = plain;  // Handles.
  auto expected = net.forward(x).pow(2).mean(), loss = model->forward(x).pow(2).mean();
  EXPECT_LE(largest_difference(loss.detach(), expected.detach()), 1e-12);
  loss.backward();
  net.zero_grad();  // The handles are those of `plain`, which serves several calls.
  expected.backward();
  EXPECT_LE(largest_difference(hsdp::unsharded(model.module().linear->weight.grad()), net.linear->weight.grad()),
            1e-12);
}

TEST(Factories, HandOverHoldersPointersAndValues) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      use_float64();
      const hsdp::FullyShardOptions options{.mesh = context.environment().mesh()};
      const auto seeded = [](auto make) {
        torch::manual_seed(7);
        return make();
      };
      const auto plain = seeded([] { return Net(); });
      const auto factory = [](int64_t width) { return Net(width); };
      expect_handed_over(
          context,
          [&] {
            return hsdp::fully_shard(seeded([&] { return hsdp::meta_init([&] { return factory(5); }); }), options);
          },
          *plain);
      expect_handed_over(
          context,
          [&] {
            return hsdp::fully_shard(seeded([] { return hsdp::meta_init([] { return std::make_shared<NetImpl>(); }); }),
                                     options);
          },
          *plain);
      expect_handed_over(
          context,
          [&] { return hsdp::fully_shard(seeded([] { return hsdp::meta_init([] { return NetImpl(); }); }), options); },
          *plain);
      expect_handed_over(
          context,
          [&] {
            auto unique = seeded([] { return hsdp::meta_init([] { return std::make_unique<NetImpl>(); }); });
            return hsdp::fully_shard(std::shared_ptr<NetImpl>(std::move(unique)), options);
          },
          *plain);
    });
  }
}

TEST(Factories, HandOverAProgramWithModulesAsMembers) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      use_float64();
      const hsdp::FullyShardOptions options{.mesh = context.environment().mesh()};
      torch::manual_seed(7);
      Program plain;
      torch::manual_seed(7);
      auto program = hsdp::meta_init([] { return std::make_unique<Program>(); });
      expect_handed_over(
          context, [&] { return hsdp::fully_shard(program->member, options); }, *plain.member);
      expect_handed_over(
          context, [&] { return hsdp::fully_shard(program->shared, options); }, *plain.shared);
      expect_handed_over(
          context, [&] { return hsdp::fully_shard(std::shared_ptr<NetImpl>(std::move(program->unique)), options); },
          *plain.unique);
      expect_handed_over(
          context, [&] { return hsdp::fully_shard(std::move(program->value), options); }, plain.value);
    });
  }
}

// ---- devices ----

TEST(Devices, NamedInConstructorsAreThoseOfMaterialize) {
  // An accelerator that need not be here: the same constructor, plainly, names the CPU.
  const auto make = [](torch::Device device) {
    return std::function<Made()>([device] {
      return Made([device](MadeImpl& m) {
        const auto options = torch::TensorOptions().device(device).dtype(torch::kFloat64);
        auto linear = m.add("linear", nn::Linear(6, 7));
        linear->to(device);
        auto w = m.register_parameter("w", torch::rand({7, 7}, options) * 0.2);
        auto table = m.register_buffer("table", torch::arange(7, torch::TensorOptions(device).dtype(torch::kLong)));
        auto loose = torch::full({7}, 0.5, options).to(device, torch::kFloat32).to(torch::kFloat64);
        m.to(device, torch::kFloat64);
        m.to(torch::kFloat64);
        m.kept = {loose, torch::zeros({3}, device), torch::ones_like(loose, options), torch::rand({3}).to(w.device())};
        m.run = [=](Tensor x) mutable { return linear(x).mm(w) + table * loose; };
      });
    });
  };
  expect_alike(make(torch::kCUDA), make(torch::kCPU));
  expect_alike(make(torch::kCPU));
}

// ---- generators and seeds ----

TEST(Generators, OfTheConstructorsOwnAreReplayedAndGoOn) {
  expect_alike([](MadeImpl& m) {
    auto own = torch::make_generator<at::CPUGeneratorImpl>(5), other = at::detail::createCPUGenerator(6);
    auto w = m.register_parameter("w", torch::randn({6, 7}, own) * 0.2);
    auto few = torch::empty({7});
    few.uniform_(-0.1, 0.1, own);
    own.set_current_seed(9);
    auto many = m.register_buffer("many", torch::rand({90, 90}, own));
    auto mixed = torch::rand({7}) + torch::rand({7}, other) + torch::normal(0.0, 1.0, {7}, own);
    auto odd = torch::empty({19, 3}).t().normal_(0, 1, own);  // Not contiguous, with a number left over.
    nn::Linear linear(7, 5);
    nn::init::zeros_(linear->bias);
    {
      torch::NoGradGuard no_grad;
      linear->weight.normal_(0, 0.1, own);
      linear->weight[0].bernoulli_(0.5, other);
    }
    m.register_module("linear", linear);
    m.kept = {few,
              mixed,
              odd,
              torch::randperm(9, own),
              torch::randint(0, 9, {3}, other),
              torch::bernoulli(torch::rand({80, 80}), own)};
    m.run = [=](Tensor x) mutable { return linear(x.mm(w) + few + many[0][0]); };
  });
}

TEST(Generators, FromOutsideStandWherePlainConstructionLeavesThem) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      auto own = at::detail::createCPUGenerator(5);
      const std::function<Made()> make = [own] {
        return Made([own](MadeImpl& m) {
          auto w = m.register_parameter("w", torch::randn({90, 70}, own));
          torch::NoGradGuard no_grad;
          w.narrow(0, 3, 20).uniform_(0, 1, own);
        });
      };
      auto plain = make();
      const auto next = torch::rand({3}, own);
      own.set_current_seed(5);
      auto net = hsdp::meta_init(make);
      EXPECT_TRUE(torch::equal(torch::rand({3}, own), next)) << "before the values are there";
      auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
      const auto before = own.get_state();
      for (int i = 0; i < 2; ++i) {
        model.materialize(at::kCPU);
        expect_same_tensor("w", model.module().parameters()[0], plain->parameters()[0]);
      }
      EXPECT_TRUE(torch::equal(own.get_state(), before)) << "a replay leaves the program's generator alone";
    });
  }
}

TEST(Generators, ThatDifferBetweenRanksAreRefusedOnAll) {
  const std::string text =
      "[replay_init] rank 2 had another generator state than rank 0 when meta_init ran, expected the same on all "
      "ranks; call torch::manual_seed(seed) with one seed before meta_init, and seed alike what constructors seed";
  for (bool own : {true, false}) {
    run_ranks(3, [&](RankContext& context) {
      const uint64_t seed = context.rank() == 2 ? 5 : 4;
      torch::manual_seed(1);
      auto net = hsdp::meta_init([&] {
        return Made([&](MadeImpl& m) {
          if (own) {
            m.register_parameter("w", torch::rand({6, 6}, at::detail::createCPUGenerator(seed)));
          } else {
            torch::manual_seed(seed);
            m.register_parameter("w", torch::rand({6, 6}));
          }
        });
      });
      auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
      expect_error<dtensor::ValueError>([&] { model.materialize(at::kCPU); }, text);
    });
  }
}

TEST(Generators, SeededInAConstructor) {
  expect_alike([](MadeImpl& m) {
    auto before = torch::rand({6, 7});
    torch::manual_seed(99);
    auto w = m.register_parameter("w", torch::rand({6, 7}) * 0.3);
    auto generator = at::detail::getDefaultCPUGenerator();
    const auto state = generator.get_state();
    auto b = m.register_parameter("b", torch::rand({7}, generator));
    generator.set_state(state);
    m.kept = {before, torch::rand({7})};
    torch::manual_seed(3);
    m.run = [=](Tensor x) { return x.mm(w) + b; };
  });
}

// ---- tensors that outlive a construction ----

Tensor& shared_table() {
  static Tensor table = torch::arange(6, torch::kFloat64) / 6;
  return table;
}

TEST(Statics, MadeOutsideAreSharedByTwoModules) {
  run_ranks(3, [](RankContext& context) {
    use_float64();
    const auto& table = shared_table();  // Before any construction: a plain tensor.
    const auto make = [] {
      return Made([](MadeImpl& m) {
        auto linear = m.add("linear", nn::Linear(6, 5));
        m.register_buffer("copy", shared_table() * 2);
        m.run = [linear](Tensor x) mutable { return linear(x * shared_table()); };
      });
    };
    for (int i = 0; i < 2; ++i) {
      auto c = training_case<Made>(make);
      expect_parity(context, c);
    }
    EXPECT_TRUE(torch::equal(table, torch::arange(6, torch::kFloat64) / 6));
  });
}

Tensor& table_of_the_first() {
  static Tensor table = torch::rand({6});
  return table;
}

TEST(Statics, MadeInAConstructionServeTheNextOnceTheyHaveValues) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      const hsdp::FullyShardOptions options{.mesh = context.environment().mesh()};
      const auto make = [] {
        return Made([](MadeImpl& m) { m.register_parameter("w", torch::rand({6, 6}) * table_of_the_first()); });
      };
      torch::manual_seed(7);
      const auto table = torch::rand({6});
      // The left operand is made first, or not: only the table's own numbers are of interest.
      auto first = hsdp::meta_init(make);
      expect_error<NotSupportedError>([&] { hsdp::meta_init(make); },
                                      "[meta_init] aten::mul uses a tensor of shape [6] that another meta_init made, "
                                      "expected tensors of this one; construct both modules in one meta_init");
      auto one = hsdp::fully_shard(first, options);
      one.materialize(at::kCPU);
      EXPECT_EQ(dtensor::dtensor_impl(table_of_the_first()), nullptr);
      auto two = hsdp::fully_shard(hsdp::meta_init(make), options);
      two.materialize(at::kCPU);
      const auto w = hsdp::unsharded(two.module().parameters()[0]);
      EXPECT_TRUE((w <= table_of_the_first()).all().item<bool>());
    });
  }
}

// ---- failures ----

TEST(Failures, OfAFactoryPassThroughAndTheNextConstructionIsAsIfAlone) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      use_float64();
      const std::function<Made()> make = [] {
        return Made([](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 7));
          m.run = [=](Tensor x) mutable { return linear(x); };
        });
      };
      torch::manual_seed(7);
      std::vector<nn::Linear> left;
      EXPECT_THROW(hsdp::meta_init([&] {
                     left.push_back(nn::Linear(6, 7));
                     throw std::invalid_argument("width");
                     return make();
                   }),
                   std::invalid_argument);
      expect_error<NotSupportedError>([&] { hsdp::fully_shard(left[0], {.mesh = context.environment().mesh()}); },
                                      "[fully_shard] parameter \"weight\" is");
      expect_constructed_alike<Made>(context, make);
    });
  }
}

// ---- size ----

struct DeepImpl : Listed {
  DeepImpl() {
    for (int i = 0; i < 200; ++i) layers->push_back(nn::Linear(6, 6));
    register_module("layers", layers);
    apply([](nn::Module& module) {
      if (auto* linear = module.as<nn::Linear>()) nn::init::orthogonal_(linear->weight);
    });
  }
  Tensor forward(Tensor x) {
    for (auto& layer : *layers) x = torch::tanh(layer->as<nn::Linear>()->forward(x));
    return x;
  }
  nn::ModuleList layers;
};
TORCH_MODULE(Deep);

TEST(Size, TwoHundredLayers) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      use_float64();
      const auto start = std::chrono::steady_clock::now();
      auto model = hsdp::fully_shard(hsdp::meta_init([] { return Deep(); }),
                                     {.mesh = context.environment().mesh(), .units = hsdp::each<nn::Linear>()});
      model.materialize(at::kCPU);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      if (context.rank() == 0) std::printf("200 layers on %d ranks: %.3f s\n", context.world_size(), seconds.count());
      auto c = training_case<Deep>([] { return Deep(); });
      c.options.units = hsdp::each<nn::Linear>();
      c.steps = 2;
      expect_parity(context, c);
    });
  }
}

// ---- tied members ----

struct TiedImpl : Listed {
  explicit TiedImpl(bool tied) {
    table = register_module("table", nn::Embedding(11, 6));
    middle = register_module("middle", nn::Linear(6, 6));
    head = register_module("head", nn::Linear(nn::LinearOptions(6, 11).bias(false)));
    list = register_module("list", nn::ParameterList(torch::rand({11, 6})));
    if (tied) head->weight = table->weight;
  }
  Tensor forward(Tensor x) { return head(torch::tanh(middle(table(tokens_of(x, 11)).mean(1)))); }
  nn::Embedding table{nullptr};
  nn::Linear middle{nullptr}, head{nullptr};
  nn::ParameterList list{nullptr};
};
TORCH_MODULE(Tied);

TEST(TiedMember, IsNamedOnceAndGatheredOnce) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      use_float64();
      const auto shard = [&](bool tied) {
        testing::internal::CaptureStderr();
        auto model = hsdp::fully_shard(
            hsdp::meta_init([&] { return Tied(tied); }),
            {.mesh = context.environment().mesh(), .units = hsdp::each("*"), .reshard_after_forward = false});
        return std::pair(std::move(model), testing::internal::GetCapturedStderr());
      };
      EXPECT_EQ(shard(false).second, "");
      auto [model, text] = shard(true);
      const std::string line =
          "[fully_shard] warning: parameter \"head.weight\" of shape [11, 6] is registered and no member holds it, "
          "while "
          "more than one holds \"table.weight\"; if a member was assigned (head->weight = table->weight), forward uses "
          "\"table.weight\" and \"head.weight\" never trains, as in plain libtorch; to tie both names register one "
          "tensor "
          "twice\n";
      EXPECT_EQ(text, context.rank() == 0 ? line : "");
      model.materialize(at::kCPU);
      dtensor::reset_collective_counts();
      model->forward(rows_of_step(0, 0, 12)).pow(2).mean().backward();
      if (context.world_size() == 1) return;
      // The table, which two modules read, and the layer in the middle; nothing of the orphan.
      EXPECT_EQ(dtensor::collective_counts().all_gathers, 2);
      EXPECT_EQ(dtensor::collective_counts().reduce_scatters, 2);
      EXPECT_FALSE(model.module().head->named_parameters()["weight"].grad().defined());
    });
  }
}

TEST(TiedMember, SurvivesExportAndLoad) {
  for (int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      use_float64();
      const auto make = [&] {
        return hsdp::fully_shard(hsdp::meta_init([] { return Tied(true); }), {.mesh = context.environment().mesh()});
      };
      const auto path = context.directory() + "/tied.pt";
      const auto x = rows_of_step(0, 0, 12);
      torch::manual_seed(1);
      auto model = make();
      model.materialize(at::kCPU);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      model->forward(x).pow(2).mean().backward();
      optimizer.step();
      torch::NoGradGuard no_grad;
      const auto expected = model->forward(x);
      hsdp::export_pt(model, path);
      torch::manual_seed(2);
      auto loaded = make();
      hsdp::load(loaded, path);
      EXPECT_TRUE(torch::equal(loaded->forward(x), expected));
      Tied plain(true);
      torch::load(plain, path);
      EXPECT_TRUE(torch::allclose(plain->forward(x), expected));
    });
  }
}

// ---- refused ----

template <class E = NotSupportedError>
void expect_refused(const std::function<void(MadeImpl&)>& construct, const std::string& text) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](RankContext& context) {
      use_float64();
      expect_error<E>(
          [&] {
            auto net = hsdp::meta_init([&] { return Made(construct); });
            auto model = hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
            model.materialize(at::kCPU);
            (void)model->forward(rows_of_step(0, 0, 12));
          },
          text);
    });
  }
}

const std::string kReadLater =
    ", expected one that is known while the module is constructed; read it after materialize(device), or compute it "
    "without random numbers";

TEST(Refused, RandomValuesReadOnTheHost) {
  expect_refused([](MadeImpl& m) { m.add("l", nn::Linear(6, torch::randint(3, 9, {1}).item<int64_t>())); },
                 "[meta_init] aten::item reads a value that depends on random numbers (shape [1])" + kReadLater);
  expect_refused(
      [](MadeImpl& m) {
        auto w = m.register_parameter("w", torch::rand({3, 3}));
        w.accessor<double, 2>()[1][1] = 0;
      },
      "[meta_init] raw access to a tensor of shape [3, 3], which depends on random numbers, expected a value that is "
      "known during construction; change it with operators, or after materialize(device)");
  expect_refused(
      [](MadeImpl& m) {
        auto own = at::detail::createCPUGenerator(3);
        if (torch::rand({}, own).item<double>() > 0.5) m.add("l", nn::Linear(6, 6));
      },
      "[meta_init] aten::item reads a value that depends on random numbers (shape [])" + kReadLater);
}

TEST(Refused, WhatCannotBeReplayedByItsOperator) {
  expect_refused([](MadeImpl& m) { m.kept = {(torch::rand({9}) > 0.5).nonzero()}; },
                 "[meta_init] aten::nonzero cannot run on tensors without memory (");
  expect_refused([](MadeImpl& m) { m.kept = {torch::eye(4).to_sparse()}; },
                 "[meta_init] aten::to_sparse makes a tensor of layout Sparse, expected strided tensors; make it after "
                 "materialize(device)");
  expect_refused(
      [](MadeImpl& m) {
        auto own = at::detail::createCPUGenerator(3);
        m.kept = {torch::multinomial(torch::ones({9}), 2, false, own)};
      },
      "[meta_init] aten::multinomial was given a generator of its own, and how many numbers it takes depends on "
      "values, "
      "expected the default generator; leave the argument out");
}

TEST(Refused, NumbersDrawnPastTheOperators) {
  expect_refused(
      [](MadeImpl& m) {
        at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())->random();
        m.add("l", nn::Linear(6, 6));
      },
      "[meta_init] the default generator was used directly while the module was constructed, expected random numbers "
      "to "
      "come from operators, which can be replayed; draw them with torch::rand and the like");
}

TEST(Refused, AViewOfAParameterAsAMember) {
  expect_refused(
      [](MadeImpl& m) {
        auto table = m.add("table", nn::Embedding(11, 6));
        auto head = m.add("head", nn::Linear(11, 6));
        head->weight = table->weight.t();
        m.run = [head](Tensor x) mutable { return head(x); };
      },
      "[fully_shard] tensor \"unregistered member of shape [6, 11]\" is a view of parameter \"table.weight\", expected "
      "memory of its own; take the view inside forward");
}

TEST(Refused, ABufferWithAHistory) {
  expect_refused(
      [](MadeImpl& m) {
        auto linear = m.add("linear", nn::Linear(6, 6));
        m.register_buffer("scaled", linear->weight * 2);
      },
      "[fully_shard] buffer \"scaled\" of shape [6, 6] requires grad, expected one without; register it as a "
      "parameter, or "
      "the detach() of what was computed from parameters");
}

TEST(Refused, AMemberThatRequiresGradAndIsNotRegistered) {
  for (bool computed : {false, true}) {
    expect_refused(
        [computed](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 6));
          linear->weight = computed ? linear->weight * 2 : torch::rand({6, 6}, torch::requires_grad());
          m.run = [linear](Tensor x) mutable { return linear(x); };
        },
        "[forward] a tensor of shape [6, 6] that requires grad was made in meta_init and is not registered in the "
        "sharded "
        "module, expected register_parameter(name, tensor), or the detach() of what was computed from parameters");
  }
}

}  // namespace construction_scope_test

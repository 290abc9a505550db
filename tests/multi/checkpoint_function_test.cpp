// hsdp::checkpoint: how often the function runs, what it may take, return and do, when memory goes, and what is
// refused.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tests/testing/expect.h"
#include "tests/testing/habit.h"

namespace checkpoint_function_test {

using namespace testing_support;
using torch::Tensor;

/// One process that may use autograd, in double precision.
void alone(const std::function<void()>& body) {
  run_ranks(1, [&](RankContext&) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    body();
  });
}

Tensor leaf(torch::IntArrayRef sizes) { return torch::randn(sizes).set_requires_grad(true); }

/// Expects that `call(x)` has the same value and gradient checkpointed, and that it runs as often: in all, and before
/// the backward.
void expect_same_gradient(const std::function<Tensor(Tensor)>& call, int64_t runs = 2, int64_t first_runs = 1) {
  auto x = leaf({4, 5});
  auto expected = call(x);
  const auto gradient = torch::autograd::grad({expected.sum()}, {x})[0];
  int64_t count = 0;
  auto y = hsdp::checkpoint(
      [&](const Tensor& input) {
        ++count;
        return call(input);
      },
      x);
  EXPECT_TRUE(torch::equal(y, expected));
  EXPECT_EQ(count, first_runs);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({y.sum()}, {x})[0], gradient));
  EXPECT_EQ(count, runs);
}

Tensor chain(const Tensor& x) { return torch::tanh(torch::sigmoid(torch::tanh(x * 2).exp()) * x); }

TEST(Checkpoint, RunsTheFunctionOnceMore) {
  alone([] {
    expect_same_gradient(chain);
    expect_same_gradient([](Tensor x) { return x + 1; }, /*runs=*/1);  // Nothing was saved.
    expect_same_gradient([](Tensor x) { return torch::softmax(x, 1).add(1).mul_(2).relu_(); });
    expect_same_gradient([](Tensor x) { return torch::cat({x.chunk(2, 0)[1], x}).cumsum(0).prod(1); });
  });
}

TEST(Checkpoint, ReturnsAnything) {
  alone([] {
    struct Two {
      Tensor first;
      std::vector<Tensor> rest;
      int64_t number;
    };
    auto x = leaf({4, 5});
    const auto expected = torch::autograd::grad({(chain(x) + torch::tanh(x)).sum()}, {x})[0];
    const auto gradient = [&](const Tensor& a, const Tensor& b) {
      return torch::autograd::grad({(a + b).sum()}, {x})[0];
    };
    const auto pair = hsdp::checkpoint([](Tensor t) { return std::tuple(chain(t), torch::tanh(t)); }, x);
    EXPECT_TRUE(torch::allclose(gradient(std::get<0>(pair), std::get<1>(pair)), expected));
    const auto list = hsdp::checkpoint([](Tensor t) { return std::vector<Tensor>{chain(t), torch::tanh(t)}; }, x);
    EXPECT_TRUE(torch::allclose(gradient(list[0], list[1]), expected));
    const auto two = hsdp::checkpoint([](Tensor t) { return Two{chain(t), {torch::tanh(t)}, t.size(0)}; }, x);
    EXPECT_TRUE(torch::allclose(gradient(two.first, two.rest[0]), expected));
    EXPECT_EQ(two.number, 4);
    // Nothing at all: what it makes leaves by reference.
    Tensor a, b;
    int64_t runs = 0;
    hsdp::checkpoint(
        [&](Tensor t) {
          if (runs++ > 0) {
            chain(t).add(torch::tanh(t));
            return;
          }
          a = chain(t);
          b = torch::tanh(t);
        },
        x);
    EXPECT_TRUE(torch::allclose(gradient(a, b), expected));
    // One output after the other, over the same run.
    const auto again = hsdp::checkpoint([](Tensor t) { return std::tuple(chain(t), torch::tanh(t)); }, x);
    auto first = torch::autograd::grad({std::get<0>(again).sum()}, {x})[0];
    auto second = torch::autograd::grad({std::get<1>(again).sum()}, {x})[0];
    EXPECT_TRUE(torch::allclose(first + second, expected));
  });
}

TEST(Checkpoint, TakesAnything) {
  alone([] {
    struct Scale {
      double by;
      Tensor of(Tensor x, std::optional<Tensor> shift, const std::vector<Tensor>& more, Tensor none, int64_t power) {
        for (auto& one : more) x = x * torch::tanh(one);
        if (shift) x = torch::sigmoid(x + *shift);
        EXPECT_FALSE(none.defined());
        return (x * by).pow(power);
      }
    };
    Scale scale{0.5};
    auto x = leaf({4, 5}), shift = leaf({5});
    const auto constant = torch::rand({4, 5});
    std::vector<Tensor> more{leaf({4, 5}), constant};
    const std::vector<Tensor> wanted{x, shift, more[0]};
    const auto expected = torch::autograd::grad({scale.of(x, shift, more, Tensor(), 3).sum()}, wanted);
    auto y = hsdp::checkpoint(&Scale::of, &scale, x, std::optional<Tensor>(shift), more, Tensor(), 3);
    const auto gradients = torch::autograd::grad({y.sum()}, wanted);
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(torch::equal(gradients[i], expected[i])) << i;
    // No input at all, and none that requires grad.
    auto captured = hsdp::checkpoint([&] { return scale.of(x, shift, more, Tensor(), 3); });
    EXPECT_TRUE(torch::equal(torch::autograd::grad({captured.sum()}, wanted)[0], expected[0]));
    auto weight = leaf({5, 5});
    const auto by_weight = [weight](Tensor t) { return torch::tanh(t.mm(weight)).pow(2); };
    const auto direct = torch::autograd::grad({by_weight(constant).sum()}, {weight})[0];
    EXPECT_TRUE(
        torch::equal(torch::autograd::grad({hsdp::checkpoint(by_weight, constant).sum()}, {weight})[0], direct));
    // A module holder is a function.
    torch::nn::Linear linear(5, 5);
    torch::tanh(linear(x)).pow(2).sum().backward();
    const auto plain = linear->weight.grad().clone();
    linear->weight.mutable_grad().zero_();
    hsdp::checkpoint([](Tensor t) { return torch::tanh(t).pow(2); }, hsdp::checkpoint(linear, x)).sum().backward();
    EXPECT_TRUE(torch::equal(linear->weight.grad(), plain));
  });
}

TEST(Checkpoint, OutsideOfGradModeIsAPlainCall) {
  alone([] {
    int64_t runs = 0;
    const auto count = [&](Tensor x) {
      ++runs;
      return chain(x);
    };
    auto x = leaf({4, 5});
    {
      torch::NoGradGuard no_grad;
      EXPECT_FALSE(hsdp::checkpoint(count, x).requires_grad());
    }
    {
      c10::InferenceMode inference;
      EXPECT_TRUE(hsdp::checkpoint(count, torch::rand({4, 5})).is_inference());
    }
    EXPECT_EQ(runs, 2);
    expect_same_gradient([](Tensor t) {
      Tensor level;
      {
        torch::NoGradGuard no_grad;
        level = torch::tanh(t);
      }
      return level * torch::tanh(t);
    });
  });
}

TEST(Checkpoint, NestsAndKeepsInputsOfInnerOnesNoLonger) {
  alone([] {
    hsdp::count_host_memory();
    int64_t outer = 0, middle = 0, inner = 0;
    auto x = leaf({50, 50});
    const auto expected = torch::autograd::grad({chain(chain(chain(torch::tanh(x)))).sum()}, {x})[0];
    const auto before = hsdp::memory_bytes(at::kCPU);
    auto y = hsdp::checkpoint(
        [&](Tensor a) {
          ++outer;
          return hsdp::checkpoint(
              [&](Tensor, std::vector<Tensor> list) {
                ++middle;
                return chain(hsdp::checkpoint(
                    [&](Tensor c) {
                      ++inner;
                      return chain(c);
                    },
                    chain(list[0])));
              },
              a, std::vector<Tensor>{torch::tanh(a)});
        },
        x);
    // The result, and generator states.
    EXPECT_LE(hsdp::memory_bytes(at::kCPU) - before, 50 * 50 * 8 + 40000);
    EXPECT_TRUE(torch::equal(torch::autograd::grad({y.sum()}, {x})[0], expected));
    EXPECT_EQ(outer, 2);
    EXPECT_EQ(middle, 3);
    EXPECT_EQ(inner, 4);
  });
}

TEST(Checkpoint, GraphsThatAreRetainedTakenInPartsOrDifferentiatedTwice) {
  alone([] {
    hsdp::count_host_memory();
    auto x = leaf({50, 50}), z = leaf({50, 50});
    int64_t runs = 0;
    const auto call = [&](Tensor a, Tensor b) {
      ++runs;
      return chain(torch::tanh(a) * b);
    };
    const auto expected = torch::autograd::grad({call(x, z).sum()}, {x, z});
    runs = 0;
    {
      auto loss = hsdp::checkpoint(call, x, z).sum();
      const auto saved = hsdp::memory_bytes(at::kCPU);
      for (int i = 0; i < 3; ++i) {
        {
          const auto gradients = torch::autograd::grad({loss}, {x, z}, {}, /*retain_graph=*/true);
          EXPECT_TRUE(torch::equal(gradients[0], expected[0]));
        }
        EXPECT_EQ(runs, 2 + i);
        EXPECT_EQ(hsdp::memory_bytes(at::kCPU), saved) << "what was computed again goes with the backward";
      }
      // In parts: z alone leaves the node of tanh(a) out.
      EXPECT_TRUE(torch::equal(torch::autograd::grad({loss}, {z}, {}, true)[0], expected[1]));
      EXPECT_EQ(hsdp::memory_bytes(at::kCPU), saved);
      EXPECT_TRUE(torch::equal(torch::autograd::grad({loss}, {x}, {})[0], expected[0]));
    }
    // Two runs before either backward.
    auto one = hsdp::checkpoint(call, x, z).sum(), two = hsdp::checkpoint(call, z, x).sum();
    EXPECT_TRUE(torch::equal(torch::autograd::grad({one}, {x})[0], expected[0]));
    EXPECT_TRUE(torch::equal(torch::autograd::grad({two}, {x})[0], torch::autograd::grad({call(z, x).sum()}, {x})[0]));
    // Twice differentiated.
    const auto penalty = [&](const Tensor& y) {
      const auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
      return torch::autograd::grad({gradient.pow(2).sum() + y.sum()}, {x, z});
    };
    const auto direct = penalty(call(x, z)), checkpointed = penalty(hsdp::checkpoint(call, x, z));
    EXPECT_TRUE(torch::equal(direct[0], checkpointed[0]));
    EXPECT_TRUE(torch::equal(direct[1], checkpointed[1]));
  });
}

TEST(Checkpoint, BackwardsInsideTheFunction) {
  alone([] {
    expect_same_gradient(
        [](Tensor x) {
          auto h = torch::tanh(x);
          auto slope = torch::autograd::grad({chain(h).sum()}, {h}, {}, true, true)[0];
          return chain(h) + slope * torch::sigmoid(x);
        },
        /*runs=*/3, /*first_runs=*/2);  // The backward inside asks for what the first run has saved so far.
    expect_same_gradient(
        [](Tensor x) {
          auto h = torch::tanh(x).detach().set_requires_grad(true);
          return torch::tanh(x) * torch::autograd::grad({chain(h).sum()}, {h})[0];
        },
        /*runs=*/3, /*first_runs=*/2);
  });
}

/// The checkpoint that users wrote before: a backward that runs a forward and a backward of its own.
struct Handwritten : torch::autograd::Function<Handwritten> {
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor x) {
    context->save_for_backward({x});
    return hsdp::checkpoint(chain, x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    torch::AutoGradMode grad(true);
    hsdp::checkpoint(chain, x).backward(gradients[0]);
    return {x.grad()};
  }
};

TEST(Checkpoint, InsideASecondRunOfAnotherKind) {
  alone([] {
    auto x = leaf({4, 5});
    const auto expected = torch::autograd::grad({chain(torch::tanh(x)).sum()}, {x})[0];
    EXPECT_TRUE(torch::equal(torch::autograd::grad({Handwritten::apply(torch::tanh(x)).sum()}, {x})[0], expected));
    const auto both = hsdp::checkpoint([](Tensor t) { return Handwritten::apply(torch::tanh(t)); }, x);
    EXPECT_TRUE(torch::equal(torch::autograd::grad({both.sum()}, {x})[0], expected));
  });
}

TEST(Checkpoint, MemoryGoesNodeByNode) {
  alone([] {
    hsdp::count_host_memory();
    const int64_t bytes = 100 * 100 * 8;
    auto x = leaf({100, 100});
    int64_t with = 0, during = 0;
    const auto before = hsdp::memory_bytes(at::kCPU);
    {
      auto y = hsdp::checkpoint(
          [](Tensor t) {
            for (int i = 0; i < 10; ++i) t = torch::tanh(t);
            return t;
          },
          x);
      with = hsdp::memory_bytes(at::kCPU) - before;
      auto graph = y.sum();
      x.register_hook([&](const Tensor& gradient) {
        during = hsdp::memory_bytes(at::kCPU) - before;
        return gradient;
      });
      graph.backward();
    }
    EXPECT_LT(with, bytes + 20000);  // The result; saved without it: ten.
    EXPECT_LT(during, 4 * bytes);    // At the last node: nothing is left of what the second run saved.
    EXPECT_LT(hsdp::memory_bytes(at::kCPU) - before, bytes + 20000);  // The gradient.
  });
}

TEST(Checkpoint, DrawsTheSameNumbersAndAutocastsAlike) {
  alone([] {
    const auto noisy = [](Tensor x) { return torch::dropout(x, 0.5, true) * torch::rand_like(x) * torch::tanh(x); };
    auto x = leaf({40, 50});
    torch::manual_seed(3);
    const auto expected = torch::autograd::grad({noisy(x).sum()}, {x})[0];
    const auto next = torch::rand({3});
    torch::manual_seed(3);
    auto y = hsdp::checkpoint(noisy, x);
    torch::manual_seed(11);
    EXPECT_TRUE(torch::equal(torch::autograd::grad({y.sum()}, {x})[0], expected));
    const auto after = torch::rand({3});
    torch::manual_seed(11);
    EXPECT_TRUE(torch::equal(after, torch::rand({3}))) << "backward took numbers";
    torch::manual_seed(3);
    y = hsdp::checkpoint(noisy, x);
    EXPECT_TRUE(torch::equal(torch::rand({3}), next));
    torch::manual_seed(3);
    y = hsdp::checkpoint({.preserve_random_state = false}, noisy, x);
    EXPECT_FALSE(torch::equal(torch::autograd::grad({y.sum()}, {x})[0], expected));

    // Autocast in the forward alone.
    auto single = torch::randn({8, 8}, torch::kFloat).set_requires_grad(true);
    auto weight = torch::randn({8, 8}, torch::kFloat).set_requires_grad(true);
    std::vector<at::ScalarType> dtypes;
    const auto multiply = [&](Tensor t) {
      auto h = torch::mm(t, weight);
      dtypes.push_back(h.scalar_type());
      return torch::tanh(torch::mm(h, weight).to(torch::kFloat));
    };
    const auto run = [&](bool checkpointed) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      auto loss = (checkpointed ? hsdp::checkpoint(multiply, single) : multiply(single)).sum();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
      auto gradients = torch::autograd::grad({loss}, {single, weight});
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      return gradients;
    };
    const auto direct = run(false), checkpointed = run(true);
    EXPECT_EQ(dtypes, std::vector<at::ScalarType>(3, at::kBFloat16));
    EXPECT_TRUE(torch::equal(direct[0], checkpointed[0]));
    EXPECT_TRUE(torch::equal(direct[1], checkpointed[1]));
  });
}

// ---- refused ----

TEST(Checkpoint, FunctionsThatDoNotDoTheSameAgain) {
  alone([] {
    auto x = leaf({4, 5});
    int64_t runs = 0;
    const auto backward_of = [&](const std::function<Tensor(Tensor)>& function) {
      runs = 0;
      auto y = hsdp::checkpoint(function, x);
      return [y] { y.sum().backward(); };
    };
    expect_error<dtensor::StateError>(backward_of([&](Tensor t) { return runs++ == 0 ? chain(t) : torch::tanh(t); }),
                                      "[checkpoint] the function saved ",
                                      " tensors for backward when it ran first and 1 when backward ran it again, "
                                      "expected the same; nothing that it depends on may change in between");
    expect_error<dtensor::StateError>(
        backward_of([&](Tensor t) { return runs++ == 0 ? torch::tanh(t) : torch::tanh(torch::tanh(t)); }),
        "saved 1 tensors for backward when it ran first and 2 when backward ran it again");
    expect_error<dtensor::StateError>(backward_of([&](Tensor t) { return torch::tanh(t.narrow(0, 0, 2 + runs++)); }),
                                      "[checkpoint] the function saved a Double tensor of shape [2, 5] when it ran "
                                      "first and a Double tensor of shape "
                                      "[3, 5] when backward ran it again, expected the same");
    expect_error<dtensor::StateError>(
        backward_of([&](Tensor t) { return torch::tanh(runs++ == 0 ? t : t.to(torch::kFloat)).to(torch::kDouble); }),
        "saved a Double tensor of shape [4, 5] when it ran first and a Float tensor");
    EXPECT_FALSE(x.grad().defined());
    expect_same_gradient(chain);
  });
}

TEST(Checkpoint, InputsAndWeightsThatChange) {
  alone([] {
    auto x = leaf({4, 5});
    expect_error<dtensor::NotSupportedError>(
        [&] { hsdp::checkpoint([](Tensor t) { return torch::tanh(t.mul_(2)); }, x + 0); },
        "[checkpoint] the function changes an input of shape [4, 5] in place, expected it unchanged, since backward "
        "runs "
        "the function again; give it a clone()");
    expect_error<dtensor::NotSupportedError>(
        [&] {
          hsdp::checkpoint([](std::vector<Tensor> t) { return t[1].mul_(2); }, std::vector<Tensor>{x, x + 0});
        },
        "the function changes an input of shape [4, 5] in place");
    auto middle = x + 0;
    auto y = hsdp::checkpoint(chain, middle);
    middle.add_(1);
    expect_error<dtensor::StateError>([&] { y.sum().backward(); },
                                      "[backward] a tensor of shape [4, 5] needed for "
                                      "gradient computation was modified by an inplace "
                                      "operation");
    torch::nn::Linear linear(5, 5);
    y = hsdp::checkpoint([&](Tensor t) { return torch::tanh(linear(t)); }, x);
    {
      torch::NoGradGuard no_grad;
      linear->weight.mul_(2);
    }
    expect_error<dtensor::StateError>([&] { y.sum().backward(); }, "needed for gradient computation was modified");
  });
}

TEST(Checkpoint, FunctionsThatThrow) {
  alone([] {
    auto x = leaf({4, 5});
    int64_t runs = 0;
    const auto fail_in = [&](int64_t run) {
      return [&runs, run](Tensor t) {
        auto h = torch::tanh(t);
        if (runs++ == run) throw std::runtime_error("broken");
        return torch::tanh(h);
      };
    };
    expect_error<std::runtime_error>([&] { hsdp::checkpoint(fail_in(0), x); }, "broken");
    EXPECT_EQ(runs, 1);
    // What is saved after it is saved as usual.
    EXPECT_NO_THROW(torch::tanh(x).sum().backward());
    runs = 0;
    auto y = hsdp::checkpoint(fail_in(1), x);
    torch::manual_seed(5);
    expect_error<std::runtime_error>([&] { y.sum().backward({}, true); }, "broken");
    const auto drawn = torch::rand({3});
    torch::manual_seed(5);
    EXPECT_TRUE(torch::equal(drawn, torch::rand({3})));
    EXPECT_TRUE(torch::equal(torch::autograd::grad({y.sum()}, {x})[0],
                             torch::autograd::grad({torch::tanh(torch::tanh(x)).sum()}, {x})[0]));
  });
}

// ---- sharded ----

struct Sharded {
  Three net{nullptr};
  std::optional<hsdp::FullySharded<ThreeImpl>> model;
  explicit Sharded(RankContext& context, const hsdp::UnitSelector& units = hsdp::each<torch::nn::Linear>()) {
    torch::manual_seed(5);
    net = hsdp::meta_init([] { return Three(); });
    model =
        hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = units, .reshard_after_forward = true});
    model->materialize(context.environment().device());
  }
  std::vector<Tensor> gradients() {
    std::vector<Tensor> list;
    for (auto& parameter : net->parameters()) {
      const auto& gradient = parameter.grad();
      list.push_back(gradient.defined() ? dtensor::DTensor(gradient).full_tensor().clone() : Tensor());
      parameter.mutable_grad() = Tensor();
    }
    return list;
  }
};

class ShardedCheckpoint : public ::testing::TestWithParam<int> {
 protected:
  void run(const std::function<void(RankContext&)>& body) {
    run_ranks(GetParam(), [&](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      body(context);
    });
  }
};

void expect_equal(const std::vector<Tensor>& ours, const std::vector<Tensor>& expected) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_TRUE(ours[i].defined()) << i;
    EXPECT_TRUE(torch::equal(ours[i], expected[i])) << i << "\n" << ours[i] << "\n" << expected[i];
  }
}

TEST_P(ShardedCheckpoint, AroundForwardsAndInsideThem) {
  run([](RankContext& context) {
    Sharded sharded(context);
    auto& model = *sharded.model;
    auto& net = *sharded.net;
    const Inputs in(0, 0, 12);
    torch::mse_loss(model->forward(in.x), in.y).backward();
    const auto expected = sharded.gradients();
    int cases = 0;
    const auto check = [&](const Tensor& y) {
      SCOPED_TRACE("case " + std::to_string(cases++));
      torch::mse_loss(y, in.y).backward();
      expect_equal(sharded.gradients(), expected);
    };
    // The function opens the forward itself, is called in one, or is part of one.
    check(hsdp::checkpoint([&](Tensor x) { return model->forward(x); }, in.x));
    {
      hsdp::ForwardScope scope(model.core());
      check(hsdp::checkpoint([&](Tensor x) { return net.forward(x); }, in.x));
    }
    {
      hsdp::ForwardScope scope(model.core());
      auto h = hsdp::checkpoint([&](Tensor x) { return torch::tanh(net.b(torch::tanh(net.a(x)))); }, in.x);
      check(hsdp::checkpoint([&](Tensor x) { return net.c(x) + net.bias; }, h));
    }
    // Each in a scope of its own, and a parameter as an input.
    auto h = hsdp::checkpoint([&](Tensor x) { return model->a(x); }, in.x);
    h = hsdp::checkpoint(
        [&](Tensor x, Tensor weight) {
          hsdp::ForwardScope scope(model.core());
          return torch::linear(torch::tanh(x), weight, net.b->bias);
        },
        h, net.b->weight);
    {
      hsdp::ForwardScope scope(model.core());
      h = net.c(torch::tanh(h)) + net.bias;
    }
    check(h);
    // Nested, and over a graph that is retained.
    auto y = hsdp::checkpoint(
        [&](Tensor x) {
          hsdp::ForwardScope scope(model.core());
          auto inner = hsdp::checkpoint([&](Tensor t) { return torch::tanh(net.a(t)); }, x);
          return hsdp::checkpoint([&](Tensor t) { return net.c(torch::tanh(net.b(t))) + net.bias; }, inner);
        },
        in.x);
    auto loss = torch::mse_loss(y, in.y);
    loss.backward({}, true);
    expect_equal(sharded.gradients(), expected);
    loss.backward();
    expect_equal(sharded.gradients(), expected);
  });
}

TEST_P(ShardedCheckpoint, GathersAUnitOnceForItsSecondRun) {
  run([](RankContext& context) {
    Sharded sharded(context);
    auto& net = *sharded.net;
    std::vector<std::string> gathers;
    sharded.model->core()->scheduler()->set_observer([&](const char* event, const hsdp::Unit& unit) {
      if (std::string(event) == "all_gather") gathers.push_back(unit.name());
    });
    const Inputs in(0, 0, 12);
    auto x = in.x.detach().set_requires_grad(true);
    for (int step = 0; step < 3; ++step) {
      gathers.clear();
      Tensor loss;
      {
        hsdp::ForwardScope scope(sharded.model->core());
        auto h = hsdp::checkpoint([&](Tensor t) { return torch::tanh(net.a(t)); }, x);
        h = hsdp::checkpoint([&](Tensor t) { return torch::tanh(net.b(t)); }, h);
        h = hsdp::checkpoint([&](Tensor t) { return torch::tanh(net.c(t)); }, h);
        loss = torch::mse_loss(h, in.y);
      }
      EXPECT_EQ(gathers, (std::vector<std::string>{"a", "b", "c"}));
      gathers.clear();
      loss.backward();
      EXPECT_EQ(gathers, (std::vector<std::string>{"c", "b", "a"})) << "step " << step;
      EXPECT_LE(sharded.model->core()->scheduler()->peaks().units_without_ancestors, 2);
    }
  });
}

TEST_P(ShardedCheckpoint, StepsThatFailLeaveTheModelUsable) {
  run([](RankContext& context) {
    Sharded sharded(context);
    auto& model = *sharded.model;
    auto& net = *sharded.net;
    const Inputs in(0, 0, 12);
    torch::mse_loss(model->forward(in.x), in.y).backward();
    const auto expected = sharded.gradients();
    int64_t runs = 0;
    const auto call = [&](int64_t failing) {
      return [&, failing](Tensor x) {
        hsdp::ForwardScope scope(model.core());
        auto h = torch::tanh(net.b(torch::tanh(net.a(x))));
        if (runs++ == failing) throw std::runtime_error("broken");
        return net.c(h) + net.bias;
      };
    };
    const auto check = [&] {
      runs = 0;
      torch::mse_loss(hsdp::checkpoint(call(-1), in.x), in.y).backward();
      expect_equal(sharded.gradients(), expected);
    };
    expect_error<std::runtime_error>([&] { hsdp::checkpoint(call(0), in.x); }, "broken");
    model.reset_iteration_state();
    check();
    runs = 0;
    auto loss = torch::mse_loss(hsdp::checkpoint(call(1), in.x), in.y);
    expect_error<std::runtime_error>([&] { loss.backward(); }, "broken");
    model.reset_iteration_state();
    sharded.gradients();
    check();
    // The optimizer went first.
    runs = 0;
    loss = torch::mse_loss(hsdp::checkpoint(call(-1), in.x), in.y);
    {
      torch::NoGradGuard no_grad;
      net.b->weight.mul_(2);
    }
    expect_error<dtensor::StateError>([&] { loss.backward(); },
                                      "[backward] parameter \"b.weight\" needed for gradient "
                                      "computation was modified by an inplace operation");
    model.reset_iteration_state();
    {
      torch::NoGradGuard no_grad;
      net.b->weight.div_(2);
    }
    sharded.gradients();
    check();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardedCheckpoint, ::testing::Values(1, 2));

}  // namespace checkpoint_function_test

// Ways of running forwards and backwards, each compared with the unsharded module: frozen, unused and tied parameters,
// several forwards before a backward, several backwards before a step, forwards without gradients, graphs that are
// kept, differentiated twice, abandoned or recomputed, and custom functions.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hsdp/hsdp.h"
#include "tests/testing/habit.h"

namespace {

using namespace testing_support;

TEST_P(Habit, FrozenParameters) {
  auto c = three();
  c.make = [] {
    Three net;
    net->b->weight.set_requires_grad(false);
    net->a->weight.set_requires_grad(false);
    net->a->bias.set_requires_grad(false);
    return net;
  };
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    // The input requires grad, so that frozen weights are needed in backward.
    return torch::mse_loss(net.forward(in.x.set_requires_grad(true)), in.y);
  };
  train(c);
}

TEST_P(Habit, FrozenAndThawedBetweenSteps) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    net.b->weight.set_requires_grad(step % 2 == 0);
    net.c->bias.set_requires_grad(step % 2 == 1);
    Inputs in(step, begin, end);
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

TEST_P(Habit, UnusedParametersAndModules) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    return torch::mse_loss(net.c(torch::tanh(net.a(in.x))), in.y);
  };
  train(c);
}

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : in(register_module("in", torch::nn::Linear(6, 7))), out(register_module("out", torch::nn::Linear(7, 6))) {
    auto middle = torch::nn::Linear(torch::nn::LinearOptions(7, 7).bias(false));
    first = register_module("first", middle);
    second = register_module("second", std::make_shared<Wrapped>(middle->weight));
  }
  struct Wrapped : torch::nn::Module {
    explicit Wrapped(torch::Tensor shared) : weight(register_parameter("weight", shared)) {}
    torch::Tensor weight;
  };
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(first(torch::tanh(in(x))));
    return out(torch::tanh(torch::linear(x, second->weight)));
  }
  torch::nn::Linear in{nullptr}, out{nullptr}, first{nullptr};
  std::shared_ptr<Wrapped> second;
};
TORCH_MODULE(Tied);

TEST_P(Habit, TiedParameters) {
  ParityCase<Tied> c;
  c.make = [] { return Tied(); };
  c.options.units = hsdp::each("*");
  c.loss = [](TiedImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

TEST_P(Habit, SeveralForwardsBeforeABackward) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs one(step, begin, end), two(step, begin, end, 5);
    auto a = forward([&] { return net.forward(one.x); });
    auto b = forward([&] { return net.forward(two.x); });
    auto loss = torch::mse_loss(a, one.y) + torch::mse_loss(b, two.y);
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, OneUnitSeveralTimesInAForward) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto x = torch::tanh(net.a(in.x));
    for (int i = 0; i < 3; ++i) x = torch::tanh(net.b(x)) + torch::tanh(net.a(net.c(x)));
    return torch::mse_loss(net.c(x), in.y);
  };
  train(c);
}

TEST_P(Habit, AccumulationOverBackwards) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    torch::Tensor sum = torch::zeros({});
    for (int64_t micro = 0; micro < 3; ++micro) {
      Inputs in(step, begin, end, micro);
      auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y) / 3; });
      loss.backward();
      sum += loss.detach();
    }
    return sum;
  };
  train(c);
}

TEST_P(Habit, ForwardsWithoutGradientsInBetween) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    torch::Tensor before;
    {
      torch::NoGradGuard no_grad;
      before = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    }
    {
      c10::InferenceMode inference;
      (void)forward([&] { return net.forward(in.x); });
    }
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    EXPECT_EQ(before.item<double>(), loss.item<double>());
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, RetainedGraphTwoBackwards) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, AbandonedForward) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto dropped = forward([&] { return net.forward(in.x * 2); });
    dropped.reset();
    auto kept = forward([&] { return net.forward(in.x * 3); });  // Alive during the backward of another graph.
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, GradientPenaltyByDoubleBackward) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto x = in.x.detach().set_requires_grad(true);
    auto loss = forward([&] {
      auto y = net.forward(x);
      auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
      return torch::mse_loss(y, in.y) + gradient.pow(2).mean();
    });
    loss.backward();
    return loss.detach();
  };
  train(c);
}

/// Checkpointing as a user would write it: forward without a graph, recomputed inside backward.
struct Recompute : torch::autograd::Function<Recompute> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, torch::Tensor,
                               std::function<torch::Tensor(torch::Tensor)> function) {
    context->save_for_backward({x});
    context->saved_data["function"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(function));
    torch::AutoGradMode no_grad(false);
    return function(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    auto holder = c10::static_intrusive_pointer_cast<Holder>(context->saved_data["function"].toCapsule());
    torch::Tensor y;
    {
      torch::AutoGradMode grad(true);
      y = holder->function(x);
    }
    y.backward(gradients[0]);
    return {x.grad(), torch::Tensor(), torch::Tensor()};
  }
  struct Holder : torch::CustomClassHolder {
    explicit Holder(std::function<torch::Tensor(torch::Tensor)> held) : function(std::move(held)) {}
    std::function<torch::Tensor(torch::Tensor)> function;
  };
};

TEST_P(Habit, UserWrittenCheckpoint) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto dummy = torch::zeros({1}).set_requires_grad(true);
    auto h =
        Recompute::apply(in.x, dummy, [&net](torch::Tensor x) { return torch::tanh(net.b(torch::tanh(net.a(x)))); });
    return torch::mse_loss(net.c(h) + net.bias, in.y);
  };
  train(c);
}

/// Sees the parameter itself, past the dispatcher, and saves it.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, torch::Tensor w) {
    context->save_for_backward({x, w});
    return x.mm(w.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0])};
  }
};

TEST_P(Habit, CustomFunctionOnTheParameterItself) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    // Once past the unit's node alone, once beside uses that go through it.
    auto h = torch::tanh(OwnLinear::apply(in.x, net.a->weight));
    return torch::mse_loss(net.c(torch::tanh(net.b(h)) + OwnLinear::apply(h, net.b->weight)), in.y);
  };
  train(c);
}

TEST_P(Habit, CachedViewsAcrossUnitsAndSteps) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto wa = net.a->weight.t(), wb = net.b->weight.narrow(0, 0, 4);
    auto x = torch::tanh(in.x.matmul(wa) + net.a->bias);
    x = torch::tanh(net.b(x));
    x = torch::cat({torch::linear(x, wb), x.narrow(1, 4, 3)}, 1) + in.x.matmul(wa);
    return torch::mse_loss(net.c(x), in.y);
  };
  train(c);
}

TEST_P(Habit, OperatorsThatReadSeveralUnits) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto joined =
        torch::cat({net.a->weight, net.c->weight.t()}, 1).mm(torch::cat({net.c->weight, net.a->weight.t()}, 0));
    return torch::mse_loss(net.forward(in.x), in.y) + joined.pow(2).mean();
  };
  train(c);
}

TEST_P(Habit, RawAccessInsideAForward) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    const double corner = net.b->weight.data_ptr<double>()[48];
    const double other = net.c->weight.accessor<double, 2>()[5][6];
    return torch::mse_loss(net.forward(in.x), in.y) * (1 + corner * corner + other * other);
  };
  train(c);
}

TEST_P(Habit, WeightsClampedInForward) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    {
      torch::NoGradGuard no_grad;
      net.b->weight.clamp_(-0.2, 0.2);
      net.a->weight.narrow(0, 1, 2).mul_(0.9);
    }
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

TEST_P(Habit, BackwardOfSomeInputs) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    loss.backward({}, std::nullopt, false, std::vector<torch::Tensor>{net.b->weight, net.c->bias});
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, DataInForwardCutsTheGradient) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    net.b->weight.data().clamp_(-0.3, 0.3);
    return torch::mse_loss(net.forward(in.x), in.y) + (net.a->weight * net.a->weight.data()).sum() * 0.1;
  };
  train(c);
}

TEST_P(Habit, RawPointersOfTwoUnitsAtOnce) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    const double* a = net.a->bias.const_data_ptr<double>();
    const double* b = net.b->bias.const_data_ptr<double>();
    double dot = 0;
    for (int i = 0; i < 7; ++i) dot += a[i] * b[i];
    return torch::mse_loss(net.forward(in.x), in.y) * (1 + dot * dot);
  };
  train(c);
}

TEST_P(Habit, EverythingInOneScopeAndInOneExpression) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    // Backward and the optimizer's kind of write (through data()) with the scope still open.
    return forward([&] {
      auto loss = torch::mse_loss(net.forward(in.x), in.y);
      loss.backward();
      {
        torch::NoGradGuard no_grad;
        net.b->weight.data().add_(net.b->weight.grad(), -0.1);
      }
      auto again = torch::mse_loss(net.forward(in.x), in.y);
      again.backward();
      return loss.detach() + again.detach();
    });
  };
  train(c);
}

TEST_P(Habit, AmsgradAndCaughtFailuresOfOtherBackwards) {
  auto c = three();
  c.optimizer = [](std::vector<torch::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01).eps(1e-3).amsgrad(true));
  };
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto h = torch::tanh(net.a(in.x));
    h.register_hook([](const torch::Tensor& gradient) {
      struct Failing : torch::autograd::Function<Failing> {
        static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor t) { return t.clone(); }
        static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                       torch::autograd::variable_list) {
          throw std::runtime_error("planted");
        }
      };
      torch::AutoGradMode grad(true);
      auto other = torch::ones({1}).set_requires_grad(true);
      EXPECT_THROW(Failing::apply(other).backward(), std::runtime_error);
      return gradient;
    });
    return torch::mse_loss(net.c(torch::tanh(net.b(h))) + net.bias, in.y);
  };
  train(c);
}

TEST_P(Habit, HooksSeeTheReducedGradient) {
  auto c = three();
  c.make = [] {
    Three net;
    net->b->weight.register_hook([](const torch::Tensor& gradient) { return gradient * 2; });
    return net;
  };
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

TEST_P(Habit, HooksOfTwoForwardsInOneBackward) {
  auto c = three();
  c.make = [] {
    Three net;
    net->b->weight.register_hook([](const torch::Tensor& gradient) { return gradient + 0.1; });
    return net;
  };
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs one(step, begin, end), two(step, begin, end, 5);
    auto first = forward([&] { return torch::mse_loss(net.forward(one.x), one.y); });
    auto second = forward([&] { return torch::mse_loss(net.forward(two.x), two.y); });
    auto loss = first + second;
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, HooksThatAreNotLinearSeeTheReducedGradient) {
  auto c = three();
  c.make = [] {
    Three net;
    net->b->weight.register_hook([](const torch::Tensor& gradient) { return gradient.clamp(-0.003, 0.003); });
    net->a->weight.register_hook([](const torch::Tensor& gradient) { return gradient * gradient.norm(); });
    return net;
  };
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

/// Takes the view once, in the first forward of all, and keeps it.
struct KeepingImpl : ThreeImpl {
  torch::Tensor forward(const torch::Tensor& x) {
    if (!transposed.defined()) {
      torch::NoGradGuard no_grad;
      transposed = b->weight.t();
    }
    return c(torch::tanh(b(torch::tanh(a(x))) + torch::tanh(a(x)).mm(transposed))) + bias;
  }
  torch::Tensor transposed;
};
TORCH_MODULE(Keeping);

TEST_P(Habit, AViewTakenOnceServesEveryStep) {
  ParityCase<Keeping> c;
  c.make = [] { return Keeping(); };
  c.loss = [](KeepingImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Habit, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });
INSTANTIATE_TEST_SUITE_P(Nightly, Habit, ::testing::Values(2),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace

// Ways of running autograd that are not one forward and one backward, each compared with the unsharded module:
// gradients of inputs, penalties outside the forward, parts of graphs, hooks of every kind, two models that train each
// other.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/habit.h"

namespace {

using namespace testing_support;

TEST_P(Habit, GradientPenaltyOutsideTheForward) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto x = in.x.detach().set_requires_grad(true);
    auto y = forward([&] { return net.forward(x); });
    auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    auto loss = torch::mse_loss(y, in.y) + (gradient.norm(2, 1) - 1).pow(2).mean();
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, BackwardOfSeveralTensorsWithGivenGradients) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    torch::Tensor h;
    auto y = forward([&] {
      h = torch::tanh(net.b(torch::tanh(net.a(in.x))));
      return net.c(h) + net.bias;
    });
    const double rows = static_cast<double>(end - begin);
    torch::autograd::backward({y, h}, {(y.detach() - in.y) / rows, torch::ones_like(h) / rows});
    return ((y - in.y).pow(2).sum() / 2 + h.sum()).detach() / rows;
  };
  train(c);
}

TEST_P(Habit, ChainsCutByDetachAndJoinedByHand) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto h = forward([&] { return torch::tanh(net.a(in.x)); });
    auto cut = h.detach().set_requires_grad(true);
    auto loss = torch::mse_loss(forward([&] { return net.c(torch::tanh(net.b(cut))) + net.bias; }), in.y);
    loss.backward();
    h.backward(cut.grad());
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, GradientsOfInputsAlone) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto x = in.x.detach().set_requires_grad(true);
    auto adversarial = forward([&] { return torch::mse_loss(net.forward(x), in.y); });
    auto direction = torch::autograd::grad({adversarial}, {x})[0].sign();  // No parameter is reduced.
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x + 0.1 * direction), in.y); });
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, ActivationsWithHooksAndRetainedGradients) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    torch::Tensor h, w;
    int calls = 0;
    auto loss = forward([&] {
      h = torch::tanh(net.a(in.x));
      h.retain_grad();
      h.register_hook([&](const torch::Tensor& gradient) {
        ++calls;
        return gradient * 2;
      });
      w = net.b->weight * 2;
      w.retain_grad();
      net.c->weight.retain_grad();  // Of a leaf: nothing, as in torch.
      return torch::mse_loss(net.c(torch::tanh(torch::linear(h, w))) + net.bias, in.y);
    });
    loss.backward();
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(h.grad().sizes(), h.sizes());
    EXPECT_EQ(w.grad().sizes(), torch::IntArrayRef({7, 7}));
    return loss.detach() + h.grad().sum() + w.grad().sum();  // Linear in the rows, so they average as losses do.
  };
  train(c);
}

TEST_P(Habit, HooksOnAViewOfAWeight) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto transposed = net.b->weight.t();
    transposed.register_hook([](const torch::Tensor& gradient) { return gradient * 3; });
    transposed.retain_grad();
    return torch::mse_loss(net.c(torch::tanh(torch::tanh(net.a(in.x)).mm(transposed))), in.y);
  };
  train(c);
}

/// Runs after a gradient has landed, as an optimizer in backward would.
struct Counting : torch::autograd::PostAccumulateGradHook {
  explicit Counting(int* counted) : calls(counted) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    ++*calls;
    ASSERT_TRUE(parameter.grad().defined());
    torch::NoGradGuard no_grad;
    parameter.mutable_grad().clamp_(-0.003, 0.003);
  }
  int* calls;
};

TEST_P(Habit, PostAccumulateHooksSeeTheReducedGradient) {
  auto c = three();
  auto calls = std::make_shared<int>(0);
  c.forward_backward = [calls](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    torch::autograd::impl::set_post_acc_grad_hooks(net.b->weight, std::make_unique<Counting>(calls.get()));
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    *calls = 0;
    loss.backward();
    EXPECT_EQ(*calls, 1);
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, HooksThatAreRemovedAndHooksThatReadTheirParameter) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto weight = net.a->weight;
    const auto decay =
        weight.register_hook([weight](const torch::Tensor& gradient) { return gradient + 0.1 * weight.detach(); });
    const auto gone = net.b->weight.register_hook([](const torch::Tensor& gradient) { return gradient * 100; });
    net.b->weight.remove_hook(gone);
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    loss.backward();
    net.a->weight.remove_hook(decay);
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, ForwardsThatFailAndAreRunAgain) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    EXPECT_ANY_THROW(forward([&] { return net.c(net.a(in.x).narrow(1, 0, 3)); }));  // Shapes that do not fit.
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, LossesOfTwoForwardsWithDifferentUnits) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto first = forward([&] { return torch::tanh(net.a(in.x)).pow(2).mean(); });
    auto second = forward([&] {
      return torch::mse_loss(net.c(torch::tanh(net.b(torch::cat({in.x, in.y.narrow(1, 0, 1)}, 1)))), in.y);
    });
    second.backward();
    first.backward();
    return (first + second).detach();
  };
  train(c);
}

TEST_P(Habit, SequencesWithALossAtEveryStep) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    // Truncated backpropagation through time: state goes on, the graph does not.
    torch::Tensor state = in.x, total = torch::zeros({});
    for (int t = 0; t < 3; ++t) {
      auto loss = forward([&] {
        auto next = net.forward(state);
        state = next.detach();
        return torch::mse_loss(next, in.y) / 3;
      });
      loss.backward();
      total += loss.detach();
    }
    return total;
  };
  train(c);
}

TEST_P(Habit, LossesScaledByNormsOfGradientsAndWeights) {
  auto c = three();
  c.whole_batch_everywhere = true;  // The scale of a loss is that of the reduced gradient.
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs one(step, begin, end), two(step, begin, end, 3);
    forward([&] { return torch::mse_loss(net.forward(one.x), one.y); }).backward();
    auto second = forward([&] { return net.forward(two.x).pow(2).mean(); });
    auto third = forward([&] { return net.forward(two.x * 2).pow(2).mean() / net.a->weight.grad().norm(); });
    auto loss = second / net.a->weight.grad().norm() + second * net.b->weight.detach().norm() + third;
    loss.backward();
    return loss.detach();
  };
  train(c);
}

TEST_P(Habit, ScalarsOfGradientsSummedInPlace) {
  auto c = three();
  c.whole_batch_everywhere = true;
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    loss.backward();
    torch::NoGradGuard no_grad;
    auto total = net.a->weight.grad().pow(2).sum();
    total += net.b->weight.grad().pow(2).sum();
    total.sqrt_();
    net.c->weight.grad().div_(total);
    return loss.detach() + *total.data_ptr<double>();
  };
  train(c);
}

TEST_P(Habit, ParametersDetachedInPlace) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    if (step == 1) net.b->weight.detach_();
    EXPECT_EQ(net.b->weight.requires_grad(), step == 0);
    Inputs in(step, begin, end);
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

TEST_P(Habit, ForwardsInsideHooksOfParameters) {
  auto c = three();
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    double seen = 0;
    const auto hook = net.c->weight.register_hook([&](const torch::Tensor& gradient) {
      torch::NoGradGuard no_grad;
      seen = forward([&] { return net.forward(in.x).mean(); }).item<double>();
      return gradient;
    });
    auto loss = forward([&] { return torch::mse_loss(net.forward(in.x), in.y); });
    loss.backward();
    net.c->weight.remove_hook(hook);
    return loss.detach() + seen;
  };
  train(c);
}

TEST_P(Habit, BackwardsInsideHooksOfParametersOverRetainedGraphs) {
  auto c = three();
  c.whole_batch_everywhere = true;
  c.forward_backward = [](ThreeImpl& net, const InForward& forward, int64_t step, int64_t begin, int64_t end) {
    Inputs one(step, begin, end), two(step, begin, end, 4);
    bool busy = false;
    const auto hook = net.c->weight.register_hook([&](const torch::Tensor& gradient) {
      if (busy) return gradient;
      busy = true;
      torch::AutoGradMode grad(true);
      forward([&] { return torch::mse_loss(net.forward(two.x), two.y); }).backward();
      busy = false;
      return gradient;
    });
    auto loss = forward([&] { return torch::mse_loss(net.forward(one.x), one.y); });
    loss.backward({}, true);
    loss.backward();
    net.c->weight.remove_hook(hook);
    return loss.detach();
  };
  train(c);
}

/// A checkpoint that saves a weight of the unit whose other parameter its inner backward reduces.
struct SavesAWeight : torch::autograd::Function<SavesAWeight> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, torch::Tensor w,
                               ThreeImpl* net) {
    context->save_for_backward({x, w});
    context->saved_data["net"] = reinterpret_cast<int64_t>(net);
    torch::AutoGradMode no_grad(false);
    return net->c(x) * w.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto saved = context->get_saved_variables();
    auto* net = reinterpret_cast<ThreeImpl*>(context->saved_data["net"].toInt());
    auto x = saved[0].detach().set_requires_grad(true);
    torch::Tensor y;
    {
      torch::AutoGradMode grad(true);
      y = net->c(x);
    }
    y.backward(gradients[0] * saved[1].sum());
    return {x.grad(), torch::ones_like(saved[1]) * (gradients[0] * y.detach()).sum(), torch::Tensor()};
  }
};

TEST_P(Habit, CheckpointsThatUseAWeightAfterTheirInnerBackward) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    return torch::mse_loss(SavesAWeight::apply(torch::tanh(net.b(torch::tanh(net.a(in.x)))), net.c->weight, &net),
                           in.y);
  };
  train(c);
}

// ---- two models ----

TEST(TwoModels, TrainEachOtherAsGansDo) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      auto& environment = context.environment();
      const auto sgd = [](const std::vector<torch::Tensor>& parameters) {
        return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
      };
      torch::manual_seed(5);
      Three generator, discriminator;
      torch::manual_seed(5);
      auto net_g = hsdp::meta_init([] { return Three(); });
      auto net_d = hsdp::meta_init([] { return Three(); });
      hsdp::FullyShardOptions options{.mesh = environment.mesh(), .units = hsdp::each<torch::nn::Linear>()};
      auto model_g = hsdp::fully_shard(net_g, options), model_d = hsdp::fully_shard(net_d, options);
      model_g.materialize(environment.device());
      model_d.materialize(environment.device());
      auto their_g = sgd(generator->parameters()), their_d = sgd(discriminator->parameters());
      auto our_g = sgd(model_g->parameters()), our_d = sgd(model_d->parameters());
      const auto train = [](auto&& g, auto&& d, auto& optimizer_g, auto& optimizer_d, const Inputs& in) {
        optimizer_d.zero_grad();
        auto fake = g(in.x);
        auto loss_d = torch::mse_loss(d(in.y), torch::ones_like(in.y)) +
                      torch::mse_loss(d(fake.detach()), torch::zeros_like(in.y));
        loss_d.backward();
        optimizer_d.step();
        optimizer_g.zero_grad();
        auto loss_g = torch::mse_loss(d(fake), torch::ones_like(in.y));  // Leaves gradients in the discriminator too.
        loss_g.backward();
        optimizer_g.step();
        return (loss_d + loss_g).template item<double>();
      };
      const int64_t share = 12 / environment.world_size(), begin = environment.rank() * share;
      for (int64_t step = 0; step < 4; ++step) {
        const double expected =
            train([&](auto x) { return generator->forward(x); }, [&](auto x) { return discriminator->forward(x); },
                  their_g, their_d, Inputs(step, 0, 12));
        const double loss = train([&](auto x) { return model_g(x); }, [&](auto x) { return model_d->forward(x); },
                                  our_g, our_d, Inputs(step, begin, begin + share));
        ASSERT_NEAR(mean_over_ranks(loss, environment), expected, 1e-11 * expected);
      }
      for (const auto& [model, plain] : {std::pair(model_g, generator), std::pair(model_d, discriminator)}) {
        const auto expected = plain->named_parameters();
        for (auto& parameter : model->named_parameters()) {
          EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value()), expected[parameter.key()]), 1e-11)
              << parameter.key();
          EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value().grad()), expected[parameter.key()].grad()),
                    1e-10)
              << parameter.key();
        }
      }
    });
  }
}

TEST(TwoModels, OneInsideTheOthersForward) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      auto& environment = context.environment();
      torch::manual_seed(5);
      Three teacher, student;
      torch::manual_seed(5);
      auto net_t = hsdp::meta_init([] { return Three(); });
      auto net_s = hsdp::meta_init([] { return Three(); });
      hsdp::FullyShardOptions options{.mesh = environment.mesh(), .units = hsdp::each<torch::nn::Linear>()};
      auto model_t = hsdp::fully_shard(net_t, options), model_s = hsdp::fully_shard(net_s, options);
      model_t.materialize(environment.device());
      model_s.materialize(environment.device());
      const Inputs all(0, 0, 12);
      const int64_t share = 12 / environment.world_size(), begin = environment.rank() * share;
      const Inputs in(0, begin, begin + share);
      // The student's product with the teacher's weight: one operator, two models.
      auto expected = torch::mse_loss(
          student->forward(all.x) + all.x.mm(teacher->a->weight.t()).mm(student->b->weight).narrow(1, 0, 6),
          teacher->forward(all.x));
      expected.backward();
      torch::Tensor loss;
      {
        hsdp::ForwardScope one(model_s.core()), two(model_t.core());
        loss =
            torch::mse_loss(net_s->forward(in.x) + in.x.mm(net_t->a->weight.t()).mm(net_s->b->weight).narrow(1, 0, 6),
                            net_t->forward(in.x));
      }
      loss.backward();
      EXPECT_NEAR(mean_over_ranks(loss.item<double>(), environment), expected.item<double>(), 1e-11);
      for (const auto& [model, plain] : {std::pair(model_t, teacher), std::pair(model_s, student)}) {
        const auto reference = plain->named_parameters();
        for (auto& parameter : model->named_parameters()) {
          EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value().grad()), reference[parameter.key()].grad()),
                    1e-11)
              << parameter.key();
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Habit, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace

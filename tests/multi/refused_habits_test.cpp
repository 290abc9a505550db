// What is refused in forwards and backwards, by name and with the line to write instead; after each refusal the model
// trains on as if nothing had been tried.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/habit.h"

namespace refused_habits_test {

using namespace testing_support;

/// A sharded Three beside a plain one, on the same batch on every rank.
struct Fixture {
  explicit Fixture(RankContext& context)
      : environment(context.environment()), net(make_net()), model(shard(environment, net)) {
    torch::manual_seed(5);
    plain = Three();
  }
  static Three make_net() {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    torch::manual_seed(5);
    return hsdp::meta_init([] { return Three(); });
  }
  static hsdp::FullySharded<ThreeImpl> shard(hsdp::Environment& environment, Three net) {
    auto sharded = hsdp::fully_shard(net, {.mesh = environment.mesh(), .units = hsdp::each<torch::nn::Linear>()});
    sharded.materialize(environment.device());
    return sharded;
  }
  torch::Tensor loss() { return torch::mse_loss(model->forward(in.x), in.y); }
  /// A step of both gives the same gradients.
  void expect_trains() {
    model->zero_grad();
    plain->zero_grad();
    auto ours = loss();
    ours.backward();
    auto theirs = torch::mse_loss(plain->forward(in.x), in.y);
    theirs.backward();
    EXPECT_EQ(ours.item<double>(), theirs.item<double>());
    const auto expected = plain->named_parameters();
    for (auto& parameter : model->named_parameters()) {
      EXPECT_LE(largest_difference(hsdp::unsharded(parameter.value().grad()), expected[parameter.key()].grad()), 1e-12)
          << parameter.key();
    }
  }

  hsdp::Environment& environment;
  Three net, plain{nullptr};
  hsdp::FullySharded<ThreeImpl> model;
  Inputs in{0, 0, 12};
};

void on_ranks(const std::function<void(Fixture&)>& body) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](RankContext& context) {
      Fixture f(context);
      body(f);
      f.expect_trains();
    });
  }
}

TEST(Refused, LossTermsOnParametersOutsideAForward) {
  on_ranks([](Fixture& f) {
    auto loss = f.loss();
    expect_error<dtensor::NotSupportedError>([&] { loss = loss + f.net->a->weight.pow(2).sum(); }, "[aten::pow",
                                             "\"a.weight\"", "requires grad and is used outside a forward",
                                             "its gradient would be lost", "hsdp::ForwardScope");
    // The line to write instead.
    hsdp::ForwardScope scope(f.model.core());
    auto term = f.net->a->weight.pow(2).sum();
    EXPECT_NEAR(term.item<double>(), f.plain->a->weight.pow(2).sum().item<double>(), 1e-12);
  });
}

TEST(Refused, TheBareModulesForward) {
  on_ranks([](Fixture& f) {
    expect_error<dtensor::NotSupportedError>([&] { f.net->forward(f.in.x); }, "[aten::t]", "\"a.weight\"",
                                             "outside a forward", "model->forward(x)");
    torch::NoGradGuard no_grad;
    expect_error<dtensor::NotSupportedError>([&] { f.net->forward(f.in.x); }, "[aten::t]", "\"a.weight\"",
                                             "model->forward(x)");
  });
}

TEST(Refused, ViewsThatLeaveTheirForward) {
  on_ranks([](Fixture& f) {
    torch::Tensor view;
    {
      hsdp::ForwardScope scope(f.model.core());
      view = f.net->b->weight.narrow(0, 0, 2);
    }
    expect_error<dtensor::StateError>([&] { (void)(view * 2); },
                                      "a view of a sharded parameter is read outside a forward", "expected inside one");
    // A world of one has nothing to free.
    if (f.environment.world_size() > 1) {
      expect_error<c10::Error>([&] { (void)view.data_ptr(); },
                               "[raw access] a view of parameter \"b.weight\" has no memory outside a forward",
                               "clone()");
    }
    // In a later forward it is what it was.
    hsdp::ForwardScope scope(f.model.core());
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(view, f.plain->b->weight.narrow(0, 0, 2)));
  });
}

TEST(Refused, GradientsOfParametersByAutogradGrad) {
  on_ranks([](Fixture& f) {
    auto loss = f.loss();
    expect_error<dtensor::NotSupportedError>(
        [&] { torch::autograd::grad({loss}, {f.net->b->weight}); },
        "[autograd::grad] asked for the gradient of sharded parameter \"b.weight\"", "backward()");
  });
}

TEST(Refused, SecondOrderGradientsOfParameters) {
  on_ranks([](Fixture& f) {
    auto loss = f.loss();
    expect_error<dtensor::NotSupportedError>([&] { loss.backward({}, true, /*create_graph=*/true); },
                                             "[backward] create_graph=true for the parameters of unit",
                                             "expected gradients of inputs only");
    f.model.reset_iteration_state();
  });
}

TEST(Refused, InPlaceChangesOfLeavesWithGradModeOn) {
  on_ranks([](Fixture& f) {
    hsdp::ForwardScope scope(f.model.core());
    expect_error<dtensor::StateError>([&] { f.net->a->weight.mul_(2); }, "\"a.weight\"", "torch::NoGradGuard");
    expect_error<dtensor::StateError>([&] { f.net->a->weight.t().mul_(2); }, "torch::NoGradGuard");
    expect_error<dtensor::StateError>([&] { f.net->a->weight[0].zero_(); }, "torch::NoGradGuard");
  });
}

TEST(Refused, BackwardAfterAnOptimizerStep) {
  on_ranks([](Fixture& f) {
    torch::optim::AdamW optimizer(f.model->parameters(), 0.1), theirs(f.plain->parameters(), 0.1);
    auto first = f.loss(), second = f.loss();
    first.backward();
    optimizer.step();
    expect_error<dtensor::StateError>([&] { second.backward(); }, "[backward] parameter \"",
                                      "needed for gradient computation was modified by an inplace operation");
    f.model.reset_iteration_state();
    // As plain libtorch, which refuses the same.
    auto plain_first = torch::mse_loss(f.plain->forward(f.in.x), f.in.y),
         plain_second = torch::mse_loss(f.plain->forward(f.in.x), f.in.y);
    plain_first.backward();
    theirs.step();
    EXPECT_THROW(plain_second.backward(), c10::Error);
    // The refused backward may have come some way: start both from the same values.
    for (auto& parameter : f.model->named_parameters()) {
      torch::NoGradGuard no_grad;
      parameter.value().copy_(f.plain->named_parameters()[parameter.key()]);
    }
  });
}

// SGD writes through data(), which torch's own check does not see.
TEST(Refused, BackwardAfterAStepOfSgd) {
  on_ranks([](Fixture& f) {
    torch::optim::SGD optimizer(f.model->parameters(), 0.1);
    auto first = f.loss(), second = f.loss();
    first.backward();
    optimizer.step();
    expect_error<dtensor::StateError>([&] { second.backward(); }, "[backward] parameter \"",
                                      "\" needed for gradient computation was modified by an inplace operation since ");
    f.model.reset_iteration_state();
    hsdp::copy_values(f.model, f.plain);
  });
}

TEST(Refused, ASavedActivationThatWasChanged) {
  on_ranks([](Fixture& f) {
    torch::Tensor h;
    torch::Tensor loss;
    {
      hsdp::ForwardScope scope(f.model.core());
      h = torch::tanh(f.net->a(f.in.x));
      loss = f.net->b(h).sum();
    }
    {
      torch::NoGradGuard no_grad;
      h.mul_(2);
    }
    expect_error<dtensor::StateError>(
        [&] { loss.backward(); },
        "[backward] a tensor of shape [12, 7] needed for gradient computation was modified by an inplace operation");
    f.model.reset_iteration_state();
  });
}

TEST(Refused, AForwardInASecondThreadMeanwhile) {
  on_ranks([](Fixture& f) {
    hsdp::ForwardScope scope(f.model.core());
    std::exception_ptr caught;
    std::thread([&] {
      try {
        f.model->forward(f.in.x);
      } catch (...) {
        caught = std::current_exception();
      }
    }).join();
    ASSERT_TRUE(caught);
    expect_error<dtensor::StateError>([&] { std::rethrow_exception(caught); },
                                      "[forward] another thread is inside a forward of this sharded module");
  });
}

TEST(Refused, AliasesDetachedOutsideThatRequireGradOfTheirOwn) {
  on_ranks([](Fixture& f) {
    auto alias = f.net->a->weight.detach().requires_grad_(true);
    hsdp::ForwardScope scope(f.model.core());
    expect_error<dtensor::NotSupportedError>([&] { (void)f.in.x.mm(alias.t()); }, "\"a.weight\"",
                                             "requires grad of its own", "detach() inside the forward");
    auto inside = f.net->a->weight.detach().requires_grad_(true);
    torch::tanh(f.in.x.mm(inside.t())).sum().backward();
    EXPECT_TRUE(inside.grad().defined());
    EXPECT_FALSE(f.net->a->weight.grad().defined());
  });
}

TEST(Refused, ShapesChangedInPlace) {
  on_ranks([](Fixture& f) {
    hsdp::ForwardScope scope(f.model.core());
    torch::NoGradGuard no_grad;
    auto& weight = f.net->b->weight;
    const auto check = [&](auto&& call, const char* name) {
      expect_error<dtensor::NotSupportedError>(call, name, "\"b.weight\"", "would change its shape in place",
                                               "the operator without the underscore");
    };
    check([&] { weight.t_(); }, "[aten::t_]");
    check([&] { weight.unsqueeze_(0); }, "[aten::unsqueeze_]");
    check([&] { weight.transpose_(0, 1); }, "[aten::transpose_]");
    check([&] { weight.resize_({49}); }, "[aten::resize_]");
  });
}

TEST(Refused, GradientsThatPlainTensorsWouldLose) {
  on_ranks([](Fixture& f) {
    f.loss().backward();
    auto rate = torch::full({1}, 0.1).requires_grad_();
    auto mask = torch::ones({7, 7}).requires_grad_();
    for (auto& plain : {rate, mask}) {
      expect_error<dtensor::NotSupportedError>([&] { (void)(f.net->b->weight.grad() * plain); }, "[aten::mul]",
                                               "requires grad and meets a sharded tensor outside a forward",
                                               "hsdp::ForwardScope");
    }
    hsdp::ForwardScope scope(f.model.core());
    (f.net->b->weight.grad() * rate).pow(2).sum().backward();
    EXPECT_NEAR(rate.grad().item<double>(), hsdp::unsharded(f.net->b->weight.grad()).pow(2).sum().item<double>() * 0.2,
                1e-12);
  });
}

TEST(Refused, RandomFillsByOtherDistributedTensorsAndPartwiseDraws) {
  on_ranks([](Fixture& f) {
    torch::NoGradGuard no_grad;
    auto copy = f.net->b->weight.detach().clone();
    expect_error<dtensor::NotSupportedError>([&] { copy.bernoulli_(copy.abs().clamp(0, 1)); }, "[aten::bernoulli_]",
                                             "a random fill that depends on another distributed tensor");
    expect_error<dtensor::NotSupportedError>([&] { (void)torch::rrelu(copy, 0.1, 0.3, true); }, "aten::rrelu",
                                             "no rule for sharded tensors");
  });
}

TEST(Refused, ParametersRegisteredAfterTheFirstForward) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      Fixture f(context);
      f.loss().backward();
      auto former = f.net->c;
      f.net->c = f.net->replace_module("c", torch::nn::Linear(7, 6));
      expect_error<dtensor::StateError>([&] { f.model->forward(f.in.x); },
                                        "[forward] parameter \"c.weight\" was registered after fully_shard");
      f.net->c = f.net->replace_module("c", former);
      f.expect_trains();
      f.net->register_parameter("late", torch::ones({2}));
      expect_error<dtensor::StateError>([&] { f.model->forward(f.in.x); },
                                        "[forward] parameter \"late\" was registered after fully_shard");
    });
  }
}

TEST(Refused, ValuesWrittenInAForwardThatDifferBetweenRanks) {
  run_ranks(3, [](RankContext& context) {
    Fixture f(context);
    {
      hsdp::ForwardScope scope(f.model.core());
      torch::NoGradGuard no_grad;
      (void)f.net->b->weight.sum();
      f.net->b->weight.add_(torch::full({1}, static_cast<double>(context.rank())));
    }
    const auto unlike = [&](auto&& call) {
      expect_error<dtensor::StateError>(call, "[all_gather] rank ", "wrote other values into parameters in a forward",
                                        "here last into \"b.weight\"", "all-reduce what is written first");
    };
    unlike([&] { hsdp::unsharded(f.net->b->weight); });
    unlike([&] { hsdp::export_pt(f.model, context.directory() + "/model.pt"); });
    unlike([&] { hsdp::SummonFull scope(f.model); });
    expect_error<dtensor::StateError>([&] { f.model->forward(f.in.x); }, "[all_gather] rank ",
                                      "wrote other values into parameters in a forward", "here last into \"b.weight\"",
                                      "expected the same on all ranks");
  });
}

TEST(Refused, PrintingSavingAndRawAccessOutsideAForward) {
  on_ranks([](Fixture& f) {
    auto& weight = f.net->a->weight;
    std::ostringstream out;
    expect_error<c10::Error>([&] { out << weight; }, "\"a.weight\"",
                             "is sharded and has no storage of its own outside a forward");
    expect_error<c10::Error>([&] { weight.data_ptr(); }, "[raw access]", "\"a.weight\"");
    expect_error<c10::Error>([&] { weight.accessor<double, 2>()[0][0]; }, "[raw access]", "\"a.weight\"");
    expect_error<dtensor::StateError>([&] { weight.storage().nbytes(); }, "[raw access]", "\"a.weight\"");
    expect_error<dtensor::StateError>([&] { torch::save(weight, out); }, "\"a.weight\"");
    expect_error<dtensor::StateError>([&] { (void)weight.is_alias_of(weight); }, "\"a.weight\"");
    expect_error<dtensor::NotSupportedError>([&] { (void)weight.mm(weight.t()); }, "\"a.weight\"");
  });
}

// ---- evaluation, and habits around the model that are not refused ----

TEST(Evaluation, BeforeTheFirstStepInBothModes) {
  on_ranks([](Fixture& f) {
    torch::Tensor expected, no_grad_result, inference_result;
    {
      torch::NoGradGuard no_grad;
      expected = f.plain->forward(f.in.x);
      no_grad_result = f.model->forward(f.in.x);
      EXPECT_FALSE(no_grad_result.requires_grad());
    }
    {
      c10::InferenceMode inference;
      inference_result = f.model->forward(f.in.x);
      EXPECT_TRUE(inference_result.is_inference());
      EXPECT_TRUE(torch::equal(inference_result, expected));
    }
    EXPECT_TRUE(torch::equal(no_grad_result, expected));
  });
}

TEST(Evaluation, InInferenceModeAsTheFirstForwardOfAll) {
  on_ranks([](Fixture& f) {
    c10::InferenceMode inference;
    EXPECT_TRUE(torch::equal(f.model->forward(f.in.x), f.plain->forward(f.in.x)));
  });
}

TEST(Evaluation, TrainAndEvalReachTheSubmodules) {
  on_ranks([](Fixture& f) {
    f.net->eval();
    EXPECT_FALSE(f.net->a->is_training());
    f.net->train();
    EXPECT_TRUE(f.net->is_training());
  });
}

TEST(Threads, AForwardInAWorkerAndItsBackwardInMain) {
  on_ranks([](Fixture& f) {
    torch::Tensor loss;
    std::thread([&] { loss = f.loss(); }).join();
    loss.backward();
    torch::mse_loss(f.plain->forward(f.in.x), f.in.y).backward();
    EXPECT_LE(largest_difference(hsdp::unsharded(f.net->b->weight.grad()), f.plain->b->weight.grad()), 1e-12);
    torch::Tensor again = f.loss();
    std::thread([&] { again.backward(); }).join();
  });
}

TEST(Anomaly, DetectionChangesNothing) {
  on_ranks([](Fixture& f) {
    torch::autograd::DetectAnomalyGuard guard;
    f.expect_trains();
  });
}

TEST(Closures, OptimizersStepWithThem) {
  on_ranks([](Fixture& f) {
    torch::optim::SGD ours(f.model->parameters(), 0.1), theirs(f.plain->parameters(), 0.1);
    const auto loss = ours.step([&] {
      ours.zero_grad();
      auto value = f.loss();
      value.backward();
      return value;
    });
    const auto expected = theirs.step([&] {
      theirs.zero_grad();
      auto value = torch::mse_loss(f.plain->forward(f.in.x), f.in.y);
      value.backward();
      return value;
    });
    EXPECT_EQ(loss.item<double>(), expected.item<double>());
  });
}

TEST(Evaluation, OfForwardsThatMakeStateLikeTheirWeights) {
  on_ranks([](Fixture& f) {
    const auto masked = [](ThreeImpl& net, const torch::Tensor& x) {
      auto& w = net.b->weight;
      auto picked = torch::zeros_like(w);
      picked[0] = 1;
      auto mask = torch::tril(torch::ones_like(w)) - torch::eye(7);
      auto diagonal_free = torch::ones_like(w).fill_diagonal_(0);
      auto copied = torch::empty_like(w).copy_(w).view({49});
      auto h = torch::tanh(net.a(x));
      return h.mm((w + torch::zeros_like(w)).t()) + torch::linear(h, w * mask * diagonal_free) +
             torch::linear(h, picked) * copied[3] + torch::zeros_like(net.b->bias).view({1, 7});
    };
    torch::NoGradGuard no_grad;
    const auto expected = masked(*f.plain, f.in.x);
    {
      hsdp::ForwardScope scope(f.model.core());
      EXPECT_TRUE(torch::equal(masked(*f.net, f.in.x), expected));
    }
    hsdp::SummonFull scope(f.model);
    EXPECT_TRUE(torch::equal(masked(*f.net, f.in.x), expected));
  });
}

// Without gradients too, such state holds what this rank's rows say.
TEST(Evaluation, OfForwardsThatFillStateFromTheirOwnRows) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      Fixture f(context);
      torch::NoGradGuard no_grad;
      const int64_t share = 12 / context.world_size();
      const auto x = f.in.x.narrow(0, share * context.rank(), share);
      const auto filled = [](ThreeImpl& net, const torch::Tensor& rows) {
        auto h = torch::tanh(net.a(rows));
        auto t = torch::zeros_like(net.b->weight);
        t.add_(h.t().mm(h), 0.1);
        auto picked = torch::zeros_like(net.b->weight);
        picked.masked_fill_(h.t().mm(h) > 0, 2);
        auto lerped = torch::zeros_like(net.b->bias).lerp_(h.mean(0), 0.5);
        return h.mm(t + net.b->weight) + h.mm(picked) + lerped;
      };
      hsdp::ForwardScope scope(f.model.core());
      EXPECT_TRUE(torch::allclose(filled(*f.net, x), filled(*f.plain, x), 1e-12, 1e-12));
    });
  }
}

TEST(Refused, AliasesOfStateThatAForwardUsesAsAWhole) {
  run_ranks(3, [](RankContext& context) {
    Fixture f(context);
    torch::NoGradGuard no_grad;
    hsdp::ForwardScope scope(f.model.core());
    auto state = torch::zeros_like(f.net->b->weight);
    expect_error<dtensor::NotSupportedError>([&] { state.data().view({-1}).fill_(2); }, "has aliases, expected none",
                                             "torch::zeros(p.sizes(), p.options())");
    auto alias = state.detach();
    expect_error<dtensor::NotSupportedError>([&] { state[0] = 1; }, "has aliases, expected none");
  });
}

TEST(Refused, NumbersOfThisRanksDataInStateMadeLikeAWeight) {
  run_ranks(3, [](RankContext& context) {
    Fixture f(context);
    {
      torch::NoGradGuard no_grad;
      hsdp::ForwardScope scope(f.model.core());
      (void)torch::full_like(f.net->b->weight, static_cast<double>(context.rank()));
    }
    expect_error<dtensor::StateError>([&] { f.model->forward(f.in.x); },
                                      "wrote other values into parameters in a forward",
                                      "here last into state made like a parameter");
  });
}

TEST(RawWrites, ThatOnlyOneRanksPartShowsAreNoDifference) {
  on_ranks([](Fixture& f) {
    torch::NoGradGuard no_grad;
    const double former = f.plain->b->weight[0][0].item<double>();
    for (const double value : {0.5, former}) {
      {
        hsdp::ForwardScope scope(f.model.core());
        f.net->b->weight.data_ptr<double>()[0] = value;
      }
      EXPECT_EQ(hsdp::unsharded(f.net->b->weight)[0][0].item<double>(), value);
      (void)f.model->forward(f.in.x);
    }
  });
}

TEST(Evaluation, InInferenceModeMayGatherWholeValues) {
  on_ranks([](Fixture& f) {
    c10::InferenceMode inference;
    EXPECT_TRUE(torch::equal(hsdp::unsharded(f.net->b->weight), f.plain->b->weight));
  });
}

// ---- lifetimes ----

TEST(Lifetimes, AGraphOutlivesItsModel) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      torch::Tensor loss, weight, expected;
      {
        Fixture f(context);
        weight = f.net->b->weight;
        loss = f.loss();
        torch::mse_loss(f.plain->forward(f.in.x), f.in.y).backward();
        expected = f.plain->b->weight.grad();
      }
      loss.backward();
      EXPECT_LE(largest_difference(hsdp::unsharded(weight.grad()), expected), 1e-12);
    });
  }
}

TEST(Lifetimes, ParametersAndOptimizersOutliveTheirModel) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](RankContext& context) {
      std::unique_ptr<torch::optim::AdamW> optimizer;
      torch::Tensor weight, before;
      {
        Fixture f(context);
        weight = f.net->b->weight;
        optimizer = std::make_unique<torch::optim::AdamW>(f.model->parameters(), 0.1);
        f.loss().backward();
        before = hsdp::unsharded(weight).clone();
      }
      optimizer->step();
      EXPECT_FALSE(torch::equal(hsdp::unsharded(weight), before));
      expect_error<dtensor::Error>([&] { (void)weight.mm(weight.t()); }, "\"b.weight\"");
    });
  }
}

TEST(Lifetimes, HandlesAreCopiedMovedAndKeptInContainers) {
  on_ranks([](Fixture& f) {
    std::vector<hsdp::FullySharded<ThreeImpl>> models{f.model, f.model};
    auto moved = std::move(models[0]);
    models.clear();
    std::function<torch::Tensor(torch::Tensor)> call = moved;
    EXPECT_TRUE(torch::equal(call(f.in.x), f.model(f.in.x)));
  });
}

}  // namespace refused_habits_test

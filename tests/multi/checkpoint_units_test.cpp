// activation_checkpoint: units whose forward backward runs again, of modules that know nothing of it, under the habits
// that loops have.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace checkpoint_units_test {

using namespace testing_support;
using torch::Tensor;

constexpr int64_t kRows = 60, kWidth = 8;

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, 6 * kWidth))),
        down(register_module("down", torch::nn::Linear(6 * kWidth, kWidth))) {}
  Tensor forward(Tensor x) {
    auto h = up(norm(x));
    if (inside) h = inside(h);
    return down(torch::tanh(torch::gelu(h)));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  std::function<Tensor(Tensor)> inside;
};
TORCH_MODULE(Layer);

struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < 3; ++i) layers->push_back(Layer());
    register_module("layers", layers);
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  }
  Tensor forward(Tensor x) {
    for (auto& layer : *layers)
      x = between ? between(x, layer->as<Layer>()->forward(x)) : x + layer->as<Layer>()->forward(x);
    return head(x);
  }
  void set_inside(const std::function<Tensor(Tensor)>& inside) {
    for (auto& layer : *layers) layer->as<Layer>()->inside = inside;
  }
  torch::nn::ModuleList layers;
  torch::nn::Linear head{nullptr};
  std::function<Tensor(Tensor, Tensor)> between;
};
TORCH_MODULE(Stack);

/// A sharded stack, checkpointed or not, and what its steps leave.
struct Model {
  Stack net{nullptr};
  std::optional<hsdp::FullySharded<StackImpl>> sharded;
  std::vector<std::string> gathers;
  std::optional<torch::optim::SGD> optimizer;

  Model(RankContext& context, hsdp::FullyShardOptions options) {
    torch::manual_seed(5);
    net = hsdp::meta_init([] { return Stack(); });
    if (!options.mesh) options.mesh = context.environment().mesh();
    if (options.units.rules().empty()) options.units = hsdp::each<Layer>();
    sharded = hsdp::fully_shard(net, options);
    sharded->materialize(context.environment().device());
    sharded->core()->scheduler()->set_observer([this](const char* event, const hsdp::Unit& unit) {
      if (std::string(event) == "all_gather") gathers.push_back(unit.name());
    });
    optimizer.emplace(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  StackImpl& module() { return *net; }
  hsdp::ForwardScope scope() { return hsdp::ForwardScope(sharded->core()); }
  Tensor forward(const Tensor& x) { return (*sharded)->forward(x); }

  std::vector<Tensor> state() {
    std::vector<Tensor> list;
    for (auto& parameter : net->parameters()) {
      const auto& gradient = parameter.grad();
      list.push_back(gradient.defined() ? dtensor::DTensor(gradient).full_tensor().clone() : Tensor());
      list.push_back(dtensor::DTensor(parameter).full_tensor().clone());
    }
    return list;
  }
};

void expect_equal(const std::vector<Tensor>& ours, const std::vector<Tensor>& expected) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i].defined(), expected[i].defined()) << i;
    if (ours[i].defined()) {
      ASSERT_TRUE(torch::equal(ours[i], expected[i])) << i << "\n" << ours[i] << "\n" << expected[i];
    }
  }
}

struct Batch {
  Tensor x, y;
  explicit Batch(int step, int64_t rows = kRows) {
    torch::manual_seed(100 + step);
    x = torch::randn({rows, kWidth}).set_requires_grad(true);
    y = torch::randn({rows, kWidth});
  }
};

class CheckpointedUnits : public ::testing::TestWithParam<int> {
 protected:
  /// Runs `step` three times without and with checkpointed layers: it returns what must be equal, beside gradients and
  /// parameters.
  void compare(const std::function<Tensor(Model&, const Batch&)>& step,
               const std::function<void(Model&)>& prepare = nullptr, hsdp::FullyShardOptions options = {},
               double share = 0.6, const std::vector<int64_t>& mesh = {}) {
    const int ranks = mesh.empty() ? GetParam() : static_cast<int>(c10::multiply_integers(mesh));
    run_ranks(ranks, [&](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      hsdp::count_host_memory();
      if (!mesh.empty()) options.mesh = context.environment().make_mesh(mesh, {"replicate", "shard"});
      Model expected(context, options);
      options.activation_checkpoint = hsdp::each<Layer>();
      Model model(context, options);
      if (prepare) {
        prepare(expected);
        prepare(model);
      }
      for (int i = 0; i < 3; ++i) {
        std::vector<Tensor> results[2];
        for (auto* one : {&expected, &model}) {
          const Batch batch(i);
          auto& result = results[one == &model];
          result.push_back(step(*one, batch).detach());
          result.push_back(batch.x.grad());
          result.push_back(torch::rand({2}));
          for (auto& tensor : one->state()) result.push_back(tensor);
        }
        expect_equal(results[1], results[0]);
      }
      // The regions were there.
      int64_t saved[2];
      for (auto* one : {&expected, &model}) {
        const Batch batch(9);
        const auto before = hsdp::memory_bytes(at::kCPU);
        const auto y = one->forward(batch.x);
        saved[one == &model] = hsdp::memory_bytes(at::kCPU) - before;
      }
      EXPECT_LT(static_cast<double>(saved[1]), share * static_cast<double>(saved[0]));
    });
  }
  static Tensor loss_of(Model& model, const Batch& batch) {
    return torch::mse_loss(model.forward(batch.x).to(torch::kDouble), batch.y);
  }
  static void update(Model& model) {
    model.optimizer->step();
    model.optimizer->zero_grad();
  }
};

TEST_P(CheckpointedUnits, GatherAndFreeAsWithoutIt) {
  compare([](Model& model, const Batch& batch) {
    update(model);
    model.gathers.clear();
    auto loss = loss_of(model, batch);
    if (GetParam() > 1) {
      EXPECT_EQ(model.gathers, (std::vector<std::string>{"layers.0", "layers.1", "layers.2", "root"}));
    }
    model.gathers.clear();
    loss.backward();
    EXPECT_EQ(model.gathers, (std::vector<std::string>{"layers.2", "layers.1", "layers.0"}));
    EXPECT_LE(model.sharded->core()->scheduler()->peaks().units_without_ancestors, 2);
    return loss;
  });
}

TEST_P(CheckpointedUnits, OnlyThosePicked) {
  run_ranks(GetParam(), [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    hsdp::count_host_memory();
    // Large beside gathered units and generator states.
    const int64_t rows = 20 * kRows, layer = rows * kWidth * 8;
    const auto saved_with = [&](const hsdp::UnitSelector& picked) {
      Model model(context, {.activation_checkpoint = picked});
      const Batch batch(0, rows);
      loss_of(model, batch).backward();
      const auto before = hsdp::memory_bytes(at::kCPU);
      const auto y = model.forward(batch.x);
      return hsdp::memory_bytes(at::kCPU) - before;
    };
    const auto none = saved_with({}), one = saved_with(hsdp::each("layers.1")),
               all = saved_with(hsdp::each("layers.*"));
    // Without it a layer saves what up, gelu and down want, 1 + 2 x 6 widths, beside its input.
    EXPECT_GT(none - one, 10 * layer);
    EXPECT_GT(one - all, 18 * layer);
    // The inputs of three layers and of the head, and the result.
    EXPECT_LT(all, 6 * layer);
  });
}

TEST_P(CheckpointedUnits, PicksThatAreNoUnits) {
  run_ranks(GetParam(), [](RankContext& context) {
    const auto shard_with = [&](const hsdp::UnitSelector& picked) {
      return [&, picked] {
        auto net = hsdp::meta_init([] { return Stack(); });
        hsdp::fully_shard(
            net, {.mesh = context.environment().mesh(), .units = hsdp::each<Layer>(), .activation_checkpoint = picked});
      };
    };
    expect_error<dtensor::ValueError>(
        shard_with(hsdp::each("layers.*.up")),
        "picks \"layers.0.up\", which is no unit, expected one; name it in .units as well");
    expect_error<dtensor::ValueError>(shard_with(hsdp::each("blocks.*")),
                                      "matches none of the submodules, expected at least one that is a unit");
  });
}

TEST_P(CheckpointedUnits, ForwardsWhoseScopeIsOpenInBackward) {
  compare([](Model& model, const Batch& batch) {
    torch::mse_loss((*model.sharded)->forward(batch.x), batch.y).backward();
    update(model);
    Tensor loss;
    {
      auto scope = model.scope();
      loss = torch::mse_loss(model.module().forward(batch.x), batch.y);
      loss.backward();
      update(model);
      loss = torch::mse_loss(model.module().forward(batch.x), batch.y);
      loss.backward();
    }
    return loss;
  });
}

TEST_P(CheckpointedUnits, GraphsThatAreRetainedTakenInPartsOrRunTogether) {
  compare([](Model& model, const Batch& batch) {
    update(model);
    auto loss = loss_of(model, batch);
    loss.backward({}, true);
    loss.backward({}, true);
    torch::autograd::backward({loss}, {}, true, false, {model.module().head->weight, batch.x});
    loss.backward();
    const Batch other(50);
    auto one = loss_of(model, batch), two = loss_of(model, other);
    one.backward();
    two.backward();
    auto three = loss_of(model, batch), four = loss_of(model, other);
    (three * four).backward();
    return four;
  });
}

TEST_P(CheckpointedUnits, GradientsOfGradients) {
  compare([](Model& model, const Batch& batch) {
    update(model);
    auto y = model.forward(batch.x);
    auto gradient = torch::autograd::grad({y.sum()}, {batch.x}, {}, true, true)[0];
    auto loss = torch::mse_loss(y, batch.y) + gradient.pow(2).mean();
    loss.backward();
    return loss;
  });
}

TEST_P(CheckpointedUnits, BackwardsInsideForwards) {
  const auto inside = [](Tensor h) {
    auto cut = h.detach().set_requires_grad(true);
    return h * torch::autograd::grad({torch::tanh(cut).pow(2).sum()}, {cut})[0];
  };
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        auto loss = loss_of(model, batch);
        loss.backward();
        return loss;
      },
      [&](Model& model) { model.module().set_inside(inside); }, {}, 1.0);
}

TEST_P(CheckpointedUnits, ResidualsAddedInPlace) {
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        auto loss = loss_of(model, batch);
        loss.backward();
        return loss;
      },
      [](Model& model) {
        // The input of a layer changes after it has run, in the parent, before anything needed it: what the norm saved
        // of it is a clone's.
        model.module().between = [](Tensor x, Tensor y) { return y.add_(x); };
        model.module().set_inside([](Tensor h) {
          auto kept = torch::sigmoid(h);
          h.add_(kept);
          return h;
        });
      });
}

TEST_P(CheckpointedUnits, InputsThatChangeInTheParent) {
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        auto y = model.forward(batch.x);
        auto loss = torch::mse_loss(y, batch.y);
        loss.backward();
        return loss;
      },
      [](Model& model) {
        model.module().between = [](Tensor x, Tensor y) {
          auto sum = x * 1;  // Multiplication by a number saves nothing, so that torch lets it change.
          sum.add_(y);
          return sum;
        };
      });
}

TEST_P(CheckpointedUnits, CheckpointsByHandInsideAndBeside) {
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        auto loss = loss_of(model, batch);
        loss.backward();
        Tensor second;
        {
          auto scope = model.scope();
          auto& net = model.module();
          auto h = hsdp::checkpoint([&](Tensor x) { return net.layers[0]->as<Layer>()->forward(x); }, batch.x);
          h = net.layers[1]->as<Layer>()->forward(h);
          h = hsdp::checkpoint(
              [&](Tensor x) {
                return net.head(hsdp::checkpoint([&](Tensor t) { return net.layers[2]->as<Layer>()->forward(t); }, x));
              },
              h);
          second = torch::mse_loss(h, batch.y);
        }
        second.backward();
        return loss + second;
      },
      [](Model& model) {
        model.module().set_inside([](Tensor h) {
          return hsdp::checkpoint([](Tensor t) { return torch::tanh(torch::sigmoid(torch::tanh(t))); }, h);
        });
      },
      {}, 1.0);
}

TEST_P(CheckpointedUnits, WithFrozenPartsAndWithoutGradients) {
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        Tensor quiet;
        {
          torch::NoGradGuard no_grad;
          quiet = loss_of(model, batch);
        }
        {
          c10::InferenceMode inference;
          quiet = quiet + loss_of(model, batch).item<double>();
        }
        auto loss = loss_of(model, batch);
        loss.backward();
        return loss + quiet;
      },
      [](Model& model) {
        for (auto& parameter : model.module().layers[0]->parameters()) parameter.set_requires_grad(false);
        model.module().layers[1]->as<Layer>()->up->weight.set_requires_grad(false);
      });
}

TEST_P(CheckpointedUnits, WithUnitsInsideThem) {
  hsdp::FullyShardOptions options{.units = hsdp::each<Layer>() | hsdp::each<torch::nn::Linear>()};
  options.reshard_after_forward = true;
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        auto loss = loss_of(model, batch);
        loss.backward();
        return loss;
      },
      nullptr, options);
}

TEST_P(CheckpointedUnits, OwnGeneratorsAndAutocastWithinALayer) {
  auto generator = std::make_shared<std::optional<at::Generator>>();
  compare(
      [generator](Model& model, const Batch& batch) {
        update(model);
        generator->emplace(at::detail::createCPUGenerator(11));
        auto loss = loss_of(model, batch);
        loss.backward();
        return loss + torch::rand({}, **generator);
      },
      [generator](Model& model) {
        model.module().set_inside([generator](Tensor h) {
          if (!*generator) generator->emplace(at::detail::createCPUGenerator(12));
          auto noise = torch::rand(h.sizes(), **generator) * torch::rand_like(h);
          h = torch::dropout(h * noise, 0.2, true).to(torch::kFloat);
          at::autocast::set_autocast_enabled(at::kCPU, true);
          at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
          auto product = torch::tanh(torch::mm(h, h.t()));
          at::autocast::set_autocast_enabled(at::kCPU, false);
          EXPECT_EQ(product.scalar_type(), at::kBFloat16);
          return torch::mm(product.to(torch::kDouble), h.to(torch::kDouble));
        });
      });
}

TEST_P(CheckpointedUnits, MixedPrecisionCastsAlikeInBothRuns) {
  hsdp::FullyShardOptions options;
  options.mixed_precision.param_dtype = at::kFloat;
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        auto loss = loss_of(model, batch);
        loss.backward();
        return loss;
      },
      [](Model& model) {
        model.module().set_inside([](Tensor h) {
          EXPECT_EQ(h.scalar_type(), at::kFloat);
          return h;
        });
      },
      options);
}

TEST_P(CheckpointedUnits, StepsThatFailLeaveTheModelUsable) {
  compare([](Model& model, const Batch& batch) {
    update(model);
    auto& net = model.module();
    // In the middle of a forward, and on with the same forward.
    net.set_inside([](Tensor h) -> Tensor {
      EXPECT_ANY_THROW(torch::mm(h, h));
      return torch::tanh(h);
    });
    auto loss = loss_of(model, batch);
    loss.backward();
    net.set_inside([](Tensor h) { return h.narrow(1, 0, 3); });
    EXPECT_ANY_THROW(loss_of(model, batch));
    model.sharded->reset_iteration_state();
    net.set_inside(nullptr);
    // The optimizer went first.
    auto late = loss_of(model, batch);
    {
      torch::NoGradGuard no_grad;
      net.layers[1]->as<Layer>()->down->weight.mul_(2);
    }
    expect_error<dtensor::StateError>(
        [&] { late.backward(); },
        "[backward] parameter \"layers.1.down.weight\" needed for gradient computation was "
        "modified by an inplace operation since the forward");
    model.sharded->reset_iteration_state();
    {
      torch::NoGradGuard no_grad;
      net.layers[1]->as<Layer>()->down->weight.div_(2);
    }
    model.optimizer->zero_grad();
    batch.x.mutable_grad() = Tensor();
    loss = loss_of(model, batch);
    loss.backward();
    return loss;
  });
}

TEST_P(CheckpointedUnits, InputsThatChangeAfterTheForward) {
  run_ranks(GetParam(), [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    Model model(context, {.activation_checkpoint = hsdp::each<Layer>()});
    const Batch batch(0);
    auto x = batch.x * 2;
    auto loss = torch::mse_loss(model.forward(x), batch.y);
    x.add_(1);
    expect_error<dtensor::StateError>([&] { loss.backward(); },
                                      "[backward] a tensor of shape [60, 8] needed for gradient "
                                      "computation was modified by an inplace operation");
    model.sharded->reset_iteration_state();
    EXPECT_NO_THROW(loss_of(model, batch).backward());
  });
}

TEST_P(CheckpointedUnits, TwoModelsInOneExpression) {
  run_ranks(GetParam(), [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    std::vector<Tensor> results[2];
    for (const bool checkpointed : {false, true}) {
      hsdp::FullyShardOptions options;
      if (checkpointed) options.activation_checkpoint = hsdp::each<Layer>();
      Model one(context, options), two(context, options), plain(context, {});
      const Batch batch(0);
      torch::mse_loss(two.sharded->operator->()->forward(
                          plain.sharded->operator->()->forward(one.sharded->operator->()->forward(batch.x))),
                      batch.y)
          .backward();
      for (auto* model : {&one, &two, &plain}) {
        for (auto& tensor : model->state()) results[checkpointed].push_back(tensor);
      }
    }
    expect_equal(results[1], results[0]);
  });
}

TEST_P(CheckpointedUnits, CollectivesOfTheProgramWithinALayer) {
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        auto loss = loss_of(model, batch);
        loss.backward();
        return loss;
      },
      [](Model& model) {
        const auto mesh = model.sharded->core()->mesh();
        model.module().set_inside([mesh](Tensor h) {
          auto level = h.detach().abs().mean(0);
          mesh->communicator(0).all_reduce(level, dtensor::ReduceOp::sum, {"all_reduce", "level"})->wait();
          return torch::tanh(h * level + level);
        });
      },
      {}, 1.0);
}

TEST_P(CheckpointedUnits, StepsThatCommunicateOnlyAtTheirEnd) {
  compare([](Model& model, const Batch& batch) {
    update(model);
    Tensor loss;
    for (int part = 0; part < 3; ++part) {
      model.sharded->set_requires_gradient_sync(part == 2);
      loss = loss_of(model, batch);
      loss.backward();
    }
    return loss;
  });
}

TEST_P(CheckpointedUnits, OverTwoAxes) {
  for (const auto& mesh : {std::vector<int64_t>{2, GetParam()}, std::vector<int64_t>{GetParam(), 1}}) {
    compare(
        [](Model& model, const Batch& batch) {
          update(model);
          auto loss = loss_of(model, batch);
          loss.backward();
          return loss;
        },
        nullptr, {}, 0.6, mesh);
  }
}

TEST_P(CheckpointedUnits, HooksAndGradientsOfActivationsInside) {
  compare(
      [](Model& model, const Batch& batch) {
        update(model);
        auto loss = loss_of(model, batch);
        loss.backward();
        return loss;
      },
      [](Model& model) {
        model.module().set_inside([](Tensor h) {
          auto twice = torch::tanh(h) * 2;
          twice.register_hook([](const Tensor& gradient) { return gradient * 0.5; });
          twice.retain_grad();
          return twice;
        });
      });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointedUnits, ::testing::Values(1, 2));

}  // namespace checkpoint_units_test

// What users do with a module as a whole: methods of their own, train and eval, to(dtype), clone, torch::save,
// collectives on gradients by hand. Each either works as on the plain module or is refused with the line to write
// instead.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/parity.h"

namespace module_habits_test {

using namespace testing_support;

/// An autoencoder with methods of its own, dropout and running statistics. Cloneable, as stock modules are.
struct CoderImpl : torch::nn::Cloneable<CoderImpl> {
  CoderImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 7));
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
    drop = register_module("drop", torch::nn::Dropout(0.5));
    last = register_module("last", torch::nn::Linear(7, 6));
    gain = register_parameter("gain", torch::ones({6}));
  }
  torch::Tensor encode(const torch::Tensor& x) { return drop(torch::tanh(norm(first(x)))); }
  torch::Tensor forward(torch::Tensor x) { return last(encode(x)) * gain; }
  torch::Tensor generate(torch::Tensor x, int64_t steps = 3) {
    torch::NoGradGuard no_grad;
    for (int64_t i = 0; i < steps; ++i) x = torch::tanh(forward(x));
    return x;
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::Tensor gain;
};
TORCH_MODULE(Coder);

/// A sharded module beside the plain one, on the same batch on every rank.
struct Pair {
  explicit Pair(RankContext& context) : environment(context.environment()) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    torch::manual_seed(5);
    plain = Coder();
    torch::manual_seed(5);
    net = hsdp::meta_init([] { return Coder(); });
    model.emplace(hsdp::fully_shard(net, {.mesh = environment.mesh(), .units = hsdp::each<torch::nn::Linear>()}));
    model->materialize(environment.device());
    ours.emplace(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    theirs.emplace(plain->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  torch::Tensor input(int64_t step) const {
    torch::manual_seed(100 + static_cast<uint64_t>(step));
    return torch::randn({12, 6}).to(plain->gain.scalar_type());
  }
  /// A forward and backward of both, with equal dropout masks.
  void backward(int64_t step) {
    const auto x = input(step);
    torch::manual_seed(1);
    torch::mse_loss((*model)->forward(x), x).backward();
    torch::manual_seed(1);
    torch::mse_loss(plain->forward(x), x).backward();
  }
  void step(int64_t step) {
    (*model)->zero_grad();
    plain->zero_grad();
    backward(step);
    ours->step();
    theirs->step();
  }
  void expect_equal(double tolerance) {
    const auto parameters = plain->named_parameters();
    for (auto& entry : net->named_parameters()) {
      const auto& expected = parameters[entry.key()];
      EXPECT_EQ(entry.value().scalar_type(), expected.scalar_type()) << entry.key();
      const auto value = hsdp::unsharded(entry.value());
      EXPECT_LE(largest_difference(value.to(torch::kFloat64), expected.to(torch::kFloat64)), tolerance) << entry.key();
    }
    const auto buffers = plain->named_buffers();
    for (auto& entry : net->named_buffers()) {
      EXPECT_EQ(entry.value().scalar_type(), buffers[entry.key()].scalar_type()) << entry.key();
      EXPECT_LE(largest_difference(entry.value().to(torch::kFloat64), buffers[entry.key()].to(torch::kFloat64)),
                tolerance)
          << entry.key();
    }
  }

  hsdp::Environment& environment;
  Coder net{nullptr}, plain{nullptr};
  std::optional<hsdp::FullySharded<CoderImpl>> model;
  std::optional<torch::optim::SGD> ours, theirs;
};

class Whole : public ::testing::TestWithParam<int> {
 protected:
  /// After `body` both train on alike.
  static void on_ranks(const std::function<void(Pair&, RankContext&)>& body, double tolerance = 1e-11) {
    run_ranks(GetParam(), [&](RankContext& context) {
      Pair pair(context);
      pair.step(0);
      pair.expect_equal(1e-12);
      body(pair, context);
      for (int64_t step = 1; step < 4; ++step) pair.step(step);
      pair.expect_equal(tolerance);
    });
  }
};

TEST_P(Whole, MethodsOfItsOwn) {
  on_ranks([](Pair& p, RankContext&) {
    auto& model = *p.model;
    const auto x = p.input(7);
    torch::manual_seed(2);
    const auto code = model->encode(x);
    torch::manual_seed(2);
    const auto expected = p.plain->encode(x);
    EXPECT_LE(largest_difference(code, expected), 1e-12);
    model->zero_grad();
    code.pow(2).sum().backward();
    p.plain->zero_grad();
    expected.pow(2).sum().backward();
    EXPECT_LE(largest_difference(hsdp::unsharded(p.net->first->weight.grad()), p.plain->first->weight.grad()), 1e-12);
    EXPECT_FALSE(p.net->last->weight.grad().defined());
    model->eval();
    p.plain->eval();
    EXPECT_FALSE(model->is_training());
    EXPECT_FALSE(p.net->drop->is_training());
    EXPECT_LE(largest_difference(model->generate(x), p.plain->generate(x)), 1e-12);
    EXPECT_LE(largest_difference(model->generate(x, 5), p.plain->generate(x, 5)), 1e-12);
    EXPECT_LE(largest_difference(model(x), p.plain->forward(x)), 1e-12);
    model->train();
    p.plain->train();
    EXPECT_TRUE(p.net->norm->is_training());
    EXPECT_EQ(model->named_parameters().keys(), p.plain->named_parameters().keys());
    EXPECT_EQ(model->named_buffers().keys(), p.plain->named_buffers().keys());
    EXPECT_EQ(model->parameters().size(), p.plain->parameters().size());
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      EXPECT_TRUE(model->parameters()[i].is_same(p.net->parameters()[i]));
      EXPECT_EQ(model->parameters()[i].sizes(), p.plain->parameters()[i].sizes());
    }
    model->zero_grad(/*set_to_none=*/false);
    EXPECT_EQ(hsdp::unsharded(p.net->first->weight.grad()).abs().sum().item<double>(), 0);
    model->zero_grad();
    EXPECT_FALSE(p.net->first->weight.grad().defined());
    EXPECT_EQ(model->children().size(), 4u);
  });
}

TEST_P(Whole, AnotherDtypeAndTrainingInIt) {
  for (const bool in_scope : {false, true}) {
    for (const auto& [dtype, tolerance] : std::vector<std::pair<torch::ScalarType, double>>{
             {torch::kFloat32, 1e-5}, {torch::kFloat64, 1e-11}, {torch::kBFloat16, 5e-2}}) {
      on_ranks(
          [&, dtype = dtype](Pair& p, RankContext&) {
            const auto before = p.net->parameters();
            if (in_scope) {
              (*p.model)->to(dtype);
            } else {
              p.net->to(dtype);
            }
            p.plain->to(dtype);
            p.expect_equal(dtype == torch::kFloat64 ? 1e-12 : 1e-7);
            // The optimizer's keys, the members and the registered tensors are what they were.
            for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].is_same(p.net->parameters()[i]));
            EXPECT_TRUE(p.net->first->weight.requires_grad());
            EXPECT_EQ((*p.model)->forward(p.input(3)).scalar_type(), dtype);
            (void)p.plain->forward(p.input(3));
            // Statistics of two forwards with unlike dropout have no counterpart: start them again.
            p.net->norm->reset_running_stats();
            p.plain->norm->reset_running_stats();
          },
          tolerance);
    }
  }
}

TEST_P(Whole, AnotherDtypeWithGradientsInHand) {
  on_ranks(
      [](Pair& p, RankContext&) {
        p.backward(4);
        p.net->to(torch::kFloat32);
        p.plain->to(torch::kFloat32);
        EXPECT_EQ(p.net->gain.grad().defined(), p.plain->gain.grad().defined());
        EXPECT_EQ(p.net->gain.grad().scalar_type(), p.plain->gain.grad().scalar_type());
        p.backward(5);
        p.ours->step();
        p.theirs->step();
      },
      1e-5);
}

TEST_P(Whole, TheSameDeviceAndAnotherOne) {
  on_ranks([](Pair& p, RankContext&) {
    (*p.model)->to(torch::kCPU);
    p.net->to(torch::kCPU);
    p.net->to(torch::kCPU, torch::kFloat64);
    p.plain->to(torch::kCPU, torch::kFloat64);
    for (const bool in_scope : {false, true}) {
      expect_error<dtensor::ValueError>(
          [&] {
            if (in_scope) {
              (*p.model)->to(torch::kMeta);
            } else {
              p.net->to(torch::kMeta);
            }
          },
          "[set_data] parameter \"first.weight\" of shape [7, 6] (Shard(0)) given a tensor on meta, expected cpu as "
          "its mesh "
          "has; a sharded module stays on the device of its mesh");
    }
    p.expect_equal(1e-12);
  });
}

TEST_P(Whole, Clone) {
  on_ranks([](Pair& p, RankContext&) {
    expect_error<dtensor::ValueError>([&] { (void)p.net->clone(); },
                                      "[set_data] a plain tensor of shape [6] given DTensor Double [6] (Shard(0))",
                                      "a sharded module has no clone(): model->clone() makes a whole plain one, and a "
                                      "second sharded one is built as the "
                                      "first and filled with hsdp::copy_values or copy_()");
    // Inside a forward the parameters are whole, and so is the clone.
    auto copied = std::dynamic_pointer_cast<CoderImpl>((*p.model)->clone());
    const auto expected = p.plain->named_parameters();
    for (auto& entry : copied->named_parameters()) {
      EXPECT_FALSE(dtensor::DTensor::is_dtensor(entry.value()));
      EXPECT_LE(largest_difference(entry.value(), expected[entry.key()]), 1e-12) << entry.key();
    }
    copied->eval();
    p.plain->eval();
    const auto x = p.input(2);
    EXPECT_LE(largest_difference(copied->forward(x), p.plain->forward(x)), 1e-12);
    p.plain->train();
    // A copy: training the one leaves the other alone.
    copied->forward(x).sum().backward();
    EXPECT_TRUE(copied->gain.grad().defined());
  });
}

TEST_P(Whole, SavedAndLoadedByTorch) {
  on_ranks([](Pair& p, RankContext& context) {
    auto& model = *p.model;
    const auto path = context.directory() + "/net.pt";
    expect_error<dtensor::NotSupportedError>(
        [&] { torch::save(model, path); },
        "[torch::save] of a sharded model, expected a plain module; hsdp::export_pt(model, path) writes a file that "
        "torch::load(module, path) opens");
    EXPECT_FALSE(std::filesystem::exists(path));
    const auto saved = context.directory() + "/plain" + std::to_string(context.rank()) + ".pt";
    torch::save(p.plain, saved);
    expect_error<dtensor::NotSupportedError>(
        [&] { torch::load(model, saved); },
        "[torch::load] into a sharded model, expected a plain module; hsdp::load(model, path) reads a file of "
        "torch::save(module, path)");
    std::string text;
    try {
      torch::save(p.net, path + std::to_string(context.rank()));
    } catch (const std::exception& error) {
      text = error.what();
    }
    EXPECT_NE(
        text.find("[raw access] parameter \"gain\" of shape [6] (Shard(0)) is sharded and has no storage of its own "
                  "outside a forward; use hsdp::export_pt(model, path) to save the module"),
        std::string::npos)
        << text;
    const std::string remedy =
        " is sharded and keeps its memory, expected values to be copied into it; in place of torch::load(module, path) "
        "use hsdp::load(model, path), for one tensor copy_()";
    expect_error<dtensor::NotSupportedError>([&] { torch::load(p.net, saved); },
                                             "[aten::set_] parameter \"gain\" of shape [6] (Shard(0))" + remedy);
    {
      hsdp::ForwardScope scope(model.core());
      expect_error<dtensor::NotSupportedError>([&] { torch::load(p.net, saved); },
                                               "[aten::set_] parameter \"gain\" of shape [6] (Shard(0))" + remedy);
    }
    p.expect_equal(1e-12);
    hsdp::load(model, saved);
  });
}

TEST_P(Whole, TorchLoadBeforeMaterialize) {
  run_ranks(GetParam(), [](RankContext& context) {
    Coder plain;
    const auto saved = context.directory() + "/plain" + std::to_string(context.rank()) + ".pt";
    torch::save(plain, saved);
    auto net = hsdp::meta_init([] { return Coder(); });
    expect_error<dtensor::NotSupportedError>(
        [&] { torch::load(net, saved); },
        "was made by meta_init, expected another tensor made inside it; assign values "
        "after materialize(device), or read a file with hsdp::load(model, path)");
  });
}

TEST_P(Whole, RawPointersOutsideAForward) {
  on_ranks([](Pair& p, RankContext&) {
    std::string text;
    try {
      (void)p.net->first->weight.data_ptr<double>();
    } catch (const std::exception& error) {
      text = error.what();
    }
    EXPECT_NE(
        text.find("[raw access] parameter \"first.weight\" of shape [7, 6] (Shard(0)) is sharded and has no storage of "
                  "its own outside a forward; use hsdp::export_pt(model, path) to save the module, "
                  "hsdp::unsharded(p) for the whole value, to_local() for this rank's part, hsdp::to_string(t) to "
                  "print"),
        std::string::npos)
        << text;
    p.backward(3);
    text.clear();
    try {
      (void)p.net->first->weight.grad().data_ptr();
    } catch (const std::exception& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("[raw access] tensor \"first.weight.grad\""), std::string::npos) << text;
    EXPECT_NE(text.find("; gradients are already reduced"), std::string::npos) << text;
  });
}

TEST_P(Whole, GradientsReducedByHand) {
  on_ranks([](Pair& p, RankContext&) {
    p.backward(3);
    const auto gradient = p.net->first->weight.grad();
    const std::string text =
        " tensor \"first.weight.grad\" of shape [7, 6] (Shard(0)) is sharded, of which each rank holds another part, "
        "expected "
        "a plain tensor; gradients are already reduced when backward() returns: leave this call out";
    auto& group = *p.environment.communicator();
    expect_error<dtensor::NotSupportedError>(
        [&] {
          group.all_reduce(gradient, dtensor::ReduceOp::sum, {"all_reduce", "gradients"});
        },
        "[all_reduce]" + text);
    expect_error<dtensor::NotSupportedError>(
        [&] {
          group.broadcast(gradient, 0, {"broadcast", "gradients"});
        },
        "[broadcast]" + text);
    // What c10d's process groups call.
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("c10d::allreduce_", "");
    for (const bool in_scope : {false, true}) {
      std::optional<hsdp::ForwardScope> scope;
      if (in_scope) scope.emplace(p.model->core());
      torch::jit::Stack stack;
      stack.emplace_back(c10::List<at::Tensor>({gradient}));
      while (stack.size() < op.schema().arguments().size()) stack.emplace_back();
      torch::NoGradGuard no_grad;
      expect_error<dtensor::NotSupportedError>([&] { op.callBoxed(&stack); }, "[c10d::allreduce_]" + text);
      stack.clear();
      stack.emplace_back(c10::List<at::Tensor>({p.net->gain}));
      while (stack.size() < op.schema().arguments().size()) stack.emplace_back();
      expect_error<dtensor::NotSupportedError>(
          [&] { op.callBoxed(&stack); }, "[c10d::allreduce_] parameter \"gain\" of shape [6] (Shard(0)) is sharded");
    }
    {
      hsdp::ForwardScope scope(p.model->core());
      torch::NoGradGuard no_grad;
      torch::jit::Stack stack;
      stack.emplace_back(c10::List<at::Tensor>({p.net->gain.view({-1})}));
      while (stack.size() < op.schema().arguments().size()) stack.emplace_back();
      expect_error<dtensor::NotSupportedError>([&] { op.callBoxed(&stack); },
                                               "[c10d::allreduce_] a view of a sharded parameter", "give it a clone()");
    }
    // The others' part is not lost: a value of one's own can be summed.
    auto norm = gradient.norm().clone();
    group.all_reduce(norm, dtensor::ReduceOp::max, {"all_reduce", "norm"})->wait();
    EXPECT_NEAR(norm.item<double>(), p.plain->first->weight.grad().norm().item<double>(), 1e-12);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Whole, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace module_habits_test

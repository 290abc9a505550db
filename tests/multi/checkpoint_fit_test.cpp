// Loading a checkpoint into a program that has other names or dtypes: refused before anything changes, or, when asked
// to, what fits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/checkpoint_run.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace checkpoint_fit_test {

using namespace testing_support;
using dtensor::ValueError;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

/// Linear layers and buffers by these names.
struct NamedImpl : torch::nn::Module {
  explicit NamedImpl(const std::vector<std::string>& names, int64_t width = 5) {
    for (const auto& name : names) {
      layers.push_back(register_module(name, torch::nn::Linear(width, width)));
      register_buffer("mean_of_" + name, torch::zeros({width}));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Named);

class NamedRun {
 public:
  NamedRun(RankContext& context, const std::vector<std::string>& names, int64_t width = 5)
      : net(seeded(names, width)),
        model(hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()})),
        optimizer(net->parameters(), torch::optim::AdamWOptions(0.1)) {}

  hsdp::TrainingState state() {
    hsdp::TrainingState result;
    result.model = model.core();
    result.optimizers = {&optimizer};
    return result;
  }
  hsdp::LoadReport load(const std::string& path, const hsdp::LoadOptions& options) {
    auto target = state();
    return hsdp::load(target, path, options);
  }
  void train(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      model->zero_grad();
      const auto width = net->layers.front()->options.in_features();
      model->forward(torch::linspace(-1, 1, 3 * width).view({3, width})).pow(2).mean().backward();
      optimizer.step();
    }
  }
  torch::optim::AdamWParamState& state_of(const std::string& name) {
    return static_cast<torch::optim::AdamWParamState&>(
        *optimizer.state().at(net->named_parameters()[name].unsafeGetTensorImpl()));
  }
  /// A collective, as all of values().
  std::map<std::string, torch::Tensor> values() {
    std::map<std::string, torch::Tensor> result;
    for (auto& entry : net->named_buffers()) result[entry.key()] = entry.value().clone();
    for (auto& entry : net->named_parameters()) {
      result[entry.key()] = whole_of(entry.value()).clone();
      const auto found = optimizer.state().find(entry.value().unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& kept = static_cast<torch::optim::AdamWParamState&>(*found->second);
      result["state." + entry.key() + ".exp_avg"] = whole_of(kept.exp_avg()).clone();
      result["state." + entry.key() + ".exp_avg_sq"] = whole_of(kept.exp_avg_sq()).clone();
      result["state." + entry.key() + ".step"] = torch::tensor(kept.step());
    }
    return result;
  }

  Named net;
  hsdp::FullySharded<NamedImpl> model;
  torch::optim::AdamW optimizer;

 private:
  static Named seeded(const std::vector<std::string>& names, int64_t width) {
    torch::manual_seed(3);
    return hsdp::meta_init([&] { return Named(names, width); });
  }
};

std::map<std::string, torch::Tensor> with_name(std::map<std::string, torch::Tensor> values, const std::string& name) {
  std::erase_if(values, [&](const auto& entry) { return entry.first.find(name) == std::string::npos; });
  return values;
}

TEST(CheckpointNames, ThatDifferAreRefusedUnlessListed) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    NamedRun run(context, {"first", "second"});
    run.model.materialize(at::kCPU);
    run.train(2);
    auto saved_state = run.state();
    saved_state.progress.step = 2;
    hsdp::save(saved_state, path);
    const auto saved = run.values();

    NamedRun other(context, {"second", "third"});
    other.model.materialize(at::kCPU);
    other.train(1);
    const auto before = other.values();
    expect_error<ValueError>([&] { other.load(path, {}); },
                             " does not fit the module: missing \"third.weight\", \"third.bias\", "
                             "\"mean_of_third\", unexpected \"first.bias\", \"first.weight\", \"mean_of_first\"; ");
    expect_same_values(other.values(), before);

    const auto report = other.load(path, {.strict = false});
    EXPECT_THAT(report.missing, UnorderedElementsAre("third.weight", "third.bias", "mean_of_third",
                                                     "state.third.weight.*", "state.third.bias.*"));
    EXPECT_THAT(report.unexpected, UnorderedElementsAre("first.weight", "first.bias", "mean_of_first",
                                                        "state.first.weight.*", "state.first.bias.*"));
    auto values = other.values();
    expect_same_values(with_name(values, "second"), with_name(saved, "second"));
    expect_same_values(with_name(values, "third"), with_name(before, "third"));
    EXPECT_EQ(values.size(), before.size());
    // The step counts are those of the checkpoint and of the program.
    EXPECT_EQ(values["state.second.weight.step"].item<int64_t>(), 2);
    EXPECT_EQ(values["state.third.weight.step"].item<int64_t>(), 1);
    other.train(1);
    EXPECT_EQ(other.state_of("third.weight").step(), 2);
    EXPECT_EQ(other.state_of("second.weight").step(), 3);
  });
}

TEST(CheckpointNames, OfAPartAreEnoughForAPart) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    NamedRun run(context, {"first", "second"});
    run.model.materialize(at::kCPU);
    run.train(2);
    hsdp::save(run.state(), path);
    // On meta, and all that the program has is there.
    NamedRun part(context, {"second"});
    const auto report = part.load(path, {.strict = false});
    EXPECT_TRUE(report.missing.empty());
    EXPECT_EQ(report.unexpected.size(), 5u);
    expect_same_values(part.values(), with_name(run.values(), "second"));
    // What the program has besides begins as it was constructed.
    NamedRun more(context, {"second", "third"});
    more.model.materialize(at::kCPU);
    const auto constructed = more.values();
    NamedRun on_meta(context, {"second", "third"});
    EXPECT_EQ(on_meta.load(path, {.strict = false}).missing.size(), 5u);
    auto values = on_meta.values();
    expect_same_values(with_name(values, "second"), with_name(run.values(), "second"));
    expect_same_values(with_name(values, "third"), with_name(constructed, "third"));
    on_meta.train(1);
  });
}

TEST(CheckpointNames, OfOptimizersAreListedApart) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    NamedRun run(context, {"first", "second"});
    run.model.materialize(at::kCPU);
    torch::optim::AdamW second({run.net->layers[1]->weight, run.net->layers[1]->bias}, torch::optim::AdamWOptions(0.1));
    auto state = run.state();
    state.optimizers = {&second};
    hsdp::save(state, path);
    expect_error<ValueError>([&] { run.load(path, {}); },
                             "'s optimizer state does not fit: missing \"state.first.weight.*\", "
                             "\"state.first.bias.*\", expected the same names on both sides; ");
    EXPECT_THAT(run.load(path, {.strict = false}).missing, ElementsAre("state.first.weight.*", "state.first.bias.*"));
    hsdp::save(run.state(), path);
    expect_error<ValueError>([&] { hsdp::load(state, path); },
                             "does not fit: unexpected \"state.first.bias.*\", \"state.first.weight.*\", expected");
    EXPECT_THAT(hsdp::load(state, path, {.strict = false}).unexpected,
                ElementsAre("state.first.bias.*", "state.first.weight.*"));
  });
}

TEST(CheckpointShapes, ThatDifferAreRefused) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    NamedRun run(context, {"first"}, 5);
    run.model.materialize(at::kCPU);
    run.train(1);
    hsdp::save(run.state(), path);
    NamedRun other(context, {"first"}, 6);
    other.model.materialize(at::kCPU);
    const auto before = other.values();
    for (const bool strict : {true, false}) {
      expect_error<ValueError>([&] { other.load(path, {.strict = strict, .convert_dtypes = true}); },
                               " does not fit the module: ", "\"first.weight\" of shape [5, 5], expected [6, 6]",
                               "\"first.bias\" of shape [5], expected [6]");
      expect_same_values(other.values(), before);
    }
  });
}

// ---- dtypes ----

struct Conversion {
  std::string name;
  torch::ScalarType from, to;
};
std::ostream& operator<<(std::ostream& out, const Conversion& conversion) { return out << conversion.name; }

class CheckpointDtypes : public ::testing::TestWithParam<Conversion> {
 protected:
  static void set_default(torch::ScalarType dtype) { torch::set_default_dtype(torch::scalarTypeToTypeMeta(dtype)); }
};

TEST_P(CheckpointDtypes, AreConvertedWhenAsked) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    set_default(GetParam().from);
    NamedRun run(context, {"first", "second"});
    run.model.materialize(at::kCPU);
    run.train(2);
    {
      torch::NoGradGuard no_grad;
      run.net->named_buffers()["mean_of_first"].fill_(0.3);
    }
    hsdp::save(run.state(), path);
    auto expected = run.values();
    for (auto& [name, tensor] : expected) {
      if (tensor.is_floating_point()) tensor = tensor.to(GetParam().to);
    }
    set_default(GetParam().to);
    for (const bool materialized : {false, true}) {
      NamedRun other(context, {"first", "second"});
      if (materialized) {
        other.model.materialize(at::kCPU);
        other.train(1);
        const auto before = other.values();
        expect_error<ValueError>([&] { other.load(path, {}); }, " does not fit the module: ",
                                 c10::str("\"first.weight\" of dtype ", GetParam().from, ", expected ", GetParam().to));
        expect_same_values(other.values(), before);
      }
      other.load(path, {.convert_dtypes = true});
      expect_same_values(other.values(), expected);
      other.train(1);
      EXPECT_EQ(other.state_of("first.bias").exp_avg().scalar_type(), GetParam().to);
    }
    // Kernels that need one dtype throughout.
    NamedRun other(context, {"first", "second"});
    hsdp::FusedAdamW fused(other.net->parameters(), torch::optim::AdamWOptions(0.1));
    auto state = other.state();
    state.optimizers = {&fused};
    hsdp::load(state, path, {.convert_dtypes = true});
    other.model->zero_grad();
    other.model->forward(torch::ones({3, 5})).sum().backward();
    fused.step();
  });
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointDtypes,
                         ::testing::Values(Conversion{"FloatToDouble", torch::kFloat, torch::kDouble},
                                           Conversion{"DoubleToFloat", torch::kDouble, torch::kFloat},
                                           Conversion{"FloatToBFloat16", torch::kFloat, torch::kBFloat16}),
                         [](const auto& which) { return which.param.name; });

}  // namespace checkpoint_fit_test

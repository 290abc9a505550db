// Training that goes on from a checkpoint with each kind of optimizer, bit for bit as if it had never stopped.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/checkpoint/checkpointed_tensors.h"
#include "hsdp/checkpoint/optimizer_state.h"
#include "hsdp/hsdp.h"
#include "tests/testing/checkpoint_run.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace checkpoint_optimizers_test {

using namespace testing_support;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using CheckpointModel = hsdp::FullySharded<CheckpointNetImpl>;
using Optimizers = std::vector<std::shared_ptr<Optimizer>>;

/// A model and optimizers of the test's choice.
class OptimizerRun {
 public:
  OptimizerRun(RankContext& context, const std::function<Optimizers(const CheckpointModel&)>& make, bool materialized)
      : run(context) {
    if (materialized) run.model.materialize(at::kCPU);
    optimizers = make(run.model);
  }

  hsdp::TrainingState state() {
    auto result = run.state();
    result.optimizers.clear();
    for (auto& optimizer : optimizers) result.optimizers.push_back(optimizer.get());
    return result;
  }
  void train(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      const auto rows = (torch::arange(12) * (run.progress.step + 1)) % 11;
      run.model->forward(rows).pow(2).mean().backward();
      if (!in_backward) {
        for (auto& optimizer : optimizers) optimizer->step();
        run.model->zero_grad();
      }
      ++run.progress.step;
    }
  }
  hsdp::LoadReport load(const std::string& path, const hsdp::LoadOptions& options = {}) {
    auto target = state();
    auto report = hsdp::load(target, path, options);
    run.progress = target.progress;
    return report;
  }
  /// Whole parameters and buffers, and by `state.<parameter>.<name>` what the optimizers keep and do. A collective.
  std::map<std::string, torch::Tensor> values() {
    std::map<std::string, torch::Tensor> result;
    for (auto& entry : run.net->named_parameters()) result[entry.key()] = whole_of(entry.value()).clone();
    for (auto& entry : run.net->named_buffers()) result[entry.key()] = entry.value().clone();
    const auto names = hsdp::parameter_names(hsdp::registered_tensors(*run.model.core()));
    for (const auto& [parameter, entry] : hsdp::optimizer_states(state().optimizers, names)) {
      const auto key = [&, &of = parameter](const std::string& name) { return "state." + of + "." + name; };
      for (const auto& [name, tensor] : entry.tensors) result[key(name)] = whole_of(tensor).clone();
      for (const auto& [name, count] : entry.counts) result[key(name)] = torch::tensor(count);
      for (const auto& [name, option] : entry.options) {
        result[key("options." + name)] = std::visit([](auto value) { return torch::tensor(value); }, option);
      }
    }
    return result;
  }

  CheckpointRun run;
  Optimizers optimizers;
  bool in_backward = false;
};

struct Kind {
  std::string name;
  /// `otherwise`: the same classes with other options.
  std::function<Optimizers(const CheckpointModel&, bool otherwise)> make;
  /// What is kept for a parameter, beside options.
  std::vector<std::string> state;
  bool in_backward = false;
};
std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }

/// One optimizer with two groups.
template <class O, class Options>
Kind grouped(const std::string& name, Options options, Options other, std::vector<std::string> state) {
  return {name,
          [=](const CheckpointModel& model, bool otherwise) -> Optimizers {
            const auto& used = otherwise ? other : options;
            auto of_biases = used;
            of_biases.lr(used.lr() * 2);
            return {std::make_shared<O>(hsdp::parameter_groups(model, {{"**.bias", of_biases}, {"**", used}}), used)};
          },
          std::move(state)};
}

Kind in_backward() {
  return {"InBackward",
          [](const CheckpointModel& model, bool otherwise) {
            return hsdp::apply_optimizer_in_backward(model, [&](const at::Tensor& parameter) {
              const double lr = otherwise ? 0.5 : parameter.dim() > 1 ? 0.01 : 0.02;
              return std::make_unique<hsdp::FusedAdamW>(std::vector<at::Tensor>{parameter},
                                                        torch::optim::AdamWOptions(lr));
            });
          },
          {"exp_avg", "exp_avg_sq", "step"},
          true};
}

/// Of two classes.
Kind two_optimizers() {
  return {"TwoOptimizers",
          [](const CheckpointModel& model, bool otherwise) -> Optimizers {
            std::vector<torch::Tensor> vectors, matrices;
            for (auto& parameter : model.module().parameters()) {
              (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
            }
            auto sgd = std::make_shared<torch::optim::SGD>(
                vectors, torch::optim::SGDOptions(otherwise ? 1.0 : 0.02).momentum(otherwise ? 0.1 : 0.9));
            auto adam =
                std::make_shared<torch::optim::Adam>(matrices, torch::optim::AdamOptions(otherwise ? 1.0 : 0.01));
            // The program may well have them in another order than it had.
            return otherwise ? Optimizers{adam, sgd} : Optimizers{sgd, adam};
          },
          {}};
}

std::vector<Kind> kinds() {
  using namespace torch::optim;
  const auto adam = [](double lr, bool amsgrad) { return AdamOptions(lr).weight_decay(0.1).amsgrad(amsgrad); };
  const auto adamw = [](double lr, bool amsgrad) { return AdamWOptions(lr).betas({0.8, 0.9}).amsgrad(amsgrad); };
  const auto rms = RMSpropOptions(0.01).centered(true).momentum(0.8);
  return {
      grouped<Adam>("Adam", adam(0.01, false), adam(0.5, true), {"exp_avg", "exp_avg_sq", "step"}),
      grouped<Adam>("AdamAmsgrad", adam(0.01, true), adam(0.5, false),
                    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}),
      grouped<AdamW>("AdamW", adamw(0.01, false), adamw(0.5, true), {"exp_avg", "exp_avg_sq", "step"}),
      grouped<AdamW>("AdamWAmsgrad", adamw(0.01, true), adamw(0.5, false),
                     {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}),
      grouped<SGD>("Sgd", SGDOptions(0.01), SGDOptions(0.5).momentum(0.3), {}),
      grouped<SGD>("SgdMomentum", SGDOptions(0.01).momentum(0.9).nesterov(true), SGDOptions(0.5), {"momentum_buffer"}),
      grouped<RMSprop>("RmsPropPlain", RMSpropOptions(0.01), RMSpropOptions(0.5).momentum(0.5), {"square_avg", "step"}),
      grouped<RMSprop>("RmsProp", rms, RMSpropOptions(0.5), {"grad_avg", "momentum_buffer", "square_avg", "step"}),
      grouped<Adagrad>("Adagrad", AdagradOptions(0.01).lr_decay(0.1), AdagradOptions(0.5), {"step", "sum"}),
      grouped<hsdp::FusedAdamW>("FusedAdamW", adamw(0.01, true), adamw(0.5, false),
                                {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}),
      grouped<hsdp::FusedSGD>("FusedSgd", SGDOptions(0.01).momentum(0.9), SGDOptions(0.5), {"momentum_buffer"}),
      in_backward(),
      two_optimizers(),
  };
}

class CheckpointOptimizers : public ::testing::TestWithParam<Kind> {
 protected:
  static OptimizerRun make(RankContext& context, bool otherwise, bool materialized) {
    OptimizerRun run(
        context, [&](const CheckpointModel& model) { return GetParam().make(model, otherwise); }, materialized);
    run.in_backward = GetParam().in_backward;
    return run;
  }
};

TEST_P(CheckpointOptimizers, GoOnAsIfTheyHadNeverStopped) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    auto whole = make(context, false, true);
    whole.train(2);
    const auto saved = whole.values();
    for (const auto& name : GetParam().state) EXPECT_EQ(saved.count("state.out.weight." + name), 1u) << name;
    hsdp::save(whole.state(), path);
    expect_same_values(whole.values(), saved);
    whole.train(2);
    const auto expected = whole.values();
    {
      SCOPED_TRACE("on meta");
      auto resumed = make(context, true, false);
      const auto report = resumed.load(path);
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
      EXPECT_EQ(resumed.run.progress.step, 2);
      expect_same_values(resumed.values(), saved);
      resumed.train(2);
      expect_same_values(resumed.values(), expected);
    }
    {
      SCOPED_TRACE("with values");
      auto resumed = make(context, true, true);
      resumed.train(1);
      resumed.load(path);
      expect_same_values(resumed.values(), saved);
      resumed.train(2);
      expect_same_values(resumed.values(), expected);
      // What was saved can be loaded again and again.
      resumed.load(path);
      expect_same_values(resumed.values(), saved);
    }
    SCOPED_TRACE("back");
    whole.load(path);
    whole.train(2);
    expect_same_values(whole.values(), expected);
  });
}

TEST_P(CheckpointOptimizers, ThatHaveNotStepped) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    auto whole = make(context, false, true);
    hsdp::save(whole.state(), path);
    whole.train(2);
    auto resumed = make(context, true, true);
    resumed.train(2);
    resumed.load(path);
    resumed.train(2);
    expect_same_values(resumed.values(), whole.values());
  });
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointOptimizers, ::testing::ValuesIn(kinds()),
                         [](const auto& which) { return which.param.name; });

// ---- AdamW, otherwise used ----

using torch::optim::AdamWOptions;

Optimizers adamw(std::vector<OptimizerParamGroup> groups) {
  return {std::make_shared<torch::optim::AdamW>(std::move(groups), AdamWOptions(0.01))};
}
Optimizers two_groups(const CheckpointModel& model) {
  return adamw(
      hsdp::parameter_groups(model, {{"**.bias", AdamWOptions(0.02).weight_decay(0)}, {"**", AdamWOptions(0.01)}}));
}

TEST(CheckpointOptimizer, MayHaveOtherGroupsAndAnotherOrder) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    OptimizerRun whole(context, two_groups, true);
    whole.train(2);
    hsdp::save(whole.state(), path);
    whole.train(2);
    // Each parameter has a group of its own, the last comes first; or an optimizer of its own.
    const auto each_once = [](const CheckpointModel& model) {
      std::vector<torch::Tensor> parameters;
      std::set<const c10::TensorImpl*> seen;  // tied ones are there once for each name
      for (auto& parameter : model.module().parameters()) {
        if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
      }
      return parameters;
    };
    const auto groups_of_their_own = [&](const CheckpointModel& model) {
      std::vector<OptimizerParamGroup> groups;
      const auto parameters = each_once(model);
      for (auto it = parameters.rbegin(); it != parameters.rend(); ++it) {
        groups.emplace_back(std::vector<torch::Tensor>{*it}, std::make_unique<AdamWOptions>(0.5));
      }
      return adamw(std::move(groups));
    };
    const auto optimizers_of_their_own = [&](const CheckpointModel& model) {
      Optimizers optimizers;
      for (auto& parameter : each_once(model)) {
        optimizers.push_back(adamw({OptimizerParamGroup({parameter})}).front());
      }
      return optimizers;
    };
    for (const auto& make :
         std::vector<std::function<Optimizers(const CheckpointModel&)>>{groups_of_their_own, optimizers_of_their_own}) {
      OptimizerRun resumed(context, make, false);
      resumed.load(path);
      resumed.train(2);
      expect_same_values(resumed.values(), whole.values());
    }
    // One group cannot have two learning rates.
    OptimizerRun one_group(
        context, [](const CheckpointModel& model) { return adamw({OptimizerParamGroup(model.module().parameters())}); },
        true);
    const auto before = one_group.values();
    expect_error<dtensor::ValueError>([&] { one_group.load(path); }, "are in one group but come with lr 0.0");
    expect_same_values(one_group.values(), before);
    one_group.load(path, {.optimizer_options = false});
    EXPECT_EQ(one_group.optimizers.front()->param_groups().front().options().get_lr(), 0.01);
  });
}

TEST(CheckpointOptimizer, MayKeepTheProgramsOptions) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    OptimizerRun whole(context, two_groups, true);
    whole.train(2);
    hsdp::save(whole.state(), path);
    OptimizerRun resumed(
        context,
        [](const CheckpointModel& model) {
          return adamw(hsdp::parameter_groups(model, {{"**", AdamWOptions(0.25).betas({0.5, 0.6}).weight_decay(0.3)}}));
        },
        false);
    resumed.load(path, {.optimizer_options = false});
    const auto& options = static_cast<AdamWOptions&>(resumed.optimizers[0]->param_groups()[0].options());
    EXPECT_EQ(options.lr(), 0.25);
    EXPECT_EQ(options.betas(), std::make_tuple(0.5, 0.6));
    EXPECT_EQ(options.weight_decay(), 0.3);
    auto values = resumed.values(), expected = whole.values();
    std::erase_if(values, [](const auto& entry) { return entry.first.find(".options.") != std::string::npos; });
    std::erase_if(expected, [](const auto& entry) { return entry.first.find(".options.") != std::string::npos; });
    expect_same_values(values, expected);
    // As if the options had been changed without stopping.
    for (auto& group : whole.optimizers[0]->param_groups()) {
      static_cast<AdamWOptions&>(group.options()) = options;
    }
    whole.train(2);
    resumed.train(2);
    expect_same_values(resumed.values(), whole.values());
  });
}

// A frozen parameter that the optimizer has, and one that it has not.
TEST(CheckpointOptimizer, LeavesFrozenParametersWithoutState) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    const auto make = [](const CheckpointModel& model) {
      model.module().out->bias.set_requires_grad(false);
      auto groups = hsdp::parameter_groups(model, {{"**", AdamWOptions(0.01)}});
      model.module().body->linear->weight.set_requires_grad(false);
      return adamw(std::move(groups));
    };
    OptimizerRun whole(context, make, true);
    whole.train(2);
    const auto saved = whole.values();
    EXPECT_EQ(saved.count("state.out.bias.step") + saved.count("state.out.bias.options.lr"), 0u);
    EXPECT_EQ(saved.count("state.body.linear.weight.exp_avg"), 0u);
    EXPECT_EQ(saved.count("state.body.linear.weight.options.lr"), 1u);
    hsdp::save(whole.state(), path);
    // They have been trained before: that is forgotten.
    OptimizerRun resumed(
        context,
        [](const CheckpointModel& model) {
          model.module().out->bias.set_requires_grad(false);
          return adamw(hsdp::parameter_groups(model, {{"**", AdamWOptions(0.01)}}));
        },
        true);
    resumed.train(2);
    resumed.load(path);
    expect_same_values(resumed.values(), saved);
    for (auto* run : {&whole, &resumed}) {
      run->run.net->body->linear->weight.set_requires_grad(true);
      run->train(2);
    }
    EXPECT_EQ(whole.values().at("state.body.linear.weight.step").item<int64_t>(), 2);
    expect_same_values(resumed.values(), whole.values());
  });
}

TEST(CheckpointOptimizer, OfAnotherKindIsRefused) {
  run_ranks(2, [](RankContext& context) {
    const auto path = context.directory() + "/checkpoint";
    OptimizerRun whole(context, two_groups, true);
    whole.train(1);
    hsdp::save(whole.state(), path);
    OptimizerRun other(
        context,
        [](const CheckpointModel& model) -> Optimizers {
          return {std::make_shared<torch::optim::SGD>(model.module().parameters(), torch::optim::SGDOptions(0.1))};
        },
        true);
    other.train(1);
    const auto before = other.values();
    expect_error<dtensor::ValueError>([&] { other.load(path); },
                                      "comes with the state of an AdamW optimizer, expected ", "SGD, which trains it");
    expect_same_values(other.values(), before);
    EXPECT_EQ(other.run.progress.step, 1);
    // FusedAdamW keeps what AdamW keeps.
    OptimizerRun fused(
        context,
        [](const CheckpointModel& model) -> Optimizers {
          return {std::make_shared<hsdp::FusedAdamW>(hsdp::parameter_groups(model, {{"**.bias"}, {"**"}}),
                                                     AdamWOptions(0.5))};
        },
        false);
    fused.load(path);
    expect_same_values(fused.values(), whole.values());
  });
}

}  // namespace checkpoint_optimizers_test

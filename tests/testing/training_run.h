#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/habit.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/parity.h"

/// A user's training loop written once and run in three ways: on the plain module, on the sharded one with the
/// parameters taken on a line of their own, and with `use(model->parameters())`, which keeps a forward scope open while
/// `use` runs.
namespace testing_support {

/// Odd sizes, one weight with fewer rows than three ranks, one parameter of one element.
struct OddNetImpl : torch::nn::Module {
  OddNetImpl()
      : a(register_module("a", torch::nn::Linear(6, 7))),
        b(register_module("b", torch::nn::Linear(7, 2))),
        c(register_module("c", torch::nn::Linear(2, 6))) {
    gain = register_parameter("gain", torch::rand({1}) + 0.5);
  }
  torch::Tensor forward(torch::Tensor x) { return c(torch::tanh(b(torch::tanh(a(x))))) * gain; }
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
  torch::Tensor gain;
};
TORCH_MODULE(OddNet);

enum class Way { plain, two_lines, open_scope };
/// Points of the sequence meta_init, fully_shard, to_empty, materialize.
enum class Stage { constructed, sharded, empty, materialized };

inline torch::Tensor whole_value(const torch::Tensor& tensor) {
  return dtensor::DTensor::is_dtensor(tensor) ? dtensor::DTensor(tensor).full_tensor() : tensor.detach();
}

/// One module being trained in one of the ways.
class TrainingRun {
 public:
  TrainingRun(Way way, RankContext& context) : way_(way), environment_(context.environment()) {
    torch::manual_seed(7);
    net_ = way == Way::plain ? OddNet() : hsdp::meta_init([] { return OddNet(); });
  }
  void advance_to(Stage stage) {
    if (way_ != Way::plain && stage_ < Stage::sharded && stage >= Stage::sharded) {
      model_.emplace(hsdp::fully_shard(net_, {.mesh = environment_.mesh(), .units = hsdp::each<torch::nn::Linear>()}));
    }
    if (way_ != Way::plain && stage_ < Stage::empty && stage >= Stage::empty) model_->to_empty(environment_.device());
    if (way_ != Way::plain && stage_ < Stage::materialized && stage >= Stage::materialized) model_->replay_init();
    stage_ = std::max(stage_, stage);
  }

  bool is_sharded() const { return way_ != Way::plain; }
  OddNetImpl& net() { return *net_; }
  hsdp::FullySharded<OddNetImpl>& model() { return *model_; }

  /// `use(net->parameters())`, spelled in this run's way.
  template <class Use>
  auto with_parameters(Use&& use) {
    if (model_ && way_ == Way::open_scope) return use((*model_)->parameters());
    auto parameters = net_->parameters();
    return use(parameters);
  }

  /// Forward and backward of this rank's rows; the plain module takes all.
  double backward(int64_t step, double scale = 1) {
    const int64_t share = is_sharded() ? 12 / environment_.world_size() : 12;
    const int64_t begin = is_sharded() ? environment_.rank() * share : 0;
    Inputs in(step, begin, begin + share);
    auto loss = torch::mse_loss(model_ ? (*model_)->forward(in.x) : net_->forward(in.x), in.y) * scale;
    loss.backward();
    const double value = loss.item<double>();
    return is_sharded() ? mean_over_ranks(value, environment_) : value;
  }

  /// What the loop keeps beside the parameters and is compared as well, and numbers that it read on the host.
  std::vector<torch::Tensor> tracked;
  std::vector<double> numbers;

 private:
  Way way_;
  hsdp::Environment& environment_;
  Stage stage_ = Stage::constructed;
  OddNet net_{nullptr};
  std::optional<hsdp::FullySharded<OddNetImpl>> model_;
};

/// Called at `stage` of the sequence; returns what is done in each step.
using Step = std::function<void(int64_t step)>;
using Loop = std::function<Step(TrainingRun&)>;

struct LoopOptions {
  Stage stage = Stage::materialized;
  int64_t steps = 3;
  double tolerance = 1e-11;
  /// Whether the two spellings give the same bits, rather than values within the tolerance: all but what reads norms of
  /// whole parameters, which are summed in another order.
  bool same_bits = true;
};

inline void expect_close(const torch::Tensor& value, const torch::Tensor& expected, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(value.defined(), expected.defined()) << what;
  if (!value.defined()) return;
  const auto whole = whole_value(value);
  ASSERT_TRUE(whole.sizes().equals(expected.sizes())) << what;
  // Not a number equals itself here.
  if (torch::allclose(whole, expected, 0, 0, /*equal_nan=*/true)) return;
  ASSERT_LE(largest_difference(whole, expected), tolerance) << what;
}

inline void expect_same_bits(const torch::Tensor& value, const torch::Tensor& expected, const std::string& what) {
  if (!value.defined()) return;
  ASSERT_TRUE(torch::allclose(whole_value(value), whole_value(expected), 0, 0, /*equal_nan=*/true)) << what;
}

/// Runs the loop in all three ways and compares parameters, gradients, tracked tensors and numbers after each step.
inline void expect_same_in_all_ways(int ranks, const Loop& loop, const LoopOptions& options = {}) {
  run_ranks(ranks, [&](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    std::vector<std::unique_ptr<TrainingRun>> runs;
    std::vector<Step> steps;
    for (auto way : {Way::plain, Way::two_lines, Way::open_scope}) {
      auto& run = *runs.emplace_back(std::make_unique<TrainingRun>(way, context));
      run.advance_to(options.stage);
      torch::manual_seed(11);
      steps.push_back(loop(run));
      run.advance_to(Stage::materialized);
    }
    auto& plain = *runs[0];
    for (int64_t step = 0; step < options.steps; ++step) {
      for (size_t k = 0; k < runs.size(); ++k) {
        torch::manual_seed(static_cast<uint64_t>(20 + step));
        steps[k](step);
      }
      const auto expected = plain.net().named_parameters();
      for (size_t k = 1; k < runs.size(); ++k) {
        auto& run = *runs[k];
        const std::string where = (k == 1 ? " on two lines, step " : " in an open scope, step ") + std::to_string(step);
        const bool bits = k == 2 && options.same_bits;
        auto other = runs[1]->net().named_parameters();
        for (auto& parameter : run.net().named_parameters()) {
          const auto& theirs = expected[parameter.key()];
          expect_close(parameter.value(), theirs, options.tolerance, parameter.key() + where);
          expect_close(parameter.value().grad(), theirs.grad(), options.tolerance, parameter.key() + ".grad" + where);
          if (!bits) continue;
          expect_same_bits(parameter.value(), other[parameter.key()], parameter.key() + where);
          expect_same_bits(parameter.value().grad(), other[parameter.key()].grad(), parameter.key() + ".grad" + where);
        }
        ASSERT_EQ(run.tracked.size(), plain.tracked.size());
        for (size_t i = 0; i < run.tracked.size(); ++i) {
          const std::string what = "tracked tensor " + std::to_string(i) + where;
          expect_close(run.tracked[i], plain.tracked[i], options.tolerance, what);
          if (bits) expect_same_bits(run.tracked[i], runs[1]->tracked[i], what);
        }
        ASSERT_EQ(run.numbers.size(), plain.numbers.size());
        for (size_t i = 0; i < run.numbers.size(); ++i) {
          if (!std::isfinite(run.numbers[i])) {
            ASSERT_EQ(std::to_string(run.numbers[i]), std::to_string(plain.numbers[i])) << "number " << i << where;
            continue;
          }
          ASSERT_NEAR(run.numbers[i], plain.numbers[i], options.tolerance * std::max(1.0, std::abs(plain.numbers[i])))
              << "number " << i << where;
        }
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

/// Runs `body` on each rank with a sharded module that has gradients.
inline void with_sharded_run(int ranks, const std::function<void(TrainingRun&)>& body) {
  run_ranks(ranks, [&](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    TrainingRun run(Way::two_lines, context);
    run.advance_to(Stage::materialized);
    run.backward(0);
    body(run);
  });
}

/// Expects that `call` is refused with this text and that no parameter changed.
template <class E, class Call>
void expect_refused_and_unchanged(TrainingRun& run, Call&& call, const std::string& text) {
  std::vector<torch::Tensor> before;
  for (auto& parameter : run.net().parameters()) before.push_back(whole_value(parameter));
  std::string thrown;
  try {
    call();
    ADD_FAILURE() << "nothing was thrown, expected " << text;
  } catch (const E& error) {
    thrown = error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another class of error than expected: " << error.what();
    return;
  }
  EXPECT_EQ(thrown, text);
  auto parameters = run.net().parameters();
  for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(torch::equal(whole_value(parameters[i]), before[i])) << i;
}

}  // namespace testing_support

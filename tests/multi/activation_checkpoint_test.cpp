// Activations that backward computes again, by hand and per unit: bit for bit what training without it gives, in less
// memory and with one gather for each second run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"
#include "hsdp/launch/device.h"
#include "tests/testing/multi_process.h"

namespace activation_checkpoint_test {

using namespace testing_support;
using torch::Tensor;

// ---- models ----

constexpr int64_t kRows = 60, kWidth = 8;

enum class Kind { mlp, attention, recurrent, batch_norm, in_place, views, raw_memory, buffers, custom, without_grad };

const std::map<Kind, std::string> kKinds{{Kind::mlp, "Mlp"},
                                         {Kind::attention, "Attention"},
                                         {Kind::recurrent, "Recurrent"},
                                         {Kind::batch_norm, "BatchNorm"},
                                         {Kind::in_place, "InPlace"},
                                         {Kind::views, "Views"},
                                         {Kind::raw_memory, "RawMemory"},
                                         {Kind::buffers, "Buffers"},
                                         {Kind::custom, "CustomFunction"},
                                         {Kind::without_grad, "PartsWithoutGrad"}};

/// Saves what it computed, past the dispatcher.
struct Squared : torch::autograd::Function<Squared> {
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor x) {
    auto y = x * 3;
    context->save_for_backward({x, y});
    return y * y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto saved = context->get_saved_variables();
    return {gradients[0] * 6 * saved[1] + 0 * saved[0]};
  }
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(Kind which)
      : kind(which),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))) {
    if (kind == Kind::attention) {
      attention = register_module(
          "attention", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(kWidth, 2).dropout(0.1)));
    }
    if (kind == Kind::recurrent) {
      lstm =
          register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kWidth, kWidth).num_layers(2).dropout(0.2)));
    }
    if (kind == Kind::batch_norm) bn = register_module("bn", torch::nn::BatchNorm1d(4 * kWidth));
    if (kind == Kind::buffers) {
      total = register_buffer("total", torch::zeros({4 * kWidth}));
      calls = register_buffer("calls", torch::zeros({}, torch::kLong));
    }
  }

  Tensor forward(Tensor x) {
    auto h = up(norm(x));
    switch (kind) {
      case Kind::mlp:
        h = torch::dropout(torch::gelu(h), 0.3, is_training());
        break;
      case Kind::attention: {
        auto tokens = norm(x).unsqueeze(1);
        x = x + std::get<0>(attention(tokens, tokens, tokens)).squeeze(1);
        h = torch::gelu(h);
        break;
      }
      case Kind::recurrent:
        x = x + std::get<0>(lstm(norm(x).unsqueeze(1))).squeeze(1);
        h = torch::sigmoid(h);
        break;
      case Kind::batch_norm:
        h = torch::tanh(bn(h));
        break;
      case Kind::in_place:
        h = torch::tanh(h);
        h = h + 1;
        h.mul_(0.5).sigmoid_();
        h = h * 2;
        h.narrow(1, 0, 3).mul_(3);
        h.index_put_({torch::arange(2)}, torch::zeros({}));
        break;
      case Kind::views: {
        auto parts = h.chunk(2, 1);
        h = torch::cat({parts[0] * torch::sigmoid(parts[1]), parts[1].t().contiguous().t()}, 1);
        h = h.view({kRows, 2, -1}).transpose(0, 1).reshape({2, kRows, -1}).permute({1, 0, 2}).flatten(1);
        h = torch::linear(torch::tanh(h), up->weight.t() * 0.1).repeat({1, 4});
        break;
      }
      case Kind::raw_memory: {
        auto scale = torch::tensor({0.5, 2.0, 1.0, -1.0}).repeat({kWidth});
        auto mask = torch::ones({kRows, 4 * kWidth});
        for (int64_t row = 0; row < kWidth; ++row) mask.accessor<double, 2>()[row][row] = 0;
        auto noise = torch::empty_like(h).uniform_(0, 1);
        auto joined = torch::empty({kRows, 4 * kWidth});
        joined.narrow(1, 0, kWidth).copy_(h.narrow(1, 0, kWidth));
        joined.narrow(1, kWidth, 3 * kWidth).copy_(torch::gelu(h).narrow(1, kWidth, 3 * kWidth));
        auto sums = torch::zeros_like(h);
        sums.add_(joined.data().abs()).index_add_(0, torch::tensor({1, 1}, torch::kLong), joined.narrow(0, 0, 2));
        h = joined * scale * mask * noise + torch::tanh(sums * torch::full_like(h, 0.1));
        auto shift = torch::tensor({0.1});
        h = h + shift;
        shift.mul_(3);
        h = h + shift;
        break;
      }
      case Kind::buffers:
        h = torch::tanh(h);
        {
          torch::NoGradGuard no_grad;
          total.mul_(0.9).add_(h.mean(0));
        }
        calls += 1;
        h = h * (total + 1) / (1 + calls.item<int64_t>()) + total.sum();
        break;
      case Kind::custom:
        h = Squared::apply(torch::tanh(h));
        break;
      case Kind::without_grad: {
        Tensor level;
        {
          torch::NoGradGuard no_grad;
          level = torch::softmax(h, 1);
        }
        h = torch::gelu(h * level) + torch::gelu(h.detach()).set_requires_grad(true) * 0.5;
        break;
      }
    }
    return x + down(h);
  }

  Kind kind;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
  Tensor total, calls;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(Kind kind, int64_t count, bool by_hand_) : by_hand(by_hand_) {
    first = register_module("first", torch::nn::Linear(kWidth, kWidth));
    for (int64_t i = 0; i < count; ++i) blocks->push_back(Block(kind));
    register_module("blocks", blocks);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  }
  Tensor forward(Tensor x) {
    x = first(x);
    for (auto& one : *blocks) {
      auto* block = one->as<Block>();
      x = by_hand ? hsdp::checkpoint(&BlockImpl::forward, block, x) : block->forward(x);
    }
    return head(norm(x));
  }
  bool by_hand;
  torch::nn::Linear first{nullptr}, head{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Net);

// ---- training ----

enum class Mode { plain, plain_by_hand, sharded, by_hand, per_unit };

struct Outcome {
  std::map<std::string, Tensor> tensors;  // losses, gradients, values
  int64_t saved = 0;                      // bytes alive between forward and backward, less those before
  int64_t gathers = 0;                    // of the last step
};

Tensor whole(const Tensor& tensor) {
  return dtensor::DTensor::is_dtensor(tensor) ? dtensor::DTensor(tensor).full_tensor().clone() : tensor.clone();
}

/// Three steps; `x` requires grad, so that backward needs every weight.
template <class Forward>
Outcome train(torch::nn::Module& net, const Forward& forward) {
  Outcome outcome;
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    const auto name = "step " + std::to_string(step) + " ";
    torch::manual_seed(100 + step);
    auto x = torch::randn({kRows, kWidth}).set_requires_grad(true), y = torch::randn({kRows, kWidth});
    optimizer.zero_grad();
    dtensor::reset_collective_counts();
    const auto before = hsdp::memory_bytes(at::kCPU);
    auto loss = torch::mse_loss(forward(x), y);
    outcome.saved = hsdp::memory_bytes(at::kCPU) - before;
    loss.backward();
    outcome.gathers = dtensor::collective_counts().all_gathers;
    outcome.tensors[name + "loss"] = loss.detach();
    outcome.tensors[name + "x"] = x.grad();
    outcome.tensors[name + "drawn after"] = torch::rand({3});
    for (auto& parameter : net.named_parameters()) {
      outcome.tensors[name + "gradient of " + parameter.key()] = whole(parameter.value().grad());
    }
    optimizer.step();
  }
  for (auto& parameter : net.named_parameters()) outcome.tensors[parameter.key()] = whole(parameter.value());
  for (auto& buffer : net.named_buffers()) outcome.tensors[buffer.key()] = buffer.value().clone();
  return outcome;
}

Outcome train(RankContext& context, Kind kind, Mode mode, std::optional<bool> reshard = std::nullopt) {
  torch::manual_seed(7);
  const bool by_hand = mode == Mode::by_hand || mode == Mode::plain_by_hand;
  const auto make = [&] { return Net(kind, 3, by_hand); };
  if (mode == Mode::plain || mode == Mode::plain_by_hand) {
    auto net = make();
    return train(*net, [&](auto& x) { return net->forward(x); });
  }
  auto net = hsdp::meta_init(make);
  hsdp::FullyShardOptions options{.mesh = context.environment().mesh(), .units = hsdp::each<Block>()};
  if (reshard) options.reshard_after_forward = *reshard;
  if (mode == Mode::per_unit) options.activation_checkpoint = hsdp::each<Block>();
  auto model = hsdp::fully_shard(net, options);
  model.materialize(context.environment().device());
  return train(*net, [&](auto& x) { return model->forward(x); });
}

void expect_same(const Outcome& one, const Outcome& other, const std::string& what) {
  ASSERT_EQ(one.tensors.size(), other.tensors.size()) << what;
  for (auto& [name, tensor] : one.tensors) {
    ASSERT_TRUE(torch::equal(tensor, other.tensors.at(name))) << what << ": " << name << "\n"
                                                              << tensor << "\n"
                                                              << other.tensors.at(name);
  }
}

class ActivationCheckpoint : public ::testing::TestWithParam<std::tuple<int, Kind>> {};

TEST_P(ActivationCheckpoint, TrainsBitForBitAsWithoutInLessMemory) {
  const auto& [ranks, kind] = GetParam();
  run_ranks(ranks, [kind = kind](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    hsdp::count_host_memory();
    const auto plain = train(context, kind, Mode::plain);
    const bool writes = kind == Kind::buffers || kind == Kind::batch_norm;
    if (!writes) {
      const auto plain_by_hand = train(context, kind, Mode::plain_by_hand);
      expect_same(plain_by_hand, plain, "plain module, by hand");
      EXPECT_LT(plain_by_hand.saved, plain.saved / 2);
    }
    for (std::optional<bool> reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
      const auto sharded = train(context, kind, Mode::sharded, reshard);
      expect_same(sharded, plain, "sharded");
      for (const auto mode : {Mode::by_hand, Mode::per_unit}) {
        // What a function writes by hand it writes twice.
        if (mode == Mode::by_hand && writes) continue;
        const auto outcome = train(context, kind, mode, reshard);
        const std::string what = mode == Mode::by_hand ? "by hand" : "per unit";
        expect_same(outcome, plain, what);
        // What a custom function saves itself stays.
        const bool keeps_some = mode == Mode::per_unit && kind == Kind::custom;
        EXPECT_LT(outcome.saved, keeps_some ? sharded.saved * 4 / 5 : sharded.saved / 2) << what;
        EXPECT_EQ(outcome.gathers, sharded.gathers) << what;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, ActivationCheckpoint,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::Values(Kind::mlp, Kind::attention, Kind::recurrent,
                                                              Kind::batch_norm, Kind::in_place, Kind::views,
                                                              Kind::raw_memory, Kind::buffers, Kind::custom,
                                                              Kind::without_grad)),
                         [](const auto& which) {
                           return kKinds.at(std::get<1>(which.param)) + "On" +
                                  std::to_string(std::get<0>(which.param)) + "Ranks";
                         });

}  // namespace activation_checkpoint_test

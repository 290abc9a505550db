// What a forward may do with its weights, each compared with the unsharded module: views, slices, casts, products and
// normalisations of weights, state kept beside them, kernels of one's own on raw memory, autocast, expert and low-rank
// layers, weights that another network makes.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hsdp/hsdp.h"
#include "tests/testing/habit.h"

namespace forward_habits_test {

using namespace testing_support;

/// A parity case of the net `Made` whose loss is the mean squared error of its forward.
template <class Net>
ParityCase<Net> case_of() {
  ParityCase<Net> c;
  c.make = [] { return Net(); };
  c.loss = [](typename Net::ContainedType& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  return c;
}

/// Query, key and value in one weight, used by slices of several kinds; one of them is never used whole.
struct PackedImpl : torch::nn::Module {
  PackedImpl() : out(register_module("out", torch::nn::Linear(6, 6))) {
    packed = register_parameter("packed", torch::randn({18, 6}) * 0.3);
    bias = register_parameter("bias", torch::zeros({18}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    using torch::indexing::Slice;
    auto q = torch::linear(x, packed.index({Slice(0, 6)}), bias.narrow(0, 0, 6));
    auto k = torch::linear(x, packed.slice(0, 6, 12), bias.slice(0, 6, 12));
    auto v = torch::linear(x, packed.split_with_sizes({12, 6})[1], bias.tensor_split(3)[2]);
    auto scores = torch::softmax(q.mm(k.t()) / 2.4, 1);
    return out(scores.mm(v) + x.mm(packed.unflatten(0, {3, 6}).select(0, 1)) + packed[17]);
  }
  torch::Tensor packed, bias;
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(Packed);

TEST_P(Habit, PackedWeightsInSlices) {
  auto c = case_of<Packed>();
  c.whole_batch_everywhere = true;  // Attention between rows.
  train(c);
}

TEST_P(Habit, WeightsTransposedReshapedPermutedAndExpanded) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto h = torch::tanh(in.x.mm(net.a->weight.t()) + net.a->bias.unsqueeze(0).expand({in.x.size(0), 7}));
    h = torch::tanh(torch::einsum("ni,oi->no", {h, net.b->weight}) + net.b->bias.view({1, 7}));
    h = h.matmul(net.c->weight.permute({1, 0}).contiguous().reshape({7, 6})) + net.c->bias.clone();
    return torch::mse_loss(h + net.bias.flip(0).roll(2), in.y) + net.b->weight.diagonal().pow(2).sum() * 0.01 +
           torch::trace(net.b->weight) * 0.01 + net.a->weight.flatten().dot(net.c->weight.t().reshape(-1)) * 0.01;
  };
  train(c);
}

TEST_P(Habit, WeightsCastDetachedAndMovedToTheInputsDevice) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto h = torch::tanh(torch::linear(in.x, net.a->weight.to(in.x.device()), net.a->bias.to(torch::kFloat64)));
    h = torch::tanh(torch::linear(h, net.b->weight.to(torch::kFloat32).to(h.dtype()), net.b->bias.type_as(h)));
    h = h.to(net.c->weight.dtype()) + torch::zeros_like(net.b->bias) + net.b->bias.new_ones({7}) +
        torch::linear(h, net.b->weight.detach()) + torch::empty_like(net.b->bias).fill_(0.5);
    return torch::mse_loss(torch::linear(h, net.c->weight, net.c->bias.to(in.x.options())), in.y);
  };
  c.loss_tolerance = c.parameter_tolerance = 1e-6;  // A float32 rounding lies in between.
  train(c);
}

TEST_P(Habit, WeightsChangedInPlaceThroughViews) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    {
      torch::NoGradGuard no_grad;
      net.a->weight.t().narrow(0, 1, 2).mul_(0.99);
      net.b->weight.flatten().index_fill_(0, torch::tensor({0, 5}), 0.25);
      net.c->weight[2].copy_(net.c->weight[3] * 0.5);
      net.b->weight.diagonal().clamp_(-0.1, 0.1);
      torch::nn::init::constant_(net.c->bias, 0.125);
      net.bias.index_put_({torch::indexing::Slice(1, 3)}, 0.5);
    }
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

TEST_P(Habit, WeightsNormalisedInForwardAndWrittenBack) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    {
      torch::NoGradGuard no_grad;
      net.b->weight.div_(net.b->weight.norm(2, 1, true).clamp_min(1e-6));
      net.a->weight.copy_(torch::nn::functional::normalize(net.a->weight));
      net.c->weight.data() =
          net.c->weight.data().renorm(2, 0, 0.5);  // Assigns a temporary: no effect, as without sharding.
    }
    return torch::mse_loss(net.forward(in.x), in.y);
  };
  train(c);
}

/// Power iteration in buffers, without gradients; the quotient with gradients.
struct SpectralImpl : torch::nn::Module {
  SpectralImpl()
      : in(register_module("in", torch::nn::Linear(6, 7))), out(register_module("out", torch::nn::Linear(7, 6))) {
    u = register_buffer(
        "u", torch::nn::functional::normalize(torch::randn({7}), torch::nn::functional::NormalizeFuncOptions().dim(0)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    namespace F = torch::nn::functional;
    torch::Tensor v;
    {
      torch::NoGradGuard no_grad;
      v = F::normalize(torch::mv(in->weight.t(), u), F::NormalizeFuncOptions().dim(0));
      u.copy_(F::normalize(torch::mv(in->weight, v), F::NormalizeFuncOptions().dim(0)));
    }
    auto sigma = torch::dot(u.clone(), torch::mv(in->weight, v));
    return out(torch::tanh(torch::linear(x, in->weight / sigma, in->bias)));
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::Tensor u;
};
TORCH_MODULE(Spectral);

TEST_P(Habit, SpectralNorm) { train(case_of<Spectral>()); }

/// Direction and magnitude apart; a mask that prunes; a low-rank correction of a frozen weight.
struct ReparametrisedImpl : torch::nn::Module {
  ReparametrisedImpl() : base(register_module("base", torch::nn::Linear(6, 6))) {
    direction = register_parameter("direction", torch::randn({6, 6}));
    magnitude = register_parameter("magnitude", torch::rand({6, 1}));
    down = register_parameter("down", torch::randn({2, 6}) * 0.1);
    up = register_parameter("up", torch::zeros({6, 2}));
    mask = register_buffer("mask", torch::ones({6, 6}).tril());
    base->weight.set_requires_grad(false);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = torch::tanh(x.matmul((magnitude * direction / direction.norm(2, 1, true)).t()));
    h = h + torch::linear(h, base->weight * mask.to(h.device()), base->bias);
    return h + torch::linear(x, up.mm(down));
  }
  torch::nn::Linear base{nullptr};
  torch::Tensor direction, magnitude, down, up, mask;
};
TORCH_MODULE(Reparametrised);

TEST_P(Habit, WeightNormPruningMasksAndLowRankCorrections) {
  auto c = case_of<Reparametrised>();
  c.loss = [](ReparametrisedImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    return torch::mse_loss(net.forward(in.x.set_requires_grad(true)), in.y);
  };
  train(c);
}

/// x W^T by a loop of its own over raw memory, whose backward reads the weight the same way.
struct LoopLinear : torch::autograd::Function<LoopLinear> {
  static torch::Tensor product(const torch::Tensor& x, const torch::Tensor& w, bool transposed) {
    const auto rows = x.size(0), inner = x.size(1), columns = w.size(transposed ? 0 : 1), stride = w.size(1);
    auto y = torch::zeros({rows, columns}, x.options());
    const double *px = x.data_ptr<double>(), *pw = w.data_ptr<double>();
    double* py = y.data_ptr<double>();
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < inner; ++k) {
        for (int64_t j = 0; j < columns; ++j) {
          py[i * columns + j] += px[i * inner + k] * (transposed ? pw[j * stride + k] : pw[k * stride + j]);
        }
      }
    }
    return y;
  }
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, torch::Tensor w) {
    context->save_for_backward({x, w});
    return product(x.contiguous(), w, true);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto saved = context->get_saved_variables();
    auto gradient = gradients[0].contiguous();
    return {product(gradient, saved[1], false), product(gradient.t().contiguous(), saved[0].contiguous(), false)};
  }
};

TEST_P(Habit, KernelsOfOnesOwnOnRawWeights) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto h = torch::tanh(LoopLinear::apply(in.x, net.a->weight));
    return torch::mse_loss(LoopLinear::apply(torch::tanh(net.b(h)), net.c->weight), in.y);
  };
  train(c);
}

/// Keeps the weight out of the saved tensors: a member of the context's own, read again in backward.
struct Scaled : torch::autograd::Function<Scaled> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, torch::Tensor w) {
    context->saved_data["x"] = x;
    context->saved_data["w"] = w;
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto x = context->saved_data["x"].toTensor(), w = context->saved_data["w"].toTensor();
    return {gradients[0] * w, (gradients[0] * x).sum(0)};
  }
};

/// No tensor kept at all, several outputs, and one input without a gradient.
struct SignAndShift : torch::autograd::Function<SignAndShift> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext*, torch::Tensor x, torch::Tensor w) {
    return {x + w, w.sign()};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], gradients[0].sum(0) + gradients[1] * 0.5};
  }
};

TEST_P(Habit, FunctionsThatKeepParametersByOtherWaysOrNotAtAll) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto h = Scaled::apply(torch::tanh(net.a(in.x)), net.b->bias);
    auto outputs = SignAndShift::apply(net.c(torch::tanh(net.b(h))), net.bias);
    return torch::mse_loss(outputs[0] * (1 + 0.1 * outputs[1]), in.y);
  };
  train(c);
}

TEST_P(Habit, Autocast) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    auto h = net.a(in.x.to(torch::kFloat32));
    EXPECT_EQ(h.scalar_type(), torch::kBFloat16) << "autocast is in effect";
    auto out = net.c(torch::tanh(net.b(torch::tanh(h)))) + net.bias;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(out.scalar_type(), torch::kFloat32) << "bfloat16 product plus a float32 parameter";
    return torch::mse_loss(out.to(torch::kFloat32), in.y.to(torch::kFloat32));
  };
  c.make = [] {
    Three net;
    net->to(torch::kFloat32);
    return net;
  };
  // The same products in bfloat16; rows are summed in another order.
  c.loss_tolerance = 2e-2;
  c.parameter_tolerance = 2e-2;
  train(c);
}

/// Experts of which a router picks by the batch's first row; all ranks see the whole batch, so they agree.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() : router(register_module("router", torch::nn::Linear(6, 3))) {
    for (int i = 0; i < 3; ++i) experts->push_back(torch::nn::Linear(6, 6));
    register_module("experts", experts);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto gate = torch::softmax(router(x), 1);
    const auto chosen = gate[0].argmax().item<int64_t>();
    return experts[chosen]->as<torch::nn::Linear>()->forward(x) * gate.select(1, chosen).unsqueeze(1);
  }
  torch::nn::Linear router{nullptr};
  torch::nn::ModuleList experts;
};
TORCH_MODULE(Experts);

TEST_P(Habit, ExpertsChosenByTheBatch) {
  auto c = case_of<Experts>();
  c.whole_batch_everywhere = true;
  train(c);
}

/// One network's output is another's weight; a lookup by advanced indexing; a parameter that is returned and used
/// again.
struct HyperImpl : torch::nn::Module {
  HyperImpl() : maker(register_module("maker", torch::nn::Linear(4, 36))) {
    code = register_parameter("code", torch::randn({4}));
    table = register_parameter("table", torch::randn({5, 6}) * 0.2);
  }
  const torch::Tensor& shared_table() const { return table; }
  torch::Tensor forward(const torch::Tensor& x) {
    auto weight = maker(code).view({6, 6});
    auto picks = torch::arange(x.size(0)).remainder(5);
    auto h = torch::tanh(x.mm(weight)) + table.index({picks}) + table.index_select(0, picks);
    return h + torch::embedding(shared_table(), picks) + torch::where(table.narrow(0, 0, 1) > 0, table[1], table[2]) +
           table.gather(1, torch::zeros({5, 1}, torch::kLong)).sum();
  }
  torch::nn::Linear maker{nullptr};
  torch::Tensor code, table;
};
TORCH_MODULE(Hyper);

TEST_P(Habit, WeightsMadeByNetworksAndTablesLookedUp) {
  auto c = case_of<Hyper>();
  c.rows = 60;
  c.loss = [](HyperImpl& net, int64_t step, int64_t begin, int64_t end) {
    auto x = rows_of(step, 1, {60, 6}, begin, end), y = rows_of(step, 2, {60, 6}, begin, end);
    return torch::mse_loss(net.forward(x), y);
  };
  c.whole_batch_everywhere = true;  // Picks by position.
  train(c);
}

TEST_P(Habit, L2TermInsideTheForward) {
  auto c = three();
  c.loss = [](ThreeImpl& net, int64_t step, int64_t begin, int64_t end) {
    Inputs in(step, begin, end);
    auto loss = torch::mse_loss(net.forward(in.x), in.y);
    for (auto& parameter : net.parameters())
      loss = loss + 0.01 * parameter.pow(2).sum() + 0.001 * parameter.abs().sum();
    return loss;
  };
  train(c);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Habit, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace forward_habits_test

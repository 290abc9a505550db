// Trains a module of its own, sharded, beside the same module unsharded, and ends with 0 when both have the same
// numbers.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>

#include "hsdp/hsdp.h"

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t inputs, int64_t width)
      : hidden(register_module("hidden", torch::nn::Linear(inputs, width))),
        scale(register_parameter("scale", torch::rand({width}) + 0.5)),
        last(register_module("last", torch::nn::Linear(width, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return last->forward(torch::tanh(hidden->forward(x)) * scale); }
  torch::nn::Linear hidden;
  torch::Tensor scale;
  torch::nn::Linear last;
};
TORCH_MODULE(Net);

int main() try {
  const auto env = hsdp::init({.backend = "gloo"});
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kDouble));
  torch::manual_seed(5);
  auto net = hsdp::meta_init([] { return Net(3, 7); });
  auto model = hsdp::fully_shard(net, {.units = hsdp::each<torch::nn::Linear>()});
  model.materialize(env.device());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  torch::manual_seed(5);
  Net plain(3, 7);
  torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  const auto x = torch::linspace(-1, 1, 12).reshape({4, 3});
  const auto y = x.sum(1, /*keepdim=*/true);
  double first = 0, last = 0, worst = 0;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    optimizer.step();
    plain_optimizer.zero_grad();
    auto plain_loss = torch::mse_loss(plain->forward(x), y);
    plain_loss.backward();
    plain_optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
    worst = std::max(worst, std::abs(last - plain_loss.item<double>()));
  }
  const auto expected = plain->parameters();
  const auto parameters = net->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    worst = std::max(worst, (hsdp::unsharded(parameters.at(i)) - expected[i]).abs().max().item<double>());
  }
  hsdp::shutdown();
  std::printf("loss %.6f to %.6f, largest difference from the unsharded module %.1e\n", first, last, worst);
  return worst < 1e-12 && last < first ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}

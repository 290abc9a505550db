// A training program in which rank 1 does something that the others do not: the first argument says what. For
// unlike_ranks_test, which looks at how the processes end.
#include <torch/torch.h>

#include <chrono>
#include <iostream>
#include <limits>
#include <stdexcept>
#include <string>

#include "hsdp/hsdp.h"

namespace {

struct TowerImpl : torch::nn::Module {
  TowerImpl() {
    for (int64_t i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(8, 8 + i));
    for (int64_t i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(8 + i, 8));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int64_t i = 0; i < 4; ++i) {
      if (i == throw_at) throw std::runtime_error("no more");
      x = torch::tanh(layers->ptr<torch::nn::LinearImpl>(static_cast<size_t>(i))->forward(x));
      x = layers->ptr<torch::nn::LinearImpl>(static_cast<size_t>(4 + i))->forward(x);
      if (throw_in_backward) {
        x.register_hook([](const torch::Tensor&) { throw std::runtime_error("no more"); });
      }
    }
    return x;
  }
  torch::nn::ModuleList layers;
  int64_t throw_at = -1;
  bool throw_in_backward = false;
};
TORCH_MODULE(Tower);

int train(const hsdp::Environment& env, const std::string& habit) {
  torch::manual_seed(0);
  Tower net = hsdp::meta_init([] { return Tower(); });
  auto model = hsdp::fully_shard(net, {.units = hsdp::each<torch::nn::Linear>()});
  model.materialize(env.device());
  torch::optim::AdamW optimizer(model->parameters());
  const bool unlike = env.rank() == 1;
  const int64_t steps = habit == "train" ? std::numeric_limits<int64_t>::max() : 5;
  for (int64_t step = 0; step < steps; ++step) {
    if (unlike && step == 3) {
      if (habit == "return") return 0;
      if (habit == "return_in_forward") {
        hsdp::ForwardScope scope(model.core());
        (void)net->layers->ptr<torch::nn::LinearImpl>(0)->forward(torch::ones({2, 8}));
        return 0;  // with the gather of the next unit in flight
      }
      if (habit == "throw") net->throw_at = 2;
      if (habit == "throw_in_backward") net->throw_in_backward = true;
    }
    optimizer.zero_grad();
    auto loss = model->forward(torch::ones({2, 8})).pow(2).mean();
    loss.backward();
    hsdp::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    if (step < 3) std::cout << "step " + std::to_string(step) + "\n" << std::flush;
  }
  if (habit != "no_shutdown") hsdp::shutdown();
  return 0;
}

}  // namespace

int main(int, char** arguments) {
  const std::string habit = arguments[1];
  const auto env = hsdp::init({.backend = "gloo", .timeout = std::chrono::seconds(400)});
  if (habit == "uncaught" && env.rank() == 1) return train(env, "throw");
  try {
    return train(env, habit);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}

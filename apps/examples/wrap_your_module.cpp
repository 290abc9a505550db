// Trains a user's own torch module, fully sharded; the module knows nothing of it. Alone or on several ranks:
//   torchrun --no-python --standalone --nproc-per-node 2 build/release/apps/examples/wrap_your_module

#include <torch/torch.h>

#include <iostream>

#include "hsdp/hsdp.h"

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : expand(register_module("expand", torch::nn::Linear(width, 4 * width))),
        shrink(register_module("shrink", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + shrink->forward(torch::gelu(expand->forward(x))); }
  torch::nn::Linear expand, shrink;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t inputs, int64_t width, int64_t depth)
      : first(register_module("first", torch::nn::Linear(inputs, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        last(register_module("last", torch::nn::Linear(width, 1))) {
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(width));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first->forward(x);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return last->forward(x);
  }
  torch::nn::Linear first;
  torch::nn::ModuleList blocks;
  torch::nn::Linear last;
};
TORCH_MODULE(Net);

// [readme]
int main() {
  auto env = hsdp::init();
  torch::manual_seed(0);  // the same on every rank
  auto net = hsdp::meta_init([] { return Net(8, 32, 4); });
  auto model = hsdp::fully_shard(net, {.units = hsdp::each<Block>()});
  model.materialize(env.device());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));

  for (int step = 1; step <= 50; ++step) {
    auto x = torch::randn({96 / env.world_size(), 8}).to(env.device());  // rows of this rank alone
    auto y = torch::sin(x).sum(1, /*keepdim=*/true);
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    hsdp::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    if (env.rank() == 0 && step % 10 == 0) std::cout << "step " << step << " loss " << loss.item<double>() << std::endl;
  }
  hsdp::shutdown();
}
// [/readme]

// Trains on a data set that torch::data reads: each rank sees its own part, shuffled anew in every epoch. Alone, or:
//   torchrun --no-python --standalone --nproc-per-node 2 build/release/apps/examples/distributed_sampler

#include <torch/torch.h>

#include <iostream>
#include <sstream>

#include "hsdp/hsdp.h"

/// 250 points of a sine.
struct Points : torch::data::datasets::Dataset<Points> {
  torch::data::Example<> get(size_t index) override {
    const auto x = torch::full({1}, 0.02f * static_cast<float>(index));
    return {x, torch::sin(x)};
  }
  std::optional<size_t> size() const override { return 250; }
};

int main() {
  auto env = hsdp::init();
  torch::manual_seed(0);  // the same on every rank
  auto net = hsdp::meta_init([] {
    using namespace torch::nn;
    return Sequential(Linear(1, 32), Tanh(), Dropout(0.1), Linear(32, 1));
  });
  auto model = hsdp::fully_shard(net);
  model.materialize(env.device());  // from here on the ranks drop other entries
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));

  const auto data = Points().map(torch::data::transforms::Stack<>());
  // Duplicates fill the parts up to one length. Ranks of unequal length would wait for each other in vain.
  torch::data::samplers::DistributedRandomSampler sampler(*data.size(), env.world_size(), env.rank(),
                                                          /*allow_duplicates=*/true);
  for (size_t epoch = 1; epoch <= 3; ++epoch) {
    sampler.set_epoch(epoch);  // without it every epoch has the order of the first
    // A loader keeps a copy of the sampler, which no later set_epoch reaches: hence one loader an epoch.
    auto loader = torch::data::make_data_loader(data, sampler, /*batch_size=*/25);
    std::ostringstream order;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      torch::mse_loss(model->forward(batch.data.to(env.device())), batch.target.to(env.device())).backward();
      optimizer.step();
      const auto points = (batch.data * 50).round().to(torch::kLong);
      for (int64_t i = 0; i < points.numel(); ++i) order << " " << points[i].item<int64_t>();
    }
    std::cout << "epoch " + std::to_string(epoch) + " rank " + std::to_string(env.rank()) + ":" + order.str() + "\n";
  }
  hsdp::shutdown();
}

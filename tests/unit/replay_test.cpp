#include "hsdp/construction/replay.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "hsdp/construction/tape.h"
#include "hsdp/meta_init.h"

namespace replay_test {

using torch::Tensor;

constexpr int64_t kSeed = 7;

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(100, 100));
    second = register_module("second", torch::nn::Linear(100, 3));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

TEST(Replay, GivesTheSameEveryTime) {
  torch::manual_seed(kSeed);
  auto net = hsdp::meta_init([] { return std::make_shared<Net>(); });
  const auto tape = hsdp::tape_of(net->first->weight);
  std::vector<hsdp::ValueId> ids;
  for (auto& p : net->parameters()) ids.push_back(hsdp::value_id_of(p));
  std::map<hsdp::ValueId, Tensor> once, again;
  hsdp::replay(*tape, ids, [&](hsdp::ValueId id, const Tensor& full) { once[id] = full; });
  for (auto& [id, full] : once) {
    const auto given = full;
    full = given.clone();
    given.zero_();  // the receiver owns what it got
  }
  hsdp::replay(*tape, ids, [&](hsdp::ValueId id, const Tensor& full) { again[id] = full; });
  ASSERT_EQ(once.size(), 4u);
  for (auto& [id, full] : once) EXPECT_TRUE(torch::equal(full, again.at(id)));
}

TEST(Replay, ConstantsSurviveWhatTheReceiverDoes) {
  auto t = hsdp::meta_init([] { return torch::arange(6, torch::kFloat); });
  const std::vector<hsdp::ValueId> ids{hsdp::value_id_of(t)};
  for (int i = 0; i < 2; ++i) {
    hsdp::replay(*hsdp::tape_of(t), ids, [&](hsdp::ValueId, const Tensor& full) {
      EXPECT_TRUE(torch::equal(full, torch::arange(6, torch::kFloat)));
      full.zero_();
    });
  }
}

TEST(Replay, HandsEachValueOverOnceAndOnlyTheWanted) {
  auto net = hsdp::meta_init([] { return std::make_shared<Net>(); });
  const auto wanted = hsdp::value_id_of(net->second->weight);
  const std::vector<hsdp::ValueId> ids{wanted, wanted};
  int calls = 0;
  torch::manual_seed(1);
  hsdp::replay(*hsdp::tape_of(net->first->weight), ids, [&](hsdp::ValueId id, const Tensor& full) {
    EXPECT_EQ(id, wanted);
    EXPECT_EQ(full.sizes(), (std::vector<int64_t>{3, 100}));
    ++calls;
  });
  EXPECT_EQ(calls, 1);
}

TEST(Replay, AFailureLeavesTheGeneratorAlone) {
  auto net = hsdp::meta_init([] { return std::make_shared<Net>(); });
  const std::vector<hsdp::ValueId> ids{hsdp::value_id_of(net->first->weight)};
  torch::manual_seed(5);
  torch::rand({2});
  const auto before = at::globalContext().defaultGenerator(at::kCPU).get_state();
  EXPECT_THROW(hsdp::replay(*hsdp::tape_of(net->first->weight), ids,
                            [](hsdp::ValueId, const Tensor&) { throw std::runtime_error("no room"); }),
               std::runtime_error);
  EXPECT_TRUE(torch::equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), before));
}

size_t bytes_in_use() {
  const auto info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

TEST(Replay, KeepsNoMoreThanIsStillNeeded) {
  // Each layer is initialised twice, the second time by apply() at the end, as large models are.
  constexpr int64_t kWidth = 512;
  constexpr size_t kLayerBytes = kWidth * kWidth * sizeof(float);
  struct Deep : torch::nn::Module {
    Deep() {
      for (int i = 0; i < 8; ++i) {
        layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
      }
      register_module("layers", layers);
      apply([](torch::nn::Module& m) {
        if (auto* linear = m.as<torch::nn::Linear>()) torch::nn::init::normal_(linear->weight);
      });
    }
    torch::nn::ModuleList layers;
  };
  auto net = hsdp::meta_init([] { return std::make_shared<Deep>(); });
  std::vector<hsdp::ValueId> ids;
  for (auto& p : net->parameters()) ids.push_back(hsdp::value_id_of(p));
  const auto before = bytes_in_use();
  int calls = 0;
  hsdp::replay(*hsdp::tape_of(net->parameters()[0]), ids, [&](hsdp::ValueId, const Tensor&) {
    EXPECT_LT(bytes_in_use(), before + 2 * kLayerBytes) << "at call " << calls;
    ++calls;
  });
  EXPECT_EQ(calls, 8);
}

TEST(Replay, ViewsOfOneMemoryComeTogether) {
  auto parts = hsdp::meta_init([] {
    auto whole = torch::randn({90, 60}).chunk(3);
    whole.push_back(torch::rand({5}));
    return whole;
  });
  std::vector<hsdp::ValueId> ids;
  for (int i : {0, 3, 2}) ids.push_back(hsdp::value_id_of(parts[i]));
  std::map<hsdp::ValueId, Tensor> full;
  hsdp::replay(*hsdp::tape_of(parts[0]), ids, [&](hsdp::ValueId id, const Tensor& value) { full[id] = value; });
  EXPECT_TRUE(full.at(ids[0]).is_alias_of(full.at(ids[2])));
  EXPECT_FALSE(full.at(ids[0]).is_alias_of(full.at(ids[1])));
}

}  // namespace replay_test

#include "tests/testing/construction.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "dtensor/dtensor_impl.h"
#include "hsdp/meta_init.h"
#include "tests/testing/materialize.h"

namespace testing_support {
namespace {

using torch::Tensor;

constexpr int64_t kSeed = 7;

struct Made : Listed {
  explicit Made(const std::function<std::vector<Tensor>()>& make) {
    all = make();
    for (size_t i = 0; i < all.size(); ++i) {
      if (i == 0 && all[i].is_floating_point()) {
        register_parameter("t0", all[i]);
      } else if (i % 2 == 1) {
        register_buffer("t" + std::to_string(i), all[i]);
      }
    }
  }
  std::vector<Tensor> members() const override { return all; }
  std::vector<Tensor> all;
};

void expect_same(const std::string& name, const Tensor& plain, const Tensor& replayed) {
  SCOPED_TRACE(name);
  ASSERT_EQ(plain.defined(), replayed.defined());
  if (!plain.defined()) return;
  ASSERT_EQ(plain.sizes(), replayed.sizes());
  EXPECT_EQ(plain.strides(), replayed.strides());
  EXPECT_EQ(plain.storage_offset(), replayed.storage_offset());
  ASSERT_EQ(plain.dtype(), replayed.dtype());
  EXPECT_EQ(plain.device(), replayed.device());
  // Of a view taken before its base became a parameter, plain construction says that it requires grad, too.
  if (name.starts_with("parameter")) {
    EXPECT_EQ(plain.requires_grad(), replayed.requires_grad());
  }
  EXPECT_TRUE(replayed.is_leaf());
  EXPECT_EQ(dtensor::dtensor_impl(replayed), nullptr) << "still deferred";
  EXPECT_TRUE(torch::equal(plain.detach(), replayed.detach())) << plain.flatten().slice(0, 0, 8) << "\n"
                                                               << replayed.flatten().slice(0, 0, 8);
}

// Everything that can be reached, under names.
std::map<std::string, Tensor> everything(const Listed& module) {
  std::map<std::string, Tensor> all;
  for (auto& entry : module.named_parameters()) all["parameter " + entry.key()] = entry.value();
  for (auto& entry : module.named_buffers()) all["buffer " + entry.key()] = entry.value();
  const auto members = module.members();
  for (size_t i = 0; i < members.size(); ++i) all["member " + std::to_string(i)] = members[i];
  return all;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Pattern& pattern) { return out << pattern.name; }

Pattern tensors(std::string name, std::function<std::vector<Tensor>()> make) {
  return {std::move(name), [make] { return std::make_shared<Made>(make); }};
}

void expect_replay_matches(const std::function<std::shared_ptr<Listed>()>& factory) {
  torch::manual_seed(kSeed);
  const auto plain = factory();
  const auto plain_next = torch::rand({5});

  torch::manual_seed(kSeed);
  const auto deferred = hsdp::meta_init(factory);
  for (auto& [name, tensor] : everything(*deferred)) {
    EXPECT_TRUE(!tensor.defined() || tensor.is_meta()) << name;
  }
  const auto tensors = everything(*deferred);
  const auto any = std::find_if(tensors.begin(), tensors.end(), [](auto& entry) { return entry.second.defined(); });
  ASSERT_NE(any, tensors.end());

  materialize_whole(any->second);
  EXPECT_TRUE(torch::equal(torch::rand({5}), plain_next)) << "the generator does not go on as after plain construction";
  const auto expected = everything(*plain);
  ASSERT_EQ(expected.size(), tensors.size());
  for (auto& [name, tensor] : expected) expect_same(name, tensor, tensors.at(name));
}

}  // namespace testing_support

// fully_shard without a mesh: all ranks of the environment that the program made, whatever its options were.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hsdp/hsdp.h"
#include "tests/testing/modules.h"
#include "tests/testing/multi_process.h"

namespace environment_default_test {

using namespace testing_support;

TEST(DefaultMesh, IsThatOfTheCurrentEnvironment) {
  run_ranks(2, [](RankContext& context) {
    torch::manual_seed(1);
    auto net = hsdp::meta_init([] { return OddMlp(); });
    auto model = hsdp::fully_shard(net, {.units = hsdp::each<torch::nn::Linear>()});
    EXPECT_EQ(model.core()->mesh(), context.environment().mesh());
    model.materialize(context.environment().device());
    EXPECT_EQ(model->forward(torch::ones({3, 5})).sizes(), (std::vector<int64_t>{3, 2}));
  });
}

TEST(Seeds, OfRanksThatNeverSeededAreEqual) {
  run_ranks(3, [](RankContext& context) {
    auto mine = torch::randint(0, 1 << 30, {4}, torch::kLong);
    auto all = torch::empty({12}, torch::kLong);
    context.environment().communicator()->all_gather(all, mine, {"all_gather", "test"})->wait();
    EXPECT_TRUE(torch::equal(all.narrow(0, 4, 4), all.narrow(0, 0, 4)));
    EXPECT_TRUE(torch::equal(all.narrow(0, 8, 4), all.narrow(0, 0, 4)));
  });
}

}  // namespace environment_default_test

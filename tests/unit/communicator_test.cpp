#include "dtensor/communicator.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/error.h"
#include "tests/testing/expect.h"

namespace communicator_test {

using namespace dtensor;
using testing_support::expect_error;

TEST(SelfCommunicator, IsAGroupOfOne) {
  const auto self = make_self_communicator();
  EXPECT_EQ(self->rank(), 0);
  EXPECT_EQ(self->size(), 1);
  EXPECT_EQ(self->describe(), "self, rank 0 of 1");
  EXPECT_FALSE(self->prefers_groups());
  self->barrier({"barrier"});
  self->start_group();
  self->end_group()->wait();
}

TEST(SelfCommunicator, GatherAndReduceCopy) {
  const auto self = make_self_communicator();
  const auto input = torch::arange(6, torch::kFloat).view({2, 3});
  auto output = torch::zeros({6});
  self->all_gather(output, input, {"all_gather"})->wait();
  EXPECT_TRUE(torch::equal(output, torch::arange(6, torch::kFloat)));
  output.zero_();
  const auto work = self->reduce_scatter(output, input, {"reduce_scatter"});
  work->wait();
  EXPECT_TRUE(work->is_completed());
  EXPECT_TRUE(torch::equal(output, torch::arange(6, torch::kFloat)));
}

TEST(SelfCommunicator, SharedMemoryAndOwnTensorsStayAsTheyAre) {
  const auto self = make_self_communicator();
  const auto tensor = torch::arange(4, torch::kFloat);
  self->all_gather(tensor, tensor, {"all_gather"})->wait();
  self->all_reduce(tensor, ReduceOp::sum, {"all_reduce"})->wait();
  self->broadcast(tensor, 0, {"broadcast"})->wait();
  EXPECT_TRUE(torch::equal(tensor, torch::arange(4, torch::kFloat)));
  EXPECT_EQ(tensor._version(), 0u);
}

TEST(SelfCommunicator, WritesUnseenByAutograd) {
  const auto self = make_self_communicator();
  auto parameter = torch::zeros({3}, torch::requires_grad());
  self->all_gather(parameter, torch::ones({3}), {"all_gather"})->wait();
  EXPECT_TRUE(torch::equal(parameter.detach(), torch::ones({3})));
  EXPECT_EQ(parameter._version(), 0u);
  EXPECT_TRUE(parameter.is_leaf());
}

TEST(SelfCommunicator, IsNotCounted) {
  reset_collective_counts();
  const auto self = make_self_communicator();
  self->all_gather(torch::zeros({3}), torch::ones({3}), {"all_gather"})->wait();
  self->barrier({"barrier"});
  EXPECT_EQ(collective_counts().all_gathers, 0);
  EXPECT_EQ(collective_counts().barriers, 0);
}

TEST(SelfCommunicator, RefusesWhatDoesNotFit) {
  const auto self = make_self_communicator();
  expect_error<ValueError>([&] { self->all_gather(torch::zeros({4}), torch::zeros({3}), {"all_gather"}); },
                           "[all_gather] the full tensor has 4 elements and the shard 3, expected 3");
  expect_error<ValueError>(
      [&] { self->reduce_scatter(torch::zeros({3}), torch::zeros({3}, torch::kDouble), {"reduce_scatter"}); },
      "[reduce_scatter] the full tensor is Double and the shard Float, expected one dtype");
  expect_error<ValueError>(
      [&] {
        self->all_gather(torch::zeros({6}), torch::zeros({2, 3}).t(), {"all_gather"});
      },
      "the shard of sizes [3, 2] and strides [1, 3] is not contiguous", "call contiguous()");
  expect_error<ValueError>([&] { self->broadcast(torch::zeros({3}), 1, {"broadcast"}); }, "[broadcast] root 1");
}

}  // namespace communicator_test

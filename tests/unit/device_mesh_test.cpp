#include "dtensor/device_mesh.h"

#include <gtest/gtest.h>

#include "dtensor/error.h"
#include "tests/testing/expect.h"
#include "tests/testing/fake_communicator.h"

namespace {

using namespace dtensor;
using testing_support::expect_error;
using testing_support::FakeCommunicator;

std::shared_ptr<const DeviceMesh> mesh_of(std::vector<int64_t> sizes, std::vector<std::string> names, int64_t rank) {
  return DeviceMesh::create(c10::kCPU, std::move(sizes), std::move(names), rank);
}

TEST(DeviceMesh, OneAxis) {
  const auto mesh = mesh_of({4}, {"shard"}, 2);
  EXPECT_EQ(mesh->ndim(), 1);
  EXPECT_EQ(mesh->size(), 4);
  EXPECT_EQ(mesh->size(0), 4);
  EXPECT_EQ(mesh->rank(), 2);
  EXPECT_EQ(mesh->coordinate(), (std::vector<int64_t>{2}));
  EXPECT_EQ(mesh->axis("shard"), 0);
  EXPECT_EQ(mesh->device_type(), c10::kCPU);
  EXPECT_EQ(mesh->to_string(), "mesh(cpu, shard=4)");
}

TEST(DeviceMesh, RanksFillTheAxesInRowMajorOrder) {
  for (int64_t rank = 0; rank < 24; ++rank) {
    const auto mesh = mesh_of({2, 3, 4}, {"a", "b", "c"}, rank);
    EXPECT_EQ(mesh->coordinate(), (std::vector<int64_t>{rank / 12, rank / 4 % 3, rank % 4}));
    EXPECT_EQ(mesh->coordinate_of(23), (std::vector<int64_t>{1, 2, 3}));
    EXPECT_EQ(mesh->size(), 24);
  }
  EXPECT_EQ(mesh_of({2, 4}, {"replicate", "shard"}, 0)->to_string(), "mesh(cpu, replicate=2, shard=4)");
}

// Rank 5 of {2, 4} sits at (1, 1): its axis-0 group is {1, 5}, its axis-1 group {4, 5, 6, 7}.
TEST(DeviceMesh, AsksForTheGroupOfEachLongAxisInOrder) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> asked;
  const auto mesh = DeviceMesh::create(c10::kCPU, {2, 1, 4}, {"replicate", "one", "shard"}, 5,
                                       [&](const std::vector<int64_t>& ranks, const std::string& axis) {
                                         asked.emplace_back(axis, ranks);
                                         return std::make_shared<FakeCommunicator>(1, ranks.size());
                                       });
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_EQ(asked[0].first, "replicate");
  EXPECT_EQ(asked[0].second, (std::vector<int64_t>{1, 5}));
  EXPECT_EQ(asked[1].first, "shard");
  EXPECT_EQ(asked[1].second, (std::vector<int64_t>{4, 5, 6, 7}));
  EXPECT_EQ(mesh->communicator(0).size(), 2);
  EXPECT_EQ(mesh->communicator(1).size(), 1);
  EXPECT_EQ(mesh->communicator(2).size(), 4);
}

TEST(DeviceMesh, WithoutGroupsOnlyAxesOfOneRankCommunicate) {
  const auto mesh = mesh_of({2, 1}, {"shard", "one"}, 0);
  EXPECT_EQ(mesh->communicator(1).size(), 1);
  expect_error<StateError>([&] { mesh->communicator(0); },
                           "[DeviceMesh::communicator] axis 'shard' of "
                           "mesh(cpu, shard=2, one=1) has no group of ranks",
                           "hsdp::init()");
}

TEST(DeviceMesh, FromCommunicator) {
  const auto communicator = std::make_shared<FakeCommunicator>(1, 3);
  const auto mesh = DeviceMesh::from_communicator(c10::kCUDA, communicator, "shard");
  EXPECT_EQ(mesh->to_string(), "mesh(cuda, shard=3)");
  EXPECT_EQ(mesh->rank(), 1);
  EXPECT_EQ(mesh->shared_communicator(0), communicator);
}

TEST(DeviceMesh, RefusesWhatDoesNotFit) {
  expect_error<ValueError>([] { mesh_of({}, {}, 0); }, "[DeviceMesh] no axes");
  expect_error<ValueError>([] { mesh_of({2, 2}, {"a"}, 0); }, "1 names for 2 axes");
  expect_error<ValueError>([] { mesh_of({2, 2}, {"a", ""}, 0); }, "axis 1 has an empty name");
  expect_error<ValueError>([] { mesh_of({2, 2}, {"a", "a"}, 0); }, "axis name 'a' occurs twice");
  expect_error<ValueError>([] { mesh_of({2, 0}, {"a", "b"}, 0); }, "axis 'b' has size 0", "positive");
  expect_error<ValueError>([] { mesh_of({-2}, {"a"}, 0); }, "axis 'a' has size -2");
  expect_error<ValueError>([] { mesh_of({int64_t{1} << 40, int64_t{1} << 40}, {"a", "b"}, 0); }, "more ranks than");
  expect_error<ValueError>([] { mesh_of({2, 3}, {"a", "b"}, 6); }, "rank 6 is outside a mesh of 6 ranks", "0 to 5");
  expect_error<ValueError>([] { mesh_of({2}, {"a"}, -1); }, "rank -1 is outside");
}

TEST(DeviceMesh, RefusesQuestionsOutside) {
  const auto mesh = mesh_of({2, 3}, {"replicate", "shard"}, 0);
  expect_error<ValueError>([&] { mesh->axis("tensor"); }, "no axis 'tensor'", "one of: replicate, shard");
  expect_error<ValueError>([&] { mesh->size(2); }, "axis 2 is outside mesh(cpu, replicate=2, shard=3)", "0 to 1");
  expect_error<ValueError>([&] { mesh->communicator(-1); }, "axis -1 is outside");
  expect_error<ValueError>([&] { mesh->coordinate_of(6); }, "rank 6 is outside", "0 to 5");
}

}  // namespace

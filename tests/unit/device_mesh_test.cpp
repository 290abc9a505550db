#include "dtensor/device_mesh.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "dtensor/error.h"
#include "tests/testing/expect.h"
#include "tests/testing/fake_communicator.h"

namespace device_mesh_test {

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

// Plays the groups of a mesh and notes which were asked for.
struct Groups {
  std::vector<std::pair<std::string, std::vector<int64_t>>> asked;
  GroupFactory factory(int64_t me) {
    return [this, me](const std::vector<int64_t>& ranks, const std::string& axis) {
      asked.emplace_back(axis, ranks);
      const auto index = std::find(ranks.begin(), ranks.end(), me) - ranks.begin();
      return std::make_shared<FakeCommunicator>(index, static_cast<int64_t>(ranks.size()));
    };
  }
};

// Rank 11 of {2, 2, 4} sits at (1, 0, 3), and the ranks along its last axis are 8 to 11.
TEST(SubCommunicator, IsThatOfTheBlockOfThisRank) {
  Groups groups;
  const auto mesh = DeviceMesh::create(c10::kCPU, {2, 2, 4}, {"a", "b", "c"}, 11, groups.factory(11));
  ASSERT_EQ(mesh->coordinate(), (std::vector<int64_t>{1, 0, 3}));
  groups.asked.clear();
  const auto pair = mesh->sub_communicator(2, 2);
  ASSERT_EQ(groups.asked.size(), 1u);
  EXPECT_EQ(groups.asked[0].first, "c/2");
  EXPECT_EQ(groups.asked[0].second, (std::vector<int64_t>{10, 11}));
  EXPECT_EQ(pair->size(), 2);
  EXPECT_EQ(pair->rank(), 1);
  EXPECT_EQ(mesh->sub_communicator(2, 2), pair) << "made once";
  EXPECT_EQ(mesh->sub_communicator(2, 4), mesh->shared_communicator(2));
  EXPECT_EQ(mesh->sub_communicator(2, 1)->size(), 1);
  EXPECT_EQ(mesh->sub_communicator(0, 1)->size(), 1);
  EXPECT_EQ(groups.asked.size(), 1u);
}

// Rank 9 of {6, 2} sits at (4, 1): the ranks of its column are 1, 3, 5, 7, 9, 11.
TEST(SubCommunicator, OfAnOuterAxisTakesStrides) {
  Groups groups;
  const auto mesh = DeviceMesh::create(c10::kCPU, {6, 2}, {"shard", "inner"}, 9, groups.factory(9));
  groups.asked.clear();
  EXPECT_EQ(mesh->sub_communicator(0, 2)->rank(), 0);
  EXPECT_EQ(mesh->sub_communicator(0, 3)->rank(), 1);
  ASSERT_EQ(groups.asked.size(), 2u);
  EXPECT_EQ(groups.asked[0].second, (std::vector<int64_t>{9, 11}));
  EXPECT_EQ(groups.asked[1].second, (std::vector<int64_t>{7, 9, 11}));
}

TEST(SubCommunicator, RefusesWhatCannotBe) {
  Groups groups;
  const auto mesh = DeviceMesh::create(c10::kCPU, {2, 4}, {"replicate", "shard"}, 0, groups.factory(0));
  for (const int64_t size : {3, 8, 0, -2}) {
    expect_error<ValueError>(
        [&] { mesh->sub_communicator(1, size); },
        "[DeviceMesh::sub_communicator] blocks of " + std::to_string(size) +
            " along axis 'shard' of mesh(cpu, replicate=2, shard=4), expected a size that divides 4");
  }
  expect_error<ValueError>([&] { mesh->sub_communicator(2, 1); }, "axis 2 is outside");
  const auto given = DeviceMesh::from_communicator(c10::kCPU, std::make_shared<FakeCommunicator>(1, 4), "shard");
  expect_error<StateError>([&] { given->sub_communicator(0, 2); },
                           "[DeviceMesh::sub_communicator] blocks of 2 along axis 'shard' of mesh(cpu, shard=4) need "
                           "groups of their own, and this mesh was made from given ones",
                           "use env.make_mesh()");
  EXPECT_EQ(given->sub_communicator(0, 4), given->shared_communicator(0));
  EXPECT_EQ(given->sub_communicator(0, 1)->size(), 1);
}

// A group of `axis` that this rank, at `coordinate`, belongs to, as all ranks see it where the groups are a grid.
std::shared_ptr<FakeCommunicator> group_along(size_t axis, int64_t size, std::vector<int64_t> coordinate) {
  return std::make_shared<FakeCommunicator>(coordinate[axis], size, false, [axis](int64_t rank, const at::Tensor& own) {
    auto other = own.clone();
    if (own.numel() > 1) other[static_cast<int64_t>(axis)] = rank;
    return other;
  });
}

TEST(FromCommunicators, SizesAndRankFollowFromTheGroups) {
  for (int64_t rank = 0; rank < 6; ++rank) {
    const std::vector<int64_t> coordinate{rank / 3, rank % 3};
    const auto replicate = group_along(0, 2, coordinate), shard = group_along(1, 3, coordinate);
    const auto mesh = DeviceMesh::from_communicators(c10::kCPU, {replicate, shard}, {"replicate", "shard"});
    EXPECT_EQ(mesh->to_string(), "mesh(cpu, replicate=2, shard=3)");
    EXPECT_EQ(mesh->rank(), rank);
    EXPECT_EQ(mesh->coordinate(), coordinate);
    EXPECT_EQ(mesh->shared_communicator(0), replicate);
    EXPECT_EQ(mesh->shared_communicator(1), shard);
    EXPECT_TRUE(mesh->has_groups());
  }
}

TEST(FromCommunicators, RefusesWhatIsNoGrid) {
  const auto shard = group_along(1, 2, {0, 0});
  expect_error<ValueError>(
      [&] {
        DeviceMesh::from_communicators(c10::kCPU, {nullptr, shard}, {"a", "b"});
      },
      "[DeviceMesh::from_communicators] the communicator of axis 0 is null");
  expect_error<ValueError>(
      [&] {
        DeviceMesh::from_communicators(c10::kCPU, {shard}, {"a", "b"});
      },
      "[DeviceMesh] 2 names for 1 axes");
  expect_error<ValueError>([&] { DeviceMesh::from_communicators(c10::kCPU, {}, {}); }, "[DeviceMesh] no axes");
  // The partner along "replicate" stands elsewhere along "shard".
  const auto crossed = std::make_shared<FakeCommunicator>(
      0, 2, false, [](int64_t, const at::Tensor& own) { return own.numel() > 1 ? at::ones_like(own) : own.clone(); });
  expect_error<ValueError>(
      [&] {
        DeviceMesh::from_communicators(c10::kCPU, {crossed, shard}, {"replicate", "shard"});
      },
      "[DeviceMesh::from_communicators] the groups of mesh(cpu, replicate=2, shard=2) are no "
      "grid: rank 1 of axis 'replicate' is at [1, 1] and this one at [0, 0]");
  // Another rank has found something.
  const auto told = std::make_shared<FakeCommunicator>(0, 2, false, [](int64_t rank, const at::Tensor& own) {
    auto other = own.clone();
    own.numel() > 1 ? other[0] = rank : other.fill_(1);
    return other;
  });
  expect_error<ValueError>(
      [&] {
        DeviceMesh::from_communicators(c10::kCPU, {told, shard}, {"replicate", "shard"});
      },
      "are no grid: other ranks do not meet along one axis");
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

}  // namespace device_mesh_test

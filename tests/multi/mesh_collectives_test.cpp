// Collectives over all ranks of a mesh, groups of a part of an axis, meshes over given groups.
#include "dtensor/mesh_collectives.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "dtensor/error.h"
#include "hsdp/agreement.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace mesh_collectives_test {

using namespace testing_support;
using dtensor::DeviceMesh;
using dtensor::ReduceOp;

std::vector<std::string> names_of(const std::vector<int64_t>& sizes) {
  std::vector<std::string> names;
  for (size_t i = 0; i < sizes.size(); ++i) names.push_back("axis" + std::to_string(i));
  return names;
}

int64_t sum_of_ranks(dtensor::Communicator& group, int64_t rank) {
  auto value = torch::full({1}, rank, torch::kLong);
  group.all_reduce(value, ReduceOp::sum, {"all_reduce", "test"})->wait();
  return value.item<int64_t>();
}

class MeshCollectives : public ::testing::TestWithParam<std::vector<int64_t>> {
 protected:
  // Runs the body on every rank of a mesh of the parameter's sizes.
  void on_mesh(const std::function<void(RankContext&, const DeviceMesh&)>& body) const {
    const auto sizes = GetParam();
    run_ranks(static_cast<int>(c10::multiply_integers(sizes)),
              [&](RankContext& context) { body(context, *context.environment().make_mesh(sizes, names_of(sizes))); });
  }
  int64_t long_axes() const {
    const auto sizes = GetParam();
    return std::count_if(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; });
  }
};

TEST_P(MeshCollectives, AllReduceReachesEveryRankOnce) {
  on_mesh([&](RankContext& context, const DeviceMesh& mesh) {
    const double rank = context.rank(), last = context.world_size() - 1;
    const auto reduced = [&](ReduceOp op) {
      auto values = torch::tensor({rank, -rank, 1.0}, torch::kFloat64);
      dtensor::all_reduce(mesh, values, op, {"all_reduce", "test"});
      return values;
    };
    dtensor::reset_collective_counts();
    EXPECT_TRUE(reduced(ReduceOp::sum)
                    .equal(torch::tensor({last * (last + 1) / 2, -last * (last + 1) / 2, last + 1}, torch::kFloat64)));
    EXPECT_EQ(dtensor::collective_counts().all_reduces, long_axes());
    EXPECT_TRUE(reduced(ReduceOp::max).equal(torch::tensor({last, 0.0, 1.0}, torch::kFloat64)));
    EXPECT_TRUE(reduced(ReduceOp::min).equal(torch::tensor({0.0, -last, 1.0}, torch::kFloat64)));
  });
}

TEST_P(MeshCollectives, RowsComeInTheOrderOfTheRanks) {
  on_mesh([&](RankContext& context, const DeviceMesh& mesh) {
    const int64_t ranks = context.world_size();
    const auto row = [](int64_t rank) { return torch::tensor({10 * rank, 10 * rank + 1, rank * rank}, torch::kLong); };
    dtensor::reset_collective_counts();
    const auto rows = dtensor::all_gather_rows(mesh, row(context.rank()), {"all_gather", "test"});
    EXPECT_EQ(dtensor::collective_counts().all_gathers, long_axes());
    ASSERT_EQ(rows.sizes(), (std::vector<int64_t>{ranks, 3}));
    for (int64_t rank = 0; rank < ranks; ++rank) EXPECT_TRUE(rows[rank].equal(row(rank))) << rank;
    // Of any shape, contiguous or not, and of none.
    const auto strided = torch::arange(6).view({3, 2}).t() + 6 * context.rank();
    const auto all = dtensor::all_gather_rows(mesh, strided, {"all_gather", "test"});
    EXPECT_TRUE(all[ranks - 1].equal(torch::arange(6).view({3, 2}).t().reshape({-1}) + 6 * (ranks - 1)));
    const auto empty = dtensor::all_gather_rows(mesh, torch::empty({0}), {"all_gather", "test"});
    EXPECT_EQ(empty.sizes(), (std::vector<int64_t>{ranks, 0}));
  });
}

TEST_P(MeshCollectives, BroadcastComesFromAnyRank) {
  on_mesh([&](RankContext& context, const DeviceMesh& mesh) {
    int64_t sent = 0;
    dtensor::reset_collective_counts();
    for (int64_t root = 0; root < context.world_size(); ++root) {
      auto values = torch::full({2}, 100 * context.rank() + root, torch::kLong);
      dtensor::broadcast(mesh, values, root, {"broadcast", "test"});
      EXPECT_TRUE(values.equal(torch::full({2}, 101 * root, torch::kLong))) << root;
      // Ranks that share no position with the root along later axes wait for those that do.
      const auto source = mesh.coordinate_of(root);
      for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
        bool takes_part = mesh.size(axis) > 1;
        for (int64_t inner = axis + 1; inner < mesh.ndim(); ++inner) {
          takes_part &= source[inner] == mesh.coordinate()[inner];
        }
        sent += takes_part;
      }
    }
    EXPECT_EQ(dtensor::collective_counts().broadcasts, sent);
  });
}

TEST_P(MeshCollectives, AFailureOfAnyRankIsThrownByAll) {
  on_mesh([&](RankContext& context, const DeviceMesh& mesh) {
    hsdp::agree(mesh, at::kCPU, "test", [] {});
    for (int failing = 0; failing < context.world_size(); ++failing) {
      expect_error<dtensor::NotSupportedError>(
          [&] {
            hsdp::agree(mesh, at::kCPU, "test", [&] {
              if (context.rank() < failing) return;
              dtensor::raise<dtensor::NotSupportedError>("test", "planted on ", context.rank());
            });
          },
          "[test] planted on " + std::to_string(failing));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, MeshCollectives,
                         ::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{4}, std::vector<int64_t>{2, 2},
                                           std::vector<int64_t>{4, 1}, std::vector<int64_t>{1, 4},
                                           std::vector<int64_t>{1, 2, 2}, std::vector<int64_t>{2, 3}),
                         [](const auto& which) {
                           std::string name;
                           for (const int64_t size : which.param)
                             name += (name.empty() ? "" : "_") + std::to_string(size);
                           return name;
                         });

// Blocks of two along axes of four: {0, 1}, {2, 3}; and of a column of {4, 1}: the same.
TEST(SubCommunicators, AddUpTheirBlockAlone) {
  run_ranks(4, [](RankContext& context) {
    const auto rank = context.rank();
    const auto row = context.environment().mesh();
    const auto column = context.environment().make_mesh({4, 1}, {"replicate", "shard"});
    for (const auto& mesh : {row, column}) {
      const auto block = mesh->sub_communicator(0, 2);
      EXPECT_EQ(block->size(), 2);
      EXPECT_EQ(block->rank(), rank % 2);
      EXPECT_EQ(sum_of_ranks(*block, rank), rank < 2 ? 1 : 5);
      EXPECT_EQ(mesh->sub_communicator(0, 2), block);
    }
    EXPECT_NE(row->sub_communicator(0, 2), column->sub_communicator(0, 2));
    EXPECT_EQ(row->sub_communicator(0, 2)->describe(),
              "gloo, axis shard/2, rank " + std::to_string(rank % 2) + " of 2");
    EXPECT_EQ(sum_of_ranks(row->communicator(0), rank), 6) << "the axis itself still works";
  });
}

// Of {2, 4}: rank r is at (r / 4, r % 4), and blocks of two along the shard axis are {0, 1}, {2, 3}, {4, 5}, {6, 7}.
TEST(SubCommunicators, OfAnInnerAxisStayInTheirRow) {
  run_ranks(8, [](RankContext& context) {
    const auto mesh = context.environment().make_mesh({2, 4}, {"replicate", "shard"});
    const auto rank = context.rank();
    EXPECT_EQ(sum_of_ranks(*mesh->sub_communicator(1, 2), rank), 4 * (rank / 2) + 1);
  });
}

// The groups outlive the program's handle on its environment, as the mesh does.
TEST(SubCommunicators, CanBeMadeAfterShutdown) {
  run_ranks(4,
            [](RankContext& context) {
              auto store = c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", 4);
              auto mesh = hsdp::init_from(store, context.rank(), 4).mesh();
              hsdp::shutdown();
              EXPECT_EQ(sum_of_ranks(*mesh->sub_communicator(0, 2), context.rank()), context.rank() < 2 ? 1 : 5);
            },
            {.make_environment = false});
}

TEST(GivenGroups, MakeAMeshOfTwoAxes) {
  run_ranks(4, [](RankContext& context) {
    const auto made = context.environment().make_mesh({2, 2}, {"replicate", "shard"});
    const auto mesh = DeviceMesh::from_communicators(
        c10::kCPU, {made->shared_communicator(0), made->shared_communicator(1)}, {"replicate", "shard"});
    EXPECT_EQ(mesh->rank(), context.rank());
    EXPECT_EQ(mesh->coordinate(), made->coordinate());
    const auto rows = dtensor::all_gather_rows(*mesh, torch::full({1}, context.rank(), torch::kLong), {"all_gather"});
    EXPECT_TRUE(rows.view({-1}).equal(torch::arange(4)));
  });
}

// Rows {0, 1} and {2, 3}; columns {0, 3} and {1, 2}: a sum over a column would add parts of unlike tensors.
TEST(GivenGroups, ThatCrossAreRefusedOnAllRanks) {
  run_ranks(4, [](RankContext& context) {
    const auto rank = context.rank();
    const auto& environment = context.environment();
    const auto rows = environment.make_mesh({2, 2}, {"replicate", "shard"});
    auto store = c10::make_intrusive<c10d::FileStore>(
        context.directory() + "/crossed" + std::to_string(rank == 0 || rank == 3), 2);
    hsdp::shutdown();
    auto crossed = hsdp::init_from(store, rank < 2 ? 0 : 1, 2);
    expect_error<dtensor::ValueError>(
        [&] {
          DeviceMesh::from_communicators(c10::kCPU, {crossed.communicator(), rows->shared_communicator(1)},
                                         {"replicate", "shard"});
        },
        "[DeviceMesh::from_communicators] the groups of mesh(cpu, replicate=2, shard=2) are no grid: rank ",
        "of axis 'replicate'");
  });
}

}  // namespace mesh_collectives_test

#include "dtensor/layout.h"

#include <gtest/gtest.h>

#include <thread>

#include "dtensor/error.h"
#include "tests/testing/expect.h"

namespace layout_test {

using namespace dtensor;
using testing_support::expect_error;
using Sizes = std::vector<int64_t>;

std::shared_ptr<const DeviceMesh> mesh_1d(int64_t size, int64_t rank) {
  return DeviceMesh::create(c10::kCPU, {size}, {"shard"}, rank);
}
std::shared_ptr<const DeviceMesh> mesh_2d(int64_t rows, int64_t columns, int64_t rank) {
  return DeviceMesh::create(c10::kCPU, {rows, columns}, {"replicate", "shard"}, rank);
}

struct ShardCase {
  Sizes sizes;
  int64_t dim, ranks;
  Sizes lengths;  // of the sharded dim, by rank
};

class LayoutShards : public ::testing::TestWithParam<ShardCase> {};

// Chunks have ceil(length / ranks) entries until the dim is used up.
TEST_P(LayoutShards, ChunksAreCeilSizedThenShortThenEmpty) {
  const auto& test = GetParam();
  int64_t offset = 0;
  for (int64_t rank = 0; rank < test.ranks; ++rank) {
    const auto layout = Layout::create(mesh_1d(test.ranks, rank), {Shard(test.dim)}, test.sizes, {}, c10::kFloat);
    Sizes local = test.sizes, padded = test.sizes, offsets(test.sizes.size(), 0);
    local[test.dim] = test.lengths[rank];
    padded[test.dim] = test.lengths[0];
    offsets[test.dim] = offset;
    EXPECT_EQ(layout->local().sizes, local) << "rank " << rank;
    EXPECT_EQ(layout->local().offsets, offsets) << "rank " << rank;
    EXPECT_EQ(layout->padded_local_sizes().vec(), padded) << "rank " << rank;
    // Every rank knows what the others hold.
    EXPECT_EQ(layout->local_at({test.ranks - 1}).sizes[test.dim], test.lengths.back());
    offset += test.lengths[rank];
  }
  EXPECT_EQ(offset, test.sizes[test.dim]);
}

INSTANTIATE_TEST_SUITE_P(All, LayoutShards,
                         ::testing::Values(ShardCase{{5, 3}, 0, 2, {3, 2}}, ShardCase{{2, 3}, 0, 4, {1, 1, 0, 0}},
                                           ShardCase{{10, 3}, 0, 4, {3, 3, 3, 1}}, ShardCase{{8}, 0, 4, {2, 2, 2, 2}},
                                           ShardCase{{9}, 0, 4, {3, 3, 3, 0}}, ShardCase{{5}, 0, 4, {2, 2, 1, 0}},
                                           ShardCase{{7, 5}, 1, 3, {2, 2, 1}}, ShardCase{{6, 1, 4}, 1, 2, {1, 0}},
                                           ShardCase{{0, 3}, 0, 2, {0, 0}}, ShardCase{{3}, 0, 1, {3}}));

TEST(Layout, ChunkRangesCoverTheLength) {
  for (int64_t length = 0; length < 20; ++length) {
    for (int64_t chunks = 1; chunks < 8; ++chunks) {
      int64_t end = 0;
      for (int64_t i = 0; i < chunks; ++i) {
        const ChunkRange range = chunk_range(length, chunks, i);
        EXPECT_EQ(range.begin, end);
        EXPECT_LE(range.end - range.begin, (length + chunks - 1) / chunks);
        end = range.end;
      }
      EXPECT_EQ(end, length);
    }
  }
}

TEST(Layout, ReplicateAndPartialHoldTheWholeShape) {
  for (const Placement& placement : Placements{Replicate(), Partial()}) {
    const auto layout = Layout::create(mesh_1d(3, 2), {placement}, {4, 2}, {}, c10::kFloat);
    EXPECT_EQ(layout->local().sizes, (Sizes{4, 2}));
    EXPECT_EQ(layout->local().offsets, (Sizes{0, 0}));
    EXPECT_EQ(layout->is_partial(), placement.is_partial());
  }
}

TEST(Layout, ReplicateThenShard) {
  // Rank 4 of {2, 3} is (1, 1): the second of three chunks of 7 rows.
  const auto layout = Layout::create(mesh_2d(2, 3, 4), {Replicate(), Shard(0)}, {7, 2}, {}, c10::kDouble);
  EXPECT_EQ(layout->local().offsets, (Sizes{3, 0}));
  EXPECT_EQ(layout->local().sizes, (Sizes{3, 2}));
  EXPECT_EQ(layout->to_string(), "(7, 2) double [Replicate(), Shard(0)] on mesh(cpu, replicate=2, shard=3)");
}

TEST(Layout, TwoAxesOnOneDimCutPieceOfPiece) {
  // 10 rows over 2: 5 and 5. Each over 3: 2, 2, 1.
  const std::vector<std::pair<int64_t, int64_t>> expected = {{0, 2}, {2, 2}, {4, 1}, {5, 2}, {7, 2}, {9, 1}};
  for (int64_t rank = 0; rank < 6; ++rank) {
    const auto layout = Layout::create(mesh_2d(2, 3, rank), {Shard(0), Shard(0)}, {10}, {}, c10::kFloat);
    EXPECT_EQ(layout->local().offsets[0], expected[rank].first) << rank;
    EXPECT_EQ(layout->local().sizes[0], expected[rank].second) << rank;
    EXPECT_EQ(layout->padded_local_sizes()[0], 2);
  }
}

TEST(Layout, TwoAxesOnTwoDims) {
  const auto layout = Layout::create(mesh_2d(2, 2, 3), {Shard(1), Shard(0)}, {3, 5}, {}, c10::kFloat);
  EXPECT_EQ(layout->local().offsets, (Sizes{2, 3}));
  EXPECT_EQ(layout->local().sizes, (Sizes{1, 2}));
  EXPECT_EQ(layout->padded_local_sizes().vec(), (Sizes{2, 3}));
}

TEST(Layout, Scalars) {
  const auto layout = Layout::create(mesh_1d(2, 1), {Replicate()}, {}, {}, c10::kFloat);
  EXPECT_EQ(layout->numel(), 1);
  EXPECT_TRUE(layout->local().sizes.empty());
  EXPECT_EQ(layout->to_string(), "() float [Replicate()] on mesh(cpu, shard=2)");
}

TEST(Layout, StridesAreContiguousUnlessGiven) {
  const auto mesh = mesh_1d(2, 0);
  EXPECT_EQ(Layout::create(mesh, {Shard(0)}, {4, 3, 2}, {}, c10::kFloat)->strides().vec(), (Sizes{6, 2, 1}));
  EXPECT_EQ(Layout::create(mesh, {Shard(0)}, {4, 3}, {1, 4}, c10::kFloat)->strides().vec(), (Sizes{1, 4}));
  EXPECT_EQ(row_major_strides({2, 0, 3}), (Sizes{3, 3, 1}));
}

TEST(Layout, EqualRequestsShareOneObject) {
  const auto mesh = mesh_1d(2, 0);
  const auto layout = Layout::create(mesh, {Shard(0)}, {4, 3}, {}, c10::kFloat);
  EXPECT_EQ(Layout::create(mesh, {Shard(0)}, {4, 3}, {3, 1}, c10::kFloat), layout);
  EXPECT_EQ(layout->with_dtype(c10::kFloat), layout);
  EXPECT_EQ(layout->with_dtype(c10::kHalf)->with_dtype(c10::kFloat), layout);
  EXPECT_NE(layout->with_dtype(c10::kHalf), layout);
  EXPECT_NE(Layout::create(mesh, {Shard(1)}, {4, 3}, {}, c10::kFloat), layout);
  EXPECT_NE(Layout::create(mesh, {Replicate()}, {4, 3}, {}, c10::kFloat), layout);
  EXPECT_NE(Layout::create(mesh, {Shard(0)}, {3, 4}, {}, c10::kFloat), layout);
  EXPECT_NE(Layout::create(mesh, {Shard(0)}, {4, 3}, {1, 4}, c10::kFloat), layout);
  EXPECT_NE(Layout::create(mesh_1d(2, 0), {Shard(0)}, {4, 3}, {}, c10::kFloat), layout);
  // Differ in what the hash leaves out.
  EXPECT_NE(Layout::create(mesh, {Partial::norm(1)}, {4, 3}, {}, c10::kFloat),
            Layout::create(mesh, {Partial::norm(2)}, {4, 3}, {}, c10::kFloat));
}

TEST(Layout, TheTableKeepsNothingAlive) {
  const auto mesh = mesh_1d(2, 0);
  std::weak_ptr<const Layout> weak;
  {
    const auto layout = Layout::create(mesh, {Shard(0)}, {4, 3}, {}, c10::kFloat);
    weak = layout;
    EXPECT_GT(mesh.use_count(), 1);
  }
  EXPECT_TRUE(weak.expired());
  EXPECT_EQ(mesh.use_count(), 1);
}

TEST(Layout, ThreadsThatAskTogetherShare) {
  const auto mesh = mesh_1d(2, 0);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::shared_ptr<const Layout>> made(4);
    std::vector<std::thread> threads;
    for (auto& layout : made) {
      threads.emplace_back([&] {
        Layout::create(mesh, {Shard(0)}, {round + 1}, {}, c10::kFloat).reset();
        layout = Layout::create(mesh, {Shard(0)}, {round + 1}, {}, c10::kFloat);
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& layout : made) EXPECT_EQ(layout, made[0]);
  }
}

TEST(Layout, SameDistributionLooksAtMeshPlacementsAndSizes) {
  const auto mesh = mesh_1d(2, 0);
  const auto layout = Layout::create(mesh, {Shard(0)}, {4, 3}, {}, c10::kFloat);
  EXPECT_TRUE(layout->same_distribution(*layout->with_dtype(c10::kHalf)));
  EXPECT_FALSE(layout->same_distribution(*Layout::create(mesh, {Shard(1)}, {4, 3}, {}, c10::kFloat)));
  EXPECT_FALSE(layout->same_distribution(*Layout::create(mesh, {Shard(0)}, {4, 2}, {}, c10::kFloat)));
  EXPECT_FALSE(layout->same_distribution(*Layout::create(mesh_1d(2, 0), {Shard(0)}, {4, 3}, {}, c10::kFloat)));
}

TEST(Layout, RefusesWhatDoesNotFit) {
  const auto mesh = mesh_1d(2, 0);
  const auto make = [&](Placements placements, Sizes sizes, Sizes strides = {}) {
    return [=] { Layout::create(mesh, placements, sizes, strides, c10::kFloat); };
  };
  expect_error<ValueError>(make({}, {4}), "[Layout] 0 placements () for mesh(cpu, shard=2)",
                           "one placement a mesh axis");
  expect_error<ValueError>(make({Shard(0), Replicate()}, {4}), "2 placements (Shard(0), Replicate())");
  expect_error<ValueError>(make({Shard(2)}, {4, 3}), "Shard(2) for shape (4, 3) of 2 dims");
  expect_error<ValueError>(make({Shard(0)}, {}), "Shard(0) for shape () of 0 dims");
  expect_error<ValueError>(make({Shard(0)}, {4, -1}), "shape (4, -1) has a negative size");
  expect_error<ValueError>(make({Shard(0)}, {4, 3}, {1}), "1 strides for the 2 dims of shape (4, 3)");
  expect_error<ValueError>([] { Layout::create(nullptr, {Shard(0)}, {4}, {}, c10::kFloat); }, "[Layout] no mesh");
  const auto layout = Layout::create(mesh, {Shard(0)}, {4}, {}, c10::kFloat);
  expect_error<ValueError>([&] { layout->local_at({0, 0}); }, "[Layout::local_at] a coordinate of 2 axes");
  expect_error<ValueError>([&] { layout->local_at({2}); }, "position 2 on axis 'shard'", "0 to 1");
}

}  // namespace layout_test

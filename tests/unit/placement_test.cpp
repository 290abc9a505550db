#include "dtensor/placement.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "dtensor/error.h"
#include "tests/testing/expect.h"

namespace placement_test {

using namespace dtensor;
using testing_support::expect_error;

TEST(Placement, KindsAndTexts) {
  struct Case {
    Placement placement;
    Placement::Kind kind;
    const char* text;
  };
  const std::vector<Case> cases = {
      {Shard(0), Placement::Kind::shard, "Shard(0)"},
      {Shard(3), Placement::Kind::shard, "Shard(3)"},
      {Replicate(), Placement::Kind::replicate, "Replicate()"},
      {Partial(), Placement::Kind::partial, "Partial(sum)"},
      {Partial(ReduceOp::max), Placement::Kind::partial, "Partial(max)"},
      {Partial(ReduceOp::min), Placement::Kind::partial, "Partial(min)"},
      {Partial::norm(2), Placement::Kind::partial, "Partial(norm 2)"},
  };
  for (const auto& test : cases) {
    SCOPED_TRACE(test.text);
    EXPECT_EQ(test.placement.kind(), test.kind);
    EXPECT_EQ(test.placement.is_shard(), test.kind == Placement::Kind::shard);
    EXPECT_EQ(test.placement.is_replicate(), test.kind == Placement::Kind::replicate);
    EXPECT_EQ(test.placement.is_partial(), test.kind == Placement::Kind::partial);
    EXPECT_EQ(test.placement.to_string(), test.text);
    std::ostringstream stream;
    stream << test.placement;
    EXPECT_EQ(stream.str(), test.text);
  }
}

TEST(Placement, EveryPairIsEqualOnlyToItself) {
  const Placements all = {Shard(0),         Shard(1),        Replicate(), Partial(), Partial(ReduceOp::max),
                          Partial::norm(1), Partial::norm(2)};
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < all.size(); ++j) EXPECT_EQ(all[i] == all[j], i == j) << all[i] << " and " << all[j];
  }
}

TEST(Placement, ValuesOfAKind) {
  EXPECT_EQ(Shard(2).dim(), 2);
  EXPECT_EQ(Partial(ReduceOp::min).op(), ReduceOp::min);
  EXPECT_EQ(Partial::norm(1.5).op(), ReduceOp::norm);
  EXPECT_EQ(Partial::norm(1.5).norm_type(), 1.5);
}

TEST(Placement, RefusesTheValuesOfAnotherKind) {
  expect_error<ValueError>([] { Replicate().dim(); }, "[Placement::dim] asked of Replicate(), expected a Shard");
  expect_error<ValueError>([] { Shard(1).op(); }, "[Placement::op] asked of Shard(1), expected a Partial");
  expect_error<ValueError>([] { Partial().norm_type(); }, "[Placement::norm_type] asked of Partial(sum)");
}

TEST(Placement, RefusesWrongValues) {
  expect_error<ValueError>([] { Shard(-1); }, "[Shard] tensor dim -1 is negative", "count dims from the front");
  expect_error<ValueError>([] { Partial partial(ReduceOp::norm); }, "[Partial]", "write Partial::norm(p)");
  for (const double p :
       {0.0, -2.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    expect_error<ValueError>([p] { Partial::norm(p); }, "[Partial::norm]", "expected 0 < p < infinity");
  }
}

TEST(Placement, ListText) {
  EXPECT_EQ(to_string(Placements{}), "()");
  EXPECT_EQ(to_string(Placements{Shard(0)}), "(Shard(0))");
  EXPECT_EQ(to_string(Placements{Replicate(), Shard(1)}), "(Replicate(), Shard(1))");
}

}  // namespace placement_test

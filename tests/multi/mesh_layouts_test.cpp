// Distributed tensors on meshes of one to three axes, sharded along any dims, uneven and empty parts included: every
// combination against plain tensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "dtensor/communicator.h"
#include "dtensor/dtensor.h"
#include "hsdp/clip.h"
#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"

namespace mesh_layouts_test {

using namespace testing_support;
using dtensor::DeviceMesh;
using dtensor::DTensor;
using dtensor::Partial;
using dtensor::Placements;
using dtensor::ReduceOp;
using dtensor::Replicate;
using dtensor::Shard;

using Sizes = std::vector<int64_t>;

at::Tensor counting(at::IntArrayRef sizes) {
  return torch::arange(c10::multiply_integers(sizes), torch::kFloat64).view(sizes) - 4;
}

const std::vector<Sizes>& shapes() {
  static const std::vector<Sizes> all{{1},    {3},    {5},    {8},    {1, 1}, {1, 8},    {3, 5},    {5, 3},
                                      {8, 1}, {8, 8}, {5, 8}, {3, 1}, {5, 5}, {3, 5, 8}, {8, 1, 3}, {1, 3, 5}};
  return all;
}

// Where every reduction is a collective.
const std::vector<Sizes>& few_shapes() {
  static const std::vector<Sizes> few{{1}, {5}, {8}, {3, 5}, {8, 1}};
  return few;
}

// All ways to place a tensor of `dims` dims on `axes` axes: on each, replicated or sharded along a dim.
std::vector<Placements> placements_of(int64_t axes, int64_t dims) {
  std::vector<Placements> all{{}};
  for (int64_t axis = 0; axis < axes; ++axis) {
    std::vector<Placements> longer;
    for (const auto& former : all) {
      for (int64_t dim = -1; dim < dims; ++dim) {
        auto next = former;
        dim < 0 ? next.push_back(Replicate()) : next.push_back(Shard(dim));
        longer.push_back(std::move(next));
      }
    }
    all = std::move(longer);
  }
  return all;
}

// By torch.chunk, which leaves out chunks that would be empty.
at::Tensor part_of(at::Tensor whole, const DeviceMesh& mesh, const Placements& placements) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard()) continue;
    const auto dim = placements[axis].dim(), position = mesh.coordinate()[axis];
    const auto chunks = whole.chunk(mesh.size(static_cast<int64_t>(axis)), dim);
    const bool empty = position >= static_cast<int64_t>(chunks.size());
    whole = empty ? whole.narrow(dim, 0, 0) : chunks[static_cast<size_t>(position)];
  }
  return whole;
}

int64_t long_sharded_axes(const DeviceMesh& mesh, const Placements& placements) {
  int64_t count = 0;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    count += placements[static_cast<size_t>(axis)].is_shard() && mesh.size(axis) > 1;
  }
  return count;
}

class MeshLayouts : public ::testing::TestWithParam<Sizes> {
 protected:
  // Calls the body on every rank for every shape and placement, with what to say of a failure.
  using Body = std::function<void(const Sizes& shape, const std::shared_ptr<const DeviceMesh>&, const Placements&)>;
  void sweep(const Body& body, const std::vector<Sizes>& all_shapes = shapes()) const {
    on_mesh([&](const std::shared_ptr<const DeviceMesh>& mesh) {
      for (const auto& shape : all_shapes) {
        for (const auto& placements : placements_of(mesh->ndim(), static_cast<int64_t>(shape.size()))) {
          SCOPED_TRACE(c10::str(c10::IntArrayRef(shape), " ", dtensor::to_string(placements), " rank ", mesh->rank()));
          body(shape, mesh, placements);
          if (::testing::Test::HasFailure()) return;
        }
      }
    });
  }
  void on_mesh(const std::function<void(const std::shared_ptr<const DeviceMesh>&)>& body) const {
    const auto sizes = GetParam();
    run_ranks(static_cast<int>(c10::multiply_integers(sizes)), [&](RankContext& context) {
      std::vector<std::string> names;
      for (size_t i = 0; i < sizes.size(); ++i) names.push_back("axis" + std::to_string(i));
      body(context.environment().make_mesh(sizes, names));
    });
  }
};

TEST_P(MeshLayouts, PartsAreChunksAndMakeUpTheWhole) {
  sweep([](const Sizes& shape, const std::shared_ptr<const DeviceMesh>& mesh, const Placements& placements) {
    const auto whole = counting(shape);
    const auto tensor = DTensor::distribute(whole, mesh, placements);
    const auto part = part_of(whole, *mesh, placements);
    ASSERT_EQ(tensor.to_local().sizes(), part.sizes());
    ASSERT_TRUE(tensor.to_local().equal(part));
    dtensor::reset_collective_counts();
    ASSERT_TRUE(tensor.full_tensor().equal(whole));
    int64_t gathers = 0;
    for (int64_t axis = 0; axis < mesh->ndim(); ++axis) {
      const Placements former(placements.begin(), placements.begin() + axis);
      // Where an earlier axis has left nothing there is nothing to send.
      const bool cuts = placements[static_cast<size_t>(axis)].is_shard() && mesh->size(axis) > 1;
      gathers += cuts && part_of(whole, *mesh, former).numel() > 0;
    }
    ASSERT_EQ(dtensor::collective_counts().all_gathers, gathers) << "one for each axis that shards";
    // From the parts alone.
    const auto again = DTensor::from_local(part.contiguous(), mesh, placements);
    ASSERT_EQ(again.layout(), tensor.layout());
    ASSERT_TRUE(again.full_tensor().equal(whole));
  });
}

TEST_P(MeshLayouts, ReductionsCommunicateOncePerShardedAxis) {
  sweep(
      [](const Sizes& shape, const std::shared_ptr<const DeviceMesh>& mesh, const Placements& placements) {
        const auto whole = counting(shape);
        const auto numbers = whole.to(torch::kLong);
        const auto tensor = DTensor::distribute(whole, mesh, placements).tensor();
        const auto integers = DTensor::distribute(numbers, mesh, placements).tensor();
        const auto short_integers = DTensor::distribute(numbers.to(torch::kShort), mesh, placements).tensor();
        const auto expected = long_sharded_axes(*mesh, placements);
        const auto check = [&](const std::function<at::Tensor(const at::Tensor&)>& reduce,
                               const at::Tensor& distributed, const at::Tensor& plain) {
          dtensor::reset_collective_counts();
          const auto value = reduce(distributed).item<double>(), right = reduce(plain).item<double>();
          ASSERT_NEAR(value, right, 1e-12 * std::abs(right));
          ASSERT_EQ(dtensor::collective_counts().all_reduces, expected);
        };
        for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
          check([&](const at::Tensor& t) { return t.norm(p); }, tensor, whole);
          check([&](const at::Tensor& t) { return torch::linalg_vector_norm(t, p); }, tensor, whole);
        }
        check([](const at::Tensor& t) { return t.sum(); }, tensor, whole);
        check([](const at::Tensor& t) { return t.mean(); }, tensor, whole);
        check([](const at::Tensor& t) { return t.max(); }, tensor, whole);
        check([](const at::Tensor& t) { return t.min(); }, tensor, whole);
        check([](const at::Tensor& t) { return t.sum(); }, integers, numbers);
        check([](const at::Tensor& t) { return t.max(); }, integers, numbers);
        check([](const at::Tensor& t) { return t.min(); }, integers, numbers);
        check([](const at::Tensor& t) { return t.amax(); }, short_integers, numbers);
        check([](const at::Tensor& t) { return t.amin(); }, short_integers, numbers);
        check([](const at::Tensor& t) { return t.gt(0).any(); }, tensor, whole);
        check([](const at::Tensor& t) { return t.gt(-5).all(); }, tensor, whole);
      },
      few_shapes());
}

TEST_P(MeshLayouts, ElementwiseWorkAndConversionsStayLocal) {
  sweep([](const Sizes& shape, const std::shared_ptr<const DeviceMesh>& mesh, const Placements& placements) {
    const auto whole = counting(shape);
    const auto tensor = DTensor::distribute(whole, mesh, placements).tensor();
    const auto other = DTensor::distribute(whole.cos(), mesh, placements).tensor();
    const auto row = torch::arange(shape.back(), torch::kFloat64) + 1;  // broadcasts to the global shape
    const auto check = [&](const at::Tensor& result, const at::Tensor& plain) {
      const auto part = part_of(plain, *mesh, placements);
      ASSERT_EQ(result.sizes(), plain.sizes());
      ASSERT_EQ(result.scalar_type(), plain.scalar_type());
      ASSERT_TRUE(DTensor(result).to_local().equal(part));
    };
    dtensor::reset_collective_counts();
    check(tensor * 2 + other, whole * 2 + whole.cos());
    check(tensor * row, whole * row);
    check(torch::where(tensor > other, tensor, other), torch::where(whole > whole.cos(), whole, whole.cos()));
    check(tensor.clone().mul_(row).add_(other, 0.5), whole.clone().mul_(row).add_(whole.cos(), 0.5));
    check(tensor.to(torch::kFloat), whole.to(torch::kFloat));
    check(tensor.to(torch::kHalf).to(torch::kDouble), whole.to(torch::kHalf).to(torch::kDouble));
    check(torch::zeros_like(tensor), torch::zeros_like(whole));
    check(torch::full_like(tensor, 3, torch::kFloat), torch::full_like(whole, 3, torch::kFloat));
    std::vector<at::Tensor> list{tensor.clone(), other.clone()}, plain{whole.clone(), whole.cos()};
    torch::_foreach_lerp_(list, {other, tensor}, 0.25);
    torch::_foreach_lerp_(plain, {whole.cos(), whole}, 0.25);
    check(list[0], plain[0]);
    check(list[1], plain[1]);
    // A copy of a whole value, or of what broadcasts to one, takes this rank's part.
    check(torch::zeros_like(tensor).copy_(whole), whole);
    check(torch::zeros_like(tensor).copy_(row), row.expand_as(whole).clone());
    check(torch::zeros_like(tensor).copy_(other), whole.cos());
    const auto counts = dtensor::collective_counts();
    ASSERT_EQ(counts.all_gathers + counts.all_reduces + counts.broadcasts + counts.reduce_scatters, 0);
  });
}

TEST_P(MeshLayouts, RandomFillsAreThoseOfTheWholeTensor) {
  sweep([](const Sizes& shape, const std::shared_ptr<const DeviceMesh>& mesh, const Placements& placements) {
    const auto fill = [](at::Tensor tensor) {
      torch::manual_seed(7);
      std::vector<at::Tensor> results;
      results.push_back(tensor.normal_(1, 2).clone());
      results.push_back(tensor.uniform_(-1, 1).clone());
      results.push_back(tensor.bernoulli_(0.5).clone());
      results.push_back(torch::rand_like(tensor));
      results.push_back(torch::randn_like(tensor));
      torch::nn::init::kaiming_uniform_(tensor);
      results.push_back(tensor);
      return results;
    };
    if (shape.size() != 2) return;  // kaiming_uniform_ asks deeper ones for a slice
    const auto plain = fill(torch::zeros(shape, torch::kFloat64));
    const auto results = fill(DTensor::distribute(torch::zeros(shape, torch::kFloat64), mesh, placements).tensor());
    for (size_t i = 0; i < plain.size(); ++i) {
      ASSERT_TRUE(DTensor(results[i]).to_local().equal(part_of(plain[i], *mesh, placements))) << "fill " << i;
    }
  });
}

// Gradients of unlike shapes, each sharded along another dim, and some whole on every rank.
TEST_P(MeshLayouts, ClippingCountsReplicasOnce) {
  on_mesh([](const std::shared_ptr<const DeviceMesh>& mesh) {
    Placements whole(static_cast<size_t>(mesh->ndim()), Replicate());
    const std::vector<std::pair<Sizes, int64_t>> gradients{{{5, 3}, 0}, {{3, 5}, 1}, {{1}, 0}, {{2, 3, 8}, 2}};
    for (const double type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      const auto make = [&](bool distributed) {
        std::vector<at::Tensor> parameters;
        for (const auto& [shape, dim] : gradients) {
          auto placements = whole;
          placements.back() = Shard(dim);
          const auto value = counting(shape), gradient = value.sin();
          parameters.push_back(distributed ? DTensor::distribute(value, mesh, placements).as_parameter(true).tensor()
                                           : value.clone().set_requires_grad(true));
          parameters.back().mutable_grad() =
              distributed ? DTensor::distribute(gradient, mesh, placements).tensor() : gradient.clone();
        }
        return parameters;
      };
      auto plain = make(false), ours = make(true), stock = make(true);
      const double expected = torch::nn::utils::clip_grad_norm_(plain, 0.7, type);
      dtensor::reset_collective_counts();
      EXPECT_NEAR(hsdp::clip_grad_norm_(ours, 0.7, type), expected, 1e-12 * expected);
      EXPECT_EQ(dtensor::collective_counts().all_reduces, mesh->size(mesh->ndim() - 1) > 1 ? 1 : 0);
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(stock, 0.7, type), expected, 1e-12 * expected);
      for (size_t i = 0; i < plain.size(); ++i) {
        for (const auto& other : {ours[i].grad(), stock[i].grad()}) {
          EXPECT_TRUE(torch::allclose(DTensor(other).full_tensor(), plain[i].grad(), 1e-12, 0));
        }
      }
    }
  });
}

// Rank r holds r + 1 everywhere: what is left of it is a reduction over the ranks along the axes that are partial.
TEST_P(MeshLayouts, PartialsAreReducedOverTheirAxesAlone) {
  on_mesh([](const std::shared_ptr<const DeviceMesh>& mesh) {
    const auto axes = static_cast<size_t>(mesh->ndim());
    for (size_t chosen = 0; chosen < (size_t{1} << axes); ++chosen) {
      std::vector<double> values;
      for (int64_t rank = 0; rank < mesh->size(); ++rank) {
        const auto coordinate = mesh->coordinate_of(rank);
        bool meets = true;
        for (size_t axis = 0; axis < axes; ++axis) {
          meets &= (chosen >> axis & 1) != 0 || coordinate[axis] == mesh->coordinate()[axis];
        }
        if (meets) values.push_back(static_cast<double>(rank) + 1);
      }
      const auto all = torch::tensor(values, torch::kFloat64);
      const auto mine = torch::full({2, 3}, mesh->rank() + 1.0, torch::kFloat64);
      const auto reduced = [&](const Partial& partial) {
        Placements placements(axes, Replicate());
        for (size_t axis = 0; axis < axes; ++axis) {
          if ((chosen >> axis & 1) != 0) placements[axis] = partial;
        }
        return DTensor::from_local(mine.clone(), mesh, placements).full_tensor();
      };
      EXPECT_TRUE(reduced(Partial()).equal(torch::full({2, 3}, all.sum().item<double>(), torch::kFloat64)));
      EXPECT_TRUE(
          reduced(Partial(ReduceOp::max)).equal(torch::full({2, 3}, all.max().item<double>(), torch::kFloat64)));
      EXPECT_TRUE(
          reduced(Partial(ReduceOp::min)).equal(torch::full({2, 3}, all.min().item<double>(), torch::kFloat64)));
      EXPECT_TRUE(torch::allclose(reduced(Partial::norm(2)),
                                  torch::full({2, 3}, all.norm().item<double>(), torch::kFloat64), 1e-14, 0));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, MeshLayouts,
                         ::testing::Values(Sizes{4}, Sizes{2, 2}, Sizes{4, 1}, Sizes{1, 4}, Sizes{1, 2, 2}),
                         [](const auto& which) {
                           std::string name;
                           for (const int64_t size : which.param) {
                             name += (name.empty() ? "" : "_") + std::to_string(size);
                           }
                           return name;
                         });

}  // namespace mesh_layouts_test

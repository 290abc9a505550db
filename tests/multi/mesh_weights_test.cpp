// What works on whole values (weights in and out, random fills, SummonFull, the parting of generators) on meshes of two
// axes and for shards of any dim.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/weights_net.h"

namespace mesh_weights_test {

using namespace testing_support;

struct Case {
  std::vector<int64_t> mesh;
  int64_t dim;  // the one to shard, counted from the end; 0 is the first
};

class MeshWeights : public ::testing::TestWithParam<Case> {
 protected:
  static void on_mesh(const std::function<void(RankContext&, const hsdp::FullyShardOptions&)>& body) {
    const auto& c = GetParam();
    run_ranks(static_cast<int>(c10::multiply_integers(c.mesh)), [&](RankContext& context) {
      torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
      const auto names =
          c.mesh.size() == 1 ? std::vector<std::string>{"shard"} : std::vector<std::string>{"replicate", "shard"};
      hsdp::FullyShardOptions options{.mesh = context.environment().make_mesh(c.mesh, names),
                                      .units = hsdp::each<WeightsBody>()};
      options.shard_placement_fn = [&](const std::string&, const at::Tensor&) { return std::optional(c.dim); };
      body(context, options);
    });
  }
  static Model make(const hsdp::FullyShardOptions& options, uint64_t seed = 3) {
    torch::manual_seed(seed);
    return hsdp::fully_shard(hsdp::meta_init([] { return Net(); }), options);
  }
};

TEST_P(MeshWeights, ComeFromAPlainModuleAndFromAFile) {
  on_mesh([](RankContext& context, const hsdp::FullyShardOptions& options) {
    const auto path = context.directory() + "/weights.pt";
    auto plain = plain_net(3);
    fill(*plain, 2);
    if (context.rank() == 0) torch::save(plain, path);
    auto model = make(options);
    hsdp::load(model, path);
    expect_values(model, *plain);
    auto reference = plain_net(3);
    torch::load(reference, path);
    expect_trains_alike(model, reference);
    hsdp::copy_values(model, plain);
    expect_values(model, *plain);
    const auto wrong = [&] { hsdp::load(model, context.directory() + "/none.pt"); };
    expect_error<dtensor::ValueError>(wrong, "[load] ", "none.pt cannot be read");
  });
}

TEST_P(MeshWeights, GoToAFileFromOneReplica) {
  on_mesh([](RankContext& context, const hsdp::FullyShardOptions& options) {
    auto model = make(options);
    model.materialize(at::kCPU);
    fill(model.module(), 2);
    const auto path = context.directory() + "/model.pt";
    const auto& mesh = *options.mesh;
    dtensor::reset_collective_counts();
    hsdp::export_pt(model, path);
    const bool first_replica = mesh.ndim() == 1 || mesh.coordinate()[0] == 0;
    EXPECT_EQ(dtensor::collective_counts().all_gathers, first_replica && mesh.size(mesh.ndim() - 1) > 1 ? 7 : 0);
    auto plain = plain_net(4);
    torch::load(plain, path);
    expect_values(model, *plain);
    EXPECT_EQ(plain->out->weight[2][3].item<double>(), (2 * 7 + 3 + 2) / 50.0);
    const auto nowhere = [&] { hsdp::export_pt(model, context.directory() + "/no/folder.pt"); };
    expect_error<dtensor::ValueError>(nowhere, "[export_pt] ", "cannot be created: No such file or directory");
  });
}

// The numbers are those of the module on one rank, on every replica, also after the generators have parted.
TEST_P(MeshWeights, AreInitialisedAsOnOneRank) {
  on_mesh([](RankContext&, const hsdp::FullyShardOptions& options) {
    auto plain = plain_net(9);
    auto model = make(options, 9);
    model.materialize(at::kCPU);
    torch::NoGradGuard no_grad;
    auto reset = [](torch::nn::Module& module) {
      for (auto& entry : module.named_parameters()) {
        entry.value().dim() > 1 ? torch::nn::init::xavier_normal_(entry.value()) : entry.value().uniform_(-1, 1);
      }
    };
    {
      auto reference = plain_net(9);
      expect_values(model, *reference);
    }
    torch::manual_seed(12);
    reset(*plain);
    torch::manual_seed(12);
    reset(model.module());
    expect_values(model, *plain);
  });
}

TEST_P(MeshWeights, LeaveEveryRankAGeneratorOfItsOwn) {
  on_mesh([](RankContext& context, const hsdp::FullyShardOptions& options) {
    auto plain = plain_net(9);
    const auto state = at::detail::getDefaultCPUGenerator().get_state();
    auto model = make(options, 9);
    model.materialize(at::kCPU);
    const auto rows = dtensor::all_gather_rows(*options.mesh, torch::rand({4}), {"all_gather", "test"});
    for (int64_t rank = 1; rank < context.world_size(); ++rank) {
      for (int64_t former = 0; former < rank; ++former) EXPECT_FALSE(rows[rank].equal(rows[former]));
    }
    // A fill of parameters goes on from where construction ended, on all ranks.
    torch::NoGradGuard no_grad;
    model.module().out->weight.normal_();
    auto generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(state);
    plain->out->weight.normal_();
    EXPECT_TRUE(torch::equal(hsdp::unsharded(model.module().out->weight), plain->out->weight));
  });
}

TEST_P(MeshWeights, CanBeSummonedWhole) {
  on_mesh([](RankContext& context, const hsdp::FullyShardOptions& options) {
    auto plain = plain_net(9);
    auto model = make(options, 9);
    model.materialize(at::kCPU);
    torch::NoGradGuard no_grad;
    model->eval();
    plain->eval();
    hsdp::SummonFull full(model);
    dtensor::reset_collective_counts();
    if (context.rank() == context.world_size() - 1) {
      EXPECT_TRUE(torch::allclose(model->forward(tokens()), plain->forward(tokens()), 1e-14, 0));
    }
    EXPECT_EQ(dtensor::collective_counts().all_gathers, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, MeshWeights,
                         ::testing::Values(Case{{2, 2}, 0}, Case{{2, 2}, -1}, Case{{4, 1}, 0}, Case{{1, 4}, 0},
                                           Case{{1, 4}, -1}, Case{{4}, -1}, Case{{2, 3}, 0}),
                         [](const auto& which) {
                           std::string name;
                           for (const int64_t size : which.param.mesh) name += std::to_string(size) + "_";
                           return name + (which.param.dim == 0 ? "FirstDim" : "LastDim");
                         });

}  // namespace mesh_weights_test

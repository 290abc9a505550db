// Units' transports between real processes over Gloo.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/error.h"
#include "dtensor/layout.h"
#include "hsdp/transport.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"

namespace gloo_transport_test {

using namespace dtensor;
using hsdp::make_transport;
using hsdp::TensorPair;
using testing_support::expect_error;
using testing_support::RankContext;
using testing_support::run_ranks;
using testing_support::RunOptions;

class GlooTransport : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GlooTransport, ::testing::Values(1, 2, 3, 4));

const std::vector<std::vector<int64_t>> kShapes = {{5, 3}, {2, 3}, {10, 3}, {1}, {7, 2, 2}};

at::ScalarType dtype_of(size_t parameter) { return parameter % 2 ? at::kDouble : at::kFloat; }

/// Parameter i of a module, the same on every rank.
at::Tensor parameter(size_t i) {
  return torch::arange(c10::multiply_integers(kShapes[i]), torch::kLong)
      .add(100 * static_cast<int64_t>(i))
      .to(dtype_of(i));
}

/// Rows that are padded so that all ranks hold equally many.
at::Tensor padded_to(const at::Tensor& flat, int64_t numel) {
  auto result = torch::zeros({numel}, flat.options());
  result.narrow(0, 0, flat.numel()).copy_(flat);
  return result;
}

// Shard(0) padded to equal sizes: the gathered bytes are the parameter, without any reordering.
TEST_P(GlooTransport, GathersUnevenParametersOfTwoDtypes) {
  run_ranks(GetParam(), [](RankContext& context) {
    const auto mesh = context.environment().mesh();
    const auto transport = make_transport(context.environment().communicator());
    std::vector<TensorPair> pairs;
    for (size_t i = 0; i < kShapes.size(); ++i) {
      const auto layout = Layout::create(mesh, {Shard(0)}, kShapes[i], {}, dtype_of(i));
      const int64_t length = c10::multiply_integers(layout->padded_local_sizes());
      const int64_t row = c10::multiply_integers(kShapes[i]) / kShapes[i][0];
      const auto mine = parameter(i).narrow(0, layout->local().offsets[0] * row, layout->local().sizes[0] * row);
      pairs.push_back({torch::full({length * context.world_size()}, -1, dtype_of(i)), padded_to(mine, length)});
    }
    reset_collective_counts();
    transport->all_gather(pairs, {"all_gather", "unit"})->wait();
    EXPECT_EQ(collective_counts().all_gathers, context.world_size() == 1 ? 0 : 2);  // one a dtype
    for (size_t i = 0; i < pairs.size(); ++i) {
      const auto expected = parameter(i);
      EXPECT_TRUE(torch::equal(pairs[i].full.narrow(0, 0, expected.numel()), expected)) << "parameter " << i;
      EXPECT_EQ(pairs[i].full._version(), 0u);
    }
  });
}

// Rank r's gradient is (r + 1) times the parameter: the sum is n (n + 1) / 2 times it.
TEST_P(GlooTransport, ReducesUnevenGradientsOfTwoDtypes) {
  run_ranks(GetParam(), [](RankContext& context) {
    const int64_t n = context.world_size();
    const auto mesh = context.environment().mesh();
    const auto transport = make_transport(context.environment().communicator());
    std::vector<TensorPair> pairs;
    std::vector<at::Tensor> expected;
    for (size_t i = 0; i < kShapes.size(); ++i) {
      const auto layout = Layout::create(mesh, {Shard(0)}, kShapes[i], {}, dtype_of(i));
      const int64_t length = c10::multiply_integers(layout->padded_local_sizes());
      const auto full = padded_to(parameter(i), length * n);
      expected.push_back((full * (n * (n + 1) / 2)).narrow(0, context.rank() * length, length));
      pairs.push_back({full * (context.rank() + 1), torch::full({length}, -1, dtype_of(i))});
    }
    reset_collective_counts();
    transport->reduce_scatter(pairs, {"reduce_scatter", "unit"})->wait();
    EXPECT_EQ(collective_counts().reduce_scatters, n == 1 ? 0 : 2);
    for (size_t i = 0; i < pairs.size(); ++i)
      EXPECT_TRUE(torch::equal(pairs[i].shard, expected[i])) << "parameter " << i;
  });
}

TEST(GlooTransportFailure, NamesTheUnit) {
  RunOptions options;
  options.killed = {1};
  run_ranks(
      3,
      [](RankContext& context) {
        const auto transport = make_transport(context.environment().communicator());
        if (context.rank() == 1) context.kill_self();
        const auto work = transport->all_gather(
            {TensorPair{torch::zeros({6}), torch::zeros({2})}, {torch::zeros({3}), torch::zeros({1})}},
            {"all_gather", "blocks.3"});
        expect_error<CommunicationError>([&] { work->wait(); }, "[all_gather] blocks.3, 36 bytes over gloo group");
      },
      options);
}

}  // namespace gloo_transport_test

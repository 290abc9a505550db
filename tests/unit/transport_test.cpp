#include "hsdp/transport.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/error.h"
#include "tests/testing/expect.h"
#include "tests/testing/fake_communicator.h"

namespace transport_test {

using namespace dtensor;
using hsdp::make_transport;
using hsdp::TensorPair;
using testing_support::expect_error;
using testing_support::FakeCommunicator;

/// Pair i of rank r holds 1000 * r + 100 * i + 0, 1, 2, ...
at::Tensor shard_of(int64_t rank, int64_t pair, int64_t length, at::ScalarType dtype) {
  return torch::arange(length, torch::kLong).add(1000 * rank + 100 * pair).to(dtype);
}

/// Rank `rank` of `size`, whose partners hold what they would hold in a real group: 1000 more for each rank.
std::shared_ptr<FakeCommunicator> fake(int64_t rank, int64_t size, bool groups) {
  return std::make_shared<FakeCommunicator>(
      rank, size, groups, [rank](int64_t other, const at::Tensor& own) { return own + 1000 * (other - rank); });
}

struct TransportCase {
  bool groups;
  std::vector<at::ScalarType> dtypes;
  size_t buckets;
};

class TransportPairs : public ::testing::TestWithParam<TransportCase> {};

TEST_P(TransportPairs, GatherPutsTheShardsInRankOrder) {
  const auto& test = GetParam();
  constexpr int64_t kRank = 1, kSize = 3;
  const auto communicator = fake(kRank, kSize, test.groups);
  std::vector<TensorPair> pairs;
  for (size_t i = 0; i < test.dtypes.size(); ++i) {
    const int64_t length = 2 + i;
    pairs.push_back({torch::full({kSize * length}, -1, test.dtypes[i]), shard_of(kRank, i, length, test.dtypes[i])});
  }
  const auto work = make_transport(communicator)->all_gather(pairs, {"all_gather", "blocks.3"});
  for (const auto& pair : pairs) EXPECT_TRUE(pair.full.eq(-1).all().item<bool>()) << "written before wait";
  EXPECT_FALSE(work->is_completed());
  work->wait();
  EXPECT_TRUE(work->is_completed());
  for (size_t i = 0; i < pairs.size(); ++i) {
    std::vector<at::Tensor> expected;
    for (int64_t rank = 0; rank < kSize; ++rank) expected.push_back(shard_of(rank, i, 2 + i, test.dtypes[i]));
    EXPECT_TRUE(torch::equal(pairs[i].full, torch::cat(expected))) << "pair " << i;
    EXPECT_EQ(pairs[i].full._version(), 0u);
  }
  const size_t expected_calls = test.groups ? pairs.size() : test.buckets;
  EXPECT_EQ(communicator->calls().size(), expected_calls);
  for (const auto& call : communicator->calls()) {
    EXPECT_EQ(call.operation, "all_gather");
    EXPECT_EQ(call.subject, "blocks.3");
    EXPECT_EQ(call.group > 0, test.groups);
  }
  work->wait();  // a second wait does nothing
  EXPECT_EQ(communicator->calls().size(), expected_calls);
}

// Element j of slice 1 of pair i holds 10 * i + j on this rank, and 1000 * (other - rank) more on the others.
TEST_P(TransportPairs, ReduceAddsThisRanksSlice) {
  const auto& test = GetParam();
  constexpr int64_t kRank = 1, kSize = 3;
  const auto communicator = fake(kRank, kSize, test.groups);
  std::vector<TensorPair> pairs;
  std::vector<at::Tensor> slices;
  for (size_t i = 0; i < test.dtypes.size(); ++i) {
    const int64_t length = 2 + i;
    const auto full = torch::arange(kSize * length, torch::kLong).add(10 * i).to(test.dtypes[i]);
    slices.push_back(full.narrow(0, kRank * length, length).clone());
    pairs.push_back({full, torch::full({length}, -1, test.dtypes[i])});
  }
  make_transport(communicator)->reduce_scatter(pairs, {"reduce_scatter", "blocks.3"})->wait();
  for (size_t i = 0; i < pairs.size(); ++i) {
    // The partners' offsets, -1000 and +1000, cancel.
    EXPECT_TRUE(torch::equal(pairs[i].shard, slices[i] * kSize)) << "pair " << i;
    EXPECT_EQ(pairs[i].shard._version(), 0u);
  }
  EXPECT_EQ(communicator->calls().size(), test.groups ? pairs.size() : test.buckets);
}

INSTANTIATE_TEST_SUITE_P(
    All, TransportPairs,
    ::testing::Values(TransportCase{false, {at::kFloat}, 1}, TransportCase{false, {at::kFloat, at::kFloat}, 1},
                      TransportCase{false, {at::kFloat, at::kDouble, at::kFloat, at::kLong, at::kDouble}, 3},
                      TransportCase{true, {at::kFloat}, 1},
                      TransportCase{true, {at::kFloat, at::kDouble, at::kFloat}, 2}));

TEST(PackingTransport, OnePairIsNotCopied) {
  const auto communicator = fake(0, 2, false);
  const auto full = torch::zeros({6}), shard = torch::ones({3});
  const auto work = make_transport(communicator)->all_gather(TensorPair{full, shard}, {"all_gather"});
  // The communicator works on the tensor's own memory: what is changed now still arrives.
  shard.fill_(5);
  work->wait();
  EXPECT_TRUE(full.narrow(0, 0, 3).eq(5).all().item<bool>());
}

TEST(PackingTransport, PackedGradientsAreFreeAtOnce) {
  const auto communicator = fake(0, 2, false);
  auto first = torch::ones({4}), second = torch::ones({6});
  const auto storage = first.storage().getWeakStorageImpl();
  const auto shards = std::vector{torch::zeros({2}), torch::zeros({3})};
  const auto work =
      make_transport(communicator)
          ->reduce_scatter({TensorPair{first, shards[0]}, TensorPair{second, shards[1]}}, {"reduce_scatter"});
  first.reset();
  EXPECT_TRUE(storage.expired());
  work->wait();
  // 1 from this rank and 1 + 1000 from the other.
  EXPECT_TRUE(shards[0].eq(1002).all().item<bool>());
  EXPECT_TRUE(shards[1].eq(1002).all().item<bool>());
}

TEST(Transport, EmptyPairsCostNothing) {
  for (const bool groups : {false, true}) {
    const auto communicator = fake(0, 2, groups);
    const auto transport = make_transport(communicator);
    transport->all_gather({}, {"all_gather"})->wait();
    transport->all_gather(TensorPair{torch::zeros({0}), torch::zeros({0})}, {"all_gather"})->wait();
    EXPECT_TRUE(communicator->calls().empty());
  }
}

TEST(Transport, WorksInInferenceModeAndForParameters) {
  const auto communicator = fake(0, 2, false);
  const auto parameter = torch::zeros({2}, torch::requires_grad());
  const auto shard = torch::ones({1}), other = torch::ones({1}), other_full = torch::zeros({2});
  std::shared_ptr<Work> work;
  {
    c10::InferenceMode inference;
    work =
        make_transport(communicator)->all_gather({TensorPair{parameter, shard}, {other_full, other}}, {"all_gather"});
    work->wait();
  }
  EXPECT_TRUE(torch::equal(parameter.detach(), torch::tensor({1.f, 1001.f})));
  EXPECT_TRUE(parameter.is_leaf());
  EXPECT_EQ(parameter._version(), 0u);
}

TEST(Transport, AFailedWaitKeepsTheOtherResultsRight) {
  const auto communicator = fake(0, 2, false);
  const auto a = torch::zeros({2}), b = torch::zeros({2}, torch::kDouble);
  const auto work =
      make_transport(communicator)
          ->all_gather({TensorPair{a, torch::ones({1})}, {b, torch::ones({1}, torch::kDouble)}}, {"all_gather"});
  communicator->fail_wait(2);
  expect_error<CommunicationError>([&] { work->wait(); }, "told to fail");
  EXPECT_EQ(a[1].item<float>(), 1001);
  EXPECT_EQ(b[1].item<double>(), 0);
}

/// The `nth` collective does not start.
class Refusing final : public FakeCommunicator {
 public:
  explicit Refusing(int nth) : FakeCommunicator(0, 2, /*prefers_groups=*/true), left_(nth) {}
  std::shared_ptr<dtensor::Work> all_gather(const torch::Tensor& output, const torch::Tensor& input,
                                            dtensor::OperationName name) override {
    if (--left_ == 0) throw dtensor::CommunicationError("it does not start");
    return FakeCommunicator::all_gather(output, input, name);
  }

 private:
  int left_;
};

TEST(GroupedTransport, LeavesNoGroupOpenWhenAMemberDoesNotStart) {
  const auto transport = make_transport(std::make_shared<Refusing>(2));
  std::vector<torch::Tensor> full{torch::zeros({4}), torch::zeros({4})}, shards{torch::ones({2}), torch::ones({2})};
  const std::vector<TensorPair> pairs{{full[0], shards[0]}, {full[1], shards[1]}};
  EXPECT_THROW(transport->all_gather(pairs, {"all_gather"}), dtensor::CommunicationError);
  transport->all_gather(pairs, {"all_gather"})->wait();
  for (const auto& tensor : full) EXPECT_EQ(tensor[0].item<float>(), 1);
}

TEST(LocalTransport, SharedMemoryIsANoOpAndOtherPairsAreCopied) {
  const auto transport = make_transport(make_self_communicator());
  const auto shared = torch::ones({3}), shard = torch::full({2}, 7.f), full = torch::zeros({2});
  transport->all_gather({TensorPair{shared, shared}, {full, shard}}, {"all_gather"})->wait();
  EXPECT_TRUE(torch::equal(shared, torch::ones({3})));
  EXPECT_TRUE(torch::equal(full, shard));
  EXPECT_EQ(full._version(), 0u);
  const auto gradient = torch::full({2}, 3.f);
  transport->reduce_scatter({TensorPair{shared, shared}, {gradient, shard}}, {"reduce_scatter"})->wait();
  EXPECT_TRUE(torch::equal(shard, gradient));
}

TEST(Transport, RefusesPairsThatDoNotFitBeforeAnythingStarts) {
  for (const bool groups : {false, true}) {
    const auto communicator = fake(0, 2, groups);
    const auto transport = make_transport(communicator);
    const TensorPair good{torch::zeros({4}), torch::zeros({2})};
    const auto refused = [&](const TensorPair& bad, const std::string& part) {
      expect_error<ValueError>(
          [&] {
            transport->all_gather({good, bad}, {"all_gather", "blocks.3"});
          },
          "[all_gather] ", part);
    };
    refused({torch::zeros({5}), torch::zeros({2})}, "the full tensor has 5 elements and the shard 2, expected 4");
    refused({torch::zeros({2, 2}), torch::zeros({2})}, "pair 1 of blocks.3: full has sizes [2, 2] and shard [2]");
    refused({torch::zeros({4}), torch::zeros({2}, torch::kHalf)}, "the full tensor is Float and the shard Half");
    refused({torch::zeros({8}).slice(0, 0, 8, 2), torch::zeros({2})}, "is not contiguous");
    refused({at::Tensor(), torch::zeros({2})}, "pair 1 of blocks.3: a tensor is undefined");
    refused({torch::zeros({4}, torch::kMeta), torch::zeros({2})}, "full is on meta and shard on cpu");
    expect_error<NotSupportedError>(
        [&] {
          const auto options = torch::kBool;
          transport->reduce_scatter({good, TensorPair{torch::zeros({4}, options), torch::zeros({2}, options)}},
                                    {"reduce_scatter"});
        },
        "[reduce_scatter] cannot reduce Bool, expected Float, Double, Half, BFloat16, Int or Long");
    EXPECT_TRUE(communicator->calls().empty());
  }
}

}  // namespace transport_test

// The communicator over the GPUs' own backend, NCCL: with one rank, where every collective is a copy that NCCL makes,
// and over all GPUs.
#include <c10/core/Event.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "hsdp/transport.h"
#include "tests/gpu/device.h"
#include "tests/testing/expect.h"

namespace {

using namespace testing_support;
using dtensor::CommunicationError;
using dtensor::Communicator;
using dtensor::ReduceOp;
using dtensor::StateError;
using dtensor::ValueError;

/// One rank, on the first GPU, with a group of its own.
struct Alone {
  c10::Device device = first_gpu();
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  c10::intrusive_ptr<c10d::Backend> backend = make_gpu_backend(store, 0, 1, device);
  std::shared_ptr<Communicator> communicator =
      dtensor::make_c10d_communicator(backend, "alone", std::chrono::minutes(1));
  int64_t count = 1000;

  torch::Tensor values(torch::ScalarType dtype) const { return (torch::arange(count) % 100).to(dtype).to(device); }
  torch::Tensor zeros(torch::ScalarType dtype) const {
    return torch::zeros({count}, torch::TensorOptions(device).dtype(dtype));
  }
};

void in_one_process(const std::function<void()>& body) {
  run_ranks(1, [&](RankContext&) { body(); }, {.timeout = std::chrono::seconds(120), .make_environment = false});
}

void expect_same(const torch::Tensor& value, const torch::Tensor& expected, const std::string& what) {
  // Comparing bytes, for dtypes without arithmetic.
  EXPECT_TRUE(torch::equal(value.cpu().view(torch::kByte), expected.cpu().view(torch::kByte))) << what;
}

const std::vector<torch::ScalarType> kReducible = {torch::kFloat,    torch::kDouble, torch::kHalf,
                                                   torch::kBFloat16, torch::kInt,    torch::kLong};

TEST(OneRank, MovesAndReducesEveryDtype) {
  HSDP_REQUIRE_GPUS(1);
  in_one_process([] {
    Alone rank;
    auto& communicator = *rank.communicator;
    EXPECT_EQ(communicator.size(), 1);
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kInt, torch::kLong,
                             torch::kByte, torch::kFloat8_e4m3fn}) {
      const std::string name = c10::toString(dtype);
      const auto values = rank.values(dtype);
      const auto gathered = rank.zeros(dtype);
      communicator.all_gather(gathered, values, {"all_gather", name})->wait();
      expect_same(gathered, values, "all_gather of " + name);
      const auto own = values.clone();
      communicator.all_gather(own, own, {"all_gather", name})->wait();
      expect_same(own, values, "all_gather in place of " + name);
      communicator.broadcast(own, 0, {"broadcast", name})->wait();
      expect_same(own, values, "broadcast of " + name);
    }
    for (const auto dtype : kReducible) {
      const std::string name = c10::toString(dtype);
      const auto values = rank.values(dtype);
      const auto shard = rank.zeros(dtype);
      communicator.reduce_scatter(shard, values, {"reduce_scatter", name})->wait();
      expect_same(shard, values, "reduce_scatter of " + name);
      for (const auto op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
        const auto reduced = values.clone();
        communicator.all_reduce(reduced, op, {"all_reduce", name})->wait();
        expect_same(reduced, values, "all_reduce of " + name);
      }
    }
    communicator.barrier({"barrier", "test"});
  });
}

TEST(OneRank, GroupsCollectivesOfOneKind) {
  HSDP_REQUIRE_GPUS(1);
  in_one_process([] {
    Alone rank;
    auto& communicator = *rank.communicator;
    if (stand_in() == StandIn::none) {
      EXPECT_TRUE(communicator.prefers_groups());
    }
    for (const auto dtype : kReducible) {
      const auto values = rank.values(dtype);
      std::vector<torch::Tensor> gathered, shards, reduced;
      communicator.start_group();
      for (int64_t i = 0; i < 3; ++i) {
        gathered.push_back(rank.zeros(dtype));
        communicator.all_gather(gathered.back(), values + i, {"all_gather", "several"});
      }
      communicator.end_group()->wait();
      communicator.start_group();
      for (int64_t i = 0; i < 3; ++i) {
        shards.push_back(rank.zeros(dtype));
        communicator.reduce_scatter(shards.back(), values + i, {"reduce_scatter", "several"});
      }
      communicator.end_group()->wait();
      communicator.start_group();
      for (int64_t i = 0; i < 3; ++i) {
        reduced.push_back(values + i);
        communicator.all_reduce(reduced.back(), ReduceOp::sum, {"all_reduce", "several"});
      }
      communicator.end_group()->wait();
      for (int64_t i = 0; i < 3; ++i) {
        const auto index = static_cast<size_t>(i);
        for (const auto* results : {&gathered, &shards, &reduced}) {
          expect_same((*results)[index], values + i, c10::str(dtype, " ", i));
        }
      }
    }
    communicator.start_group();
    communicator.end_group()->wait();  // of nothing
  });
}

// Inputs are written behind a kernel that takes long, on a stream that is not the default one, and the results are read
// on a third: whoever does not wait for events reads zeros.
TEST(OneRank, IsOrderedByEventsAndTheHostGoesOn) {
  HSDP_REQUIRE_GPUS(1);
  in_one_process([] {
    Alone rank;
    auto& communicator = *rank.communicator;
    // NCCL connects with the first collective.
    communicator.all_reduce(rank.zeros(torch::kFloat), ReduceOp::sum, {"all_reduce", "warm-up"})->wait();
    // Once to rehearse: the first launch of a kernel may hold the host up until the device has nothing to do.
    for (const bool counts : {false, true}) {
      const auto input = rank.zeros(torch::kFloat), reduced = rank.zeros(torch::kFloat);
      const auto gathered = rank.zeros(torch::kFloat), shard = rank.zeros(torch::kFloat);
      const auto grouped_a = rank.zeros(torch::kFloat), grouped_b = rank.zeros(torch::kFloat);
      std::vector<torch::Tensor> seen;
      for (int64_t i = 0; i < 5; ++i) seen.push_back(rank.zeros(torch::kFloat));
      synchronize(rank.device);
      const auto writes = another_stream(rank.device), reads = another_stream(rank.device);
      std::optional<c10::Event> busy;
      std::vector<std::shared_ptr<dtensor::Work>> works;
      {
        c10::StreamGuard guard(writes);
        keep_busy(std::chrono::milliseconds(counts ? 1500 : 1));
        if (counts && stand_in() == StandIn::none) busy.emplace(rank.device.type()).record(writes);
        input.fill_(3);
        reduced.fill_(3);
        works.push_back(communicator.all_gather(gathered, input, {"all_gather", "x"}));
        works.push_back(communicator.reduce_scatter(shard, input, {"reduce_scatter", "x"}));
        works.push_back(communicator.all_reduce(reduced, ReduceOp::sum, {"all_reduce", "x"}));
        communicator.start_group();
        communicator.all_gather(grouped_a, input, {"all_gather", "x"});
        communicator.all_gather(grouped_b, input, {"all_gather", "y"});
        works.push_back(communicator.end_group());
      }
      if (busy) {
        for (const auto& work : works) EXPECT_FALSE(work->is_completed());
      }
      {
        c10::StreamGuard guard(reads);
        for (const auto& work : works) work->wait();
        size_t next = 0;
        for (const auto& result : {gathered, shard, reduced, grouped_a, grouped_b}) seen[next++].copy_(result);
      }
      if (busy) {
        EXPECT_FALSE(busy->query()) << "starting and waiting held the host up until the stream was done";
      }
      synchronize(rank.device);
      for (size_t i = 0; i < seen.size(); ++i) {
        EXPECT_TRUE(torch::equal(seen[i].cpu(), torch::full({rank.count}, 3.0f))) << "result " << i;
      }
      for (const auto& work : works) EXPECT_TRUE(work->is_completed());
    }
  });
}

TEST(OneRank, RefusesWrongArgumentsAndGoesOn) {
  HSDP_REQUIRE_GPUS(1);
  in_one_process([] {
    Alone rank;
    auto& communicator = *rank.communicator;
    const auto values = rank.values(torch::kFloat);
    const auto check = [&] {
      const auto sum = values.clone();
      communicator.all_reduce(sum, ReduceOp::sum, {"all_reduce", "after"})->wait();
      expect_same(sum, values, "after a refusal");
    };
    check();
    const auto shorter = values.narrow(0, 0, 10);
    expect_error<ValueError>([&] { communicator.all_gather(values, shorter, {"all_gather", "x"}); }, "[all_gather]");
    expect_error<ValueError>(
        [&] {
          communicator.reduce_scatter(shorter, values, {"reduce_scatter", "x"});
        },
        "[reduce_scatter]");
    expect_error<ValueError>(
        [&] {
          communicator.all_gather(values, rank.values(torch::kDouble), {"all_gather", "x"});
        },
        "[all_gather]");
    const auto gaps = rank.zeros(torch::kFloat).view({-1, 2}).select(1, 0);
    expect_error<ValueError>(
        [&] {
          communicator.all_reduce(gaps, ReduceOp::sum, {"all_reduce", "x"});
        },
        "[all_reduce]", "contiguous");
    expect_error<dtensor::NotSupportedError>(
        [&] {
          communicator.all_reduce(values.to(torch::kBool), ReduceOp::sum, {"all_reduce", "x"});
        },
        "[all_reduce]");
    expect_error<ValueError>([&] { communicator.broadcast(values, 1, {"broadcast", "x"}); }, "root 1");
    expect_error<dtensor::NotSupportedError>(
        [&] {
          communicator.all_reduce(values, ReduceOp::norm, {"all_reduce", "x"});
        },
        "norm");
    check();
    expect_error<StateError>([&] { communicator.end_group(); }, "[end_group]");
    communicator.start_group();
    expect_error<StateError>([&] { communicator.start_group(); }, "[start_group]");
    expect_error<ValueError>([&] { communicator.all_gather(values, shorter, {"all_gather", "x"}); }, "[all_gather]");
    const auto gathered = rank.zeros(torch::kFloat);
    const auto member = communicator.all_gather(gathered, values, {"all_gather", "x"});
    expect_error<StateError>([&] { member->wait(); }, "end_group()");
    communicator.end_group()->wait();
    expect_same(gathered, values, "the group around a refusal");
    check();
    if (stand_in() != StandIn::host) {
      // What only the backend sees.
      expect_error<CommunicationError>(
          [&] {
            communicator.all_reduce(values.cpu(), ReduceOp::sum, {"all_reduce", "on the host"})->wait();
          },
          "[all_reduce] on the host, 4,000 bytes over");
      check();
    }
  });
}

// Closed forms, over as many GPUs as a machine has, up to eight.
TEST(AllGpus, MoveAndReduceEachOthersValues) {
  HSDP_REQUIRE_GPUS(2);
  run_on_gpus(std::min(gpu_count(), 8), Place::own_gpu, [](RankContext& context) {
    auto& communicator = *context.environment().communicator();
    const auto device = context.environment().device();
    const int64_t ranks = communicator.size(), rank = communicator.rank(), count = 1000;
    ASSERT_EQ(ranks, std::min(gpu_count(), 8));
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kLong}) {
      const std::string name = c10::toString(dtype);
      const auto from = [&](int64_t sender, int64_t size) { return (torch::arange(size) + 10 * sender).to(dtype); };
      std::vector<torch::Tensor> parts;
      for (int64_t sender = 0; sender < ranks; ++sender) parts.push_back(from(sender, count));
      const auto gathered = torch::zeros({ranks * count}, torch::TensorOptions(device).dtype(dtype));
      communicator.all_gather(gathered, from(rank, count).to(device), {"all_gather", name})->wait();
      expect_same(gathered, torch::cat(parts), "all_gather of " + name);
      // Over ranks r: the sum of i + 10r.
      const auto sums = (torch::arange(ranks * count) * ranks + 5 * ranks * (ranks - 1)).to(dtype);
      const auto shard = torch::zeros({count}, torch::TensorOptions(device).dtype(dtype));
      communicator.reduce_scatter(shard, from(rank, ranks * count).to(device), {"reduce_scatter", name})->wait();
      expect_same(shard, sums.narrow(0, rank * count, count), "reduce_scatter of " + name);
      const auto reduced = [&](ReduceOp op) {
        const auto tensor = from(rank, ranks * count).to(device);
        communicator.all_reduce(tensor, op, {"all_reduce", name})->wait();
        return tensor;
      };
      expect_same(reduced(ReduceOp::sum), sums, "sum of " + name);
      expect_same(reduced(ReduceOp::max), from(ranks - 1, ranks * count), "maximum of " + name);
      expect_same(reduced(ReduceOp::min), from(0, ranks * count), "minimum of " + name);
      const auto sent = from(rank, count).to(device);
      communicator.broadcast(sent, ranks - 1, {"broadcast", name})->wait();
      expect_same(sent, from(ranks - 1, count), "broadcast of " + name);
    }
  });
}

// How a program comes by its environment.
TEST(OneRank, InitTakesTheGpuByNameAndByGroup) {
  HSDP_REQUIRE_GPUS(1);
  in_one_process([] {
    const auto device = first_gpu();
    const char* name = stand_in() == StandIn::none ? "nccl" : stand_in() == StandIn::host ? "gloo" : "staged";
    for (const bool has_store : {false, true}) {
      c10::intrusive_ptr<c10d::Store> store;
      if (has_store) store = c10::make_intrusive<c10d::HashStore>();
      const auto environment = hsdp::init_from(store, 0, 1, {.backend = name});
      EXPECT_EQ(environment.device(), device);
      EXPECT_EQ(environment.world_size(), 1);
      hsdp::shutdown();
    }
    EXPECT_EQ(hsdp::init_from(nullptr, 0, 1, {}).device().type(), device.type()) << "auto prefers what is visible";
    hsdp::shutdown();
    EXPECT_EQ(hsdp::init_from(nullptr, 0, 1, {.backend = "gloo"}).device(), c10::Device(c10::kCPU));
    hsdp::shutdown();
    auto store = c10::make_intrusive<c10d::HashStore>();
    const auto environment = hsdp::init_from(store, make_gpu_backend(store, 0, 1, device));
    EXPECT_EQ(environment.device(), device);
    EXPECT_EQ(environment.mesh()->device_type(), device.type());
    const auto sum = torch::full({4}, 2.0, device);
    environment.communicator()->all_reduce(sum, ReduceOp::sum, {"all_reduce", "x"})->wait();
    EXPECT_TRUE(torch::equal(sum.cpu(), torch::full({4}, 2.0)));
    hsdp::shutdown();
    if (stand_in() == StandIn::none) {
      const std::string missing = c10::str("local rank ", gpu_count(), " but ", gpu_count(), " visible");
      expect_error<ValueError>([&] { hsdp::init_from(nullptr, 0, 1, {.backend = name, .local_rank = gpu_count()}); },
                               missing);
    }
  });
}

}  // namespace

// HSDP_DEBUG_COLLECTIVES=1: over a backend that would wait for ever, the ranks compare their calls in the store.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/backend.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/private_device.h"
#include "tests/testing/staged_backend.h"

namespace {

using namespace testing_support;
using dtensor::CommunicationError;
using dtensor::ReduceOp;

class Registered : public ::testing::Environment {
 public:
  void SetUp() override {
    register_private_device();
    hsdp::register_backend("staged", c10::DeviceType::PrivateUse1, make_staged_backend);
  }
};
[[maybe_unused]] const auto* const registered = ::testing::AddGlobalTestEnvironment(new Registered);

constexpr auto kVariable = "HSDP_DEBUG_COLLECTIVES";

struct Run {
  const char* variable = "1";  // null: not set
  const char* backend = "staged";
  std::chrono::milliseconds timeout{60000};
};

using Body = std::function<void(RankContext&, hsdp::Environment&, c10d::Store&)>;

hsdp::Environment start(RankContext& context, const Run& run, const c10::intrusive_ptr<c10d::Store>& store) {
  run.variable == nullptr ? unsetenv(kVariable) : setenv(kVariable, run.variable, 1);
  return hsdp::init_from(store, context.rank(), context.world_size(), {.backend = run.backend, .timeout = run.timeout});
}

void on_ranks(int ranks, const Run& run, const Body& body) {
  run_ranks(ranks,
            [&](RankContext& context) {
              auto store = c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", ranks);
              auto environment = start(context, run, store);
              body(context, environment, *store);
            },
            {.make_environment = false});
}

at::Tensor sum_of(dtensor::Communicator& group, at::Tensor tensor, const char* subject) {
  group.all_reduce(tensor, ReduceOp::sum, {"all_reduce", subject})->wait();
  return tensor;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "no error";
}

TEST(DebugCollectives, AreOffUnlessAsked) {
  for (const char* variable : {static_cast<const char*>(nullptr), "0", ""}) {
    on_ranks(2, {.variable = variable}, [](RankContext&, hsdp::Environment& environment, c10d::Store& store) {
      auto& group = *environment.communicator();
      const auto one = torch::ones({2}, environment.device());
      sum_of(group, one.clone(), "first");  // the backend below may connect now
      group.barrier({"barrier", "test"});
      const auto keys = store.getNumKeys();
      group.barrier({"barrier", "test"});
      for (int i = 0; i < 3; ++i) sum_of(group, one.clone(), "again");
      EXPECT_EQ(store.getNumKeys(), keys);
      group.barrier({"barrier", "end"});
    });
  }
}

TEST(DebugCollectives, LeaveResultsAloneAndTheStoreSmall) {
  on_ranks(3, {}, [](RankContext& context, hsdp::Environment& environment, c10d::Store& store) {
    auto& group = *environment.communicator();
    const auto options = torch::TensorOptions(environment.device()).dtype(torch::kDouble);
    const auto mine = torch::full({2}, context.rank(), options);
    group.barrier({"barrier", "before"});
    const auto keys = store.getNumKeys();
    for (int i = 0; i < 10; ++i) {
      auto all = torch::empty({6}, options);
      group.all_gather(all, mine, {"all_gather", "test"})->wait();
      EXPECT_TRUE(all.cpu().equal(torch::tensor({0, 0, 1, 1, 2, 2}, torch::kDouble)));
      auto part = torch::empty({2}, options);
      group.reduce_scatter(part, all, {"reduce_scatter", "test"})->wait();
      EXPECT_TRUE(part.cpu().equal(torch::full({2}, 3.0 * context.rank(), torch::kDouble)));
      EXPECT_TRUE(sum_of(group, mine.clone(), "test").cpu().equal(torch::full({2}, 3.0, torch::kDouble)));
      auto root = mine.clone();
      group.broadcast(root, 2, {"broadcast", "test"})->wait();
      EXPECT_TRUE(root.cpu().equal(torch::full({2}, 2.0, torch::kDouble)));
      group.start_group();
      auto one = mine.clone(), other = mine.clone() + 1;
      group.all_reduce(one, ReduceOp::sum, {"all_reduce", "one"});
      group.all_reduce(other, ReduceOp::max, {"all_reduce", "other"});
      group.end_group()->wait();
      EXPECT_EQ(one.cpu()[0].item<double>(), 3);
      EXPECT_EQ(other.cpu()[0].item<double>(), 3);
      group.barrier({"barrier", "test"});
    }
    EXPECT_LE(store.getNumKeys(), keys + context.world_size()) << "at most two keys a rank";
    group.barrier({"barrier", "end"});
  });
}

struct Call {
  std::string name;
  std::function<void(dtensor::Communicator&, at::Device)> make;
  std::string own, told;  // how its error begins on the rank that makes it, and what the other is told
};

std::vector<Call> calls() {
  const auto reduce = [](at::ScalarType dtype, int64_t count, ReduceOp op, const char* subject) {
    return [=](dtensor::Communicator& group, at::Device device) {
      group.all_reduce(torch::zeros({count}, torch::TensorOptions(device).dtype(dtype)), op, {"all_reduce", subject})
          ->wait();
    };
  };
  return {{"AllReduce", reduce(torch::kDouble, 1, ReduceOp::sum, "loss"),
           "[all_reduce] loss, 8 bytes over staged group \"shard\"", "calls all_reduce \"loss\" of 8 bytes of Double"},
          {"Barrier",
           [](dtensor::Communicator& group, at::Device) {
             group.barrier({"barrier", "shutdown"});
           },
           "[barrier] shutdown, ", "calls barrier \"shutdown\""},
          {"OtherDtype", reduce(torch::kLong, 1, ReduceOp::sum, "loss"), "[all_reduce] loss, ",
           "calls all_reduce \"loss\" of 8 bytes of Long"},
          {"OtherSize", reduce(torch::kDouble, 3, ReduceOp::sum, "loss"), "[all_reduce] loss, ",
           "calls all_reduce \"loss\" of 24 bytes of Double"},
          {"OtherName", reduce(torch::kDouble, 1, ReduceOp::sum, "norm"), "[all_reduce] norm, ",
           "calls all_reduce \"norm\" of 8 bytes of Double"},
          {"OtherReduction", reduce(torch::kDouble, 1, ReduceOp::max, "loss"), "[all_reduce] loss, ",
           "calls all_reduce \"loss\" of 8 bytes of Double with another reduction or root"}};
}

class UnlikeCalls : public ::testing::TestWithParam<size_t> {};

TEST_P(UnlikeCalls, AreToldOnAllRanksAndTheGroupGoesOn) {
  const auto usual = calls()[0], other = calls()[GetParam()];
  on_ranks(3, {}, [&](RankContext& context, hsdp::Environment& environment, c10d::Store&) {
    auto& group = *environment.communicator();
    const bool differs = context.rank() == 1;
    const auto error = error_of([&] { (differs ? other : usual).make(group, environment.device()); });
    EXPECT_TRUE(error.starts_with(differs ? other.own : usual.own)) << error;
    const auto told = differs ? usual.told : other.told;
    EXPECT_NE(error.find((differs ? "rank 0 " : "rank 1 ") + told), std::string::npos) << error;
    EXPECT_NE(error.find("expected the same call on all ranks"), std::string::npos) << error;
    EXPECT_EQ(sum_of(group, torch::ones({1}, environment.device()), "after").item<float>(), 3);
  });
}

INSTANTIATE_TEST_SUITE_P(Calls, UnlikeCalls, ::testing::Range<size_t>(1, calls().size()),
                         [](const auto& which) { return calls()[which.param].name; });

class MissingRank : public ::testing::TestWithParam<const char*> {};

// A rank that computes alone, or is gone, is named with the call that it should have made.
TEST_P(MissingRank, IsNamedWithTheCallItMisses) {
  const std::string backend = GetParam();
  on_ranks(3, {.backend = GetParam(), .timeout = std::chrono::seconds(5)},
           [&](RankContext& context, hsdp::Environment& environment, c10d::Store&) {
             auto& group = *environment.communicator();
             const auto one = torch::ones({1}, environment.device());
             sum_of(group, one.clone(), "tokens");
             if (context.rank() == 1) {
               context.await("rank 0");
               context.await("rank 2");
               const auto late = error_of([] { hsdp::shutdown(); });
               EXPECT_NE(late.find("rank 0 calls all_reduce \"loss\""), std::string::npos) << late;
               context.tell("late");
               return;
             }
             const auto error = error_of([&] { sum_of(group, one.clone(), "loss"); });
             EXPECT_TRUE(error.starts_with("[all_reduce] loss, 4 bytes over " + backend + " group \"shard\" (rank " +
                                           std::to_string(context.rank()) + " of 3) failed after "))
                 << error;
             EXPECT_NE(error.find("(timeout 5 s): rank 1 did not come to call 3 of this group, which is all_reduce "
                                  "\"loss\" of 4 bytes of Float"),
                       std::string::npos)
                 << error;
             // From then on at once, and with the same words.
             const auto before = std::chrono::steady_clock::now();
             const auto again = error_of([] { hsdp::shutdown(); });
             EXPECT_NE(again.find("rank 1 did not come to call 3"), std::string::npos) << again;
             EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(5));
             context.tell("rank " + std::to_string(context.rank()));
             context.await("late");
           });
}

INSTANTIATE_TEST_SUITE_P(Backends, MissingRank, ::testing::Values("staged", "gloo"),
                         [](const auto& which) { return std::string(which.param); });

// Rows {0, 1} and {2, 3} have stores of their own: what one does wrong is not the other's business.
TEST(DebugCollectives, OfEachGroupAreItsOwn) {
  on_ranks(4, {}, [](RankContext& context, hsdp::Environment& environment, c10d::Store&) {
    const auto mesh = environment.make_mesh({2, 2}, {"replicate", "shard"});
    auto& row = mesh->communicator(1);
    const auto one = torch::ones({1}, environment.device());
    const auto error = error_of([&] { sum_of(row, one.clone(), context.rank() == 1 ? "norm" : "loss"); });
    if (context.rank() >= 2) {
      EXPECT_EQ(error, "no error");
    } else {
      EXPECT_NE(
          error.find(context.rank() == 1 ? "rank 0 calls all_reduce \"loss\"" : "rank 1 calls all_reduce \"norm\""),
          std::string::npos)
          << error;
    }
    EXPECT_EQ(sum_of(mesh->communicator(0), one.clone(), "column").item<float>(), 2);
    EXPECT_EQ(sum_of(*mesh->sub_communicator(1, 1), one.clone(), "alone").item<float>(), 1);
  });
}

TEST(DebugCollectives, TellWhatAModelMeets) {
  on_ranks(2, {}, [](RankContext& context, hsdp::Environment& environment, c10d::Store&) {
    auto model =
        hsdp::fully_shard(hsdp::meta_init([] { return torch::nn::Linear(4, 3); }), {.mesh = environment.mesh()});
    model.materialize(environment.device());
    const auto x = torch::ones({2, 4}, environment.device());
    model->forward(x).sum().backward();
    const auto error = error_of([&] {
      if (context.rank() == 0) {
        model->forward(x);
      } else {
        environment.barrier("evaluation");
      }
    });
    if (context.rank() == 0) {
      EXPECT_NE(error.find("rank 1 calls barrier \"evaluation\""), std::string::npos) << error;
    } else {
      EXPECT_NE(error.find("rank 0 calls all_gather "), std::string::npos) << error;
    }
  });
}

TEST(DebugCollectives, NeedOneValueOnAllRanks) {
  const auto refused = [](const char* at_0, const char* at_1, std::chrono::seconds timeout, const std::string& text) {
    run_ranks(2,
              [&](RankContext& context) {
                auto store = c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", 2);
                const auto begin = [&] {
                  start(context, {.variable = context.rank() == 0 ? at_0 : at_1, .timeout = timeout}, store);
                };
                if (context.rank() == 1) {
                  expect_error<dtensor::ValueError>(begin, text);
                } else {
                  EXPECT_THROW(begin(), dtensor::Error);
                }
                context.tell("rank " + std::to_string(context.rank()));
                context.await("rank " + std::to_string(1 - context.rank()));
              },
              {.make_environment = false});
  };
  // Rank 0 waits in vain; in the second, rank 1 for what rank 0 has.
  refused("1", "yes", std::chrono::seconds(1),
          "[init] environment variable HSDP_DEBUG_COLLECTIVES is 'yes', expected 0 or 1");
  refused("1", nullptr, std::chrono::seconds(10),
          "[init] environment variable HSDP_DEBUG_COLLECTIVES is 0 on rank 1 and 1 on rank 0, expected one value");
}

}  // namespace

// What happens in which order: gathers, frees and reductions of a root with three blocks, of which the root's own
// parameter (the head) is read last.
//
// Where PyTorch's FSDP2 has another order: it gathers the root at the begin of a forward, because a hook of the root
// runs first; here an operator's read gathers, so that the root comes when its head is read. FSDP2 reduces the root at
// the end of a backward, here it goes when autograd has its gradients, which is first of all, so that memory for them
// is free earlier. Both gather the unit before the one that backward is at. FSDP2 may start a unit that nobody needs
// (its forward ran, its output is not part of the loss); here one is only started while a saved tensor waits for it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "dtensor/graph_capture.h"
#include "hsdp/hsdp.h"
#include "tests/testing/blocks.h"
#include "tests/testing/expect.h"

namespace event_order_test {

using namespace testing_support;

constexpr int64_t kWidth = 5;

torch::Tensor inputs() { return torch::ones({2, kWidth}).set_requires_grad(true); }

/// Writes down what happens: "+0" unit blocks.0 is gathered, "-0" it is freed, "=0" its gradients are reduced.
class Trace {
 public:
  explicit Trace(const hsdp::FullySharded<BlocksImpl>& model) {
    model.core()->scheduler()->set_observer([this](const char* event, const hsdp::Unit& unit) {
      auto name = unit.name();
      for (auto at = name.find("blocks."); at != std::string::npos; at = name.find("blocks.")) name.erase(at, 7);
      const std::string what = event;
      text_ += (text_.empty() ? "" : " ") +
               std::string(what == "all_gather" ? "+"
                           : what == "reshard"  ? "-"
                                                : "=") +
               name;
    });
  }
  std::string take() { return std::exchange(text_, {}); }

 private:
  std::string text_;
};

struct Sharded {
  Sharded(RankContext& context, hsdp::FullyShardOptions options)
      : model(make(context, std::move(options))), trace(model), scheduler(model.core()->scheduler()) {}
  static hsdp::FullySharded<BlocksImpl> make(RankContext& context, hsdp::FullyShardOptions options) {
    options.mesh = context.environment().mesh();
    if (options.units.rules().empty()) options.units = hsdp::each("blocks.*");
    auto model = hsdp::fully_shard(hsdp::meta_init([] { return Blocks(3, kWidth); }), options);
    model.materialize(at::kCPU);
    return model;
  }
  hsdp::UnitSet unit(const std::string& name) { return model.units(name == "root" ? name : "blocks." + name); }

  hsdp::FullySharded<BlocksImpl> model;
  Trace trace;
  std::shared_ptr<hsdp::Scheduler> scheduler;
};

const std::string kFirstForward = "+0 -0 +1 -1 +2 +root";  // before anything is known of the order
const std::string kForward = "+0 +1 -0 +2 -1 +root";       // the next one is on its way while one computes
const std::string kBackward = "+2 -root =root +1 -2 =2 +0 -1 =1 -0 =0";

TEST(Order, OfForwardAndBackwardForEachReshardSetting) {
  for (int ranks : {2, 4}) {
    run_ranks(ranks, [&](RankContext& context) {
      struct Expectation {
        std::string name;
        std::optional<hsdp::ReshardAfterForward> reshard;
        std::string first_forward, forward, backward;
      };
      std::vector<Expectation> all{
          {"default", std::nullopt, kFirstForward + " -2", kForward + " -2", kBackward},
          {"true", true, kFirstForward + " -root -2", kForward + " -root -2", "+root " + kBackward},
          {"false", false, "+0 +1 +2 +root", "+0 +1 +2 +root", "-root =root -2 =2 -1 =1 -0 =0"}};
      if (ranks == 4) all.push_back({"2", 2, all[1].first_forward, all[1].forward, all[1].backward});
      for (auto& expected : all) {
        SCOPED_TRACE(expected.name);
        Sharded sharded(context, {.reshard_after_forward = expected.reshard});
        for (int step = 0; step < 3; ++step) {
          auto y = sharded.model->forward(inputs());
          EXPECT_EQ(sharded.trace.take(), step == 0 ? expected.first_forward : expected.forward);
          y.sum().backward();
          EXPECT_EQ(sharded.trace.take(), expected.backward);
        }
        torch::NoGradGuard no_grad;
        sharded.model->forward(inputs());
        EXPECT_EQ(sharded.trace.take(), expected.forward) << "without gradients";
      }
    });
  }
}

TEST(Order, WithoutPrefetchIsThatOfReads) {
  run_ranks(2, [](RankContext& context) {
    Sharded sharded(context, {.reshard_after_forward = true, .prefetch = false});
    for (int step = 0; step < 3; ++step) {
      auto y = sharded.model->forward(inputs());
      EXPECT_EQ(sharded.trace.take(), kFirstForward + " -root -2") << step;
      y.sum().backward();
      EXPECT_EQ(sharded.trace.take(), "+root -root =root +2 -2 =2 +1 -1 =1 +0 -0 =0") << step;
    }
    // Lists are wishes of their own.
    sharded.unit("0").set_modules_to_forward_prefetch({sharded.unit("1")});
    sharded.unit("1").set_modules_to_backward_prefetch({sharded.unit("0")});
    auto y = sharded.model->forward(inputs());
    EXPECT_EQ(sharded.trace.take(), "+0 +1 -0 -1 +2 +root -root -2");
    y.sum().backward();
    EXPECT_EQ(sharded.trace.take(), "+root -root =root +2 -2 =2 +1 +0 -1 =1 -0 =0");
  });
}

TEST(Order, OfABackwardInsideTheForwardScope) {
  run_ranks(2, [](RankContext& context) {
    Sharded sharded(context, {.reshard_after_forward = true});
    sharded.model->forward(inputs()).sum().backward();
    // The forward of 2 and of the root has not ended when backward comes: both are still there.
    EXPECT_EQ(sharded.trace.take(), kFirstForward + " -root =root -2 =2 +1 +0 -1 =1 -0 =0");
  });
}

TEST(Order, OfTwoForwardsBeforeABackward) {
  run_ranks(2, [](RankContext& context) {
    Sharded sharded(context, {.reshard_after_forward = true});
    sharded.model->forward(inputs());
    sharded.trace.take();
    auto first = sharded.model->forward(inputs());
    EXPECT_EQ(sharded.trace.take(), kForward + " -root -2");
    auto second = sharded.model->forward(inputs());
    EXPECT_EQ(sharded.trace.take(), kForward + " -root -2");
    (first + second).sum().backward();
    // The later forward's graph first; nothing is started across the two, which need not both be used on all ranks.
    EXPECT_EQ(sharded.trace.take(), "+root " + kBackward + " +root " + kBackward);
  });
}

TEST(Order, OfUnitsThatBackwardDoesNotUse) {
  run_ranks(2, [](RankContext& context) {
    Sharded sharded(context, {.reshard_after_forward = true});
    sharded.model->forward(inputs()).sum().backward();
    sharded.trace.take();
    // The end of the chain is not part of the loss.
    torch::Tensor middle, end;
    {
      hsdp::ForwardScope scope(sharded.model.core());
      auto& net = sharded.model.module();
      middle = net.block(1, net.block(0, inputs()));
      end = net.head(net.block(2, middle));
    }
    sharded.trace.take();
    middle.sum().backward({}, /*retain_graph=*/false);
    EXPECT_EQ(sharded.trace.take(), "+1 +0 -1 =1 -0 =0");
    end = torch::Tensor();
    // A branch in the middle is not part of it: started while somebody holds its graph, and freed at the end.
    for (bool alive : {true, false}) {
      torch::Tensor side, y;
      {
        hsdp::ForwardScope scope(sharded.model.core());
        auto& net = sharded.model.module();
        auto x = net.block(0, inputs());
        side = net.block(1, x);
        y = net.head(net.block(2, x));
      }
      if (!alive) side = torch::Tensor();
      sharded.trace.take();
      y.sum().backward();
      EXPECT_EQ(sharded.trace.take(),
                alive ? "+root +2 -root =root +1 -2 =2 +0 -0 =0 -1" : "+root +2 -root =root -2 =2 +0 -0 =0")
          << (alive ? "held" : "let go");
    }
  });
}

TEST(Order, OfForwardsThatGoAnotherWay) {
  run_ranks(2, [](RankContext& context) {
    Sharded sharded(context, {.reshard_after_forward = true});
    torch::NoGradGuard no_grad;
    sharded.model->forward(inputs());
    sharded.trace.take();
    {
      hsdp::ForwardScope scope(sharded.model.core());
      auto& net = sharded.model.module();
      net.head(net.block(1, net.block(2, inputs())));
    }
    EXPECT_EQ(sharded.trace.take(), "+2 -2 +1 +2 -2 +root -root -1")
        << "after 1, in second place, 2 was expected; root came, and what was started for nothing is freed";
    sharded.model->forward(inputs());
    EXPECT_EQ(sharded.trace.take(), "+0 -0 +1 +root -root -1 +2 +root -root -2")
        << "likewise; from then on nothing is started ahead in this forward";
    sharded.model->forward(inputs());
    EXPECT_EQ(sharded.trace.take(), kForward + " -root -2");
  });
}

// ---- lists of what to start ahead ----

TEST(ForwardPrefetch, OneAndTwoAheadFromTheFirstForwardOn) {
  run_ranks(2, [](RankContext& context) {
    for (int ahead : {1, 2}) {
      Sharded sharded(context, {.reshard_after_forward = true});
      const std::vector<std::string> order{"0", "1", "2", "root"};
      for (size_t i = 0; i < order.size(); ++i) {
        std::vector<hsdp::UnitSet> next;
        for (size_t k = i + 1; k < std::min(order.size(), i + 1 + static_cast<size_t>(ahead)); ++k) {
          next.push_back(sharded.unit(order[k]));
        }
        sharded.unit(order[i]).set_modules_to_forward_prefetch(next);
      }
      const std::string expected = ahead == 1 ? "+0 +1 -0 +2 -1 +root -root -2" : "+0 +1 +2 -0 +root -1 -root -2";
      for (int step = 0; step < 3; ++step) {
        auto y = sharded.model->forward(inputs());
        EXPECT_EQ(sharded.trace.take(), expected) << ahead << " ahead, step " << step;
        y.sum().backward();
        EXPECT_EQ(sharded.trace.take(), "+root " + kBackward) << ahead << " ahead, step " << step;
      }
    }
  });
}

TEST(BackwardPrefetch, OneAndTwoAheadInPlaceOfTheFormerOrder) {
  run_ranks(2, [](RankContext& context) {
    for (bool checkpointed : {false, true}) {
      for (int ahead : {1, 2}) {
        SCOPED_TRACE(std::string(checkpointed ? "checkpointed, " : "") + std::to_string(ahead));
        hsdp::FullyShardOptions options{.reshard_after_forward = true};
        if (checkpointed) options.activation_checkpoint = hsdp::each("blocks.*");
        Sharded sharded(context, options);
        const std::vector<std::string> order{"root", "2", "1", "0"};
        for (size_t i = 0; i < order.size(); ++i) {
          std::vector<hsdp::UnitSet> next;
          for (size_t k = i + 1; k < std::min(order.size(), i + 1 + static_cast<size_t>(ahead)); ++k) {
            next.push_back(sharded.unit(order[k]));
          }
          sharded.unit(order[i]).set_modules_to_backward_prefetch(next);
        }
        for (int step = 0; step < 2; ++step) {
          auto y = sharded.model->forward(inputs());
          sharded.trace.take();
          y.sum().backward();
          EXPECT_EQ(sharded.trace.take(),
                    ahead == 1 ? "+root " + kBackward : "+root +2 +1 -root =root +0 -2 =2 -1 =1 -0 =0");
        }
        // Empty lists go back to the order of the forward.
        sharded.model.units().set_modules_to_backward_prefetch({});
        auto y = sharded.model->forward(inputs());
        sharded.trace.take();
        y.sum().backward();
        EXPECT_EQ(sharded.trace.take(), "+root " + kBackward);
      }
    }
  });
}

TEST(Prefetch, OfTheWrongUnitsTrainsTheSame) {
  run_ranks(2, [](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    const Share share(context);
    Twins<Blocks> twins(
        [] { return Blocks(3, kWidth); },
        {.mesh = context.environment().mesh(), .units = hsdp::each("blocks.*"), .reshard_after_forward = true});
    auto& model = twins.model;
    model.units("blocks.0").set_modules_to_forward_prefetch({model.units("root"), model.units("blocks.0")});
    model.units("blocks.1").set_modules_to_forward_prefetch({model.units("blocks.0")});
    model.units("blocks.2").set_modules_to_backward_prefetch({model.units("root"), model.units("blocks.0")});
    model.units("blocks.0").set_modules_to_backward_prefetch({model.units("blocks.2")});
    torch::optim::SGD ours(twins.net->parameters(), 0.1), theirs(twins.plain->parameters(), 0.1);
    for (int64_t step = 0; step < 3; ++step) {
      twins.zero_grad();
      model->forward(rows_of(step, 1, {12, kWidth}, share.begin, share.end)).square().mean().backward();
      twins.plain->forward(rows_of(step, 1, {12, kWidth}, 0, 12)).square().mean().backward();
      twins.expect_equal_gradients(1e-12);
      ours.step();
      theirs.step();
      for (auto& unit : model.core()->units())
        EXPECT_FALSE(unit->is_gathered() || unit->is_gathering()) << unit->name();
    }
    twins.expect_equal_parameters(1e-12);
  });
}

TEST(Prefetch, OffTrainsBitForBitTheSameInLessMemory) {
  run_ranks(3, [](RankContext& context) {
    struct Outcome {
      std::vector<torch::Tensor> losses, shards;
      dtensor::CollectiveCounts counts;
      int64_t units;
    };
    const auto train = [&](bool prefetch) {
      torch::manual_seed(3);
      Sharded sharded(context, {.reshard_after_forward = true, .prefetch = prefetch});
      torch::optim::SGD optimizer(sharded.model->parameters(), 0.1);
      Outcome outcome;
      dtensor::reset_collective_counts();
      for (int64_t step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        auto loss = sharded.model->forward(inputs() + context.rank() + step).square().mean();
        loss.backward();
        optimizer.step();
        outcome.losses.push_back(loss.detach());
      }
      outcome.counts = dtensor::collective_counts();
      outcome.units = sharded.scheduler->peaks().units_without_ancestors;
      for (auto& unit : sharded.model.core()->units()) {
        for (auto& parameter : unit->parameters()) outcome.shards.push_back(parameter.padded_shard().clone());
      }
      return outcome;
    };
    const auto on = train(true), off = train(false);
    for (size_t step = 0; step < on.losses.size(); ++step) {
      EXPECT_TRUE(torch::equal(on.losses[step], off.losses[step])) << step;
    }
    EXPECT_FALSE(torch::equal(on.losses.front(), on.losses.back())) << "it trains";
    ASSERT_EQ(on.shards.size(), off.shards.size());
    for (size_t i = 0; i < on.shards.size(); ++i) EXPECT_TRUE(torch::equal(on.shards[i], off.shards[i])) << i;
    EXPECT_EQ(on.counts.all_gathers, off.counts.all_gathers);
    EXPECT_EQ(on.counts.all_gather_bytes, off.counts.all_gather_bytes);
    EXPECT_EQ(on.units, 2);
    EXPECT_EQ(off.units, 1);
  });
}

// ---- by hand ----

TEST(Unsharding, AheadAndByHand) {
  run_ranks(2, [](RankContext& context) {
    for (bool async : {false, true}) {
      Sharded sharded(context, {.reshard_after_forward = true});
      auto ahead = sharded.model.unshard(async);
      EXPECT_EQ(sharded.trace.take(), "+root +0 +1 +2");
      for (auto& unit : sharded.model.core()->units()) {
        EXPECT_TRUE(async ? unit->is_gathering() : unit->is_gathered()) << unit->name();
      }
      // Another collective while these are on their way.
      auto value = torch::full({3}, context.rank() + 1.0);
      context.environment().communicator()->all_reduce(value, dtensor::ReduceOp::sum, {"all_reduce", "value"})->wait();
      EXPECT_EQ(value[0].item<double>(), 3);
      auto y = sharded.model->forward(inputs());
      EXPECT_EQ(sharded.trace.take(), "-0 -1 -root -2") << "each is freed when its forward ends";
      ahead.wait();
      y.sum().backward();
      EXPECT_EQ(sharded.trace.take(), "+root " + kBackward);
      // One unit, freed unread.
      sharded.unit("1").unshard(async).wait();
      sharded.unit("1").reshard();
      EXPECT_EQ(sharded.trace.take(), "+1 -1");
      // What is gathered is not gathered again.
      sharded.unit("1").unshard();
      sharded.unit("1").unshard();
      sharded.model.reshard();
      EXPECT_EQ(sharded.trace.take(), "+1 -1");
    }
  });
}

// Which graph the host pretends to record.
uint64_t capture = 0;
void pretend_captures() {
  dtensor::register_graph_capture(at::kCPU, {[](c10::Device) { return capture; }, nullptr});
}

TEST(Capture, GathersForItself) {
  run_ranks(2, [](RankContext& context) {
    pretend_captures();
    Sharded sharded(context, {.reshard_after_forward = true});
    const auto forward = [&] {
      sharded.model->forward(inputs());
      return sharded.trace.take();
    };
    const auto first = forward();
    EXPECT_EQ(first, kFirstForward + " -root -2");
    for (const uint64_t graph : {1, 2}) {
      capture = graph;
      EXPECT_EQ(forward(), kForward + " -root -2") << "graph " << graph;
    }
    // What stays gathered does so in one graph, not in the next, and not outside.
    sharded.model.set_reshard_after_forward(false);
    const std::string kept = "+0 +1 +2 +root";
    EXPECT_EQ(forward(), kept);
    EXPECT_EQ(forward(), "");
    const std::string freed = "-root -0 -1 -2 ";
    capture = 3;
    EXPECT_EQ(forward(), freed + kept);
    // Ahead of a forward, in the same graph.
    capture = 4;
    auto ahead = sharded.model.unshard(/*async=*/true);
    EXPECT_EQ(sharded.trace.take(), freed + "+root +0 +1 +2");
    EXPECT_EQ(forward(), "");
    ahead.wait();
    capture = 0;
    EXPECT_EQ(forward(), freed + kept);
  });
}

TEST(Capture, RefusesWhatIsOnItsWay) {
  run_ranks(2, [](RankContext& context) {
    pretend_captures();
    Sharded sharded(context, {.reshard_after_forward = true});
    const auto expected = sharded.model->forward(inputs());
    for (int round = 0; round < 2; ++round) {
      // Also between two graphs.
      capture = static_cast<uint64_t>(round);
      if (round == 1) sharded.model->forward(inputs());
      capture = 0;
      auto ahead = sharded.model.unshard(/*async=*/true);
      sharded.trace.take();
      capture = 10;
      for (int call = 0; call < 2; ++call) {
        expect_error<dtensor::StateError>(
            [&] {
              if (call == 0) sharded.model->forward(inputs());
              if (call == 1) sharded.model.unshard();
            },
            "[all_gather] unit \"root\" is on its way since before this graph's capture",
            "wait() for what unshard() returned");
      }
      EXPECT_EQ(sharded.trace.take(), "") << "nothing has changed";
      capture = 0;
      ahead.wait();
      EXPECT_TRUE(sharded.model->forward(inputs()).equal(expected));
    }
    sharded.model.set_is_last_backward(false);
    sharded.model->forward(inputs()).sum().backward();
    capture = 11;
    expect_error<dtensor::StateError>([&] { sharded.model->forward(inputs()); }, "[reduce_scatter] unit \"",
                                      "is on its way since before this graph's capture",
                                      "call set_is_last_backward(true) before the backward ahead of it");
    capture = 0;
    sharded.model.set_is_last_backward(true);
    sharded.model->forward(inputs()).sum().backward();
    capture = 12;
    EXPECT_TRUE(sharded.model->forward(inputs()).equal(expected));
    capture = 0;
  });
}

TEST(Resharding, ByHandBetweenForwardAndBackward) {
  run_ranks(2, [](RankContext& context) {
    Sharded sharded(context, {.reshard_after_forward = false});
    for (int step = 0; step < 2; ++step) {
      auto y = sharded.model->forward(inputs());
      EXPECT_EQ(sharded.trace.take(), "+0 +1 +2 +root");
      sharded.model.reshard();
      EXPECT_EQ(sharded.trace.take(), "-root -0 -1 -2");
      y.sum().backward();
      EXPECT_EQ(sharded.trace.take(), "+root " + kBackward);
    }
  });
}

TEST(Resharding, ChangedBetweenSteps) {
  run_ranks(4, [](RankContext& context) {
    Sharded sharded(context, {});
    sharded.model->forward(inputs()).sum().backward();
    sharded.trace.take();
    const auto step = [&] {
      auto y = sharded.model->forward(inputs());
      const auto forward = sharded.trace.take();
      y.sum().backward();
      return std::pair{forward, sharded.trace.take()};
    };
    using Events = std::pair<std::string, std::string>;
    EXPECT_EQ(step(), Events(kForward + " -2", kBackward));
    sharded.model.set_reshard_after_forward(false);
    EXPECT_EQ(step(), Events("+0 +1 +2 +root", "-root =root -2 =2 -1 =1 -0 =0"));
    sharded.unit("1").set_reshard_after_forward(true);
    EXPECT_EQ(step(), Events("+0 +1 +2 -1 +root", "-root =root +1 -2 =2 -1 =1 -0 =0"));
    sharded.model.set_reshard_after_forward(2);
    EXPECT_EQ(step(), Events(kForward + " -root -2", "+root " + kBackward));
    // From a part to the whole between forward and backward.
    auto y = sharded.model->forward(inputs());
    for (auto& unit : sharded.model.core()->units()) EXPECT_TRUE(unit->keeps_part()) << unit->name();
    sharded.model.set_reshard_after_forward(true);
    for (auto& unit : sharded.model.core()->units()) EXPECT_FALSE(unit->keeps_part()) << unit->name();
    sharded.trace.take();
    y.sum().backward();
    EXPECT_EQ(sharded.trace.take(), "+root " + kBackward);
    EXPECT_EQ(step(), Events(kForward + " -root -2", "+root " + kBackward));
    sharded.model.set_reshard_after_backward(false);
    EXPECT_EQ(step(), Events(kForward + " -root -2", "+root +2 =root +1 =2 +0 =1 =0"));
    EXPECT_EQ(step(), Events("-0 -1 -root -2", "+root +2 =root +1 =2 +0 =1 =0"));
    sharded.model.set_reshard_after_backward(true);
    EXPECT_EQ(step(), Events("-0 -1 -root -2", "+root " + kBackward));
  });
}

// ---- several modules in a unit ----

TEST(Together, AreOneUnitInEveryEvent) {
  run_ranks(2, [](RankContext& context) {
    Sharded sharded(context,
                    {.units = hsdp::together(hsdp::each("blocks.0") | hsdp::each("blocks.1")) | hsdp::each("blocks.2"),
                     .reshard_after_forward = true});
    for (int step = 0; step < 2; ++step) {
      auto y = sharded.model->forward(inputs());
      EXPECT_EQ(sharded.trace.take(), step == 0 ? "+0, 1 -0, 1 +2 +root -root -2" : "+0, 1 +2 -0, 1 +root -root -2");
      y.sum().backward();
      EXPECT_EQ(sharded.trace.take(), "+root +2 -root =root +0, 1 -2 =2 -0, 1 =0, 1");
    }
    // One of them is not used: the unit is gathered and reduced all the same, with what there is.
    dtensor::reset_collective_counts();
    torch::Tensor y;
    {
      hsdp::ForwardScope scope(sharded.model.core());
      auto& net = sharded.model.module();
      y = net.head(net.block(2, net.block(0, inputs())));
    }
    EXPECT_EQ(sharded.trace.take(), "+0, 1 +2 -0, 1 +root -root -2");
    y.sum().backward();
    EXPECT_EQ(sharded.trace.take(), "+root +2 -root =root +0, 1 -2 =2 -0, 1 =0, 1");
    EXPECT_EQ(dtensor::collective_counts().reduce_scatters, 3);
  });
}

TEST(OneRank, GathersNothingAndReducesEachUnit) {
  run_ranks(1, [](RankContext& context) {
    Sharded sharded(context, {.reshard_after_forward = true});
    dtensor::reset_collective_counts();
    sharded.model->forward(inputs()).sum().backward();
    const auto counts = dtensor::collective_counts();
    EXPECT_EQ(counts.all_gathers + counts.reduce_scatters + counts.all_reduces, 0);
    EXPECT_NE(sharded.trace.take().find("=root"), std::string::npos);
  });
}

}  // namespace event_order_test

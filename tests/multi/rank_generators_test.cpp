// After initialisation the ranks' default generators go their own ways, so that dropout differs between ranks, and
// nothing else changes: rank 0 and a world of one draw what plain construction would, and what all ranks must draw
// alike they still do.
#include "hsdp/rank_generators.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "hsdp/host.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/modules.h"
#include "tests/testing/multi_process.h"

namespace rank_generators_test {

using namespace testing_support;

struct DroppingImpl : torch::nn::Module {
  DroppingImpl()
      : linear(register_module("linear", torch::nn::Linear(16, 16))),
        dropout(register_module("dropout", torch::nn::Dropout(0.5))) {}
  torch::Tensor forward(const torch::Tensor& x) { return dropout(linear(x)); }
  torch::nn::Linear linear;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(Dropping);

hsdp::FullySharded<DroppingImpl> sharded(RankContext& context) {
  auto net = hsdp::meta_init([] { return Dropping(); });
  return hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
}

/// The tensors of all ranks, one a row.
torch::Tensor of_all_ranks(RankContext& context, const torch::Tensor& own) {
  auto all = torch::empty({context.world_size() * own.numel()}, own.options());
  context.environment().communicator()->all_gather(all, own.contiguous().view({-1}), {"all_gather", "test"})->wait();
  return all.view({context.world_size(), own.numel()});
}

void expect_all_unlike(RankContext& context, const torch::Tensor& own) {
  const auto all = of_all_ranks(context, own.detach());
  for (int64_t a = 0; a < all.size(0); ++a) {
    for (int64_t b = 0; b < a; ++b) EXPECT_FALSE(torch::equal(all[a], all[b])) << "ranks " << a << " and " << b;
  }
}

void expect_all_alike(RankContext& context, const torch::Tensor& own) {
  const auto all = of_all_ranks(context, own);
  for (int64_t rank = 1; rank < all.size(0); ++rank) EXPECT_TRUE(torch::equal(all[rank], all[0])) << "rank " << rank;
}

class RankGenerators : public ::testing::TestWithParam<int> {
 protected:
  static void run(const std::function<void(RankContext&)>& body) { run_ranks(GetParam(), body); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, RankGenerators, ::testing::Values(1, 2, 3));

TEST_P(RankGenerators, DropoutDiffersBetweenRanksAndIsThatOfThePlainModuleOnRankZero) {
  run([](RankContext& context) {
    torch::manual_seed(7);
    Dropping plain;
    const auto x = torch::full({4, 16}, 0.3);
    const auto expected = plain->forward(x), next = plain->forward(x);
    torch::Tensor first;
    for (int repetition = 0; repetition < 2; ++repetition) {
      torch::manual_seed(7);
      auto model = sharded(context);
      model.materialize(at::kCPU);
      const auto masked = model->forward(x);
      if (context.rank() == 0) {
        EXPECT_TRUE(torch::equal(masked, expected));
        EXPECT_TRUE(torch::equal(model->forward(x), next));
      }
      expect_all_unlike(context, masked.eq(0).to(torch::kByte));
      if (repetition == 0) first = masked;
      EXPECT_TRUE(torch::equal(masked, first)) << "another run draws other numbers";
    }
  });
}

TEST_P(RankGenerators, ASeedOfTheProgramStands) {
  run([](RankContext& context) {
    torch::manual_seed(9);
    const auto expected = torch::rand({8});
    torch::manual_seed(7);
    auto model = sharded(context);
    model.materialize(at::kCPU);
    torch::manual_seed(9);
    EXPECT_TRUE(torch::equal(torch::rand({8}), expected));
    torch::manual_seed(7);  // the one before construction is a seed like any other
    const auto again = torch::rand({8});
    torch::manual_seed(7);
    EXPECT_TRUE(torch::equal(torch::rand({8}), again));
    expect_all_alike(context, again);
    model.materialize(at::kCPU);
    expect_all_alike(context, torch::rand({8}));
  });
}

TEST_P(RankGenerators, ANextModuleIsConstructedAlikeOnAllRanks) {
  run([](RankContext& context) {
    torch::manual_seed(7);
    Dropping plain_one, plain_two;
    const auto next = torch::rand({8});
    torch::manual_seed(7);
    auto one = sharded(context);
    one.materialize(at::kCPU);
    if (context.rank() > 0) (void)torch::rand({5});  // what one rank draws changes nothing for the others
    auto two = sharded(context);
    two.materialize(at::kCPU);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(two->linear->weight), plain_two->linear->weight));
    const auto drawn = torch::rand({8});
    EXPECT_EQ(torch::equal(drawn, next), context.rank() == 0);
    expect_all_unlike(context, drawn);
  });
}

TEST_P(RankGenerators, InPlaceInitialisationDrawsTheSameOnAllRanks) {
  run([](RankContext& context) {
    torch::NoGradGuard no_grad;
    torch::manual_seed(7);
    Dropping plain;
    for (auto& parameter : plain->parameters()) torch::nn::init::normal_(parameter, 0.0, 0.02);
    const auto like = torch::rand_like(plain->linear->weight);
    torch::manual_seed(7);
    auto model = sharded(context);
    model.materialize(at::kCPU);
    for (auto& parameter : model.module().parameters()) torch::nn::init::normal_(parameter, 0.0, 0.02);
    const auto ours = torch::rand_like(model.module().linear->weight);
    EXPECT_TRUE(torch::equal(hsdp::unsharded(ours), like));
    for (auto& parameter : model.module().named_parameters()) {
      EXPECT_TRUE(torch::equal(hsdp::unsharded(parameter.value()), plain->named_parameters()[parameter.key()]));
    }
    expect_all_unlike(context, torch::rand({8}));
  });
}

TEST_P(RankGenerators, InitialisersOfGatheredWeightsDrawTheSameOnAllRanks) {
  run([](RankContext& context) {
    torch::NoGradGuard no_grad;
    torch::manual_seed(7);
    Dropping plain;
    torch::nn::init::normal_(plain->linear->weight);
    plain->linear->weight[0].uniform_();
    torch::manual_seed(7);
    auto model = sharded(context);
    model.materialize(at::kCPU);
    {
      hsdp::ForwardScope scope(model.core());
      (void)model.module().linear->weight.sum();
      torch::nn::init::normal_(model.module().linear->weight);
      model.module().linear->weight[0].uniform_();
      EXPECT_TRUE(torch::equal(model.module().linear->weight, plain->linear->weight));
    }
    EXPECT_TRUE(torch::equal(hsdp::unsharded(model.module().linear->weight), plain->linear->weight));
    (void)model->forward(torch::full({4, 16}, 0.3));  // What was written was the same on all ranks.
  });
}

TEST_P(RankGenerators, WithoutReplayTheyPartAtTheFirstForward) {
  run([](RankContext& context) {
    torch::manual_seed(7);
    auto model = sharded(context);
    model.to_empty(at::kCPU);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : model.module().parameters()) torch::nn::init::uniform_(parameter);
    }
    expect_all_alike(context, torch::rand({8}));
    expect_all_unlike(context, model->forward(torch::full({4, 16}, 0.3)).eq(0).to(torch::kByte));
    // A seed of the program's own, set since, stands there as well.
    auto other = sharded(context);
    other.to_empty(at::kCPU);
    torch::manual_seed(3);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : other.module().parameters()) torch::nn::init::uniform_(parameter);
    }
    expect_all_alike(context, other->forward(torch::full({4, 16}, 0.3)).eq(0).to(torch::kByte));
  });
}

// ---- states that checkpoints keep ----

using hsdp::GeneratorStates;

GeneratorStates copied(GeneratorStates states) {
  for (auto& [name, state] : states) state = state.clone();
  return states;
}

/// What rank 0 has, on all ranks.
GeneratorStates of_rank_0(RankContext& context, const GeneratorStates& own) {
  GeneratorStates states;
  for (const auto& [name, state] : own) states.emplace_back(name, of_all_ranks(context, state)[0].clone());
  return states;
}

std::vector<std::string> names_of(const GeneratorStates& states) {
  std::vector<std::string> names;
  for (const auto& [name, state] : states) names.push_back(name);
  return names;
}

struct Draws {
  std::vector<torch::Tensor> own, common;
};

/// Of each kind several, by turns: dropout, the host's generator, in-place initialisation of a sharded parameter.
Draws draw(hsdp::FullySharded<DroppingImpl>& model) {
  torch::NoGradGuard no_grad;
  Draws draws;
  for (int i = 0; i < 3; ++i) {
    draws.own.push_back(model->forward(torch::full({4, 16}, 0.3)).eq(0).to(torch::kByte));
    draws.common.push_back(hsdp::unsharded(torch::rand_like(model.module().linear->weight)));
    draws.own.push_back(torch::rand({5}));
    draws.own.push_back(torch::randn({5}));  // leaves half a pair behind
  }
  return draws;
}

void expect_same(const Draws& actual, const Draws& expected) {
  for (size_t i = 0; i < expected.own.size(); ++i) EXPECT_TRUE(torch::equal(actual.own[i], expected.own[i])) << i;
  for (size_t i = 0; i < expected.common.size(); ++i) {
    EXPECT_TRUE(torch::equal(actual.common[i], expected.common[i])) << i;
  }
}

void expect_all_alike(RankContext& context, const std::vector<torch::Tensor>& tensors) {
  for (const auto& tensor : tensors) expect_all_alike(context, tensor);
}

hsdp::FullySharded<DroppingImpl> materialized(RankContext& context, uint64_t seed) {
  torch::manual_seed(seed);
  auto model = sharded(context);
  model.materialize(at::kCPU);
  return model;
}

TEST_P(RankGenerators, ARestoreGoesOnWithTheSameNumbers) {
  run([](RankContext& context) {
    auto model = materialized(context, 7);
    (void)torch::rand({1 + 3 * context.rank()});  // ranks need not be at the same number
    draw(model);
    const auto states = copied(hsdp::capture_generators());
    const auto expected = draw(model);
    expect_all_alike(context, expected.common);

    // Where generators are parted, where they are parted otherwise, and where the program has seeded.
    const std::vector<std::function<void()>> disturbances{
        [&] { draw(model); }, [&] { model = materialized(context, 3); }, [&] { torch::manual_seed(9); }};
    for (const auto& disturb : disturbances) {
      disturb();
      hsdp::restore_generators(states);
      EXPECT_EQ(hsdp::generators_are_parted(), context.world_size() > 1);
      expect_same(draw(model), expected);
    }
    // Draws have left the states alone.
    hsdp::restore_generators(states);
    const auto again = hsdp::capture_generators();
    ASSERT_EQ(names_of(again), names_of(states));
    for (size_t i = 0; i < states.size(); ++i) {
      EXPECT_TRUE(torch::equal(again[i].second, states[i].second)) << states[i].first;
    }
  });
}

TEST_P(RankGenerators, ARestoreInANewProcessGoesOnWithTheSameNumbers) {
  const auto folder = std::filesystem::path(testing::TempDir()) / ("rank_generators." + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  const auto path = [&](RankContext& context, const char* what) {
    return (folder / (what + std::to_string(context.rank()))).string();
  };
  run([&](RankContext& context) {
    auto model = materialized(context, 7);
    draw(model);
    std::vector<torch::Tensor> tensors;
    for (const auto& [name, state] : hsdp::capture_generators()) tensors.push_back(state);
    torch::save(tensors, path(context, "states"));
    const auto draws = draw(model);
    torch::save(draws.own, path(context, "own"));
    torch::save(draws.common, path(context, "common"));
  });
  run([&](RankContext& context) {
    auto model = sharded(context);
    model.to_empty(at::kCPU);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : model.module().parameters()) parameter.fill_(0.5);
    }
    ASSERT_FALSE(hsdp::generators_are_parted());
    std::vector<torch::Tensor> tensors;
    torch::load(tensors, path(context, "states"));
    const std::vector<std::string> names{"host", "common.host", "mark.host"};
    ASSERT_EQ(tensors.size(), context.world_size() > 1 ? 3 : 1);
    GeneratorStates states;
    for (size_t i = 0; i < tensors.size(); ++i) states.emplace_back(names[i], tensors[i]);
    hsdp::restore_generators(states);
    EXPECT_EQ(hsdp::generators_are_parted(), context.world_size() > 1);
    Draws expected;
    torch::load(expected.own, path(context, "own"));
    torch::load(expected.common, path(context, "common"));
    expect_same(draw(model), expected);
  });
  std::filesystem::remove_all(folder);
}

TEST_P(RankGenerators, ARestoreEndsAPartingThatTheStatesDoNotHave) {
  run([](RankContext& context) {
    torch::manual_seed(5);
    const auto states = copied(hsdp::capture_generators());
    EXPECT_EQ(names_of(states), (std::vector<std::string>{"host"}));
    const auto expected = torch::rand({8});
    auto model = materialized(context, 7);
    hsdp::restore_generators(states);
    EXPECT_FALSE(hsdp::generators_are_parted());
    EXPECT_EQ(names_of(hsdp::capture_generators()), (std::vector<std::string>{"host"}));
    EXPECT_TRUE(torch::equal(torch::rand({8}), expected));
  });
}

TEST_P(RankGenerators, ARestoreKeepsASeedOfTheProgram) {
  run([](RankContext& context) {
    auto model = materialized(context, 7);
    torch::manual_seed(9);
    const auto states = copied(hsdp::capture_generators());
    const auto expected = draw(model);
    expect_all_alike(context, expected.own);
    model = materialized(context, 3);
    hsdp::restore_generators(states);
    EXPECT_FALSE(hsdp::generators_are_parted());
    expect_same(draw(model), expected);
  });
}

/// The draws of one kind of all ranks differ from each other, and from those given.
void expect_new(RankContext& context, const std::vector<torch::Tensor>& draws,
                const std::vector<std::vector<torch::Tensor>>& known) {
  for (size_t i = 0; i < draws.size(); ++i) {
    expect_all_unlike(context, draws[i]);
    if (context.rank() == 0) continue;
    for (const auto& others : known) EXPECT_FALSE(torch::equal(draws[i], others[i])) << i;
  }
}

TEST_P(RankGenerators, AnotherNumberOfRanksGetsNewStreamsAndRankZeroGoesOn) {
  run([](RankContext& context) {
    auto model = materialized(context, 7);
    const auto beginning = draw(model);
    const auto states = of_rank_0(context, hsdp::capture_generators());
    const auto expected = draw(model);
    const auto later = of_rank_0(context, hsdp::capture_generators());
    model = materialized(context, 3);  // what was before does not count
    draw(model);

    hsdp::reseed_generators(states, context.rank());
    EXPECT_TRUE(hsdp::generators_are_parted());
    const auto draws = draw(model);
    expect_new(context, draws.own, {beginning.own, expected.own});
    if (context.rank() == 0) expect_same({draws.own, {}}, {expected.own, {}});
    // One rank alone was not parted, and has them from now on.
    if (context.world_size() > 1) expect_same({{}, draws.common}, {{}, expected.common});
    expect_all_alike(context, draws.common);
    hsdp::reseed_generators(states, context.rank());
    expect_same(draw(model), draws);
    hsdp::reseed_generators(later, context.rank());
    expect_new(context, draw(model).own, {beginning.own, expected.own, draws.own});
  });
}

TEST_P(RankGenerators, StatesThatWereNotPartedPartAtAnotherNumberOfRanks) {
  run([](RankContext& context) {
    // As of a run of one rank, and as of one whose program has seeded since.
    for (const bool seeded_since : {false, true}) {
      SCOPED_TRACE(seeded_since);
      if (seeded_since) materialized(context, 7);
      torch::manual_seed(5);
      (void)torch::rand({3});
      const auto states = of_rank_0(context, hsdp::capture_generators());
      const auto expected = torch::rand({8});
      auto model = materialized(context, 3);
      hsdp::reseed_generators(states, context.rank());
      EXPECT_TRUE(hsdp::generators_are_parted());
      EXPECT_TRUE(torch::equal(hsdp::common_generator_state(hsdp::generator_state(hsdp::host_generator())),
                               states.front().second));
      const auto drawn = torch::rand({8});
      EXPECT_EQ(torch::equal(drawn, expected), context.rank() == 0);
      expect_all_unlike(context, drawn);
      torch::NoGradGuard no_grad;
      const auto common = hsdp::unsharded(torch::rand_like(model.module().linear->weight));
      expect_all_alike(context, common);
      if (context.world_size() == 1) continue;  // has one stream for everything
      torch::manual_seed(5);
      (void)torch::rand({3});
      EXPECT_TRUE(torch::equal(common, torch::rand({16, 16})));
    }
  });
}

TEST_P(RankGenerators, StatesOfOtherDevicesArePassedOver) {
  run([](RankContext& context) {
    auto model = materialized(context, 7);
    auto states = copied(hsdp::capture_generators());
    states.emplace_back("device.other.0", torch::zeros({16}, torch::kByte));
    if (context.world_size() > 1) {
      states.emplace_back("mark.device.other.0", torch::ones({1}, torch::kLong));
      states.emplace_back("common.device.other.0", torch::zeros({16}, torch::kByte));
    }
    const auto expected = torch::rand({8});
    hsdp::restore_generators(states);
    EXPECT_TRUE(torch::equal(torch::rand({8}), expected));
    hsdp::reseed_generators(of_rank_0(context, states), context.rank());
    EXPECT_EQ(torch::equal(torch::rand({8}), expected), context.rank() == 0);
  });
}

struct DamagedState {
  std::string name;
  std::function<void(GeneratorStates&)> apply;
  std::vector<std::string> parts;
};

const std::vector<DamagedState> kDamagedStates{
    {"None", [](auto& states) { states.clear(); }, {"\"host\""}},
    {"UnknownName", [](auto& states) { states.emplace_back("guest", states[0].second); }, {"\"guest\"", "\"host\""}},
    {"UnknownCommon",
     [](auto& states) { states.emplace_back("common.mark.host", states[0].second); },
     {"\"common.mark.host\""}},
    {"Twice", [](auto& states) { states.push_back(states[0]); }, {"\"host\" is there twice"}},
    {"MarkTwice", [](auto& states) { states.push_back(states[2]); }, {"\"mark.host\" is there twice"}},
    {"NoOwn", [](auto& states) { states.erase(states.begin()); }, {"generator \"host\"", "no state"}},
    {"NoCommon", [](auto& states) { states.erase(states.begin() + 1); }, {"generator \"host\"", "no common"}},
    {"NoMark", [](auto& states) { states.erase(states.begin() + 2); }, {"generator \"host\"", "no mark"}},
    {"DeviceWithoutState",
     [](auto& states) {
       states.emplace_back("common.device.other.0", states[1].second);
       states.emplace_back("mark.device.other.0", states[2].second);
     },
     {"generator \"device.other.0\"", "no state"}},
    {"OnlyADeviceIsParted",
     [](auto& states) {
       states.emplace_back("device.other.0", states[0].second);
       states.emplace_back("common.device.other.0", states[1].second);
       states.emplace_back("mark.device.other.0", states[2].second);
       states.erase(states.begin() + 1, states.begin() + 3);
     },
     {"\"device.other.0\"", "\"host\" has none"}},
    {"Short",
     [](auto& states) { states[0].second = states[0].second.narrow(0, 1, states[0].second.numel() - 1); },
     {"generator \"host\"", "[5055]", "[5056]"}},
    {"ShortCommon",
     [](auto& states) { states[1].second = states[1].second.narrow(0, 0, 16); },
     {"generator \"host\"", "[16]", "[5056]"}},
    {"Empty", [](auto& states) { states[0].second = torch::empty({0}, torch::kByte); }, {"\"host\"", "[0]"}},
    {"OtherDtype",
     [](auto& states) { states[0].second = states[0].second.to(torch::kInt); },
     {"\"host\"", "Int", "Byte"}},
    {"OtherDims",
     [](auto& states) {
       states[0].second = states[0].second.view({2, -1});
     },
     {"\"host\"", "[2, 2528]"}},
    {"TwoMarks", [](auto& states) { states[2].second = torch::ones({2}, torch::kLong); }, {"\"mark.host\"", "[2]"}},
    {"MarkOfBytes", [](auto& states) { states[2].second = torch::ones({1}, torch::kByte); }, {"\"mark.host\"", "Byte"}},
    {"NoState",
     [](auto& states) { states[0].second = torch::full_like(states[0].second, 255); },
     {"a generator refuses its state"}},
    {"NoCommonState",
     [](auto& states) { states[1].second = torch::full_like(states[1].second, 255); },
     {"a generator refuses its state"}},
};

class DamagedGeneratorStates : public ::testing::TestWithParam<DamagedState> {};
INSTANTIATE_TEST_SUITE_P(Damages, DamagedGeneratorStates, ::testing::ValuesIn(kDamagedStates),
                         [](const auto& which) { return which.param.name; });

TEST_P(DamagedGeneratorStates, AreRefusedAndNothingHasChanged) {
  run_ranks(2, [](RankContext& context) {
    auto model = materialized(context, 7);
    auto states = copied(hsdp::capture_generators());
    ASSERT_EQ(names_of(states), (std::vector<std::string>{"host", "common.host", "mark.host"}));
    GetParam().apply(states);
    draw(model);
    const auto before = copied(hsdp::capture_generators());
    for (const auto& part : GetParam().parts) {
      expect_error<dtensor::ValueError>([&] { hsdp::restore_generators(states); }, "[restore_generators]", part);
    }
    expect_error<dtensor::ValueError>([&] { hsdp::reseed_generators(states, context.rank()); }, "[reseed_generators]");
    EXPECT_TRUE(hsdp::generators_are_parted());
    const auto after = hsdp::capture_generators();
    ASSERT_EQ(names_of(after), names_of(before));
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(torch::equal(after[i].second, before[i].second)) << before[i].first;
    }
  });
}

}  // namespace rank_generators_test

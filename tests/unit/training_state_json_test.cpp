// training_state.json: what is written is read back bit for bit, and what is no such file is refused by its entry's
// name. And how schedules, scaler and values of a program take its scalars over.
#include "hsdp/checkpoint/training_state_json.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/optimizers.h"
#include "tests/testing/expect.h"

namespace training_state_json_test {

using hsdp::CheckpointValue;
using hsdp::OptionValue;
using hsdp::TrainingScalars;
using hsdp::TrainingState;
using testing_support::expect_error;

constexpr auto kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();
constexpr auto kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();

TrainingScalars parsed(const std::string& text) { return hsdp::parse_training_scalars("load", text, "a/state.json"); }
TrainingScalars round_trip(const TrainingScalars& scalars) { return parsed(hsdp::to_json(scalars)); }

uint64_t bits(double value) { return std::bit_cast<uint64_t>(value); }

TEST(TrainingStateJson, NothingRoundTrips) {
  const auto read = round_trip({});
  EXPECT_EQ(read.progress, hsdp::TrainingProgress());
  EXPECT_TRUE(read.values.empty());
  EXPECT_TRUE(read.lr_schedulers.empty());
  EXPECT_FALSE(read.grad_scaler.has_value());
  EXPECT_TRUE(read.optimizers.empty());
}

TEST(TrainingStateJson, ProgressRoundTrips) {
  TrainingScalars scalars;
  scalars.progress = {kMost, kLeast, (int64_t{1} << 53) + 1};
  EXPECT_EQ(round_trip(scalars).progress, scalars.progress);
}

TEST(TrainingStateJson, ValuesKeepTypeAndValue) {
  TrainingScalars scalars;
  scalars.values = {{"true", true},
                    {"false", false},
                    {"one", int64_t{1}},
                    {"one.0", 1.0},
                    {"most", kMost},
                    {"least", kLeast},
                    {"text", std::string("line\nquote\" \\ \x01 \xc3\xa4 ") + std::string(1, '\0') + "end"},
                    {"empty text", std::string()},
                    {"", std::string("the empty name")},
                    {"type", std::string("nan")},
                    {"integers", std::vector<int64_t>{kLeast, 0, kMost}},
                    {"no integers", std::vector<int64_t>()},
                    {"doubles", std::vector<double>{0.1, -kInfinity, 1}},
                    {"no doubles", std::vector<double>()}};
  EXPECT_EQ(round_trip(scalars).values, scalars.values);
}

class Doubles : public ::testing::TestWithParam<double> {};
INSTANTIATE_TEST_SUITE_P(Special, Doubles,
                         ::testing::Values(0.0, -0.0, 1.0, -1.0, 0.1, 0.1 + 0.2, 1.0 / 3, 1e22, 1e23,
                                           123456789012345678.0, 9007199254740993.0, std::numeric_limits<double>::min(),
                                           std::numeric_limits<double>::denorm_min(),
                                           -std::numeric_limits<double>::denorm_min(),
                                           std::numeric_limits<double>::max(), std::numeric_limits<double>::lowest(),
                                           std::numeric_limits<double>::epsilon(), kInfinity, -kInfinity, kNan, -kNan,
                                           std::bit_cast<double>(0x7ff0000000000001ull),
                                           std::bit_cast<double>(0xffffffffffffffffull)));

TEST_P(Doubles, ReadBackBitForBitWhereverTheyAre) {
  const auto value = GetParam();
  TrainingScalars scalars;
  scalars.values = {{"one", value}, {"list", std::vector<double>{value, value}}};
  scalars.lr_schedulers = {{{"best", value}}};
  scalars.optimizers["p"].options["lr"] = value;
  const auto read = round_trip(scalars);
  EXPECT_EQ(bits(std::get<double>(read.values.at("one"))), bits(value));
  for (const auto item : std::get<std::vector<double>>(read.values.at("list"))) EXPECT_EQ(bits(item), bits(value));
  EXPECT_EQ(bits(read.lr_schedulers.at(0).at("best")), bits(value));
  EXPECT_EQ(bits(std::get<double>(read.optimizers.at("p").options.at("lr"))), bits(value));
}

TEST(TrainingStateJson, RandomDoublesReadBackBitForBit) {
  std::vector<double> values;
  uint64_t state = 1;
  for (int i = 0; i < 20000; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    values.push_back(std::bit_cast<double>(state));
  }
  TrainingScalars scalars;
  scalars.values = {{"all", values}};
  const auto read = std::get<std::vector<double>>(round_trip(scalars).values.at("all"));
  ASSERT_EQ(read.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(bits(read[i]), bits(values[i])) << values[i];
}

TEST(TrainingStateJson, OptimizersRoundTripWithTheNamesOfTheirTensors) {
  TrainingScalars scalars;
  auto& entry = scalars.optimizers["blocks.0.\"odd\" name"];
  entry.kind = "AdamW";
  entry.options = {{"amsgrad", true}, {"lr", 1.0}, {"steps", int64_t{1}}};
  entry.counts = {{"step", kMost}};
  entry.tensors = {{"exp_avg", torch::ones({2})}, {"exp_avg_sq", torch::ones({2})}};
  scalars.optimizers["never stepped"].kind = "SGD";
  const auto read = round_trip(scalars).optimizers;
  ASSERT_EQ(read.size(), 2);
  const auto& found = read.at("blocks.0.\"odd\" name");
  EXPECT_EQ(found.kind, "AdamW");
  EXPECT_EQ(found.options, entry.options);
  EXPECT_EQ(found.counts, entry.counts);
  ASSERT_EQ(found.tensors.size(), 2);
  EXPECT_FALSE(found.tensors.at("exp_avg").defined());
  EXPECT_FALSE(found.tensors.at("exp_avg_sq").defined());
  EXPECT_EQ(read.at("never stepped").kind, "SGD");
  EXPECT_TRUE(read.at("never stepped").counts.empty());
  EXPECT_TRUE(read.at("never stepped").tensors.empty());
}

TEST(TrainingStateJson, ScalerAndSchedulesRoundTrip) {
  TrainingScalars scalars;
  scalars.grad_scaler = hsdp::GradScalerState{0.1, 1.5, 0.3, 7, 3};
  scalars.lr_schedulers = {{{"step_count", 7}}, {}, {{"a", 1}, {"b", 2}}};
  const auto read = round_trip(scalars);
  ASSERT_TRUE(read.grad_scaler.has_value());
  EXPECT_EQ(read.grad_scaler->scale, 0.1);
  EXPECT_EQ(read.grad_scaler->growth_factor, 1.5);
  EXPECT_EQ(read.grad_scaler->backoff_factor, 0.3);
  EXPECT_EQ(read.grad_scaler->growth_interval, 7);
  EXPECT_EQ(read.grad_scaler->growth_tracker, 3);
  EXPECT_EQ(read.lr_schedulers, scalars.lr_schedulers);
}

TEST(TrainingStateJson, TextsThatAreNoUtf8AreRefused) {
  TrainingScalars scalars;
  scalars.values = {{"name", std::string("a\xff")}};
  expect_error<dtensor::ValueError>([&] { hsdp::to_json(scalars); }, "\"a\xef\xbf\xbd\"", "UTF-8");
  scalars.values.clear();
  scalars.optimizers["\xc3"].kind = "SGD";
  expect_error<dtensor::ValueError>([&] { hsdp::to_json(scalars); }, "UTF-8");
}

// Written by hand, as another program might.
const std::string kValues =
    R"({"seed": {"type": "int64", "value": 7}, "loss": {"type": "double", "value": 2},
        "best": {"type": "double", "value": "-inf"}, "done": {"type": "bool", "value": false},
        "name": {"type": "string", "value": "run"}, "sizes": {"type": "int64_list", "value": [2, -3]},
        "losses": {"type": "double_list", "value": [0.5, "nan"]}})";
const std::string kScaler =
    R"({"scale": 1024.0, "growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 50, "growth_tracker": 9})";
const std::string kWeight =
    R"({"kind": "AdamW", "options": {"lr": 0.001, "amsgrad": true}, "counts": {"step": 100},
        "tensors": ["exp_avg", "exp_avg_sq"]})";
const std::string kText =
    R"({"format": "hsdp-training-state", "version": 1,
        "progress": {"step": 100, "tokens": 204800, "data_position": -3}, "values": )" +
    kValues + R"(, "lr_schedulers": [{"step_count": 100}], "grad_scaler": )" + kScaler +
    R"(, "optimizers": {"weight": )" + kWeight + "}}";

TEST(TrainingStateJson, ATextByHandIsRead) {
  const auto scalars = parsed(kText);
  EXPECT_EQ(scalars.progress, (hsdp::TrainingProgress{100, 204800, -3}));
  EXPECT_EQ(scalars.values.size(), 7);
  EXPECT_EQ(scalars.values.at("seed"), CheckpointValue(int64_t{7}));
  EXPECT_EQ(scalars.values.at("loss"), CheckpointValue(2.0));
  EXPECT_EQ(scalars.values.at("best"), CheckpointValue(-kInfinity));
  EXPECT_EQ(scalars.values.at("done"), CheckpointValue(false));
  EXPECT_EQ(scalars.values.at("name"), CheckpointValue(std::string("run")));
  EXPECT_EQ(scalars.values.at("sizes"), CheckpointValue(std::vector<int64_t>{2, -3}));
  EXPECT_EQ(scalars.lr_schedulers, (std::vector<std::map<std::string, double>>{{{"step_count", 100.0}}}));
  EXPECT_EQ(scalars.grad_scaler->growth_tracker, 9);
  const auto& state = scalars.optimizers.at("weight");
  EXPECT_EQ(state.kind, "AdamW");
  EXPECT_EQ(state.options, (std::map<std::string, OptionValue>{{"lr", 0.001}, {"amsgrad", true}}));
  EXPECT_EQ(state.counts, (std::map<std::string, int64_t>{{"step", 100}}));
  EXPECT_EQ(state.tensors.size(), 2);
}

struct Damage {
  std::string name;
  /// The first `from` in the text becomes `to`.
  std::string from, to;
  std::vector<std::string> parts;
};

const std::vector<Damage> kDamages{
    {"Empty", kText, "", {"no JSON at byte"}},
    {"List", kText, "[1]", {"it is [1]", "an object"}},
    {"Null", kText, "null", {"it is null", "an object"}},
    {"Truncated", "\"exp_avg_sq\"]}}}", "\"exp_avg_sq\"]", {"no JSON at byte"}},
    {"TextAfterTheEnd", "\"exp_avg_sq\"]}}}", "\"exp_avg_sq\"]}}}}", {"no JSON at byte"}},
    {"ZeroByte", "run", std::string(1, '\0'), {"no JSON at byte"}},
    {"NoUtf8", "run", "\xff", {"no JSON at byte"}},
    {"BareNan", "2048", "NaN,", {"no JSON at byte"}},
    {"HugeNumber", "0.001", "1e999", {"number"}},
    {"DeeplyNested", "[2, -3]", std::string(100000, '['), {"nested more than 5"}},
    {"RepeatedKey", "\"tokens\"", "\"step\"", {"\"step\" twice"}},
    {"RepeatedParameter", "\"weight\":", "\"weight\": {}, \"weight\":", {"\"weight\" twice"}},
    {"RepeatedPart", "\"lr_schedulers\": [", "\"progress\": {}, \"lr_schedulers\": [", {"\"progress\" twice"}},
    {"NoFormat", "\"format\": \"hsdp-training-state\", ", "", {"format is missing", "hsdp-training-state"}},
    {"OtherFormat", "hsdp-training-state", "hsdp-checkpoint", {"\"hsdp-checkpoint\"", "hsdp-training-state"}},
    {"NoVersion", "\"version\": 1,", "", {"version is missing", "expected 1"}},
    {"OtherVersion", "\"version\": 1", "\"version\": 2", {"version is 2", "expected 1"}},
    {"VersionAsText", "\"version\": 1", "\"version\": \"1\"", {"version is \"1\"", "expected 1"}},
    {"UnknownPart", "\"progress\"", "\"extra\": 1, \"progress\"", {"it has \"extra\"", "progress"}},
    {"NoPart", "\"lr_schedulers\": [{\"step_count\": 100}],", "", {"it lacks \"lr_schedulers\""}},
    {"ProgressAsList", "{\"step\": 100, \"tokens\": 204800, \"data_position\": -3}", "[100]", {"progress is [100]"}},
    {"NoTokens", "\"tokens\": 204800, ", "", {"progress lacks \"tokens\""}},
    {"UnknownProgress", "\"tokens\"", "\"epochs\": 1, \"tokens\"", {"progress has \"epochs\""}},
    {"FractionOfAStep", "\"step\": 100", "\"step\": 100.5", {"progress.step is 100.5", "whole number"}},
    {"DoubleStep", "\"step\": 100", "\"step\": 100.0", {"progress.step is 100.0", "whole number"}},
    {"StepAsText", "\"step\": 100", "\"step\": \"100\"", {"progress.step is \"100\""}},
    {"AboveInt64", "204800", "9223372036854775808", {"progress.tokens is 9223372036854775808", "9223372036854775807"}},
    {"FarAboveInt64", "204800", "99999999999999999999999", {"progress.tokens is 9.99"}},
    {"BelowInt64", "-3", "-9223372036854775809", {"progress.data_position"}},
    {"ValuesAsNumber", kValues, "7", {"values is 7", "object"}},
    {"BareValue", "{\"type\": \"int64\", \"value\": 7}", "7", {"values[\"seed\"] is 7", "object"}},
    {"ValueWithoutType", "\"type\": \"int64\", ", "", {"values[\"seed\"] lacks \"type\""}},
    {"ValueWithoutValue", ", \"value\": 7", "", {"values[\"seed\"] lacks \"value\""}},
    {"ValueWithMore", "\"value\": 7", "\"value\": 7, \"unit\": 1", {"values[\"seed\"] has \"unit\""}},
    {"UnknownType", "\"int64\"", "\"int32\"", {"values[\"seed\"].type is \"int32\"", "double_list"}},
    {"TypeAsNumber", "\"int64\"", "64", {"values[\"seed\"].type is 64"}},
    {"IntegerThatIsDouble", "\"value\": 7", "\"value\": 7.0", {"values[\"seed\"].value is 7.0"}},
    {"BoolThatIsNumber", "\"value\": false", "\"value\": 0", {"values[\"done\"].value is 0", "true or false"}},
    {"DoubleThatIsText", "\"-inf\"", "\"-infinity\"", {"values[\"best\"].value is \"-infinity\"", "floating-point"}},
    {"DoubleThatIsBool", "\"-inf\"", "true", {"values[\"best\"].value is true"}},
    {"DoubleThatIsNull", "\"-inf\"", "null", {"values[\"best\"].value is null"}},
    {"DoubleThatIsNotExact", "\"value\": 2}", "\"value\": 9007199254740993}", {"values[\"loss\"]", "9007199254740993"}},
    {"NanThatIsNone", "\"nan\"", "\"nan(3ff0000000000000)\"", {"values[\"losses\"].value[1]", "nan(3ff0000000000000)"}},
    {"NanOfFewDigits", "\"nan\"", "\"nan(fff8)\"", {"values[\"losses\"].value[1]"}},
    {"NanOfNoDigits", "\"nan\"", "\"nan()\"", {"values[\"losses\"].value[1]"}},
    {"NanUnclosed", "\"nan\"", "\"nan(7ff8000000000001\"", {"values[\"losses\"].value[1]"}},
    {"NanOfOtherDigits", "\"nan\"", "\"nan(7ff800000000000g)\"", {"values[\"losses\"].value[1]"}},
    {"StringThatIsNumber", "\"run\"", "5", {"values[\"name\"].value is 5", "text"}},
    {"ListThatIsNumber", "[2, -3]", "2", {"values[\"sizes\"].value is 2", "list"}},
    {"ListOfOtherThings", "[2, -3]", "[2, \"x\"]", {"values[\"sizes\"].value[1] is \"x\""}},
    {"SchedulesAsObject", "[{\"step_count\": 100}]", "{\"step_count\": 100}", {"lr_schedulers is", "list"}},
    {"ScheduleAsNumber", "{\"step_count\": 100}", "100", {"lr_schedulers[0] is 100"}},
    {"ScheduleWithText", "\"step_count\": 100", "\"step_count\": \"x\"", {"lr_schedulers[0][\"step_count\"] is \"x\""}},
    {"ScalerAsNumber", kScaler, "1024.0", {"grad_scaler is 1024.0", "object"}},
    {"NoScale", "\"scale\": 1024.0, ", "", {"grad_scaler lacks \"scale\""}},
    {"ScalerWithMore", "\"scale\"", "\"enabled\": true, \"scale\"", {"grad_scaler has \"enabled\""}},
    {"ScaleOfZero", "1024.0", "0", {"grad_scaler", "scale 0"}},
    {"ScaleOfNan", "1024.0", "\"nan\"", {"grad_scaler", "scale nan"}},
    {"IntervalOfZero", "\"growth_interval\": 50", "\"growth_interval\": 0", {"grad_scaler", "growth_interval 0"}},
    {"IntervalAsDouble",
     "\"growth_interval\": 50",
     "\"growth_interval\": 50.0",
     {"grad_scaler.growth_interval is 50.0"}},
    {"OptimizerAsText", kWeight, "\"AdamW\"", {"optimizers[\"weight\"] is \"AdamW\"", "object"}},
    {"NoKind", "\"kind\": \"AdamW\", ", "", {"optimizers[\"weight\"] lacks \"kind\""}},
    {"KindAsNumber", "\"AdamW\"", "1", {"optimizers[\"weight\"].kind is 1"}},
    {"UnknownEntry", "\"kind\"", "\"group\": 0, \"kind\"", {"optimizers[\"weight\"] has \"group\""}},
    {"OptionAsList", "0.001", "[0.9]", {"optimizers[\"weight\"].options[\"lr\"] is [0.9]"}},
    {"OptionAsNull", "0.001", "null", {"optimizers[\"weight\"].options[\"lr\"] is null"}},
    {"OptionsAsList", "{\"lr\": 0.001, \"amsgrad\": true}", "[]", {"optimizers[\"weight\"].options is []"}},
    {"CountAsDouble", "{\"step\": 100}", "{\"step\": 1e2}", {"optimizers[\"weight\"].counts[\"step\"] is 100.0"}},
    {"TensorsAsObject", "[\"exp_avg\", \"exp_avg_sq\"]", "{}", {"optimizers[\"weight\"].tensors is {}"}},
    {"TensorAsNumber", "\"exp_avg_sq\"", "2", {"optimizers[\"weight\"].tensors[1] is 2"}},
    {"RepeatedTensor", "\"exp_avg_sq\"", "\"exp_avg\"", {"optimizers[\"weight\"].tensors", "\"exp_avg\" twice"}},
};

class DamagedText : public ::testing::TestWithParam<Damage> {};
INSTANTIATE_TEST_SUITE_P(Damages, DamagedText, ::testing::ValuesIn(kDamages),
                         [](const auto& which) { return which.param.name; });

TEST_P(DamagedText, IsRefusedByFileAndEntry) {
  std::string text = kText;
  const auto at = text.find(GetParam().from);
  ASSERT_NE(at, std::string::npos);
  text.replace(at, GetParam().from.size(), GetParam().to);
  expect_error<dtensor::ValueError>([&] { parsed(text); }, "[load] a/state.json");
  for (const auto& part : GetParam().parts) expect_error<dtensor::ValueError>([&] { parsed(text); }, part);
}

TEST(TrainingStateJson, EveryBeginningOfATextIsRefused) {
  for (size_t size = 0; size < kText.size(); ++size) {
    expect_error<dtensor::ValueError>([&] { parsed(kText.substr(0, size)); }, "a/state.json");
  }
}

// ---- programs ----

struct Program {
  std::vector<torch::Tensor> parameters{torch::ones({3}, torch::requires_grad())};
  torch::optim::SGD optimizer{parameters, torch::optim::SGDOptions(1.0)};
  torch::optim::StepLR step_lr{optimizer, /*step_size=*/3, /*gamma=*/0.5};
  torch::optim::ReduceLROnPlateauScheduler plateau{optimizer,         torch::optim::ReduceLROnPlateauScheduler::min,
                                                   /*factor=*/0.5F,
                                                   /*patience=*/1,
                                                   /*threshold=*/0.0, torch::optim::ReduceLROnPlateauScheduler::abs,
                                                   /*cooldown=*/2};
  hsdp::GradScaler scaler;
  TrainingState state;
  hsdp::ParameterNames names{{parameters[0].unsafeGetTensorImpl(), "weight"}};

  Program() {
    state.optimizers = {&optimizer};
    state.lr_schedulers = {&step_lr, &plateau};
    state.grad_scaler = &scaler;
  }
  double lr() const { return optimizer.param_groups()[0].options().get_lr(); }
  /// The learning rate after a step of each schedule.
  double step(float loss) {
    step_lr.step();
    plateau.step(loss);
    return lr();
  }
  void take_over(const TrainingScalars& scalars) {
    hsdp::check_restorable("load", state, scalars);
    hsdp::restore_optimizer_states(state.optimizers, names, scalars.optimizers, {});
    hsdp::restore(state, scalars);
  }
};

TEST(TrainingScalars, SchedulesGoOnWhereTheyWere) {
  // Improving, stalling until the rate falls, cooling down, stalling again: wherever training stops, it goes on alike.
  const std::vector<float> losses{5, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};
  Program whole;
  std::vector<double> rates;
  for (const auto loss : losses) rates.push_back(whole.step(loss));
  for (size_t stop = 0; stop <= losses.size(); ++stop) {
    SCOPED_TRACE(stop);
    Program first, second;
    for (size_t i = 0; i < stop; ++i) first.step(losses[i]);
    second.step(9);  // what the program did before loading does not count
    second.take_over(round_trip(hsdp::scalars_of(first.state, first.names)));
    for (size_t i = stop; i < losses.size(); ++i) EXPECT_EQ(second.step(losses[i]), rates[i]) << i;
  }
}

TEST(TrainingScalars, AreThoseOfTheState) {
  Program program;
  program.state.progress = {3, 4, 5};
  program.state.values = {{"seed", int64_t{7}}};
  program.scaler.load_state({.scale = 16, .growth_tracker = 2});
  for (int i = 0; i < 4; ++i) program.step(2);
  const auto scalars = hsdp::scalars_of(program.state, program.names);
  EXPECT_EQ(scalars.progress, (hsdp::TrainingProgress{3, 4, 5}));
  EXPECT_EQ(scalars.values, program.state.values);
  // The first loss is better than none; of three others two are more than the patience, and lower the rate; the last
  // one is in the cooldown.
  const std::vector<std::map<std::string, double>> expected{
      {{"step_count", 4}}, {{"best", 2}, {"cooldown_counter", 1}, {"last_epoch", 4}, {"num_bad_epochs", 0}}};
  EXPECT_EQ(scalars.lr_schedulers, expected);
  ASSERT_TRUE(scalars.grad_scaler.has_value());
  EXPECT_EQ(scalars.grad_scaler->scale, 16);
  EXPECT_EQ(scalars.grad_scaler->growth_tracker, 2);
  EXPECT_EQ(scalars.optimizers.at("weight").kind, "SGD");

  Program other;
  other.state.values = {{"of its own", true}};
  other.take_over(scalars);
  EXPECT_EQ(other.state.progress, program.state.progress);
  EXPECT_EQ(other.state.values, program.state.values);
  EXPECT_EQ(other.scaler.get_scale(), 16);
  EXPECT_EQ(other.scaler.state().growth_tracker, 2);
  EXPECT_EQ(other.lr(), program.lr());
}

TEST(TrainingScalars, AFreshPlateauHasNoBestYet) {
  Program program;
  const auto scalars = round_trip(hsdp::scalars_of(program.state, program.names));
  EXPECT_EQ(scalars.lr_schedulers.at(1).at("best"), double{std::numeric_limits<float>::max()});
  program.step(2);
  program.take_over(scalars);
  EXPECT_EQ(hsdp::scalars_of(program.state, program.names).lr_schedulers, scalars.lr_schedulers);
}

TEST(TrainingScalars, NullSchedulesAreRefused) {
  Program program;
  const auto scalars = hsdp::scalars_of(program.state, program.names);
  program.state.lr_schedulers[1] = static_cast<torch::optim::LRScheduler*>(nullptr);
  expect_error<dtensor::ValueError>([&] { hsdp::scalars_of(program.state, program.names); }, "schedule 1 is null");
  expect_error<dtensor::ValueError>([&] { hsdp::check_restorable("load", program.state, scalars); }, "[load]",
                                    "schedule 1 is null");
}

struct Misfit {
  std::string name;
  std::function<void(Program&, TrainingScalars&)> apply;
  std::vector<std::string> parts;
};

const std::vector<Misfit> kMisfits{
    {"FewerSchedules",
     [](auto&, auto& scalars) { scalars.lr_schedulers.pop_back(); },
     {"1 learning-rate", "expected 2"}},
    {"MoreSchedules", [](auto&, auto& scalars) { scalars.lr_schedulers.emplace_back(); }, {"3 learning-rate"}},
    {"OtherOrder",
     [](auto&, auto& scalars) { std::swap(scalars.lr_schedulers[0], scalars.lr_schedulers[1]); },
     {"schedule 0", "best, cooldown_counter", "step_count of a LRScheduler"}},
    {"NoNumbers", [](auto&, auto& scalars) { scalars.lr_schedulers[0].clear(); }, {"schedule 0", "no numbers"}},
    {"UnknownNumber",
     [](auto&, auto& scalars) { scalars.lr_schedulers[1]["epoch"] = 1; },
     {"schedule 1", "epoch", "num_bad_epochs"}},
    {"FractionOfACount",
     [](auto&, auto& scalars) { scalars.lr_schedulers[0]["step_count"] = 1.5; },
     {"schedule 0", "step_count 1.5", "whole number"}},
    {"NegativeCount",
     [](auto&, auto& scalars) { scalars.lr_schedulers[0]["step_count"] = -1; },
     {"schedule 0", "step_count -1"}},
    {"CountOfNan",
     [](auto&, auto& scalars) { scalars.lr_schedulers[1]["last_epoch"] = kNan; },
     {"schedule 1", "last_epoch nan"}},
    {"CountThatIsTooLarge",
     [](auto&, auto& scalars) { scalars.lr_schedulers[1]["last_epoch"] = 2147483648.0; },
     {"schedule 1", "last_epoch", "2147483647"}},
    {"BestThatIsNoFloat",
     [](auto&, auto& scalars) { scalars.lr_schedulers[1]["best"] = 0.1; },
     {"schedule 1", "best 0.1", "float"}},
    {"BestThatIsTooLarge",
     [](auto&, auto& scalars) { scalars.lr_schedulers[1]["best"] = 1e300; },
     {"schedule 1", "best 1e+300"}},
    {"NoScalerInTheProgram",
     [](auto& program, auto&) { program.state.grad_scaler = nullptr; },
     {"checkpoint has a gradient scaler", "program none"}},
    {"NoScalerInTheCheckpoint",
     [](auto&, auto& scalars) { scalars.grad_scaler.reset(); },
     {"checkpoint has no gradient scaler", "program one"}},
};

class MisfitScalars : public ::testing::TestWithParam<Misfit> {};
INSTANTIATE_TEST_SUITE_P(Misfits, MisfitScalars, ::testing::ValuesIn(kMisfits),
                         [](const auto& which) { return which.param.name; });

TEST_P(MisfitScalars, AreRefused) {
  Program program;
  program.step(2);
  auto scalars = hsdp::scalars_of(program.state, program.names);
  hsdp::check_restorable("load", program.state, scalars);
  GetParam().apply(program, scalars);
  for (const auto& part : GetParam().parts) {
    expect_error<dtensor::ValueError>([&] { hsdp::check_restorable("load", program.state, scalars); }, "[load] ", part);
  }
}

}  // namespace training_state_json_test

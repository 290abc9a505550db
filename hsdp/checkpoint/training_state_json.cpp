#include "hsdp/checkpoint/training_state_json.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/checkpoint/files.h"
#include "hsdp/checkpoint/json_reader.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;
using Json = nlohmann::json;

constexpr auto kFormat = "hsdp-training-state";
constexpr int64_t kVersion = 1;
constexpr int kDeepest = 5;

// In the order of CheckpointValue's alternatives.
constexpr const char* kTypes[] = {"bool", "int64", "double", "string", "int64_list", "double_list"};
static_assert(std::size(kTypes) == std::variant_size_v<CheckpointValue>);

/// Texts of values. A class, so that all of them are known to each other.
struct Written {
  static std::string json_of(bool value) { return value ? "true" : "false"; }
  static std::string json_of(int64_t value) { return std::to_string(value); }

  static std::string json_of(const std::string& value) {
    try {
      return Json(value).dump();
    } catch (const Json::type_error&) {
      raise<ValueError>("save", "the text ", shown(value), " cannot be stored, expected UTF-8");
    }
  }

  // JSON has no words for what is not finite. The usual NaN is "nan", another one has its bits in parentheses.
  static std::string json_of(double value) {
    if (std::isfinite(value)) return Json(value).dump();
    if (std::isinf(value)) return value > 0 ? "\"inf\"" : "\"-inf\"";
    const auto bits = std::bit_cast<uint64_t>(value);
    if (bits == std::bit_cast<uint64_t>(std::numeric_limits<double>::quiet_NaN())) return "\"nan\"";
    return "\"nan(" + to_hex(bits) + ")\"";
  }

  template <class Item>
  static std::string json_of(const std::vector<Item>& items) {
    std::vector<std::string> texts;
    for (const auto& item : items) texts.push_back(json_of(item));
    return "[" + c10::Join(",", texts) + "]";
  }

  template <class Value>
  static std::string json_of(const std::map<std::string, Value>& entries) {
    std::vector<std::string> texts;
    for (const auto& [name, value] : entries) texts.push_back(json_of(name) + ":" + json_of(value));
    return "{" + c10::Join(",", texts) + "}";
  }

  static std::string json_of(const OptionValue& value) {
    return std::visit([](const auto& each) { return json_of(each); }, value);
  }

  static std::string json_of(const CheckpointValue& value) {
    return c10::str("{\"type\":\"", kTypes[value.index()],
                    "\",\"value\":", std::visit([](const auto& each) { return json_of(each); }, value), "}");
  }

  static std::string json_of(const ParameterOptimizerState& state) {
    std::vector<std::string> tensors;
    for (const auto& [name, tensor] : state.tensors) tensors.push_back(name);
    return c10::str("{\"kind\":", json_of(state.kind), ",\"options\":", json_of(state.options),
                    ",\"counts\":", json_of(state.counts), ",\"tensors\":", json_of(tensors), "}");
  }

  static std::string json_of(const std::optional<GradScalerState>& state) {
    if (!state) return "null";
    return c10::str("{\"scale\":", json_of(state->scale), ",\"growth_factor\":", json_of(state->growth_factor),
                    ",\"backoff_factor\":", json_of(state->backoff_factor),
                    ",\"growth_interval\":", json_of(state->growth_interval),
                    ",\"growth_tracker\":", json_of(state->growth_tracker), "}");
  }

  // A line each, so that people can read and compare files.
  template <class Value>
  static std::string lines(const std::map<std::string, Value>& entries) {
    std::vector<std::string> rows;
    for (const auto& [name, value] : entries) rows.push_back(json_of(name) + ":" + json_of(value));
    return rows.empty() ? "{}" : "{\n" + c10::Join(",\n", rows) + "\n}";
  }
};

class TrainingStateReader {
 public:
  TrainingStateReader(const char* where, const std::string& path) : json_(where, path, "a training state") {}

  TrainingScalars read(const std::string& text) const {
    const auto all = json_.parse(text, kFormat, kVersion, kDeepest);
    json_.check_object(all, "it",
                       {"format", "version", "progress", "values", "lr_schedulers", "grad_scaler", "optimizers"});
    TrainingScalars scalars;
    const auto& progress = all["progress"];
    json_.check_object(progress, "progress", {"step", "tokens", "data_position"});
    scalars.progress.step = json_.integer(progress["step"], "progress.step");
    scalars.progress.tokens = json_.integer(progress["tokens"], "progress.tokens");
    scalars.progress.data_position = json_.integer(progress["data_position"], "progress.data_position");
    scalars.values = map(all["values"], "values",
                         [&](const Json& value, const std::string& entry) { return checkpoint_value(value, entry); });
    scalars.lr_schedulers =
        list(all["lr_schedulers"], "lr_schedulers", [&](const Json& value, const std::string& entry) {
          return map(value, entry, [&](const Json& item, const std::string& name) { return number(item, name); });
        });
    if (!all["grad_scaler"].is_null()) scalars.grad_scaler = grad_scaler(all["grad_scaler"]);
    scalars.optimizers = map(all["optimizers"], "optimizers", [&](const Json& value, const std::string& entry) {
      return optimizer_state(value, entry);
    });
    return scalars;
  }

 private:
  template <class Read>
  using Item = std::invoke_result_t<Read, const Json&, const std::string&>;

  /// What `read(item, its entry)` returns, by key.
  template <class Read>
  std::map<std::string, Item<Read>> map(const Json& value, const std::string& entry, const Read& read) const {
    json_.check_object(value, entry);
    std::map<std::string, Item<Read>> result;
    for (const auto& item : value.items()) {
      result.emplace(item.key(), read(item.value(), c10::str(entry, "[", shown(item.key()), "]")));
    }
    return result;
  }

  template <class Read>
  std::vector<Item<Read>> list(const Json& value, const std::string& entry, const Read& read) const {
    json_.check_list(value, entry);
    std::vector<Item<Read>> result;
    for (size_t i = 0; i < value.size(); ++i) result.push_back(read(value[i], c10::str(entry, "[", i, "]")));
    return result;
  }

  bool flag(const Json& value, const std::string& entry) const {
    if (!value.is_boolean()) json_.refuse(entry, " is ", shown(value), ", expected true or false");
    return value.get<bool>();
  }

  double number(const Json& value, const std::string& entry) const {
    // Programs that know one kind of numbers write 1.0 as 1.
    constexpr int64_t kMostExact = int64_t{1} << std::numeric_limits<double>::digits;
    if (value.is_number_float()) return value.get<double>();
    if (value.is_number_integer()) {
      const auto whole = json_.integer(value, entry);
      if (whole >= -kMostExact && whole <= kMostExact) return static_cast<double>(whole);
    } else if (value.is_string()) {
      if (const auto special = not_finite(value.get_ref<const std::string&>())) return *special;
    }
    json_.refuse(entry, " is ", shown(value), ", expected a floating-point number, \"nan\", \"inf\" or \"-inf\"");
  }

  static std::optional<double> not_finite(std::string_view text) {
    constexpr std::string_view kOpening = "nan(";
    constexpr size_t kHexDigits = 16;
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
    if (!text.starts_with(kOpening) || !text.ends_with(')')) return std::nullopt;
    const auto digits = text.substr(kOpening.size(), text.size() - kOpening.size() - 1);
    uint64_t bits = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), bits, 16);
    const auto value = std::bit_cast<double>(bits);
    const bool complete = digits.size() == kHexDigits && end == digits.data() + digits.size() && error == std::errc();
    return complete && std::isnan(value) ? std::optional(value) : std::nullopt;
  }

  CheckpointValue checkpoint_value(const Json& json, const std::string& entry) const {
    json_.check_object(json, entry, {"type", "value"});
    const auto& type = json_.text(json["type"], entry + ".type");
    const auto& value = json["value"];
    const auto place = entry + ".value";
    if (type == "bool") return flag(value, place);
    if (type == "int64") return json_.integer(value, place);
    if (type == "double") return number(value, place);
    if (type == "string") return json_.text(value, place);
    if (type == "int64_list") {
      return list(value, place, [&](const Json& item, const std::string& name) { return json_.integer(item, name); });
    }
    if (type == "double_list") {
      return list(value, place, [&](const Json& item, const std::string& name) { return number(item, name); });
    }
    json_.refuse(entry, ".type is ", shown(type), ", expected one of ",
                 c10::Join(", ", std::vector<std::string>(std::begin(kTypes), std::end(kTypes))));
  }

  OptionValue option(const Json& value, const std::string& entry) const {
    if (value.is_boolean()) return value.get<bool>();
    if (value.is_number_integer()) return json_.integer(value, entry);
    return number(value, entry);
  }

  ParameterOptimizerState optimizer_state(const Json& json, const std::string& entry) const {
    json_.check_object(json, entry, {"kind", "options", "counts", "tensors"});
    ParameterOptimizerState state;
    state.kind = json_.text(json["kind"], entry + ".kind");
    state.options = map(json["options"], entry + ".options",
                        [&](const Json& value, const std::string& name) { return option(value, name); });
    state.counts = map(json["counts"], entry + ".counts",
                       [&](const Json& value, const std::string& name) { return json_.integer(value, name); });
    const auto names = list(json["tensors"], entry + ".tensors",
                            [&](const Json& value, const std::string& name) { return json_.text(value, name); });
    for (const auto& name : names) {
      if (state.tensors.try_emplace(name).second) continue;
      json_.refuse(entry, ".tensors has ", shown(name), " twice, expected it once");
    }
    return state;
  }

  GradScalerState grad_scaler(const Json& json) const {
    json_.check_object(json, "grad_scaler",
                       {"scale", "growth_factor", "backoff_factor", "growth_interval", "growth_tracker"});
    GradScalerState state;
    state.scale = number(json["scale"], "grad_scaler.scale");
    state.growth_factor = number(json["growth_factor"], "grad_scaler.growth_factor");
    state.backoff_factor = number(json["backoff_factor"], "grad_scaler.backoff_factor");
    state.growth_interval = json_.integer(json["growth_interval"], "grad_scaler.growth_interval");
    state.growth_tracker = json_.integer(json["growth_tracker"], "grad_scaler.growth_tracker");
    try {
      GradScaler checked(state);
    } catch (const ValueError& error) {
      json_.refuse("grad_scaler: ", error.what());
    }
    return state;
  }

  JsonReader json_;
};

}  // namespace

std::string to_json(const TrainingScalars& scalars) {
  const auto& progress = scalars.progress;
  std::string text = c10::str("{\n\"format\":\"", kFormat, "\",\n\"version\":", kVersion);
  text += c10::str(",\n\"progress\":{\"step\":", progress.step, ",\"tokens\":", progress.tokens,
                   ",\"data_position\":", progress.data_position, "}");
  text += ",\n\"values\":" + Written::lines(scalars.values);
  text += ",\n\"lr_schedulers\":" + Written::json_of(scalars.lr_schedulers);
  text += ",\n\"grad_scaler\":" + Written::json_of(scalars.grad_scaler);
  text += ",\n\"optimizers\":" + Written::lines(scalars.optimizers);
  return text + "\n}\n";
}

TrainingScalars parse_training_scalars(const char* where, const std::string& text, const std::string& path) {
  return TrainingStateReader(where, path).read(text);
}

}  // namespace hsdp

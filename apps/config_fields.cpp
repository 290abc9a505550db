#include "apps/config_fields.h"

#include <c10/util/StringUtil.h>
#include <yaml-cpp/yaml.h>

#include <charconv>
#include <limits>
#include <utility>

namespace apps {
namespace {

enum class Presence { optional, required };
using Presence::required;

/// Numbers a key accepts.
enum class Range { non_negative, positive, zero_to_one, zero_to_below_one };

bool contains(Range range, double value) {
  switch (range) {
    case Range::non_negative:
      return value >= 0.0;
    case Range::positive:
      return value > 0.0;
    case Range::zero_to_one:
      return value >= 0.0 && value <= 1.0;
    case Range::zero_to_below_one:
      return value >= 0.0 && value < 1.0;
  }
  return false;
}

const char* to_string(Range range) {
  switch (range) {
    case Range::non_negative:
      return "of at least 0";
    case Range::positive:
      return "above 0";
    case Range::zero_to_one:
      return "from 0 to 1";
    case Range::zero_to_below_one:
      return "from 0 to below 1";
  }
  return "";
}

std::string got(const YamlEntry& entry) {
  switch (entry.kind) {
    case YamlEntry::Kind::plain:
      return c10::str(", got '", entry.text, "'");
    case YamlEntry::Kind::quoted:
      return c10::str(", got the string '", entry.text, "'");
    case YamlEntry::Kind::list:
      return ", got a list";
    case YamlEntry::Kind::map:
      return ", got a map";
    case YamlEntry::Kind::nothing:
      return ", got nothing";
  }
  return {};
}

/// The whole text as a decimal number, with a sign but without the leading zeros and prefixes that YAML takes for
/// octal and hexadecimal, and without infinities.
template <class Number>
std::optional<Number> to_number(const YamlEntry& entry) {
  if (entry.kind != YamlEntry::Kind::plain) return std::nullopt;
  std::string_view text = entry.text;
  std::string_view digits = text;
  if (text.starts_with('+') || text.starts_with('-')) digits.remove_prefix(1);
  if (text.starts_with('+')) text = digits;
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  // Also keeps a second sign and the words inf and nan out.
  if (digits.empty() || !(is_digit(digits[0]) || digits[0] == '.')) return std::nullopt;
  if (digits.size() > 1 && digits[0] == '0' && is_digit(digits[1])) return std::nullopt;
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string to_text(double value) {
  char buffer[32];
  return std::string(buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr);
}

/// The items of a list, none of which is empty. Nothing else in a file begins with a bracket.
std::optional<std::vector<std::string>> to_texts(const YamlEntry& entry) {
  const bool spelled_out = entry.kind == YamlEntry::Kind::plain && entry.text.starts_with('[');
  if (entry.kind != YamlEntry::Kind::list && !spelled_out) return std::nullopt;
  std::vector<std::string> texts;
  try {
    // What follows a list on its line counts as another document.
    const auto documents = YAML::LoadAll(entry.text);
    if (documents.size() != 1 || !documents[0].IsSequence()) return std::nullopt;
    for (const auto& item : documents[0]) {
      if (!item.IsScalar() || item.Scalar().empty()) return std::nullopt;
      texts.push_back(item.Scalar());
    }
  } catch (const YAML::Exception&) {
    return std::nullopt;
  }
  return texts;
}

class Fields {
 public:
  std::vector<ConfigField> take() { return std::move(fields_); }

  void section(std::string name) { section_ = std::move(name); }

  void integer(const char* key, int64_t& value, int64_t low, Presence presence = Presence::optional,
               int64_t high = std::numeric_limits<int64_t>::max()) {
    const auto set = [&value, low, high](const YamlEntry& entry) -> std::optional<std::string> {
      const auto number = to_number<int64_t>(entry);
      if (!number) return "expected int" + got(entry);
      if (*number < low) return c10::str("expected int of at least ", low, got(entry));
      if (*number > high) return c10::str("expected int of at most ", high, got(entry));
      value = *number;
      return std::nullopt;
    };
    add(key, presence, set, [&value] { return std::to_string(value); });
  }

  void number(const char* key, double& value, Range range, Presence presence = Presence::optional) {
    const auto set = [&value, range](const YamlEntry& entry) -> std::optional<std::string> {
      const auto number = to_number<double>(entry);
      if (!number) return "expected number" + got(entry);
      if (!contains(range, *number)) return c10::str("expected number ", to_string(range), got(entry));
      value = *number;
      return std::nullopt;
    };
    add(key, presence, set, [&value] { return to_text(value); });
  }

  void boolean(const char* key, bool& value) { choice<bool>(key, value, {{"true", true}, {"false", false}}); }

  void text(const char* key, std::string& value, Presence presence = Presence::optional) {
    const auto set = [&value](const YamlEntry& entry) -> std::optional<std::string> {
      const bool scalar = entry.kind == YamlEntry::Kind::plain || entry.kind == YamlEntry::Kind::quoted;
      if (!scalar || entry.text.empty()) return "expected text" + got(entry);
      value = entry.text;
      return std::nullopt;
    };
    add(key, presence, set, [&value] {
      YAML::Emitter emitter;
      emitter << YAML::DoubleQuoted << value;
      return std::string(emitter.c_str());
    });
  }

  /// `none` for an empty text. A text of that word is spelled in quotes.
  void text_or_none(const char* key, std::string& value) {
    text(key, value);
    const auto plain = fields_.back();
    fields_.back().set = [&value, plain](const YamlEntry& entry) {
      if (entry.kind != YamlEntry::Kind::plain || entry.text != "none") return plain.set(entry);
      value.clear();
      return std::optional<std::string>();
    };
    fields_.back().get = [&value, plain] { return value.empty() ? "none" : plain.get(); };
  }

  template <class Value>
  void choice(const char* key, Value& value, std::vector<std::pair<std::string, Value>> choices,
              Presence presence = Presence::optional) {
    const auto set = [&value, choices](const YamlEntry& entry) -> std::optional<std::string> {
      std::string names;
      for (size_t i = 0; i < choices.size(); ++i) {
        if (entry.kind == YamlEntry::Kind::plain && entry.text == choices[i].first) {
          value = choices[i].second;
          return std::nullopt;
        }
        names += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i].first;
      }
      return "expected " + names + got(entry);
    };
    add(key, presence, set, [&value, choices] {
      for (const auto& [name, meaning] : choices) {
        if (meaning == value) return name;
      }
      return std::string();
    });
  }

  /// A list of texts, in an override as YAML on one line: `["a", "b"]`.
  void texts(const char* key, std::vector<std::string>& values) {
    const auto set = [&values](const YamlEntry& entry) -> std::optional<std::string> {
      auto read = to_texts(entry);
      if (!read) return "expected list of text" + got(entry);
      values = std::move(*read);
      return std::nullopt;
    };
    add(key, Presence::optional, set, [&values] {
      YAML::Emitter emitter;
      emitter << YAML::Flow << YAML::BeginSeq;
      for (const auto& value : values) emitter << YAML::DoubleQuoted << value;
      emitter << YAML::EndSeq;
      return std::string(emitter.c_str());
    });
  }

  /// `none` for no patterns, `full` for `all`, or a list.
  void patterns(const char* key, std::vector<std::string>& values, const std::vector<std::string>& all) {
    texts(key, values);
    const auto list = fields_.back();
    fields_.back().set = [&values, all, list](const YamlEntry& entry) -> std::optional<std::string> {
      if (entry.kind == YamlEntry::Kind::plain && (entry.text == "none" || entry.text == "full")) {
        values = entry.text == "full" ? all : std::vector<std::string>();
        return std::nullopt;
      }
      return list.set(entry) ? std::optional("expected none, full or list of text" + got(entry)) : std::nullopt;
    };
    fields_.back().get = [&values, all, list] {
      return values.empty() ? std::string("none") : values == all ? std::string("full") : list.get();
    };
  }

  /// `all` for an empty list, or numbers of ranks.
  void ranks(const char* key, std::vector<int64_t>& values) {
    const auto set = [&values](const YamlEntry& entry) -> std::optional<std::string> {
      const std::string refusal = "expected all or list of int of at least 0" + got(entry);
      std::vector<int64_t> read;
      if (entry.kind != YamlEntry::Kind::plain || entry.text != "all") {
        const auto texts = to_texts(entry);
        if (!texts || texts->empty()) return refusal;
        for (const auto& text : *texts) {
          const auto number = to_number<int64_t>({YamlEntry::Kind::plain, text, "", ""});
          if (!number || *number < 0) return refusal;
          read.push_back(*number);
        }
      }
      values = std::move(read);
      return std::nullopt;
    };
    add(key, Presence::optional, set,
        [&values] { return values.empty() ? std::string("all") : c10::str("[", c10::Join(", ", values), "]"); });
  }

  /// `default` for empty, `true`, `false`, or a positive int.
  void reshard(const char* key, std::optional<std::variant<bool, int64_t>>& value) {
    const auto set = [&value](const YamlEntry& entry) -> std::optional<std::string> {
      const bool plain = entry.kind == YamlEntry::Kind::plain;
      const auto number = to_number<int64_t>(entry);
      if (plain && entry.text == "default") {
        value.reset();
      } else if (plain && (entry.text == "true" || entry.text == "false")) {
        value = entry.text == "true";
      } else if (number && *number >= 1) {
        value = *number;
      } else {
        return "expected default, true, false or int of at least 1" + got(entry);
      }
      return std::nullopt;
    };
    add(key, Presence::optional, set, [&value]() -> std::string {
      if (!value) return "default";
      if (const auto* number = std::get_if<int64_t>(&*value)) return std::to_string(*number);
      return std::get<bool>(*value) ? "true" : "false";
    });
  }

  void dtype(const char* key, std::optional<c10::ScalarType>& value) {
    choice<std::optional<c10::ScalarType>>(key, value,
                                           {{"default", std::nullopt},
                                            {"float32", c10::ScalarType::Float},
                                            {"bfloat16", c10::ScalarType::BFloat16},
                                            {"float16", c10::ScalarType::Half}});
  }

  /// A positive int, or `auto` (or -1) for -1.
  void integer_or_auto(const char* key, int64_t& value) {
    const auto set = [&value](const YamlEntry& entry) -> std::optional<std::string> {
      const bool automatic = entry.kind == YamlEntry::Kind::plain && entry.text == "auto";
      const auto number = automatic ? std::optional<int64_t>(-1) : to_number<int64_t>(entry);
      if (!number || (*number < 1 && *number != -1)) return "expected int of at least 1, or auto" + got(entry);
      value = *number;
      return std::nullopt;
    };
    add(key, Presence::optional, set, [&value] { return value == -1 ? "auto" : std::to_string(value); });
  }

 private:
  void add(const char* key, Presence presence, std::function<std::optional<std::string>(const YamlEntry&)> set,
           std::function<std::string()> get) {
    fields_.push_back({section_ + "." + key, presence == Presence::required, std::move(set), std::move(get)});
  }

  std::string section_;
  std::vector<ConfigField> fields_;
};

}  // namespace

std::vector<ConfigField> config_fields(Config& config) {
  Fields fields;

  fields.section("model");
  fields.integer("vocab_size", config.model.vocab_size, 1, required);
  fields.integer("hidden_size", config.model.hidden_size, 1, required);
  fields.integer("intermediate_size", config.model.intermediate_size, 1, required);
  fields.integer("n_layers", config.model.n_layers, 1, required);
  fields.integer("n_heads", config.model.n_heads, 1, required);
  fields.integer("n_kv_heads", config.model.n_kv_heads, 0);
  fields.integer("max_sequence_length", config.model.max_sequence_length, 1, required);
  fields.number("rope_theta", config.model.rope_theta, Range::positive);
  fields.number("norm_eps", config.model.norm_eps, Range::positive);
  fields.boolean("tie_embeddings", config.model.tie_embeddings);

  fields.section("data");
  fields.text("path", config.data.path, required);
  fields.choice<TokenFormat>(
      "format", config.data.format,
      {{"bytes", TokenFormat::bytes}, {"uint16", TokenFormat::uint16}, {"llmc", TokenFormat::llmc}}, required);

  fields.section("training");
  fields.integer("steps", config.training.steps, 1, required);
  fields.integer("global_batch_size", config.training.global_batch_size, 1, required);
  fields.integer("gradient_accumulation", config.training.gradient_accumulation, 1);
  fields.integer("sequence_length", config.training.sequence_length, 1, required);
  fields.integer("seed", config.training.seed, 0);
  fields.number("max_norm", config.training.max_norm, Range::non_negative);
  fields.patterns("activation_checkpoint", config.training.activation_checkpoint, {"model.layers.*"});
  fields.integer("sample_bytes", config.training.sample_bytes, 0);
  fields.text("sample_prompt", config.training.sample_prompt);
  fields.number("sample_temperature", config.training.sample_temperature, Range::non_negative);

  fields.section("parallelism");
  fields.integer("replicate", config.parallelism.replicate, 1);
  fields.integer_or_auto("shard", config.parallelism.shard);
  fields.reshard("reshard_after_forward", config.parallelism.reshard_after_forward);
  fields.boolean("prefetch", config.parallelism.prefetch);

  fields.section("mixed_precision");
  fields.dtype("param_dtype", config.mixed_precision.param_dtype);
  fields.dtype("reduce_dtype", config.mixed_precision.reduce_dtype);
  fields.dtype("output_dtype", config.mixed_precision.output_dtype);

  fields.section("offload");
  fields.boolean("to_host", config.offload.to_host);
  fields.boolean("pin_memory", config.offload.pin_memory);

  fields.section("optimizer");
  fields.choice<OptimizerName>("name", config.optimizer.name,
                               {{"adamw", OptimizerName::adamw},
                                {"fused_adamw", OptimizerName::fused_adamw},
                                {"sgd", OptimizerName::sgd},
                                {"fused_sgd", OptimizerName::fused_sgd}});
  fields.number("lr", config.optimizer.lr, Range::positive, required);
  fields.number("weight_decay", config.optimizer.weight_decay, Range::non_negative);
  fields.texts("no_decay", config.optimizer.no_decay);
  fields.number("beta1", config.optimizer.beta1, Range::zero_to_below_one);
  fields.number("beta2", config.optimizer.beta2, Range::zero_to_below_one);
  fields.number("eps", config.optimizer.eps, Range::positive);
  fields.number("momentum", config.optimizer.momentum, Range::non_negative);

  fields.section("grad_scaler");
  fields.choice<std::optional<bool>>("enabled", config.grad_scaler.enabled,
                                     {{"auto", std::nullopt}, {"true", true}, {"false", false}});
  fields.number("scale", config.grad_scaler.scale, Range::positive);
  fields.integer("growth_interval", config.grad_scaler.growth_interval, 1);

  fields.section("lr_schedule");
  fields.integer("warmup_steps", config.lr_schedule.warmup_steps, 0);
  fields.choice<LrDecay>("decay", config.lr_schedule.decay,
                         {{"constant", LrDecay::constant}, {"cosine", LrDecay::cosine}, {"linear", LrDecay::linear}});
  fields.number("min_lr_factor", config.lr_schedule.min_lr_factor, Range::zero_to_one);

  fields.section("metrics");
  fields.text("folder", config.metrics.folder, required);
  fields.integer("log_every", config.metrics.log_every, 1);
  fields.boolean("count_memory", config.metrics.count_memory);

  fields.section("checkpoint");
  fields.text_or_none("folder", config.checkpoint.folder);
  fields.integer("every", config.checkpoint.every, 0);
  fields.integer("keep_latest", config.checkpoint.keep_latest, 0);
  fields.integer("keep_every", config.checkpoint.keep_every, 0);
  fields.text("load", config.checkpoint.load);
  fields.boolean("async", config.checkpoint.async);
  fields.text_or_none("weights", config.checkpoint.weights);

  fields.section("profile");
  fields.text_or_none("trace_folder", config.profile.trace_folder);
  fields.integer("trace_first_step", config.profile.trace_first_step, 1);
  fields.integer("trace_steps", config.profile.trace_steps, 1);
  fields.ranks("trace_ranks", config.profile.trace_ranks);
  fields.boolean("record_shapes", config.profile.record_shapes);
  fields.boolean("profile_memory", config.profile.profile_memory);
  fields.boolean("nvtx", config.profile.nvtx);
  fields.text_or_none("memory_snapshot_folder", config.profile.memory_snapshot_folder);
  fields.integer("memory_snapshot_step", config.profile.memory_snapshot_step, 0);

  fields.section("comm");
  fields.choice<CommBackend>(
      "backend", config.comm.backend,
      {{"auto", CommBackend::automatic}, {"gloo", CommBackend::gloo}, {"nccl", CommBackend::nccl}});
  constexpr int64_t kYear = 366 * 24 * 3600;
  fields.integer("timeout_seconds", config.comm.timeout_seconds, 1, Presence::optional, kYear);

  return fields.take();
}

}  // namespace apps

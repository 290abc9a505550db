#include "apps/config.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "apps/checkpoint_lookup.h"
#include "apps/config_fields.h"
#include "apps/yaml_entries.h"
#include "dtensor/error.h"

namespace apps {
namespace {

constexpr std::uintmax_t kLargestFile = 1 << 20;

/// Number of single-letter edits between two words.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

std::string section_of(const std::string& name) { return name.substr(0, name.find('.')); }
std::string key_of(const std::string& name) { return name.substr(name.find('.') + 1); }

/// How many edits still make a word a misspelling of `word`.
size_t tolerance(const std::string& word) { return std::max<size_t>(2, word.size() / 3); }

std::string unknown_section(const std::string& name, const std::set<std::string>& sections) {
  for (const auto& section : sections) {
    if (edit_distance(section, name) <= tolerance(name)) return "unknown section; did you mean " + section + "?";
  }
  return c10::str("unknown section; there are ", c10::Join(", ", sections));
}

/// Why `name` is unknown: what it may have been meant to be, or what its section has.
std::string unknown_key(const std::string& name, const std::vector<ConfigField>& fields) {
  const auto section = section_of(name), key = key_of(name);
  std::string nearest;
  size_t smallest = tolerance(key) + 1;
  std::vector<std::string> keys;
  std::set<std::string> sections;
  for (const auto& field : fields) {
    sections.insert(section_of(field.name));
    const bool same_section = section_of(field.name) == section;
    if (same_section) keys.push_back(key_of(field.name));
    size_t distance = smallest;
    // The right key in the wrong section is as near as a key can be.
    if (key_of(field.name) == key)
      distance = 0;
    else if (same_section)
      distance = edit_distance(key_of(field.name), key);
    if (distance < smallest) {
      smallest = distance;
      nearest = field.name;
    }
  }
  if (!nearest.empty()) return "unknown key; did you mean " + nearest + "?";
  if (keys.empty()) return unknown_section(section, sections);
  return c10::str("unknown key; ", section, " has ", c10::Join(", ", keys));
}

/// Lays `--set section.key=value` over the file's entries. The value is taken as it stands, without YAML's quotes.
void apply_overrides(const std::vector<std::string>& overrides, YamlEntries& yaml) {
  for (const auto& text : overrides) {
    const size_t equals = text.find('=');
    const std::string name = text.substr(0, equals);
    const size_t dot = name.find('.');
    if (equals == std::string::npos || dot == std::string::npos || dot == 0 || dot + 1 == name.size()) {
      yaml.problems.push_back(c10::str("--set: '", text, "', expected section.key=value"));
      continue;
    }
    yaml.entries[name] = {YamlEntry::Kind::plain, text.substr(equals + 1), "--set", "--set"};
  }
}

/// Rules between keys, checked once each key is right by itself.
void check_together(const Config& config, const YamlEntries& yaml, const std::string& name,
                    std::vector<std::string>& problems) {
  const auto place = [&](const char* key) {
    const auto entry = yaml.entries.find(key);
    return c10::str(entry == yaml.entries.end() ? name : entry->second.value_place, ": ", key);
  };
  try {
    config.model.validate();
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    problems.push_back(c10::str(name, ": model: ", text.substr(text.find("] ") + 2)));
  }
  if (config.training.sequence_length > config.model.max_sequence_length) {
    problems.push_back(c10::str(place("training.sequence_length"), " is ", config.training.sequence_length,
                                ", expected at most model.max_sequence_length ", config.model.max_sequence_length));
  }
  if (config.training.sample_bytes > 0 &&
      (config.data.format != TokenFormat::bytes || config.model.vocab_size != 256)) {
    problems.push_back(c10::str(place("training.sample_bytes"), " is ", config.training.sample_bytes,
                                ", expected 0 unless data.format is bytes and model.vocab_size is 256"));
  }
  const auto& profile = config.profile;
  if (!profile.trace_folder.empty() && (profile.trace_first_step > config.training.steps ||
                                        profile.trace_steps > config.training.steps - profile.trace_first_step + 1)) {
    problems.push_back(c10::str(place("profile.trace_first_step"), " ", profile.trace_first_step, " and trace_steps ",
                                profile.trace_steps, ", expected no step after the last, training.steps ",
                                config.training.steps));
  }
  if (profile.memory_snapshot_step > config.training.steps) {
    problems.push_back(c10::str(place("profile.memory_snapshot_step"), " is ", profile.memory_snapshot_step,
                                ", expected at most training.steps ", config.training.steps));
  }
  if (profile.memory_snapshot_step > 0 && profile.memory_snapshot_folder.empty()) {
    problems.push_back(c10::str(place("profile.memory_snapshot_step"), " is ", profile.memory_snapshot_step,
                                ", expected profile.memory_snapshot_folder to be set for it"));
  }
  if (config.checkpoint.folder.empty() && step_in(config.checkpoint.load)) {
    problems.push_back(
        c10::str(place("checkpoint.load"), " is ", config.checkpoint.load,
                 ", expected checkpoint.folder to be set, since it names one there; a path has a slash"));
  }
}

}  // namespace

Config parse_config(const std::string& text, const std::string& name, const std::vector<std::string>& overrides) {
  YamlEntries yaml = read_yaml_entries(text, name);
  apply_overrides(overrides, yaml);

  Config config;
  std::vector<std::string> problems = std::move(yaml.problems);
  const auto fields = config_fields(config);
  std::set<std::string> known_sections;
  for (const auto& field : fields) known_sections.insert(section_of(field.name));
  for (const auto& [section, place] : yaml.sections) {
    if (!known_sections.contains(section)) {
      problems.push_back(c10::str(place, ": ", section, ": ", unknown_section(section, known_sections)));
    }
  }
  for (const auto& [key, entry] : yaml.entries) {
    // The keys of an unknown section are not worth a line each.
    if (!known_sections.contains(section_of(key)) && yaml.sections.contains(section_of(key))) continue;
    const auto field = std::find_if(fields.begin(), fields.end(), [&](const auto& each) { return each.name == key; });
    if (field == fields.end()) {
      problems.push_back(c10::str(entry.key_place, ": ", key, ": ", unknown_key(key, fields)));
    } else if (const auto problem = field->set(entry)) {
      problems.push_back(c10::str(entry.value_place, ": ", key, ": ", *problem));
    }
  }
  // A broken file would only add that everything is missing.
  if (problems.empty()) {
    for (const auto& field : fields) {
      if (field.required && !yaml.entries.contains(field.name)) {
        problems.push_back(c10::str(name, ": ", field.name, ": missing, expected a value"));
      }
    }
  }
  if (problems.empty()) check_together(config, yaml, name, problems);
  if (!problems.empty()) {
    throw dtensor::ValueError("[config] " + std::string(c10::Join("\n[config] ", problems)));
  }
  if (config.model.n_kv_heads == 0) config.model.n_kv_heads = config.model.n_heads;
  return config;
}

Config read_config(const std::string& path, const std::vector<std::string>& overrides) {
  const auto refuse = [&path](const auto&... what) {
    dtensor::raise<dtensor::ValueError>("config", path, what..., ", expected a YAML file");
  };
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::is_directory(status)) refuse(" is a folder");
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) refuse(" is not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(" cannot be opened: ", std::strerror(errno));
  const auto bytes = std::filesystem::file_size(path, error);
  if (!error && bytes > kLargestFile) refuse(" has ", bytes, " bytes");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (file.bad()) refuse(" cannot be read: ", std::strerror(errno));
  return parse_config(text, path, overrides);
}

std::vector<ConfigValue> config_values(const Config& config) {
  Config copy = config;
  std::vector<ConfigValue> values;
  for (const auto& field : config_fields(copy)) values.push_back({field.name, field.get()});
  return values;
}

std::string to_yaml(const Config& config) {
  std::ostringstream out;
  std::string section;
  for (const auto& [name, value] : config_values(config)) {
    if (section_of(name) != section) {
      section = section_of(name);
      out << section << ":\n";
    }
    out << "  " << key_of(name) << ": " << value << "\n";
  }
  return out.str();
}

int64_t shard_ranks(const ParallelismConfig& parallelism, int64_t world_size) {
  const int64_t replicate = parallelism.replicate;
  const bool automatic = parallelism.shard == -1;
  const int64_t shard = automatic ? std::max<int64_t>(1, world_size / replicate) : parallelism.shard;
  if (replicate * shard != world_size) {
    dtensor::raise<dtensor::ValueError>("parallelism", "replicate ", replicate, " x shard ", shard, " = ",
                                        replicate * shard, " ranks, launched with ", world_size,
                                        automatic ? "; launch a multiple of parallelism.replicate"
                                                  : "; launch that many or set parallelism.shard to auto");
  }
  return shard;
}

}  // namespace apps

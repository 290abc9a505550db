#pragma once

#include <map>
#include <string>
#include <vector>

namespace apps {

/// One `section.key: value` of a configuration, with the place it came from: `file:line:column` or `--set`.
struct YamlEntry {
  /// What stands at a value's place. `quoted` is a scalar in quotes or a block: a string, whatever it looks like.
  enum class Kind { plain, quoted, list, map, nothing };

  Kind kind = Kind::nothing;
  /// The scalar's text, or the list as YAML on one line; empty for the other kinds.
  std::string text;
  std::string key_place, value_place;
};

/// Two levels of YAML as a flat table keyed by `section.key`, and what was wrong with the rest.
struct YamlEntries {
  /// Sections of the text and the places of their names.
  std::map<std::string, std::string> sections;
  std::map<std::string, YamlEntry> entries;
  /// `place: what`, one a problem: a repeated key, a section that is not a map, a key that is not a word.
  std::vector<std::string> problems;
};

/// Reads `text`; `name` is the file's name in places. A text that is not YAML, more than one document or a top level
/// that is not a map comes back as a problem. An empty text has no entries.
YamlEntries read_yaml_entries(const std::string& text, const std::string& name);

}  // namespace apps

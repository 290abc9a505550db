#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/yaml_entries.h"

namespace apps {

/// One key of the configuration, bound to a member of one Config.
struct ConfigField {
  /// `section.key`.
  std::string name;
  bool required;
  /// Stores the entry's value, or returns what is wrong with it ("expected int, got 'x'") and stores nothing.
  std::function<std::optional<std::string>(const YamlEntry&)> set;
  /// The value as YAML text that `set` reads back.
  std::function<std::string()> get;
};

/// All keys in the order of the file: the one list that reading, overriding, writing and comparing go by. The fields
/// point into `config`, which must outlive them.
std::vector<ConfigField> config_fields(Config& config);

}  // namespace apps

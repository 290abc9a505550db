#include "hsdp/name_pattern.h"

#include <cstddef>

namespace hsdp {

bool matches_pattern(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() != '*') {
    return !name.empty() && pattern.front() == name.front() && matches_pattern(pattern.substr(1), name.substr(1));
  }
  const bool across_dots = pattern.starts_with("**");
  const auto rest = pattern.substr(across_dots ? 2 : 1);
  for (size_t taken = 0;; ++taken) {
    if (matches_pattern(rest, name.substr(taken))) return true;
    if (taken == name.size() || (!across_dots && name[taken] == '.')) return false;
  }
}

}  // namespace hsdp

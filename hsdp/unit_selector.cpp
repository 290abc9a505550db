#include "hsdp/unit_selector.h"

#include <string_view>

namespace hsdp {
namespace {

bool matches(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern.front() != '*') {
    return !text.empty() && pattern.front() == text.front() && matches(pattern.substr(1), text.substr(1));
  }
  const bool across_dots = pattern.starts_with("**");
  const auto rest = pattern.substr(across_dots ? 2 : 1);
  for (size_t taken = 0;; ++taken) {
    if (matches(rest, text.substr(taken))) return true;
    if (taken == text.size() || (!across_dots && text[taken] == '.')) return false;
  }
}

}  // namespace

UnitSelector UnitSelector::operator|(const UnitSelector& other) const {
  auto joined = *this;
  joined.rules_.insert(joined.rules_.end(), other.rules_.begin(), other.rules_.end());
  return joined;
}

UnitSelector each(const std::string& pattern) {
  return UnitSelector({"each(\"" + pattern + "\")", [pattern](const std::string& path, const torch::nn::Module&) {
                         return matches(pattern, path);
                       }});
}

}  // namespace hsdp

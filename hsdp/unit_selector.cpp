#include "hsdp/unit_selector.h"

#include <utility>

#include "hsdp/name_pattern.h"

namespace hsdp {

UnitSelector UnitSelector::operator|(const UnitSelector& other) const {
  auto joined = *this;
  joined.rules_.insert(joined.rules_.end(), other.rules_.begin(), other.rules_.end());
  return joined;
}

UnitSelector each(const std::string& pattern) {
  return UnitSelector({"each(\"" + pattern + "\")", [pattern](const std::string& path, const torch::nn::Module&) {
                         return matches_pattern(pattern, path);
                       }});
}

UnitSelector together(const UnitSelector& selector) {
  UnitSelector joined;
  const auto unit = std::make_shared<const int>();
  for (auto rule : selector.rules()) {
    rule.together = unit;
    joined = joined | UnitSelector(std::move(rule));
  }
  return joined;
}

}  // namespace hsdp

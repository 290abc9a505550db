#include "hsdp/launch/slurm_node_list.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string_view>
#include <vector>

#include "dtensor/error.h"

namespace hsdp {
namespace {

// Slurm's own limit for one range.
constexpr uint64_t kMaxRange = 64 * 1024;

class NodeList {
 public:
  NodeList(const char* variable, const std::string& list) : variable_(variable), list_(list) {}

  std::string first_node() const {
    std::string first;
    size_t begin = 0;
    while (true) {
      const size_t end = end_of_name(begin);
      const std::string node = first_of_name(std::string_view(list_).substr(begin, end - begin));
      if (begin == 0) first = node;
      if (end == list_.size()) return first;
      begin = end + 1;
    }
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... problem) const {
    dtensor::raise<dtensor::ValueError>("init", "environment variable ", variable_, " is '", list_, "': ", problem...,
                                        ", expected a node list like n[01-03,7]");
  }

  /// The comma outside of brackets, or the end.
  size_t end_of_name(size_t begin) const {
    bool inside = false;
    for (size_t i = begin; i < list_.size(); ++i) {
      const char c = list_[i];
      if (c == '[' && inside) refuse("a bracket inside a bracket");
      if (c == ']' && !inside) refuse("a bracket that was never opened");
      if (c == '[' || c == ']') inside = c == '[';
      if (c == ',' && !inside) return i;
    }
    if (inside) refuse("a bracket that is never closed");
    return list_.size();
  }

  std::string first_of_name(std::string_view name) const {
    if (name.empty()) refuse("an empty name");
    std::string first;
    while (!name.empty()) {
      if (name.front() == '[') {
        const size_t end = name.find(']');
        first += first_number(name.substr(1, end - 1));
        name.remove_prefix(end + 1);
      } else {
        const auto bad = [](char c) { return c <= ' ' || c == 0x7f; };
        if (bad(name.front())) refuse("a blank in a name");
        first += name.front();
        name.remove_prefix(1);
      }
    }
    return first;
  }

  std::string_view first_number(std::string_view items) const {
    const std::string_view first = items.substr(0, items.find_first_of(",-"));
    while (true) {
      const size_t end = std::min(items.find(','), items.size());
      check_item(items.substr(0, end));
      if (end == items.size()) return first;
      items.remove_prefix(end + 1);
    }
  }

  void check_item(std::string_view item) const {
    const size_t dash = item.find('-');
    const uint64_t low = number(item.substr(0, dash));
    if (dash == std::string_view::npos) return;
    const uint64_t high = number(item.substr(dash + 1));
    if (high < low) refuse("range ", item, " runs backwards");
    if (high - low >= kMaxRange) refuse("range ", item, " has more than ", kMaxRange, " numbers");
  }

  uint64_t number(std::string_view text) const {
    uint64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stopped != end) refuse("'", text, "' in brackets is no number");
    return value;
  }

  const char* variable_;
  const std::string& list_;
};

}  // namespace

std::string first_slurm_node(const char* variable, const std::string& list) {
  return NodeList(variable, list).first_node();
}

}  // namespace hsdp

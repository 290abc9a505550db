#include "dtensor/call_site.h"

#include <c10/util/StringUtil.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <torch/csrc/profiler/unwind/unwind.h>

#include <algorithm>
#include <array>
#include <exception>
#include <sstream>
#include <string_view>
#include <vector>

namespace dtensor {
namespace {

constexpr size_t kShown = 4;

std::string_view base_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

bool starts_with_any(std::string_view text, std::initializer_list<std::string_view> starts) {
  return std::any_of(starts.begin(), starts.end(), [&](auto start) { return text.starts_with(start); });
}

bool is_library(std::string_view object) {
  return starts_with_any(base_name(object), {"libhsdp", "libtorch", "libc10", "libstdc++", "libc.", "libgcc_s",
                                             "libpthread", "libgomp", "libm.", "ld-linux"});
}

// Templates and inline functions of the headers are compiled into the program, and say nothing about it. A lambda that
// was inlined into its std::function is named by that function's arguments.
bool is_header(std::string_view function) {
  auto qualified = function.substr(0, function.find_first_of("<(", 1));
  qualified = qualified.substr(qualified.rfind(' ') + 1);
  if (qualified.starts_with("std::_Function_handler")) return false;
  return starts_with_any(qualified, {"std::", "at::", "c10::", "torch::", "hsdp::", "dtensor::", "_start"});
}

// Without the parameters, and not too long.
std::string short_name(std::string_view function) {
  function = function.substr(0, function.find(" [clone"));
  if (function.ends_with(" const")) function.remove_suffix(6);
  if (function.ends_with(")")) {
    int depth = 0;
    for (size_t at = function.size(); at-- > 0;) {
      depth += function[at] == ')' ? 1 : function[at] == '(' ? -1 : 0;
      if (depth > 0) continue;
      if (at > 0) function = function.substr(0, at);
      break;
    }
  }
  constexpr size_t kLongest = 200;
  return c10::str(function.substr(0, kLongest), function.size() > kLongest ? "..." : "");
}

// A line of a library's header, inlined into the function, would mislead: the offset leads to all of them.
std::string place_of(const torch::unwind::Frame& frame, std::string_view object, void* address) {
  const std::string_view file = frame.filename;
  if (base_name(file) != base_name(object) && file.find("/include/") == file.npos &&
      !file.ends_with("hsdp/fully_shard.h")) {
    return c10::str(base_name(file), ":", frame.lineno);
  }
  const auto library = torch::unwind::libraryFor(address);
  std::ostringstream text;
  text << base_name(object) << "+0x" << std::hex << (library ? library->second : 0);
  return text.str();
}

std::string describe_stack() {
  std::array<void*, 256> addresses{};
  const int count = ::backtrace(addresses.data(), static_cast<int>(addresses.size()));
  std::vector<void*> frames;
  std::vector<std::string> objects;
  void* former = nullptr;
  bool entered = false;  // the library function that the program called is the last one before its first frame
  for (int i = 1; i < count; ++i) {
    void* address = static_cast<char*>(addresses[static_cast<size_t>(i)]) - 1;  // in the call, not after it
    Dl_info info{};
    if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) continue;
    if (is_library(info.dli_fname)) {
      former = address;
      continue;
    }
    if (!entered && former != nullptr) {
      frames.push_back(former);
      objects.emplace_back();
      entered = true;
    }
    frames.push_back(address);
    objects.emplace_back(info.dli_fname);
  }
  if (!entered) return {};
  const auto symbols = torch::unwind::symbolize(frames, torch::unwind::Mode::fast);
  std::string text;
  size_t shown = 0;
  for (size_t i = 1; i < symbols.size() && shown < kShown; ++i) {
    if (is_header(symbols[i].funcname)) continue;
    text += (shown++ == 0 ? " by " : ", ") + short_name(symbols[i].funcname) + " (" +
            place_of(symbols[i], objects[i], frames[i]) + ")";
  }
  return shown == 0 ? std::string() : "; called in " + short_name(symbols[0].funcname) + text;
}

}  // namespace

std::string call_site() {
  try {
    return describe_stack();
  } catch (const std::exception&) {
    return {};  // An addition to a message must not replace it.
  }
}

}  // namespace dtensor

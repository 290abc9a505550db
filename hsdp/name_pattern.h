#pragma once

#include <string_view>

namespace hsdp {

/// Whether a qualified name such as "blocks.0.attention.weight" fits a pattern: `*` stands for any characters but a
/// dot, `**` for any characters, everything else for itself. "blocks.*" fits "blocks.0" and not "blocks.0.attention".
bool matches_pattern(std::string_view pattern, std::string_view name);

}  // namespace hsdp

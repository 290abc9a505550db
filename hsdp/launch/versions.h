#pragma once

#include <string>

namespace hsdp {

/// What this process computes and communicates with, a name and a version a line: of this library, of torch, of the
/// backends that are part of the build and of what they run on. No device is touched.
std::string versions();

}  // namespace hsdp

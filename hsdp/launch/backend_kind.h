#pragma once

#include <c10/core/DeviceType.h>

#include <string>
#include <vector>

#include "hsdp/backend.h"

namespace hsdp {

/// What init() knows of a backend: all that differs from one platform to another.
struct BackendKind {
  std::string name;
  c10::DeviceType device_type;
  BackendFactory make;
  /// Why this build cannot make it and what to do instead, as a message goes on after its name; empty where it can.
  std::string missing = {};
};

/// The kinds that are part of the library, in the order in which "auto" looks for a device; the last trains on the
/// host.
std::vector<BackendKind> built_in_backends();

/// All kinds, registered ones first. They live as long as the process.
std::vector<const BackendKind*> backend_kinds();

}  // namespace hsdp

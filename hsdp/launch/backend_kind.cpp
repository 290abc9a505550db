#include "hsdp/launch/backend_kind.h"

#include <deque>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "dtensor/error.h"

namespace hsdp {
namespace {

struct Table {
  std::mutex mutex;
  std::deque<BackendKind> registered;
  const std::vector<BackendKind> built_in = built_in_backends();
};

Table& table() {
  static auto* instance = new Table;  // never destroyed: environments may outlive it
  return *instance;
}

std::vector<const BackendKind*> kinds_of(const Table& known) {
  std::vector<const BackendKind*> kinds;
  for (const auto& kind : known.registered) kinds.push_back(&kind);
  for (const auto& kind : known.built_in) kinds.push_back(&kind);
  return kinds;
}

}  // namespace

std::vector<const BackendKind*> backend_kinds() {
  Table& known = table();
  std::lock_guard lock(known.mutex);
  return kinds_of(known);
}

void register_backend(std::string name, c10::DeviceType device_type, BackendFactory make) {
  constexpr const char* where = "register_backend";
  if (!make) {
    dtensor::raise<dtensor::ValueError>(where, "backend '", name, "' has no factory, expected one");
  }
  if (name.empty() || name == "auto" || name == "none") {
    dtensor::raise<dtensor::ValueError>(where, "the name '", name, "', expected one of its own");
  }
  Table& known = table();
  std::lock_guard lock(known.mutex);
  for (const auto* kind : kinds_of(known)) {
    if (kind->name == name) {
      dtensor::raise<dtensor::ValueError>(where, "backend '", name, "' is known already, expected another name");
    }
  }
  known.registered.push_back({std::move(name), device_type, std::move(make)});
}

}  // namespace hsdp

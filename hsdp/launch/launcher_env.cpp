#include "hsdp/launch/launcher_env.h"

#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <limits>

#include "dtensor/error.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;

constexpr const char* kWhere = "init";
// Ranks and sizes travel as int through c10d.
constexpr int64_t kMaxRanks = std::numeric_limits<int>::max();

std::optional<std::string> get(const EnvLookup& lookup, const char* name) {
  auto value = lookup(name);
  if (value && value->empty()) value.reset();
  return value;
}

int64_t parse(const char* name, const std::string& text, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end) {
    raise<ValueError>(kWhere, "environment variable ", name, " is '", text, "', expected a whole number");
  }
  if (value < low || value > high) {
    raise<ValueError>(kWhere, "environment variable ", name, " is ", value, ", expected ", low, " to ", high);
  }
  return value;
}

/// Throws when some of the variables that belong together are missing.
void require(const EnvLookup& lookup, const char* family, std::initializer_list<const char*> names, const char* hint) {
  std::string present, missing;
  for (const char* name : names) {
    std::string& list = get(lookup, name) ? present : missing;
    list += (list.empty() ? "" : ", ") + std::string(name);
  }
  if (missing.empty()) return;
  raise<ValueError>(kWhere, "environment has ", present, " but not ", missing, ", expected all variables of ", family,
                    "; ", hint);
}

std::optional<LauncherEnv> read_torchrun(const EnvLookup& lookup) {
  if (!get(lookup, "RANK") && !get(lookup, "WORLD_SIZE") && !get(lookup, "LOCAL_RANK")) return std::nullopt;
  require(lookup, "torchrun", {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"},
          "start the program with torchrun --no-python, or unset them to run alone");
  LauncherEnv env;
  env.source = "torchrun";
  env.world_size = parse("WORLD_SIZE", *get(lookup, "WORLD_SIZE"), 1, kMaxRanks);
  env.rank = parse("RANK", *get(lookup, "RANK"), 0, env.world_size - 1);
  env.local_rank = parse("LOCAL_RANK", *get(lookup, "LOCAL_RANK"), 0, env.world_size - 1);
  env.master_addr = *get(lookup, "MASTER_ADDR");
  env.master_port = parse("MASTER_PORT", *get(lookup, "MASTER_PORT"), 1, 65535);
  env.launcher_serves_store = get(lookup, "TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (const auto restarts = get(lookup, "TORCHELASTIC_RESTART_COUNT")) {
    env.restart_count = parse("TORCHELASTIC_RESTART_COUNT", *restarts, 0, kMaxRanks);
  }
  return env;
}

}  // namespace

LauncherEnv read_launcher_env(const EnvLookup& lookup) {
  // A family of variable names each; the first that is present decides.
  using Reader = std::optional<LauncherEnv> (*)(const EnvLookup&);
  for (const Reader read : std::initializer_list<Reader>{read_torchrun}) {
    if (auto env = read(lookup)) return *env;
  }
  return {};
}

std::optional<std::string> process_env(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

}  // namespace hsdp

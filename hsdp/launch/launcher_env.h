#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace hsdp {

/// Looks up an environment variable; no value when it is not set.
using EnvLookup = std::function<std::optional<std::string>(const char* name)>;

/// What the launcher told this process about the job.
struct LauncherEnv {
  /// "torchrun", or "alone" when no launcher was found.
  std::string source = "alone";
  int64_t rank = 0;
  int64_t world_size = 1;
  /// Position on this host: the index of the device to use.
  int64_t local_rank = 0;
  /// Where the store for the rendezvous listens. Empty and 0 when alone.
  std::string master_addr;
  int64_t master_port = 0;
  /// True when the launcher itself serves the store, so that every rank, 0 included, is its client.
  bool launcher_serves_store = false;
  /// How often the launcher has restarted the job: ranks of different attempts must not meet.
  int64_t restart_count = 0;
};

/// Finds out which launcher started this process. Read are, for torchrun and everything that follows its names: RANK,
/// WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (all five), and where set TORCHELASTIC_USE_AGENT_STORE and
/// TORCHELASTIC_RESTART_COUNT. Without RANK, WORLD_SIZE and LOCAL_RANK the process is alone.
///
/// Throws ValueError naming the missing variables of an incomplete set, or name and value of one that is no number or
/// out of range. A variable set to nothing counts as missing. Pure: asks `lookup` only.
LauncherEnv read_launcher_env(const EnvLookup& lookup);

/// The process's own environment.
std::optional<std::string> process_env(const char* name);

}  // namespace hsdp

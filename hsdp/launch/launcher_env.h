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
  /// "torchrun", "Slurm", "Open MPI" or "PMI (mpiexec)"; "alone" when no launcher was found.
  std::string source = "alone";
  int64_t rank = 0;
  int64_t world_size = 1;
  /// Position on this host: the index of the device to use.
  int64_t local_rank = 0;
  /// Slurm and MPI may show each process a device of its own only: one visible device is then meant, whatever the local
  /// rank.
  bool may_bind_devices = false;
  /// Where the store for the rendezvous listens. Empty and 0 when alone.
  std::string master_addr;
  int64_t master_port = 0;
  /// True when the launcher itself serves the store, so that every rank, 0 included, is its client.
  bool launcher_serves_store = false;
  /// How often the launcher has restarted the job: ranks of different attempts must not meet.
  int64_t restart_count = 0;
  /// The launcher's name for the job where it has one: ranks of different jobs must not meet, should their ports agree.
  std::string job;
};

/// Finds out which launcher started this process, by the variables that it sets; docs/environment.md lists them. The
/// first of these that is present decides, and must then be complete:
///
/// - torchrun and everything that follows its names: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
/// - Slurm's srun: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID. Rank 0 serves the store on the first node of the step, at
///   port 15000 + the last four digits of the job's number. A batch script and an interactive shell are no tasks.
/// - Open MPI: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; then PMI (MPICH, Intel MPI): PMI_RANK, PMI_SIZE,
///   MPI_LOCALRANKID. Rank 0 serves the store at 127.0.0.1 when all ranks are on one host, else MASTER_ADDR says where;
///   the port is 29500. Inside a Slurm job these decide, since what mpirun starts inherits Slurm's variables.
///
/// MASTER_ADDR and MASTER_PORT win over what is derived. Throws ValueError naming the missing variables of an
/// incomplete set, or name and value of one that makes no sense. A variable set to nothing counts as missing. Pure:
/// asks `lookup` only.
LauncherEnv read_launcher_env(const EnvLookup& lookup);

/// The process's own environment.
std::optional<std::string> process_env(const char* name);

}  // namespace hsdp

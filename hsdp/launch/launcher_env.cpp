#include "hsdp/launch/launcher_env.h"

#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/launch/slurm_node_list.h"

namespace hsdp {
namespace {

using dtensor::raise;
using dtensor::ValueError;

constexpr const char* kWhere = "init";
// Ranks and sizes travel as int through c10d.
constexpr int64_t kMaxRanks = std::numeric_limits<int>::max();
constexpr int64_t kMaxPort = 65535;
// Where c10d's stores listen unless told otherwise.
constexpr int64_t kDefaultPort = 29500;

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

bool any(const EnvLookup& lookup, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (get(lookup, name)) return true;
  }
  return false;
}

int64_t parse(const EnvLookup& lookup, const char* name, int64_t low, int64_t high) {
  return parse(name, *get(lookup, name), low, high);
}

/// Throws when some of the variables that belong together are missing.
void require(const EnvLookup& lookup, const std::string& family, const std::vector<const char*>& names,
             const char* hint) {
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
  if (!any(lookup, {"RANK", "WORLD_SIZE", "LOCAL_RANK"})) return std::nullopt;
  LauncherEnv env;
  env.source = "torchrun";
  require(lookup, env.source, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"},
          "start the program with torchrun --no-python, or unset RANK, WORLD_SIZE and LOCAL_RANK");
  env.world_size = parse(lookup, "WORLD_SIZE", 1, kMaxRanks);
  env.rank = parse(lookup, "RANK", 0, env.world_size - 1);
  env.local_rank = parse(lookup, "LOCAL_RANK", 0, env.world_size - 1);
  env.master_addr = *get(lookup, "MASTER_ADDR");
  env.master_port = parse(lookup, "MASTER_PORT", 1, kMaxPort);
  env.launcher_serves_store = get(lookup, "TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (get(lookup, "TORCHELASTIC_RESTART_COUNT")) {
    env.restart_count = parse(lookup, "TORCHELASTIC_RESTART_COUNT", 0, kMaxRanks);
  }
  return env;
}

/// Slurm describes the allocation to batch scripts and interactive shells as well, as if they were its task 0. Only
/// tasks have a step; the shell's own process, or its usual names, tell it from a set that was made by hand.
bool is_slurm_shell(const EnvLookup& lookup) {
  if (get(lookup, "SLURM_STEP_ID")) return false;
  const auto job_name = get(lookup, "SLURM_JOB_NAME");
  return get(lookup, "SLURM_TASK_PID") || job_name == "bash" || job_name == "interactive";
}

std::optional<LauncherEnv> read_slurm(const EnvLookup& lookup) {
  if (!any(lookup, {"SLURM_PROCID", "SLURM_LOCALID"}) || is_slurm_shell(lookup)) return std::nullopt;
  // What mpirun or mpiexec starts inside a job inherits Slurm's variables of one process for all.
  if (any(lookup, {"OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"})) return std::nullopt;
  LauncherEnv env;
  env.source = "Slurm";
  env.may_bind_devices = true;
  std::vector<const char*> names = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"};
  // The step may use a part of the job's nodes.
  const char* const node_list = get(lookup, "SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  const bool derive_addr = !get(lookup, "MASTER_ADDR"), derive_port = !get(lookup, "MASTER_PORT");
  if (get(lookup, "SLURM_NTASKS") != "1") {
    if (derive_addr) names.push_back(node_list);
    if (derive_port) names.push_back("SLURM_JOB_ID");
  }
  require(lookup, env.source, names, "start the program with srun, or unset SLURM_PROCID and SLURM_LOCALID");
  env.world_size = parse(lookup, "SLURM_NTASKS", 1, kMaxRanks);
  env.rank = parse(lookup, "SLURM_PROCID", 0, env.world_size - 1);
  env.local_rank = parse(lookup, "SLURM_LOCALID", 0, env.world_size - 1);
  if (env.world_size == 1) return env;
  env.master_addr = derive_addr ? first_slurm_node(node_list, *get(lookup, node_list)) : *get(lookup, "MASTER_ADDR");
  if (derive_port) {
    env.master_port = 15000 + parse(lookup, "SLURM_JOB_ID", 0, std::numeric_limits<int64_t>::max()) % 10000;
  } else {
    env.master_port = parse(lookup, "MASTER_PORT", 1, kMaxPort);
  }
  env.job = get(lookup, "SLURM_JOB_ID").value_or("") + "." + get(lookup, "SLURM_STEP_ID").value_or("");
  return env;
}

/// What the launcher of an MPI library calls the same things.
struct MpiNames {
  const char *family, *rank, *size, *local_rank, *local_size, *hint;
};

std::optional<LauncherEnv> read_mpi(const EnvLookup& lookup, const MpiNames& mpi) {
  if (!any(lookup, {mpi.rank, mpi.size, mpi.local_rank})) return std::nullopt;
  LauncherEnv env;
  env.source = mpi.family;
  env.may_bind_devices = true;
  std::vector<const char*> names = {mpi.rank, mpi.size, mpi.local_rank};
  const auto size = get(lookup, mpi.size);
  const bool one_host = size == "1" || (size && get(lookup, mpi.local_size) == size);
  if (!one_host && size) names.push_back("MASTER_ADDR");
  require(lookup, env.source, names, mpi.hint);
  env.world_size = parse(lookup, mpi.size, 1, kMaxRanks);
  env.rank = parse(lookup, mpi.rank, 0, env.world_size - 1);
  env.local_rank = parse(lookup, mpi.local_rank, 0, env.world_size - 1);
  if (env.world_size == 1) return env;
  env.master_addr = get(lookup, "MASTER_ADDR").value_or("127.0.0.1");
  env.master_port = get(lookup, "MASTER_PORT") ? parse(lookup, "MASTER_PORT", 1, kMaxPort) : kDefaultPort;
  return env;
}

std::optional<LauncherEnv> read_open_mpi(const EnvLookup& lookup) {
  auto env = read_mpi(lookup, {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE",
                               "start the program with mpirun; with several hosts name that of rank 0, as by mpirun -x "
                               "MASTER_ADDR=HOST"});
  if (env) env->job = get(lookup, "PMIX_NAMESPACE").value_or("");
  return env;
}

std::optional<LauncherEnv> read_pmi(const EnvLookup& lookup) {
  return read_mpi(lookup, {"PMI (mpiexec)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
                           "start the program with mpiexec; with several hosts name that of rank 0, as by mpiexec "
                           "-genv MASTER_ADDR HOST"});
}

}  // namespace

LauncherEnv read_launcher_env(const EnvLookup& lookup) {
  // A family of variable names each; the first that is present decides.
  using Reader = std::optional<LauncherEnv> (*)(const EnvLookup&);
  for (const Reader read : std::initializer_list<Reader>{read_torchrun, read_slurm, read_open_mpi, read_pmi}) {
    if (auto env = read(lookup)) return *env;
  }
  return {};
}

std::optional<std::string> process_env(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

}  // namespace hsdp

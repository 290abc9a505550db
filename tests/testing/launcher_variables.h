#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace testing_support {

/// What launchers set and init() reads: a test that stands for one of them must not inherit another's.
inline constexpr const char* kLauncherVariables[] = {"RANK",
                                                     "WORLD_SIZE",
                                                     "LOCAL_RANK",
                                                     "MASTER_ADDR",
                                                     "MASTER_PORT",
                                                     "TORCHELASTIC_USE_AGENT_STORE",
                                                     "TORCHELASTIC_RESTART_COUNT",
                                                     "TORCHELASTIC_ERROR_FILE",
                                                     "SLURM_PROCID",
                                                     "SLURM_NTASKS",
                                                     "SLURM_LOCALID",
                                                     "SLURM_JOB_ID",
                                                     "SLURM_JOB_NAME",
                                                     "SLURM_JOB_NODELIST",
                                                     "SLURM_STEP_ID",
                                                     "SLURM_STEP_NODELIST",
                                                     "SLURM_TASK_PID",
                                                     "OMPI_COMM_WORLD_RANK",
                                                     "OMPI_COMM_WORLD_SIZE",
                                                     "OMPI_COMM_WORLD_LOCAL_RANK",
                                                     "OMPI_COMM_WORLD_LOCAL_SIZE",
                                                     "PMIX_NAMESPACE",
                                                     "PMI_RANK",
                                                     "PMI_SIZE",
                                                     "MPI_LOCALRANKID",
                                                     "MPI_LOCALNRANKS"};

/// For ProcessOptions::environment: no launcher at all.
inline std::map<std::string, std::optional<std::string>> without_launcher() {
  std::map<std::string, std::optional<std::string>> variables;
  for (const char* name : kLauncherVariables) variables[name] = std::nullopt;
  return variables;
}

/// The same for this process.
inline void forget_launcher() {
  for (const char* name : kLauncherVariables) unsetenv(name);
}

}  // namespace testing_support

// Trains a transformer language model, fully sharded, as a YAML file says. Alone or on several ranks:
//   torchrun --no-python --standalone --nproc-per-node 2 build/release/apps/hsdp_train --config configs/quickstart.yaml

#include <CLI/CLI.hpp>
#include <chrono>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/agreement.h"
#include "apps/config.h"
#include "apps/data_loader.h"
#include "apps/failure.h"
#include "apps/metrics.h"
#include "apps/stop_signal.h"
#include "apps/trainer.h"
#include "dtensor/error.h"
#include "hsdp/init.h"
#include "hsdp/launch/device.h"
#include "hsdp/launch/launcher_env.h"
#include "hsdp/launch/versions.h"

namespace {

struct Arguments {
  std::string config;
  std::vector<std::string> overrides;
};

/// The rank before the ranks have met; 0 when the launcher's variables make no sense, which init() then says.
int64_t launched_rank() {
  try {
    return hsdp::read_launcher_env(hsdp::process_env).rank;
  } catch (const dtensor::Error&) {
    return 0;
  }
}

hsdp::InitOptions init_options(const apps::CommConfig& comm) {
  hsdp::InitOptions options;
  switch (comm.backend) {
    case apps::CommBackend::automatic:
      options.backend = "auto";
      break;
    case apps::CommBackend::gloo:
      options.backend = "gloo";
      break;
    case apps::CommBackend::nccl:
      options.backend = "nccl";
      break;
  }
  options.timeout = std::chrono::seconds(comm.timeout_seconds);
  return options;
}

apps::Config read_config(const Arguments& arguments) {
  apps::Config config = apps::read_config(arguments.config, arguments.overrides);
  // Found here rather than by init(), the ranks can still meet over another backend and tell it once.
  if (config.comm.backend == apps::CommBackend::nccl && hsdp::device_count(c10::kCUDA) == 0) {
    dtensor::raise<dtensor::ValueError>("comm",
                                        "backend is nccl and no CUDA device is visible, expected one for each "
                                        "rank; set comm.backend to gloo or auto");
  }
  return config;
}

/// Every rank does the same; a mistake that only some of them see ends all of them.
void run(const hsdp::Environment& environment, const std::optional<apps::Config>& config,
         const std::exception_ptr& config_failure, const apps::StopSignal* stop) {
  apps::agree(environment, [&] {
    if (config_failure) std::rethrow_exception(config_failure);
    apps::shard_ranks(config->parallelism, environment.world_size());
  });
  std::vector<apps::ConfigValue> values = apps::config_values(*config);
  // Folders may be named differently on each host.
  std::erase_if(values, [](const auto& value) {
    return value.name == "data.path" || value.name == "metrics.folder" || value.name == "profile.trace_folder" ||
           value.name == "profile.memory_snapshot_folder";
  });
  apps::check_same(environment, values);

  std::optional<apps::DataLoader> data;
  apps::agree(environment, [&] {
    data.emplace(apps::TokenFile(config->data.path, config->data.format),
                 apps::DataLoaderOptions{.global_batch_size = config->training.global_batch_size,
                                         .sequence_length = config->training.sequence_length,
                                         .vocab_size = config->model.vocab_size,
                                         .seed = config->training.seed,
                                         .rank = environment.rank(),
                                         .ranks = environment.world_size(),
                                         .micro_batches = config->training.gradient_accumulation});
  });
  apps::check_same(environment, {{"the number of tokens in data.path", std::to_string(data->file().size())}});

  // Last, since it replaces the metrics of a former run.
  const auto open_folder = [&](int64_t resumed_step) {
    std::unique_ptr<apps::RunFolder> folder;
    apps::agree(environment, [&] {
      if (environment.rank() == 0) folder = std::make_unique<apps::RunFolder>(*config, resumed_step);
    });
    return folder;
  };
  apps::train(*config, environment, *data, open_folder, stop);
}

apps::ExitCode train_and_report(const Arguments& arguments) {
  std::optional<apps::Config> config;
  std::exception_ptr config_failure;
  try {
    config = read_config(arguments);
  } catch (...) {
    config_failure = std::current_exception();
  }

  if (config && config->metrics.count_memory) hsdp::count_host_memory();
  // From here on a signal ends the run with a checkpoint.
  std::optional<apps::StopSignal> stop;
  if (config && !config->checkpoint.folder.empty()) stop.emplace();

  std::optional<hsdp::Environment> environment;
  try {
    // With a broken configuration the ranks meet all the same, to find out who tells it.
    environment = hsdp::init(init_options(config ? config->comm : apps::CommConfig{}));
  } catch (...) {
    return apps::report(config_failure ? config_failure : std::current_exception(), launched_rank(),
                        apps::Teller::each);
  }

  try {
    run(*environment, config, config_failure, stop ? &*stop : nullptr);
    hsdp::shutdown();
  } catch (...) {
    return apps::report(std::current_exception(), environment->rank(), apps::Teller::first);
  }
  return apps::ExitCode::success;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Trains a transformer language model, fully sharded, as a YAML file says.", "hsdp_train");
  app.add_option("--config", arguments.config, "YAML file with the settings of the run")->required();
  app.add_option("--set", arguments.overrides, "section.key=value, laid over the file; may be repeated")
      ->allow_extra_args(false);
  app.set_version_flag("--version", hsdp::versions);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {
    return launched_rank() == 0 ? app.exit(request) : 0;
  } catch (const CLI::ParseError& error) {
    // The launcher gives every rank the same arguments, so rank 0 speaks for all.
    if (launched_rank() == 0) {
      std::cerr << "[command line] " << error.what() << "; hsdp_train --help lists the options" << std::endl;
    }
    return int(apps::ExitCode::user_mistake);
  }
  return int(train_and_report(arguments));
}

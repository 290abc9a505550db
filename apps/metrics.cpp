#include "apps/metrics.h"

#include <c10/util/StringUtil.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "dtensor/error.h"

namespace apps {
namespace {

/// Opens a file of the run folder for writing, from its start.
std::ofstream start_file(const std::filesystem::path& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (!file) {
    dtensor::raise<dtensor::ValueError>("metrics", path.string(), " cannot be written: ", std::strerror(errno),
                                        ", expected a folder to write to; set metrics.folder");
  }
  return file;
}

}  // namespace

std::string to_json(const StepMetrics& metrics) {
  nlohmann::ordered_json line;
  line["step"] = metrics.step;
  line["loss"] = metrics.loss;
  line["grad_norm"] = metrics.grad_norm;
  line["lr"] = metrics.lr;
  line["tokens_per_second"] = metrics.tokens_per_second;
  line["peak_memory_bytes"] = metrics.peak_memory_bytes;
  line["tokens"] = metrics.tokens;
  line["seconds"] = metrics.seconds;
  return line.dump();
}

std::string to_console(const StepMetrics& metrics, int64_t steps) {
  char line[256];
  std::snprintf(line, sizeof(line),
                "step %6lld/%lld | loss %8.4f | grad_norm %9.4f | lr %.3e | %8.0f tok/s | %6lld MiB | %7.1f s",
                static_cast<long long>(metrics.step), static_cast<long long>(steps), metrics.loss, metrics.grad_norm,
                metrics.lr, metrics.tokens_per_second, static_cast<long long>(metrics.peak_memory_bytes >> 20),
                metrics.seconds);
  return line;
}

RunFolder::RunFolder(const Config& config) {
  const std::filesystem::path folder = config.metrics.folder;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!std::filesystem::is_directory(folder)) {
    dtensor::raise<dtensor::ValueError>("metrics", folder.string(),
                                        " cannot be made a folder: ", error ? error.message() : "it is a file",
                                        ", expected a folder to write to; set metrics.folder");
  }
  path_ = (folder / "metrics.jsonl").string();
  replaced_ = std::filesystem::exists(path_, error);
  file_ = start_file(path_);
  start_file(folder / "config.yaml") << "# All settings of this run: defaults, file and --set together.\n"
                                     << to_yaml(config);
}

void RunFolder::append(const StepMetrics& metrics) {
  file_ << to_json(metrics) << '\n' << std::flush;
  if (!file_) {
    throw std::runtime_error(c10::str("[metrics] ", path_, " cannot be written: ", std::strerror(errno)));
  }
}

}  // namespace apps

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

/// Opens a file of the run folder for writing: from its start, or at its end.
std::ofstream open_file(const std::filesystem::path& path, std::ios::openmode mode) {
  std::ofstream file(path, std::ios::binary | mode);
  if (!file) {
    dtensor::raise<dtensor::ValueError>("metrics", path.string(), " cannot be written: ", std::strerror(errno),
                                        ", expected a folder to write to; set metrics.folder");
  }
  return file;
}

/// What a run that goes on from a step leaves of a file of metrics: whole lines of rising steps up to that one.
struct KeptLines {
  int64_t lines = 0;
  uintmax_t bytes = 0;
  double seconds = 0.0;
};

KeptLines lines_to_keep(const std::filesystem::path& path, int64_t resumed_step) {
  KeptLines kept;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return kept;
  int64_t last_step = 0;
  std::ifstream file(path, std::ios::binary);
  for (std::string line; std::getline(file, line) && !file.eof();) {
    const auto values = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!values.is_object()) break;
    const auto step = values.find("step"), seconds = values.find("seconds");
    if (step == values.end() || !step->is_number_integer() || seconds == values.end() || !seconds->is_number()) break;
    if (step->get<int64_t>() <= last_step || step->get<int64_t>() > resumed_step) break;
    last_step = step->get<int64_t>();
    ++kept.lines;
    kept.bytes += line.size() + 1;
    kept.seconds = seconds->get<double>();
  }
  return kept;
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
  line["ranks"] = metrics.ranks;
  const auto& counts = metrics.collectives;
  line["collectives"] = {
      {"all_gathers", counts.all_gathers},           {"reduce_scatters", counts.reduce_scatters},
      {"all_reduces", counts.all_reduces},           {"broadcasts", counts.broadcasts},
      {"all_gather_bytes", counts.all_gather_bytes}, {"reduce_scatter_bytes", counts.reduce_scatter_bytes},
      {"all_reduce_bytes", counts.all_reduce_bytes}};
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

RunFolder::RunFolder(const Config& config, int64_t resumed_step) {
  const std::filesystem::path folder = config.metrics.folder;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!std::filesystem::is_directory(folder)) {
    dtensor::raise<dtensor::ValueError>("metrics", folder.string(),
                                        " cannot be made a folder: ", error ? error.message() : "it is a file",
                                        ", expected a folder to write to; set metrics.folder");
  }
  path_ = (folder / "metrics.jsonl").string();
  const auto kept = lines_to_keep(path_, resumed_step);
  kept_lines_ = kept.lines;
  kept_seconds_ = kept.seconds;
  replaced_ = kept.lines == 0 && std::filesystem::exists(path_, error);
  file_ = open_file(path_, kept.lines > 0 ? std::ios::app : std::ios::trunc);
  if (kept.lines > 0) {
    std::filesystem::resize_file(path_, kept.bytes, error);
    if (error) {
      dtensor::raise<dtensor::ValueError>("metrics", path_, " cannot be cut to its first ", kept.bytes,
                                          " bytes: ", error.message(), ", expected a file that can be written");
    }
  }
  open_file(folder / "config.yaml", std::ios::trunc)
      << "# All settings of this run: defaults, file and --set together.\n"
      << to_yaml(config);
}

void RunFolder::append(const StepMetrics& metrics) {
  file_ << to_json(metrics) << '\n' << std::flush;
  if (!file_) {
    throw std::runtime_error(c10::str("[metrics] ", path_, " cannot be written: ", std::strerror(errno)));
  }
}

}  // namespace apps

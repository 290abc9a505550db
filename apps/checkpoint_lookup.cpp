#include "apps/checkpoint_lookup.h"

#include <charconv>
#include <filesystem>
#include <string_view>

#include "hsdp/checkpoint/checkpoint_folder.h"
#include "hsdp/checkpoint/files.h"
#include "hsdp/checkpoint/manifest.h"

namespace apps {

namespace fs = std::filesystem;

std::optional<int64_t> step_in(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  // Written again, it must be the same: no sign, no zeros in front.
  if (error != std::errc() || stop != end || step < 0) return std::nullopt;
  return name == std::string(kPrefix) + std::to_string(step) ? std::optional(step) : std::nullopt;
}

std::string checkpoint_at(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored) || fs::exists(fs::path(path) / hsdp::kManifestFile, ignored)) return path;
  const auto found = hsdp::find_checkpoints(path);
  return found.empty() ? path : found.back().path;
}

hsdp::TrainingScalars read_scalars(const char* where, const std::string& checkpoint) {
  hsdp::read_manifest(where, checkpoint);
  constexpr size_t kMostBytes = 1'000'000'000;
  const auto path = (fs::path(checkpoint) / hsdp::kTrainingStateFile).string();
  return hsdp::parse_training_scalars(where, hsdp::read_text(where, path, kMostBytes), path);
}

}  // namespace apps

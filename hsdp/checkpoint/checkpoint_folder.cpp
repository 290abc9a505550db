#include "hsdp/checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <charconv>
#include <exception>
#include <filesystem>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "dtensor/error.h"
#include "hsdp/agreement.h"
#include "hsdp/checkpoint/file_lock.h"
#include "hsdp/checkpoint/folder_names.h"
#include "hsdp/checkpoint/manifest.h"
#include "hsdp/checkpoint/target_folder.h"

namespace hsdp {
namespace {

namespace fs = std::filesystem;
using dtensor::raise;
using dtensor::ValueError;

constexpr auto kWhere = "checkpoints";
constexpr std::string_view kStep = "step-";

std::string name_of(int64_t step) { return std::string(kStep) + std::to_string(step); }

// Of `step-12` and no other spelling.
std::optional<int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  int64_t step = 0;
  const auto* begin = name.data() + kStep.size();
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), step);
  if (error != std::errc() || step < 0 || name != name_of(step)) return std::nullopt;
  return step;
}

// Names that a save gives to what is no checkpoint yet, or no more: `step-12.writing`, `step-12.replaced.removing`.
bool is_leftover(std::string name) {
  for (const std::string_view suffix : {kRemovingSuffix, kWritingSuffix, kReplacedSuffix}) {
    if (!name.ends_with(suffix)) continue;
    name = name.substr(0, name.size() - suffix.size());
    if (step_of(name)) return true;
  }
  return false;
}

}  // namespace

std::vector<FoundCheckpoint> find_checkpoints(const std::string& folder) {
  std::error_code error;
  const auto status = fs::status(folder, error);
  if (!fs::exists(status)) return {};
  if (!fs::is_directory(status)) {
    raise<ValueError>(kWhere, folder, " is a file, expected a folder of checkpoints or nothing");
  }
  std::map<int64_t, std::string> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    auto name = entry.path().filename().string();
    // Where a run was killed between the two steps of replacing it.
    const bool replaced = name.ends_with(kReplacedSuffix);
    if (replaced) name = name.substr(0, name.size() - std::string_view(kReplacedSuffix).size());
    const auto step = step_of(name);
    if (!step || !fs::exists(entry.path() / kManifestFile, error)) continue;
    if (replaced && found.contains(*step)) continue;
    found[*step] = entry.path().string();
  }
  std::vector<FoundCheckpoint> checkpoints;
  for (auto& [step, path] : found) checkpoints.push_back({step, std::move(path)});
  return checkpoints;
}

struct CheckpointFolder::State {
  Environment environment;
  std::string path;
  CheckpointFolderOptions options;
  std::unique_ptr<FileLock> lock;  // rank 0's
  std::shared_ptr<StagingMemory> memory;
  PendingSave pending;
  int64_t pending_step = 0;
  std::thread removal;

  ~State() {
    if (removal.joinable()) removal.join();
  }

  bool leads() const { return environment.rank() == 0; }
  void agreed(const std::function<void()>& work) const {
    agree(*environment.mesh(), environment.device(), kWhere, [&] { with_paths(kWhere, work); });
  }
  std::string path_of(int64_t step) const { return (fs::path(path) / name_of(step)).string(); }

  // Before a save, on rank 0, which holds the lock: nobody writes there.
  void prepare(int64_t step) {
    if (removal.joinable()) removal.join();
    const auto found = find_checkpoints(path);
    if (!found.empty() && found.back().step > step) {
      raise<ValueError>(kWhere, path, " has a checkpoint of step ", found.back().step,
                        ", expected none later than step ", step,
                        ", which is to be saved: a later run would resume from the wrong one; move it away, or "
                        "save to another folder");
    }
    for (const auto& entry : fs::directory_iterator(path)) {
      const auto is_found = [&](const auto& checkpoint) { return checkpoint.path == entry.path().string(); };
      if (!is_leftover(entry.path().filename().string()) || std::any_of(found.begin(), found.end(), is_found)) continue;
      fs::remove_all(entry.path());
    }
  }

  // The newest is the one that was just saved, and is always kept.
  void remove_old_ones() {
    if (options.keep_latest == 0) return;
    auto found = find_checkpoints(path);
    const auto kept = std::min(found.size(), static_cast<size_t>(options.keep_latest));
    found.resize(found.size() - kept);
    std::erase_if(found, [&](const auto& checkpoint) {
      return options.keep_every > 0 && checkpoint.step % options.keep_every == 0;
    });
    const auto remove = [found] {
      for (const auto& checkpoint : found) remove_checkpoint(checkpoint.path);
    };
    if (!options.async) {
      remove();
    } else if (!found.empty()) {
      removal = std::thread(remove);
    }
  }

  std::string completed() {
    agreed([&] {
      if (leads()) remove_old_ones();
    });
    return path_of(pending_step);
  }
};

CheckpointFolder::CheckpointFolder(Environment environment, std::string path, const CheckpointFolderOptions& options) {
  if (options.keep_latest < 0 || options.keep_every < 0) {
    raise<ValueError>(kWhere, "keep_latest ", options.keep_latest, " and keep_every ", options.keep_every,
                      ", expected at least 0");
  }
  state_ = std::unique_ptr<State>(
      new State{std::move(environment), trimmed(std::move(path)), options, nullptr, make_staging_memory(), {}, 0, {}});
  state_->agreed([&] {
    if (!state_->leads()) return;
    find_checkpoints(state_->path);
    make_folders(kWhere, state_->path);
    state_->lock = std::make_unique<FileLock>(kWhere, (fs::path(state_->path) / kLockFile).string());
  });
}

CheckpointFolder::~CheckpointFolder() = default;

const std::string& CheckpointFolder::path() const { return state_->path; }

void CheckpointFolder::save(const TrainingState& state) {
  finish();
  state_->agreed([&] {
    if (state_->leads()) state_->prepare(state.progress.step);
  });
  state_->pending_step = state.progress.step;
  const auto target = state_->path_of(state.progress.step);
  if (state_->options.async) {
    state_->pending = save_async(state, target, state_->memory);
    return;
  }
  hsdp::save(state, target);
  state_->completed();
}

std::optional<std::string> CheckpointFolder::poll() {
  if (!state_->pending.pending() || !state_->pending.poll()) return std::nullopt;
  return state_->completed();
}

std::optional<std::string> CheckpointFolder::finish() {
  if (!state_->pending.pending()) return std::nullopt;
  state_->pending.wait();
  return state_->completed();
}

std::optional<FoundCheckpoint> CheckpointFolder::newest() const {
  std::string text;
  state_->agreed([&] {
    if (!state_->leads()) return;
    const auto found = find_checkpoints(state_->path);
    if (!found.empty()) text = std::to_string(found.back().step) + " " + found.back().path;
  });
  text = broadcast_text(*state_->environment.mesh(), state_->environment.device(), kWhere, text, 0);
  if (text.empty()) return std::nullopt;
  const auto space = text.find(' ');
  return FoundCheckpoint{std::stoll(text.substr(0, space)), text.substr(space + 1)};
}

}  // namespace hsdp

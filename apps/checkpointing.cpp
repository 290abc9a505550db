#include "apps/checkpointing.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <variant>
#include <vector>

#include "apps/agreement.h"
#include "apps/checkpoint_lookup.h"
#include "dtensor/error.h"
#include "hsdp/weights.h"

namespace apps {
namespace {

namespace fs = std::filesystem;

constexpr auto kWhere = "checkpoint";

std::string to_text(const hsdp::CheckpointValue& value) {
  if (const auto* number = std::get_if<int64_t>(&value)) return std::to_string(*number);
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  return "a value of another type";
}

/// "step-10, step-20 and 3 more".
std::string names_of(const std::vector<hsdp::FoundCheckpoint>& found) {
  constexpr size_t kMost = 6;
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(kMost, found.size()); ++i) names.push_back(c10::str("step-", found[i].step));
  const std::string text = c10::str(c10::Join(", ", names));
  return found.size() <= kMost ? text : c10::str(text, " and ", found.size() - kMost, " more");
}

/// checkpoint_at(path) on rank 0, which alone reads there; the path as it is on the others. A collective.
std::string found_by_rank_0(const hsdp::Environment& environment, const std::string& path) {
  auto found = path;
  agree(environment, [&] {
    if (environment.rank() == 0) found = checkpoint_at(path);
  });
  return found;
}

}  // namespace

Checkpointing::Checkpointing(const Config& config, const hsdp::Environment& environment, const DataLoader& data)
    : config_(config), environment_(environment) {
  for (const auto& [name, value] : config_values(config)) {
    if (name == "data.format") values_[name] = value;
  }
  values_["data.tokens"] = data.file().size();
  values_["training.global_batch_size"] = config.training.global_batch_size;
  values_["training.seed"] = config.training.seed;
  values_["training.sequence_length"] = config.training.sequence_length;
  if (config.checkpoint.folder.empty()) return;
  folder_.emplace(environment, config.checkpoint.folder,
                  hsdp::CheckpointFolderOptions{.keep_latest = config.checkpoint.keep_latest,
                                                .keep_every = config.checkpoint.keep_every,
                                                .async = config.checkpoint.async});
}

void Checkpointing::start(hsdp::TrainingState& state) {
  state.values = values_;
  const auto from = resume_point();
  if (!from) {
    if (config_.checkpoint.weights.empty()) {
      state.model->materialize(environment_.device());
    } else {
      const auto weights = found_by_rank_0(environment_, config_.checkpoint.weights);
      hsdp::load(state.model, weights);
      say(c10::str("began with the weights in ", weights));
    }
    return;
  }
  agree(environment_, [&] {
    if (environment_.rank() == 0) check_data(from->path);
  });
  const auto report = hsdp::load(state, from->path, {.optimizer_options = false});
  state.values = values_;
  auto scaling = state.grad_scaler->state();
  scaling.growth_interval = config_.grad_scaler.growth_interval;
  state.grad_scaler->load_state(scaling);
  say(c10::str("resumed at step ", state.progress.step, " from ", from->path,
               report.same_ranks ? "" : ", which another number of ranks wrote"));
  if (!from->in_folder) return;
  saved_step_ = state.progress.step;
  agree(environment_, [&] {
    if (environment_.rank() == 0) set_later_aside(state.progress.step);
  });
}

void Checkpointing::step_done(const hsdp::TrainingState& state) {
  if (!folder_) return;
  say_saved(folder_->poll());
  if (config_.checkpoint.every > 0 && state.progress.step % config_.checkpoint.every == 0) save(state);
}

void Checkpointing::save(const hsdp::TrainingState& state) {
  if (!folder_ || saved_step_ == state.progress.step) return;
  wait();
  folder_->save(state);
  saved_step_ = state.progress.step;
  if (!config_.checkpoint.async) {
    say_saved((fs::path(folder_->path()) / c10::str("step-", state.progress.step)).string());
  }
}

void Checkpointing::wait() {
  if (folder_) say_saved(folder_->finish());
}

std::optional<Checkpointing::ResumePoint> Checkpointing::resume_point() const {
  const std::string& load = config_.checkpoint.load;
  const auto newest = folder_ ? folder_->newest() : std::nullopt;
  if (load == "none" && newest) {
    dtensor::raise<dtensor::ValueError>(
        kWhere, "load is none and ", folder_->path(), " holds ", names_of(hsdp::find_checkpoints(folder_->path())),
        ", expected a folder without checkpoints, since new ones would replace them; set checkpoint.load to auto to go "
        "on from step-",
        newest->step, ", or another checkpoint.folder");
  }
  if (const auto step = step_in(load)) return named(*step);
  if (folder_) {
    const auto path = fs::path(load).lexically_normal();
    const auto step = step_in(path.filename().string());
    // With a slash at the end or without.
    if (step && path.parent_path() == (fs::path(folder_->path()) / ".").lexically_normal().parent_path()) {
      return named(*step);
    }
  }
  if (newest) return ResumePoint{newest->path, true};
  if (load == "none" || load == "auto") return std::nullopt;
  return ResumePoint{found_by_rank_0(environment_, load), false};
}

Checkpointing::ResumePoint Checkpointing::named(int64_t step) const {
  ResumePoint result{(fs::path(folder_->path()) / c10::str("step-", step)).string(), true};
  agree(environment_, [&] {
    if (environment_.rank() != 0) return;
    const auto found = hsdp::find_checkpoints(folder_->path());
    const auto wanted = std::find_if(found.begin(), found.end(), [&](const auto& each) { return each.step == step; });
    if (wanted == found.end()) {
      dtensor::raise<dtensor::ValueError>(kWhere, folder_->path(), " has no complete step-", step, ", expected ",
                                          found.empty() ? "checkpoints there" : "one of " + names_of(found));
    }
    result.path = wanted->path;
  });
  return result;
}

void Checkpointing::check_data(const std::string& path) const {
  const auto saved = read_scalars(kWhere, path);
  const auto folder = fs::path(path).filename().string();
  if (step_in(folder).value_or(saved.progress.step) != saved.progress.step) {
    dtensor::raise<dtensor::ValueError>(kWhere, path, " is of step ", saved.progress.step, ", expected step-",
                                        saved.progress.step, " as its name; give it that again");
  }
  std::vector<std::string> differences;
  for (const auto& [name, value] : values_) {
    const auto found = saved.values.find(name);
    if (found == saved.values.end()) {
      dtensor::raise<dtensor::ValueError>(kWhere, path, " has no value ", name,
                                          ", expected a checkpoint of hsdp_train; checkpoint.weights takes the weights "
                                          "of any");
    }
    if (found->second != value) {
      differences.push_back(c10::str(name, " ", to_text(found->second), " there and ", to_text(value), " here"));
    }
  }
  if (differences.empty()) return;
  dtensor::raise<dtensor::ValueError>(kWhere, path,
                                      " was trained on other data or in another order: ", c10::Join(", ", differences),
                                      ", expected the same; to begin anew with its weights, set checkpoint.weights to "
                                      "it and checkpoint.folder to a folder without checkpoints");
}

void Checkpointing::set_later_aside(int64_t step) const {
  std::vector<hsdp::FoundCheckpoint> later;
  for (const auto& each : hsdp::find_checkpoints(folder_->path())) {
    if (each.step > step) later.push_back(each);
  }
  if (later.empty()) return;
  const auto name = (fs::path(folder_->path()) / c10::str("after-step-", step)).string();
  auto aside = name;
  for (int again = 2; fs::exists(aside); ++again) aside = c10::str(name, "-", again);
  std::error_code error;
  fs::create_directory(aside, error);
  for (const auto& each : later) {
    if (!error) fs::rename(each.path, fs::path(aside) / c10::str("step-", each.step), error);
  }
  if (error) {
    dtensor::raise<dtensor::ValueError>(kWhere, names_of(later), " cannot be moved to ", aside, ": ", error.message(),
                                        ", expected a folder that can be written");
  }
  say(c10::str("moved ", names_of(later), " to ", aside));
}

void Checkpointing::say(const std::string& text) const {
  if (environment_.rank() == 0) std::cout << "checkpoint: " << text << std::endl;
}

void Checkpointing::say_saved(const std::optional<std::string>& path) const {
  if (path) say(c10::str("saved ", *path));
}

}  // namespace apps

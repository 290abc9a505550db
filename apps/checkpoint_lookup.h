#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "hsdp/checkpoint/training_state_json.h"

/// Finding and looking into checkpoints, without communication. `where` names the caller in messages.
namespace apps {

/// The number in `step-300`; none for another text.
std::optional<int64_t> step_in(const std::string& name);

/// The checkpoint that a path means: the newest complete one of a folder of checkpoints `step-N`; any other path comes
/// back as it is.
std::string checkpoint_at(const std::string& path);

/// What training_state.json of a complete checkpoint says. Throws dtensor::ValueError where the path is none.
hsdp::TrainingScalars read_scalars(const char* where, const std::string& checkpoint);

}  // namespace apps

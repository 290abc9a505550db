#pragma once

#include <iosfwd>
#include <string>

#include "hsdp/checkpoint/hugging_face.h"

/// What hsdp_checkpoint does, in one process, without a model. A path is that of a checkpoint, or of a folder of them:
/// then the newest complete one is meant, and `out` says which. All throw dtensor::ValueError naming file, tensor and
/// values for what is damaged, incomplete or neither of these.
namespace apps {

/// Prints what is in a checkpoint or a whole model (a .safetensors file, or a folder in Hugging Face's layout); with
/// `tensors` a line for each of them. Reads no values.
void inspect(const std::string& path, bool tensors, std::ostream& out);

/// Reads all of a checkpoint and prints one line; throws where anything is not as it was written.
void verify(const std::string& path, std::ostream& out);

/// Makes a whole model of a checkpoint or of another whole model; see hsdp::consolidate.
void consolidate(const std::string& from, const std::string& to, const hsdp::HuggingFaceOptions& options,
                 std::ostream& out);

/// Compares checkpoints or whole models, bit for bit: parameters and buffers; of two checkpoints also the optimizer's
/// tensors and the scalars, and the ranks' random generators where the number of ranks is the same. Prints a line a
/// difference. Returns whether there was none. A part of one tensor at a time is in memory.
bool diff(const std::string& a, const std::string& b, std::ostream& out);

}  // namespace apps

#pragma once

#include <ATen/core/Tensor.h>

namespace testing_support {

/// Replays the construction that made `deferred` and turns every tensor left of it into an ordinary one with its whole
/// value, in place. Returns the number of tensors.
size_t materialize_whole(const at::Tensor& deferred);

}  // namespace testing_support

#pragma once

#include <cstdint>

namespace hsdp {

/// Makes libtorch's autograd engine keep references into units instead of gathered weights: whatever an operator saves
/// for backward in a forward scope is packed (unit, geometry, generation) and gathered when backward unpacks it.
/// Everything else is saved as usual, with a version check of ours, since torch skips its own under hooks. Idempotent;
/// runs when the library is loaded.
void install_saved_tensor_engine();

/// Counts scopes on this thread in which saved tensors are packed.
class SavedTensorScope {
 public:
  SavedTensorScope();
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
};

/// Whether this backward pass (autograd's graph task id) threw. Remembers the last ones; thread-safe.
bool backward_failed(int64_t graph_task);

}  // namespace hsdp

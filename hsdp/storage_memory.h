#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace hsdp {

/// Gives the StorageImpl behind a tensor fresh memory of its former kind: the object stays, so views stay valid
/// handles. Old contents are gone. Works for every device whose allocator libtorch knows.
void allocate_memory(const at::Tensor& tensor, size_t nbytes);
/// Takes the memory away; reading it through a raw pointer is then an error of the caller.
void free_memory(const at::Tensor& tensor);

}  // namespace hsdp

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>

namespace hsdp {

/// Gives the StorageImpl behind a tensor fresh memory of its former kind: the object stays, so views stay valid
/// handles. Old contents are gone. Works for every device whose allocator libtorch knows.
void allocate_memory(const at::Tensor& tensor, size_t nbytes);
/// Takes the memory away: until it is allocated again, asking for a raw pointer into it throws c10::Error.
void free_memory(const at::Tensor& tensor);
/// The text of that error.
void say_when_read_without_memory(const at::Tensor& tensor, std::string message);

}  // namespace hsdp

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <string>

namespace hsdp {

/// Host memory of unsharded parameters and of collectives' buffers goes from one unit to the next instead of back to
/// the heap, where activations would break it up: cached blocks, of at most what was once in use at the same time,
/// until release_cached_memory(). Thread-safe. Other devices have caching allocators of their own.

/// Gives the StorageImpl behind a tensor fresh memory of its former kind: the object stays, so views stay valid
/// handles. Old contents are gone. Works for every device whose allocator libtorch knows.
void allocate_memory(const at::Tensor& tensor, size_t nbytes);
/// Takes the memory away: until it is allocated again, asking for a raw pointer into it throws c10::Error.
void free_memory(const at::Tensor& tensor);
/// The text of that error.
void say_when_read_without_memory(const at::Tensor& tensor, std::string message);

/// A tensor without values, for a buffer that lives for one collective. Whoever waits for that gives it to
/// dtensor::free_buffer(), because references may outlive the collective on a backend's own thread.
at::Tensor empty_buffer(c10::IntArrayRef sizes, const at::TensorOptions& options);
/// Gives cached blocks back to the heap: at the end of a forward or backward.
void release_cached_memory();

}  // namespace hsdp

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "dtensor/communicator.h"

/// What implementations of Communicator share: counting, argument checks, and the modes under which they touch tensors.
namespace dtensor {

enum class Collective { all_gather, reduce_scatter, all_reduce, broadcast, barrier };

/// Adds one collective to the process's counts. Thread-safe.
void count_collective(Collective kind, int64_t bytes);

/// A work that is already over: for groups of one rank and for tensors without elements.
std::shared_ptr<Work> completed_work();

/// An alias that has no autograd history and a version counter of its own, so that writing through it is invisible to
/// autograd's checks of saved tensors.
at::Tensor untracked_alias(const at::Tensor& tensor);

/// Frees the memory of a buffer that its collective is done with, whoever refers to it: a backend's own thread may keep
/// the tensor for a while longer. All that shares the memory is gone with it.
void free_buffer(const at::Tensor& buffer);

/// The words of c10d, a backend or a store for a failure: one line, without the source location and the backtrace.
std::string backend_message(const std::exception& error);

/// Refuse, with ValueErrors named after the operation, what no backend can do: tensors that are not contiguous, dtypes
/// that differ, sizes that do not fit the group.
void check_plain(const char* operation, const at::Tensor& tensor);
void check_gather_arguments(const char* operation, const at::Tensor& full, const at::Tensor& shard, int64_t ranks);
void check_contiguous(const char* operation, const char* argument, const at::Tensor& tensor);
/// Sums and comparisons are offered for float, double, half, bfloat16, int and long.
void check_reducible(const char* operation, const at::Tensor& tensor);

/// Collectives allocate ordinary tensors and record nothing, whatever mode the caller is in. Backends carry the modes
/// of the call over to their worker threads, so this has to be in force when a collective starts, too.
class CollectiveGuard {
 public:
  CollectiveGuard() : inference_(false) {}

 private:
  c10::InferenceMode inference_;
  at::NoGradGuard no_grad_;
};

}  // namespace dtensor

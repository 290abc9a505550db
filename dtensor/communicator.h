#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "dtensor/placement.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace dtensor {

class CallBoard;

/// One collective in flight. Owns the tensors it reads and writes until it is waited for or destroyed.
class Work {
 public:
  virtual ~Work();
  /// Blocks the host or, on a device with streams, makes the current one wait. Throws CommunicationError naming the
  /// operation, at the latest when the group's timeout has passed. A second call returns at once.
  virtual void wait() = 0;
  virtual bool is_completed() = 0;
  /// Whether it runs on the stream that was current when it was started, so that what is queued there later comes after
  /// it without a wait.
  virtual bool is_on_stream() const { return false; }
};

/// What a collective is for: named in errors, traces and counters.
struct OperationName {
  /// "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "check".
  const char* operation = "";
  /// Unit, parameter or purpose, for example "blocks.3" or "clip_grad_norm_".
  std::string_view subject = {};
};

/// A group of ranks that communicate along one mesh axis.
///
/// Ownership: shared by meshes and transports; outlives the collectives it started. Threads: one caller at a time; all
/// ranks of the group must make the same calls in the same order. Streams: on a device, collectives are ordered after
/// the work queued on the current stream when the call is made. All tensors are contiguous and on one device type.
class Communicator {
 public:
  virtual ~Communicator();

  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  /// Short text for messages: backend, axis, "rank 1 of 4".
  virtual std::string describe() const = 0;
  /// True where several collectives started together are cheaper than packing their tensors.
  virtual bool prefers_groups() const = 0;

  /// `output` has size() * input.numel() elements, laid out by rank. `input` may be the slice of `output` of this rank.
  virtual std::shared_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input, OperationName name) = 0;
  /// `input` has size() * output.numel() elements; `output` receives the sum over ranks of slice rank().
  virtual std::shared_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                               OperationName name) = 0;
  /// Reduces in place; op is sum, max or min.
  virtual std::shared_ptr<Work> all_reduce(const at::Tensor& tensor, ReduceOp op, OperationName name) = 0;
  virtual std::shared_ptr<Work> broadcast(const at::Tensor& tensor, int64_t root, OperationName name) = 0;
  /// Starts and ends a set of collectives that the backend may fuse; end_group returns the work of them all. They may
  /// start as late as it, on the stream that is current then.
  virtual void start_group() = 0;
  virtual std::shared_ptr<Work> end_group() = 0;
  /// Returns when every rank of the group has called it.
  virtual void barrier(OperationName name) = 0;
};

/// Numbers of collectives and bytes since the process started or `reset_collective_counts` was called; this rank, all
/// communicators of more than one rank. Bytes are those of the larger side (gathered or unreduced).
struct CollectiveCounts {
  int64_t all_gathers = 0, reduce_scatters = 0, all_reduces = 0, broadcasts = 0, barriers = 0;
  int64_t all_gather_bytes = 0, reduce_scatter_bytes = 0, all_reduce_bytes = 0;
};
CollectiveCounts collective_counts();
void reset_collective_counts();

/// The group of one rank: every collective is a copy or nothing.
std::shared_ptr<Communicator> make_self_communicator();

/// A communicator over a c10d backend of any kind that the caller made. `label` names it in
/// messages; `timeout` is that of the backend and is only quoted. With a `board` (call_board.h) the ranks compare each
/// collective there before they start it.
std::shared_ptr<Communicator> make_c10d_communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string label,
                                                     std::chrono::milliseconds timeout,
                                                     std::shared_ptr<CallBoard> board = nullptr);

}  // namespace dtensor

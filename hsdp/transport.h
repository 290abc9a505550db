#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <memory>

#include "dtensor/communicator.h"

namespace hsdp {

/// One parameter's two sides of a collective. Both are plain tensors, contiguous, 1-D, of one dtype and device;
/// full.numel() is the number of ranks times shard.numel(). At size 1 the two may be one memory.
struct TensorPair {
  at::Tensor full;
  at::Tensor shard;
};

/// Gathers and reduces a unit's tensors with as few collectives as its communicator is good at.
///
/// Ownership: holds its communicator; a returned Work owns the tensors and all buffers until it was waited for.
/// Threads: as the communicator, one caller at a time. Streams: collectives and the copies before them run behind the
/// stream that is current at the start, copies after them on the one that is current in wait(). Results are written
/// through aliases: version counters of the tensors handed in do not move, and autograd sees nothing.
class Transport {
 public:
  virtual ~Transport();

  /// Fills each `full` with the shards of all ranks, ordered by rank; complete after wait(). Throws ValueError for
  /// pairs that do not fit, CommunicationError when the collective fails.
  virtual std::shared_ptr<dtensor::Work> all_gather(c10::ArrayRef<TensorPair> pairs, dtensor::OperationName name) = 0;
  /// Fills each `shard` with the sum over ranks of this rank's slice of `full`; complete after wait(). `full` must not
  /// change before. Throws as all_gather does.
  virtual std::shared_ptr<dtensor::Work> reduce_scatter(c10::ArrayRef<TensorPair> pairs,
                                                        dtensor::OperationName name) = 0;

  /// Whether one pair that holds everything costs less than several.
  virtual bool packs() const { return true; }
  virtual dtensor::Communicator& communicator() const = 0;
};

/// A transport that groups collectives where the communicator prefers that, and otherwise packs tensors into one
/// buffer and one collective a dtype.
std::shared_ptr<Transport> make_transport(std::shared_ptr<dtensor::Communicator> communicator);

}  // namespace hsdp

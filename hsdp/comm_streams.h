#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

#include "dtensor/communicator.h"

namespace hsdp {

/// The streams on which communication runs beside computing, for one device of this process: gathers (casting, copies
/// from the host, all-gathers), reduce-scatters (and copies to the host), and all-reduces over replicas. All have high
/// priority, so that a collective that is due is not kept back by a device full of computing.
///
/// Everything else runs on the compute stream: the one that is current where a function of the library is called. A
/// communication stream begins by waiting for the compute stream (on_stream), and the compute stream waits for it
/// before it uses or frees what was made there; so memory of one stream's pool may be used on another and nothing needs
/// record_stream. Ownership: shared, for the life of the process. Threads: immutable.
class CommStreams {
 public:
  /// Of `device`, made at the first call; null where the device has no streams that one can ask for, and all work is
  /// done in the order of the calls. Thread-safe.
  static const CommStreams* of(c10::Device device);

  const c10::Stream* gather() const { return &gather_; }
  const c10::Stream* reduce_scatter() const { return &reduce_scatter_; }
  const c10::Stream* all_reduce() const { return &all_reduce_; }

 private:
  CommStreams(c10::Stream gather, c10::Stream reduce_scatter, c10::Stream all_reduce)
      : gather_(gather), reduce_scatter_(reduce_scatter), all_reduce_(all_reduce) {}

  c10::Stream gather_, reduce_scatter_, all_reduce_;
};

/// The calling thread's current stream on a device.
c10::Stream current_stream(c10::Device device);

/// Makes `later` wait for what is queued on `earlier` so far. Nothing where they are the same.
void order_after(const c10::Stream& later, const c10::Stream& earlier);

/// Makes a communication stream the current one for its own lifetime, with null nothing.
class OnStream {
 public:
  /// `stream` first waits for what is queued on the former current stream so far.
  explicit OnStream(const c10::Stream* stream);
  /// Waits for what is queued on `earlier` instead, where that is given.
  OnStream(const c10::Stream* stream, const std::optional<c10::Stream>& earlier);

 private:
  std::optional<c10::StreamGuard> guard_;
};

/// A point behind what is queued on a stream: as a Work it is waited for by the stream that is then current.
class StreamMark final : public dtensor::Work {
 public:
  explicit StreamMark(const c10::Stream& stream);
  void wait() override;
  bool is_completed() override { return event_.query(); }
  /// Blocks the host until it is reached.
  void synchronize() const { event_.synchronize(); }

 private:
  c10::Event event_;
  c10::Device device_;
};

}  // namespace hsdp

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/testing/stream_log.h"

/// Streams and events of the private device, and the log of all that is given to them. Operators run at once, on the
/// host, so a run's numbers hardly ever show that a wait is missing; happens_before.h finds it in the log. What a run
/// does show is a host that reads too early: a copy to pinned memory that does not block delivers garbage until the
/// host knows that it has ended.
///
/// Threads: all functions may be called from any. The current stream is each thread's own.
namespace testing_support {

/// What a test sees and steers. Everything is of this process.
namespace recorded {

/// All entries since the process started, of this process and, before a fork, of its parent.
StreamLog log();
size_t log_size();
void note(std::string text);
/// From here on, ranges that the library names with RecordFunction (hsdp/profiling/span.h) are labels of the log, and
/// operators that read or write pinned memory on the host are logged as the host's accesses.
void watch_operators();

/// The n-th wait of a stream for an event from here on (0 is the next) is dropped, as by a library that forgot it;
/// -1: none is.
void drop_wait(int64_t n);
/// Whether a query of an event that the host does not know to be complete finds it complete after all; `nth` counts the
/// queries of this recording, from 1. Without a policy the answer is no, for ever. A thread that has never given work
/// to the device, such as one that watches for time-outs, is told the truth, that all but stalled work has ended.
void set_query_policy(std::function<bool(int64_t nth)> policy);
/// Work given to the stream from here on never ends: events behind it never complete, and a host that waits for one
/// gets an exception in place of a hang. `resume` ends that for all streams.
void stall(c10::Stream stream);
void resume();
bool is_stalled(const c10::Stream& stream);

int priority(const c10::Stream& stream);

}  // namespace recorded

/// What the device and its backend write down. Nothing of it does anything before start_recording().
namespace recorder {

void start_recording();
bool is_recording();

// ---- guard ----
c10::Stream current_stream(c10::Device device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::Device device, int priority);
void record(void** event, const c10::Stream& stream, const char* why = "");
void block(void* event, const c10::Stream& stream, const char* why = "");
bool query(void* event);
bool query(const c10::Stream& stream);
void destroy(void* event) noexcept;
void wait(void* event);
void wait(const c10::Stream& stream, const char* why);
void wait_device(c10::DeviceIndex device);
void record_stream(const void* data, const c10::Stream& stream);

// ---- memory ----
void allocated(const void* data, size_t bytes, c10::DeviceIndex device, bool pinned);
void released(const void* data) noexcept;
bool is_pinned(const void* data);
c10::Allocator* pinned_allocator();

// ---- work ----
/// Within it, what the calling thread does is part of an operator that is logged as a whole.
class Inside {
 public:
  Inside();
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  static bool is_active();
};

/// Bytes of tensors that the device can reach; nothing for others.
std::vector<ByteRange> ranges(const std::vector<at::Tensor>& tensors);
bool are_live(const std::vector<ByteRange>& ranges);
/// Logged on the current stream of `device`. Tensors that the device cannot reach are left out.
void launch(std::string name, c10::Device device, const std::vector<at::Tensor>& reads,
            const std::vector<at::Tensor>& writes);
/// An entry as it is, but for thread and label.
void add(LogEntry entry);
/// `result` is what the host will find in `destination` once it knows that the work given to the stream so far has
/// ended.
void deliver_later(const c10::Stream& stream, const at::Tensor& destination, const at::Tensor& result);
/// The device reads these now: what is to be delivered there has come, in the order of the streams.
void deliver(const std::vector<at::Tensor>& tensors);

StreamName name_of(const c10::Stream& stream);

}  // namespace recorder
}  // namespace testing_support

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>

#include "hsdp/backend.h"

namespace testing_support {

/// The c10d backend of the private device with recorded streams, named "recorded", as hsdp::register_backend takes it.
/// It treats streams, events and groups as torch's ProcessGroupNCCL of version 2.11 does and logs every call:
/// - asyncOp = false: the collective runs on the current stream and there is no Work, also for a group;
/// - asyncOp = true: it runs on a stream of the backend that waits for the current one; Work::wait() makes the then
///   current stream wait, and the tensors stay alive until then;
/// - members of a group (startCoalescing, endCoalescing) start when it ends;
/// - a barrier without asyncOp blocks the host.
/// Underneath the data moves over Gloo while the host waits, in a group when it ends. Sums are added in the order of
/// the ranks, as the library does over Gloo.
c10::intrusive_ptr<c10d::Backend> make_recorded_backend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                        int64_t size, std::chrono::milliseconds timeout,
                                                        c10::Device device);

/// The n-th collective from here on (0 is the next), of all backends of this process, never ends: no data moves, and
/// its stream stalls (recorded::stall). Has to be said on all ranks of the group. -1: none.
void hang_collective(int64_t n);

}  // namespace testing_support

#pragma once

#include "dtensor/device_mesh.h"
#include "hsdp/comm_streams.h"

namespace hsdp {

/// Blocks the host until a device has come to `mark`. Where a collective over an axis of `mesh` has failed, behind
/// which the mark may lie for ever, throws CommunicationError instead.
void wait_on_host(StreamMark& mark, const dtensor::DeviceMesh& mesh);

}  // namespace hsdp

#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>

#include "dtensor/device_mesh.h"

namespace hsdp {

/// Does work that may fail on some ranks alone, such as opening a file, and leaves no rank waiting for one that failed:
/// when it threw anywhere, every rank throws what the lowest rank that failed has to say, as the same class where that
/// is one of dtensor/error.h, else as CommunicationError. `where` names the call in messages; `device` is where the
/// mesh communicates. Every rank of the mesh must call it.
void agree(const dtensor::DeviceMesh& mesh, c10::Device device, const char* where, const std::function<void()>& work);

/// What rank `root` of the mesh says, on all ranks. A collective.
std::string broadcast_text(const dtensor::DeviceMesh& mesh, c10::Device device, const char* where,
                           const std::string& text, int64_t root);

}  // namespace hsdp

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>

#include "hsdp/backend.h"

namespace testing_support {

/// The c10d backend of the private device, named "staged", as hsdp::register_backend takes it: copies to the host,
/// talks there, copies back when the work is waited for. It implements what docs/devices.md asks for and nothing else.
c10::intrusive_ptr<c10d::Backend> make_staged_backend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                      int64_t size, std::chrono::milliseconds timeout,
                                                      c10::Device device);

}  // namespace testing_support

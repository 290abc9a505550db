#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace hsdp {

/// Whether this build contains the backend; says nothing about the machine.
bool gloo_available();
bool nccl_available();

/// Make a c10d backend for ranks 0 to size - 1 that meet in `store`; every rank of the group must call it. Gloo
/// connects here and throws what c10d throws after `timeout`; NCCL connects with the first collective. Throw
/// NotSupportedError in a build without the backend.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                    int64_t size, std::chrono::milliseconds timeout);
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                    int64_t size, std::chrono::milliseconds timeout,
                                                    c10::Device device);

}  // namespace hsdp

#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

/// How an out-of-tree accelerator joins in; docs/devices.md says what else it has to bring.
namespace hsdp {

/// Makes the c10d backend through which ranks 0 to size - 1 talk. Every rank of the group calls it and meets the others
/// in `store`; `device` is the rank's own and already the current one. The backend ends collectives that take longer
/// than `timeout` with an error. Throws what c10d throws.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size, std::chrono::milliseconds timeout,
    c10::Device device)>;

/// Lets init() train on devices of a type that this library has never heard of, one for each rank of a host. `name` is
/// what InitOptions::backend asks for; "auto" prefers registered backends to the built-in ones, in the order of
/// registration, where a device is visible. Once for each name, before init(), from any thread. Throws ValueError for a
/// name that is empty, taken or has another meaning, and without a factory.
void register_backend(std::string name, c10::DeviceType device_type, BackendFactory make);

}  // namespace hsdp

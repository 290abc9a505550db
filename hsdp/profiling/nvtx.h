#pragma once

/// NVTX ranges of the calling thread, in the default domain, where tools look first. Process-wide switch; thread-safe.
namespace hsdp::nvtx {

/// False where the build had no headers of NVTX.
bool is_available();
bool is_on();
/// Must be available to be switched on.
void set_on(bool on);

/// Ranges of a thread nest. A name is copied.
void push(const char* name);
void pop();

}  // namespace hsdp::nvtx

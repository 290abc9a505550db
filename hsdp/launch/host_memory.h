#pragma once

#include <cstdint>

/// What count_host_memory() counts; asked through device.h. Thread-safe.
namespace hsdp::host_memory {

bool is_counted();
/// In tensors now, and at most since the last reset; 0 while nothing is counted.
int64_t bytes();
int64_t peak_bytes();
void reset_peak();

}  // namespace hsdp::host_memory

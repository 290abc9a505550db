#include "hsdp/launch/device.h"

#include <sys/resource.h>

#include "hsdp/launch/device_memory.h"

namespace hsdp {

int64_t peak_memory_bytes(c10::Device device) {
  if (device.is_cuda()) return cuda_peak_memory_bytes(device);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  // Linux counts in KiB.
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

void reset_peak_memory(c10::Device device) {
  if (device.is_cuda()) cuda_reset_peak_memory(device);
}

}  // namespace hsdp

#include "tools/bench/bench_device.h"

namespace bench {

std::string device_name(c10::Device) { return {}; }

}  // namespace bench

#include "hsdp/host.h"

#include <ATen/Context.h>

namespace hsdp {

at::Generator host_generator() { return at::globalContext().defaultGenerator(kHost); }

}  // namespace hsdp

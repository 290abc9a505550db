#include "hsdp/launch/backend_builtin.h"

namespace hsdp {

BackendKind gloo_backend() {
  return {"gloo", c10::kCPU, nullptr, "in a build without Gloo; build with HSDP_WITH_GLOO=ON"};
}

}  // namespace hsdp

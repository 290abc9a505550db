#include "hsdp/launch/backend_builtin.h"

namespace hsdp {

std::vector<BackendKind> built_in_backends() { return {nccl_backend(), gloo_backend()}; }

}  // namespace hsdp

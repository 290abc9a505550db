#include "hsdp/launch/backend_builtin.h"

namespace hsdp {

BackendKind nccl_backend() {
  return {"nccl", c10::kCUDA, nullptr,
          "in a build without NCCL, expected gloo; or build on a machine with a CUDA toolkit"};
}

std::string nccl_version() { return {}; }
std::string cuda_version() { return {}; }

}  // namespace hsdp

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dtensor/error.h"
#include "hsdp/launch/backend.h"

namespace hsdp {

bool nccl_available() { return false; }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>&, int64_t, int64_t,
                                                    std::chrono::milliseconds, c10::Device) {
  dtensor::raise<dtensor::NotSupportedError>("make_nccl_backend",
                                             "this build has no NCCL; build on a machine with a CUDA toolkit");
}

}  // namespace hsdp

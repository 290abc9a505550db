#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dtensor/error.h"
#include "hsdp/launch/backend.h"

namespace hsdp {

bool gloo_available() { return false; }

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>&, int64_t, int64_t,
                                                    std::chrono::milliseconds) {
  dtensor::raise<dtensor::NotSupportedError>("make_gloo_backend",
                                             "this build has no Gloo; build with HSDP_WITH_GLOO=ON");
}

}  // namespace hsdp

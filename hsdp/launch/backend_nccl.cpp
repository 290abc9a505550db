// The one file that sees ProcessGroupNCCL.hpp.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "hsdp/launch/backend_builtin.h"

namespace hsdp {

BackendKind nccl_backend() {
  return {"nccl", c10::kCUDA,
          [](const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
             std::chrono::milliseconds timeout, c10::Device) -> c10::intrusive_ptr<c10d::Backend> {
            auto options = c10d::ProcessGroupNCCL::Options::create();
            options->timeout = timeout;
            return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, static_cast<int>(rank), static_cast<int>(size),
                                                               options);
          }};
}

}  // namespace hsdp

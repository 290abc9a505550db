// The one file that sees ProcessGroupNCCL.hpp.
#include <ATen/Context.h>
#include <c10/util/StringUtil.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "hsdp/launch/backend_builtin.h"

namespace hsdp {

BackendKind nccl_backend() {
  return {"nccl", c10::kCUDA,
          [](const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
             std::chrono::milliseconds timeout, c10::Device) -> c10::intrusive_ptr<c10d::Backend> {
            auto options = c10d::ProcessGroupNCCL::Options::create();
            // Its watchdog ends the process when a collective does not end. The communicator's own watch, which knows
            // the unit, speaks first.
            options->timeout = timeout + std::chrono::seconds(5);
            return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, static_cast<int>(rank), static_cast<int>(size),
                                                               options);
          }};
}

std::string nccl_version() { return c10d::getNcclVersion(); }

std::string cuda_version() {
  const auto version = at::globalContext().versionCUDART();  // 13000 for 13.0
  return c10::str(version / 1000, '.', version % 1000 / 10);
}

}  // namespace hsdp

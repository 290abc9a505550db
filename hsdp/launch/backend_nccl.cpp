// The one file that sees ProcessGroupNCCL.hpp.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "hsdp/launch/backend.h"

namespace hsdp {

bool nccl_available() { return true; }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                    int64_t size, std::chrono::milliseconds timeout,
                                                    c10::Device device) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, static_cast<int>(rank), static_cast<int>(size), options);
  // A barrier carries no tensor that would say where to run.
  backend->setBoundDeviceId(device);
  return backend;
}

}  // namespace hsdp

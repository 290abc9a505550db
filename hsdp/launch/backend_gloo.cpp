// The one file that sees ProcessGroupGloo.hpp. libtorch contains Gloo but ships none of its headers, and those of the
// distribution may be older: nothing here touches a Gloo type.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "hsdp/launch/backend_builtin.h"

namespace hsdp {

BackendKind gloo_backend() {
  return {"gloo", c10::kCPU,
          [](const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
             std::chrono::milliseconds timeout, c10::Device) -> c10::intrusive_ptr<c10d::Backend> {
            auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);
            // A thread runs one collective at a time: announcements must not wait behind the all-reduces in flight.
            options->threads = 6;
            return c10::make_intrusive<c10d::ProcessGroupGloo>(store, static_cast<int>(rank), static_cast<int>(size),
                                                               std::move(options));
          }};
}

}  // namespace hsdp

#include "hsdp/launch/versions.h"

#include <c10/util/StringUtil.h>
#include <torch/headeronly/version.h>

#include "hsdp/launch/backend_builtin.h"

namespace hsdp {

std::string versions() {
  const auto or_none = [](const std::string& version) { return version.empty() ? "none" : version; };
  return c10::str("hsdp ", HSDP_VERSION, "\ntorch ", TORCH_VERSION, "\ngloo ", gloo_backend().make ? "yes" : "no",
                  "\nnccl ", or_none(nccl_version()), "\ncuda ", or_none(cuda_version()));
}

}  // namespace hsdp

#pragma once

#include "hsdp/launch/backend_kind.h"

namespace hsdp {

/// The built-in kinds, whether this build contains them or not. Gloo connects when it is made, NCCL with the first
/// collective.
BackendKind nccl_backend();
BackendKind gloo_backend();

}  // namespace hsdp

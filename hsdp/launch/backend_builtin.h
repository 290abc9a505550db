#pragma once

#include <string>

#include "hsdp/launch/backend_kind.h"

namespace hsdp {

/// The built-in kinds, whether this build contains them or not. Gloo connects when it is made, NCCL with the first
/// collective.
BackendKind nccl_backend();
BackendKind gloo_backend();

/// Of the NCCL that was loaded, "2.28.9", and of the CUDA runtime that torch was built with, "13.0"; empty in a build
/// without NCCL. No device is asked or touched.
std::string nccl_version();
std::string cuda_version();

}  // namespace hsdp

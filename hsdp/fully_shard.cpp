#include "hsdp/fully_shard.h"

#include <ATen/ATen.h>

#include <sstream>

#include "dtensor/dtensor.h"

namespace hsdp {

at::Tensor unsharded(const at::Tensor& parameter) {
  const dtensor::DTensor tensor(parameter);
  if (auto unit = std::dynamic_pointer_cast<Unit>(tensor.impl().owner())) {
    if (auto scheduler = unit->scheduler()) scheduler->compare_writes(*unit->context().mesh);
  }
  return tensor.full_tensor();
}

std::string to_string(const at::Tensor& tensor) {
  std::ostringstream text;
  text << dtensor::describe(tensor);
  if (auto* impl = dtensor::distributed_impl(tensor)) {
    if (!impl->local().is_meta()) text << "\n" << impl->local().detach();
  } else if (tensor.defined() && dtensor::dtensor_impl(tensor) == nullptr) {
    text << "\n" << tensor;
  }
  return text.str();
}

}  // namespace hsdp

#include "dtensor/inspect.h"

#include "dtensor/dtensor.h"
#include "dtensor/error.h"

namespace dtensor {
namespace {

Observation observe(const at::Tensor& plain) {
  Observation seen;
  seen.impl = plain.unsafeGetTensorImpl();
  if (plain.has_storage()) {
    const auto* storage = plain.storage().unsafeGetStorageImpl();
    seen.storage = storage;
    seen.data = storage->data();
    seen.nbytes = storage->nbytes();
    seen.resizable = storage->resizable();
    seen.storage_device = storage->device();
  }
  seen.offset = plain.storage_offset();
  seen.sizes = plain.sizes().vec();
  seen.strides = plain.strides().vec();
  return seen;
}

}  // namespace

std::string Observation::to_string() const {
  return c10::str("impl ", impl, ", storage ", storage, " (", nbytes, " bytes at ", data, ", ", storage_device,
                  resizable ? ", resizable" : "", "), offset ", offset, ", sizes ", c10::IntArrayRef(sizes),
                  ", strides ", c10::IntArrayRef(strides));
}

std::string Inspection::to_string() const {
  return c10::str("identity ", identity, distributed ? " (distributed)" : " (plain)", "\n  body:  ", body.to_string(),
                  "\n  local: ", local.to_string());
}

Inspection inspect(const at::Tensor& tensor) {
  if (!tensor.defined()) raise<ValueError>("inspect", "the tensor is undefined, expected a tensor");
  Inspection seen;
  seen.identity = tensor.unsafeGetTensorImpl();
  if (auto* impl = distributed_impl(tensor)) {
    seen.distributed = true;
    seen.body = observe(impl->body());
    seen.local = observe(impl->local());
    return seen;
  }
  if (dtensor_impl(tensor) != nullptr) {
    raise<ValueError>("inspect", describe(tensor),
                      " has no memory yet, expected a distributed or plain tensor; call "
                      "fully_shard first");
  }
  seen.body = seen.local = observe(tensor);
  return seen;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || !a.has_storage() || !b.has_storage()) return false;
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes().equals(b.sizes()) && a.strides().equals(b.strides()) &&
         a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

}  // namespace dtensor

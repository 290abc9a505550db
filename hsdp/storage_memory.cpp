#include "hsdp/storage_memory.h"

#include <c10/core/Allocator.h>

namespace hsdp {

void allocate_memory(const at::Tensor& tensor, size_t nbytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto* allocator = storage->allocator() != nullptr ? storage->allocator() : c10::GetAllocator(storage->device_type());
  storage->set_data_ptr_noswap(allocator->allocate(nbytes));
  storage->set_nbytes(nbytes);
}

void free_memory(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->set_nbytes(0);
}

}  // namespace hsdp

#include "hsdp/storage_memory.h"

#include <c10/core/Allocator.h>

#include <utility>

namespace hsdp {
namespace {

// StorageImpl can be told that its memory must not be asked for, but offers no way back; this names the private flag.
template <bool c10::StorageImpl::*flag>
struct RefusesReads {
  friend bool& refuses_reads(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct RefusesReads<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
bool& refuses_reads(c10::StorageImpl& storage);

}  // namespace

void allocate_memory(const at::Tensor& tensor, size_t nbytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto* allocator = storage->allocator() != nullptr ? storage->allocator() : c10::GetAllocator(storage->device_type());
  auto memory = allocator->allocate(nbytes);
  refuses_reads(*storage) = false;
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(nbytes);
}

void free_memory(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  refuses_reads(*storage) = true;
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->set_nbytes(0);
}

void say_when_read_without_memory(const at::Tensor& tensor, std::string message) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const bool refused = refuses_reads(*storage);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  refuses_reads(*storage) = refused;
  // Lets the storage look at its flag again.
  auto memory = std::move(storage->_mutable_data_ptr_no_checks());
  storage->set_data_ptr_noswap(std::move(memory));
}

}  // namespace hsdp

#include "hsdp/storage_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include "dtensor/collective.h"
#include "hsdp/host.h"

namespace hsdp {
namespace {

// StorageImpl can be told that its memory must not be asked for, but offers no way back; this names the private flag.
template <bool c10::StorageImpl::*flag>
struct RefusesReads {
  friend bool& refuses_reads(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct RefusesReads<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
bool& refuses_reads(c10::StorageImpl& storage);

class BlockCache {
 public:
  c10::DataPtr take(c10::Allocator& allocator, size_t nbytes) {
    std::lock_guard lock(mutex_);
    std::unique_ptr<Block> block;
    const auto found =
        std::find_if(cached_.rbegin(), cached_.rend(), [&](const auto& one) { return one->nbytes == nbytes; });
    if (found == cached_.rend()) {
      block = std::make_unique<Block>(Block{allocator.allocate(nbytes), nbytes});
    } else {
      block = std::move(*found);
      cached_.erase(std::next(found).base());
      cached_bytes_ -= nbytes;
    }
    is_open_ = true;
    used_bytes_ += nbytes;
    most_bytes_ = std::max(most_bytes_, used_bytes_);
    drop_beyond(most_bytes_);
    auto* data = block->memory.get();
    const auto device = block->memory.device();
    return {data, block.release(), &give_back, device};
  }

  void close() {
    std::lock_guard lock(mutex_);
    is_open_ = false;
    drop_beyond(0);
  }

  static BlockCache& instance() {
    // Leaked: blocks may be given back after static destruction.
    static auto* cache = new BlockCache;
    return *cache;
  }

 private:
  struct Block {
    c10::DataPtr memory;
    size_t nbytes;
  };

  // Under the lock.
  void drop_beyond(size_t bytes) {
    while (!cached_.empty() && used_bytes_ + cached_bytes_ > bytes) {
      cached_bytes_ -= cached_.front()->nbytes;
      cached_.pop_front();
    }
  }

  static void give_back(void* context) {
    auto& self = instance();
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    std::lock_guard lock(self.mutex_);
    self.used_bytes_ -= block->nbytes;
    // A group's own thread may be the last to let go of what it sent.
    if (!self.is_open_) return;
    self.cached_bytes_ += block->nbytes;
    self.cached_.push_back(std::move(block));
  }

  std::mutex mutex_;
  bool is_open_ = false;                       // blocks are kept
  std::deque<std::unique_ptr<Block>> cached_;  // the oldest first
  size_t cached_bytes_ = 0, used_bytes_ = 0, most_bytes_ = 0;
};

// Small blocks do not break up the heap.
constexpr size_t kLeastCached = 64 * 1024;

c10::DataPtr allocate(c10::Allocator& allocator, c10::DeviceType device, size_t nbytes) {
  if (device != kHost || nbytes < kLeastCached) return allocator.allocate(nbytes);
  return BlockCache::instance().take(allocator, nbytes);
}

}  // namespace

void allocate_memory(const at::Tensor& tensor, size_t nbytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  // Allocators give memory of the thread's current device.
  const c10::DeviceGuard on_device(storage->device());
  auto* allocator = storage->allocator() != nullptr ? storage->allocator() : c10::GetAllocator(storage->device_type());
  auto memory = allocate(*allocator, storage->device_type(), nbytes);
  refuses_reads(*storage) = false;
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(nbytes);
}

void free_memory(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  refuses_reads(*storage) = true;
  dtensor::free_buffer(tensor);
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

at::Tensor empty_buffer(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto nbytes = static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (options.device().type() != kHost || nbytes < kLeastCached) return at::empty(sizes, options);
  auto* allocator = c10::GetAllocator(kHost);
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, allocate(*allocator, kHost, nbytes), allocator,
                       /*resizable=*/false);
  return at::empty({0}, options).set_(std::move(storage), 0, sizes);
}

void release_cached_memory() { BlockCache::instance().close(); }

}  // namespace hsdp

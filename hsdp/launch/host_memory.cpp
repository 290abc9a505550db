#include "hsdp/launch/host_memory.h"

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <limits>

#include "hsdp/host.h"
#include "hsdp/launch/device.h"

namespace hsdp {
namespace {

class HostMemory final : public c10::Allocator {
 public:
  static HostMemory& instance() {
    // Never freed: tensors may outlive static destruction.
    static auto* const memory = new HostMemory;
    return *memory;
  }

  void start() {
    if (is_counted.exchange(true)) return;
    former_ = c10::GetAllocator(kHost);
    c10::SetAllocator(kHost, this, /*priority=*/std::numeric_limits<uint8_t>::max());
  }

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::Device(kHost)};
    // What is too much must not become little.
    TORCH_CHECK(nbytes <= std::numeric_limits<size_t>::max() - kHeader, "out of memory: ", nbytes, " bytes");
    auto* start = static_cast<std::byte*>(former_->raw_allocate(nbytes + kHeader));
    *reinterpret_cast<int64_t*>(start) = static_cast<int64_t>(nbytes);
    const auto now = bytes += static_cast<int64_t>(nbytes);
    for (auto most = peak.load(); most < now && !peak.compare_exchange_weak(most, now);) {
    }
    void* data = start + kHeader;
    return {data, data, &give_back, c10::Device(kHost)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* destination, const void* source, size_t count) const override {
    default_copy_data(destination, source, count);
  }

  std::atomic<bool> is_counted{false};
  std::atomic<int64_t> bytes{0}, peak{0};

 private:
  /// Stands before the memory of a tensor, as long as its alignment: some operators want to free by the pointer alone.
  static constexpr size_t kHeader = 64;

  static void give_back(void* data) {
    if (data == nullptr) return;
    auto* start = static_cast<std::byte*>(data) - kHeader;
    instance().bytes -= *reinterpret_cast<int64_t*>(start);
    instance().former_->raw_deallocate(start);
  }

  c10::Allocator* former_ = nullptr;
};

}  // namespace

void count_host_memory() { HostMemory::instance().start(); }

namespace host_memory {

bool is_counted() { return HostMemory::instance().is_counted; }
int64_t bytes() { return HostMemory::instance().bytes; }
int64_t peak_bytes() { return HostMemory::instance().peak; }
void reset_peak() { HostMemory::instance().peak = HostMemory::instance().bytes.load(); }

}  // namespace host_memory
}  // namespace hsdp

#include "tests/testing/private_device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace testing_support {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current_device = 0;
std::atomic<int64_t> fallbacks{0};

// ---- guard: current device, and streams on which everything is done at once ----

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto former = getDevice();
    setDevice(device);
    return former;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kType && device.index() >= 0 && device.index() < kPrivateDevices, "no device ",
                device);
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(kPrivateDevices); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = &token_; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

 private:
  static c10::Device with_index(c10::Device device) {
    return device.has_index() ? device : c10::Device(kType, current_device);
  }
  static inline char token_ = 0;
};

// ---- hooks: what libtorch asks an accelerator in general ----

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  Hooks() {
    for (auto& generator : generators_) generator = at::make_generator<at::CPUGeneratorImpl>();
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(kPrivateDevices); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generators_.at(static_cast<size_t>(index < 0 ? current_device : index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }

 private:
  std::array<at::Generator, kPrivateDevices> generators_;
};

// ---- memory: the host's, counted by device ----

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device;
    if (bytes == 0) return {nullptr, nullptr, &release, {kType, index}};
    constexpr size_t alignment = 64;
    void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    TORCH_CHECK(data != nullptr, "out of memory");
    // Nothing may count on what fresh memory happens to hold.
    std::memset(data, 0x7f, bytes);
    add(index, static_cast<int64_t>(bytes));
    return {data, new Block{data, bytes, index}, &release, {kType, index}};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    using c10::CachingAllocator::StatType;
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard lock(mutex());
    auto& bytes = stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)];
    bytes.current = now().at(static_cast<size_t>(index));
    bytes.peak = peak().at(static_cast<size_t>(index));
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard lock(mutex());
    peak().at(static_cast<size_t>(index)) = now().at(static_cast<size_t>(index));
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
    c10::DeviceIndex index;
  };
  using Counts = std::array<int64_t, kPrivateDevices>;
  static std::mutex& mutex() {
    static auto* instance = new std::mutex;
    return *instance;
  }
  static Counts& now() {
    static Counts counts{};
    return counts;
  }
  static Counts& peak() {
    static Counts counts{};
    return counts;
  }
  static void add(c10::DeviceIndex index, int64_t bytes) {
    std::lock_guard lock(mutex());
    auto& used = now().at(static_cast<size_t>(index));
    used += bytes;
    auto& most = peak().at(static_cast<size_t>(index));
    most = std::max(most, used);
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    if (block == nullptr) return;
    add(block->index, -static_cast<int64_t>(block->bytes));
    std::free(block->data);
    delete block;
  }
};

Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

// ---- operators: making and viewing memory, copies, and the rest on the host ----

c10::DeviceGuard on_device(std::optional<c10::Device> device) {
  return c10::DeviceGuard(device && device->has_index() ? *device : c10::Device(kType, current_device));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const auto guard = on_device(device);
  return at::detail::empty_generic(sizes, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const auto guard = on_device(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto bytes = static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && bytes > storage->nbytes()) {
    const auto guard = on_device(self.device());
    auto larger = memory().allocate(bytes);
    if (storage->nbytes() > 0) std::memcpy(larger.mutable_get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(bytes);
  }
  return self;
}

// The same memory as the host sees it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool) {
  on_host(destination).copy_(on_host(self));
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return on_host(self).item(); }

at::Tensor on_host(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? on_host(*tensor) : at::Tensor();
}

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Three back_on(c10::Device device, const Three& results) {
  const auto moved = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(device) : tensor; };
  return {moved(std::get<0>(results)), moved(std::get<1>(results)), moved(std::get<2>(results))};
}

// Its schema does not say that it writes the running statistics, so that the fallback would lose them.
Three batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                 const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
                 const std::optional<at::Tensor>& variance, bool training, double momentum, double eps) {
  return back_on(input.device(), at::native_batch_norm(on_host(input), on_host(weight), on_host(bias), on_host(mean),
                                                       on_host(variance), training, momentum, eps));
}

// What libtorch calls on devices for which it has no convolution.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  return at::convolution(on_host(input), on_host(weight), on_host(bias), stride, padding, dilation, transposed,
                         output_padding, groups)
      .to(input.device());
}

Three convolution_backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                           at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                           at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  return back_on(input.device(), at::convolution_backward(on_host(gradient), on_host(input), on_host(weight),
                                                          at::IntArrayRef{weight.size(0)}, stride, padding, dilation,
                                                          transposed, output_padding, groups, mask));
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++fallbacks;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

void register_operators() {
  static auto* operators =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  operators->impl("empty.memory_format", empty);
  operators->impl("empty_strided", empty_strided);
  operators->impl("as_strided", [](const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                                   std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
  });
  operators->impl("view", [](const at::Tensor& self, at::IntArrayRef sizes) { return at::native::view(self, sizes); });
  operators->impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
    return at::native::_reshape_alias(self, sizes, strides);
  });
  operators->impl("unfold", [](const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
  operators->impl("set_.source_Storage_storage_offset", set_storage);
  operators->impl("resize_", resize);
  operators->impl("_copy_from", copy_from);
  operators->impl("_copy_from_and_resize", copy_from_and_resize);
  operators->impl("_local_scalar_dense", local_scalar);
  operators->impl("native_batch_norm", batch_norm);
  operators->impl("convolution_overrideable", convolution);
  operators->impl("convolution_backward_overrideable", convolution_backward);
  static auto* rest = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  rest->fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

void register_private_device() {
  static const bool once = [] {
    c10::register_privateuse1_backend("npu");
    static const c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    c10::SetAllocator(kType, &memory());
    register_operators();
    return true;
  }();
  (void)once;
}

int64_t private_bytes(c10::DeviceIndex index) { return memory().getDeviceStats(index).allocated_bytes[0].current; }

int64_t private_fallbacks() { return fallbacks; }

}  // namespace testing_support

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
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/testing/private_streams.h"

namespace testing_support {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current_device = 0;
std::atomic<int64_t> fallbacks{0};

// ---- guard: current device, and streams: recorded ones, or one on which everything is done at once ----

using recorder::is_recording;

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
    return is_recording() ? recorder::current_stream(with_index(device)) : getDefaultStream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    if (!is_recording()) return DeviceGuardImplInterface::getStreamFromGlobalPool(device, high_priority);
    return recorder::new_stream(with_index(device), high_priority ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    if (!is_recording()) return DeviceGuardImplInterface::getNewStream(device, priority);
    return recorder::new_stream(with_index(device), priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return is_recording() ? recorder::exchange_stream(stream) : getStream(stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(kPrivateDevices); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (is_recording()) return recorder::record(event, stream);
    *event = &token_;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (is_recording()) recorder::block(event, stream);
  }
  bool queryEvent(void* event) const override { return !is_recording() || recorder::query(event); }
  bool queryStream(const c10::Stream& stream) const override { return !is_recording() || recorder::query(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (is_recording()) recorder::wait(stream, "synchronize");
  }
  void synchronizeEvent(void* event) const override {
    if (is_recording()) recorder::wait(event);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    if (is_recording()) recorder::wait_device(device);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (is_recording()) recorder::destroy(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (is_recording()) recorder::record_stream(data.get(), stream);
  }

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
  bool isPinnedPtr(const void* data) const override { return is_recording() && recorder::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return is_recording() ? recorder::pinned_allocator() : PrivateUse1HooksInterface::getPinnedMemoryAllocator();
  }

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
    recorder::allocated(data, bytes, index, /*pinned=*/false);
    return {data, new Block{data, bytes, index}, &release, {kType, index}};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (is_recording()) recorder::record_stream(data.get(), stream);
  }
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
    recorder::released(block->data);
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

// One line of the log for an operator that the host has run for the device.
void note(const char* name, c10::Device device, const std::vector<at::Tensor>& reads,
          const std::vector<at::Tensor>& writes) {
  if (is_recording() && !recorder::Inside::is_active()) recorder::launch(name, device, reads, writes);
}

at::Tensor bytes_of(const c10::StorageImpl& storage, const void* data, size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)},
                       at::TensorOptions(at::kByte).device(storage.device()));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  if (self.sizes().equals(sizes)) return self;  // as it is, strides and all
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto bytes = static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && bytes > storage->nbytes()) {
    const auto guard = on_device(self.device());
    auto larger = memory().allocate(bytes);
    if (storage->nbytes() > 0) {
      const auto former = bytes_of(*storage, storage->data(), storage->nbytes());
      std::memcpy(larger.mutable_get(), storage->data(), storage->nbytes());
      note("aten::resize_", self.device(), {former}, {bytes_of(*storage, larger.get(), storage->nbytes())});
    }
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

// Between host and device, the copy is in order behind the current stream's work and the host goes on only where it
// may: with pinned memory that needs no conversion on the host.
void record_copy(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  const bool from_host = self.device().type() != kType, to_host = destination.device().type() != kType;
  const auto device = to_host ? self.device() : destination.device();
  const auto& host_side = from_host ? self : destination;
  const bool goes_on = non_blocking && host_side.is_contiguous() && recorder::is_pinned(host_side.storage().data()) &&
                       (to_host || self.scalar_type() == destination.scalar_type()) &&
                       self.sizes().equals(destination.sizes());
  const auto stream = recorder::current_stream(device);
  recorder::launch("aten::copy_", device, {self}, {destination});
  if ((!from_host && !to_host) || host_side.numel() == 0) return;
  if (!goes_on) {
    recorder::wait(stream, from_host ? "copy from the host" : "copy to the host");
  } else if (to_host) {
    recorder::deliver_later(stream, destination, destination.clone());
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  const bool record = is_recording() && !recorder::Inside::is_active();
  if (record) recorder::deliver({self, destination});
  {
    const recorder::Inside inside;
    on_host(destination).copy_(on_host(self));
  }
  if (record) {
    const recorder::Inside inside;
    record_copy(self, destination, non_blocking);
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  note("aten::item", self.device(), {self}, {});
  if (is_recording()) recorder::wait(recorder::current_stream(self.device()), "aten::item");
  const recorder::Inside inside;
  return on_host(self).item();
}

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
  const auto results = [&] {
    const recorder::Inside inside;
    return back_on(input.device(), at::native_batch_norm(on_host(input), on_host(weight), on_host(bias), on_host(mean),
                                                         on_host(variance), training, momentum, eps));
  }();
  const auto or_none = [](const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); };
  note("aten::native_batch_norm", input.device(), {input, or_none(weight), or_none(bias)},
       {std::get<0>(results), std::get<1>(results), std::get<2>(results), or_none(mean), or_none(variance)});
  return results;
}

// What libtorch calls on devices for which it has no convolution.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  const auto result = [&] {
    const recorder::Inside inside;
    return at::convolution(on_host(input), on_host(weight), on_host(bias), stride, padding, dilation, transposed,
                           output_padding, groups)
        .to(input.device());
  }();
  note("aten::convolution", input.device(), {input, weight, bias.value_or(at::Tensor())}, {result});
  return result;
}

Three convolution_backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                           at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                           at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const auto results = [&] {
    const recorder::Inside inside;
    return back_on(input.device(), at::convolution_backward(on_host(gradient), on_host(input), on_host(weight),
                                                            at::IntArrayRef{weight.size(0)}, stride, padding, dilation,
                                                            transposed, output_padding, groups, mask));
  }();
  note("aten::convolution_backward", input.device(), {gradient, input, weight},
       {std::get<0>(results), std::get<1>(results), std::get<2>(results)});
  return results;
}

// What an operator reads and writes by its schema, and whether the host has to know a result before it can go on.
struct Operands {
  std::vector<at::Tensor> reads, writes;
  std::optional<c10::Device> device;
  bool host_waits = false;

  void add(const c10::IValue& value, bool written) {
    auto& list = written ? writes : reads;
    const auto take = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device().type() != kType) return;
      device = tensor.device();
      const bool known = std::any_of(list.begin(), list.end(), [&](auto& one) { return one.is_same(tensor); });
      if (!known) list.push_back(tensor);
    };
    if (value.isTensor()) {
      take(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) take(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor) take(*tensor);
      }
    }
  }
};

bool depends_on_values(const c10::OperatorHandle& op, const Operands& operands) {
  static const std::set<std::string> counting{
      "aten::nonzero", "aten::masked_select", "aten::unique_consecutive", "aten::_unique2",
      "aten::_unique", "aten::unique_dim",    "aten::repeat_interleave",  "aten::bincount"};
  if (counting.contains(op.schema().name())) return true;
  const bool indexes = op.schema().name() == "aten::index" || op.schema().name() == "aten::_index_put_impl_";
  return indexes && std::any_of(operands.reads.begin() + 1, operands.reads.end(),
                                [](const at::Tensor& tensor) { return tensor.scalar_type() == at::kBool; });
}

void run_recorded(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Operands operands;
  const auto count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    operands.add(torch::jit::peek(*stack, i, count), alias != nullptr && alias->isWrite());
  }
  operands.host_waits = !operands.reads.empty() && depends_on_values(op, operands);
  recorder::deliver(operands.reads);
  {
    const recorder::Inside inside;
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  }
  const auto results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    const auto& result = torch::jit::peek(*stack, i, results);
    operands.add(result, true);
    operands.host_waits |= result.isBool() || result.isScalar();
  }
  if (!operands.device) return;
  note(schema.name().c_str(), *operands.device, operands.reads, operands.writes);
  if (operands.host_waits) recorder::wait(recorder::current_stream(*operands.device), schema.name().c_str());
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++fallbacks;
  if (is_recording() && !recorder::Inside::is_active()) return run_recorded(op, stack);
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

void register_private_device(PrivateStreams streams) {
  if (streams == PrivateStreams::recorded) recorder::start_recording();
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

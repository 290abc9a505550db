#include "tests/testing/private_streams.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "tests/testing/happens_before.h"
#include "tests/testing/private_device.h"

namespace testing_support {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local std::array<int64_t, kPrivateDevices> current{};
thread_local int inside = 0;
// Whether the thread gives work to streams. One that only asks how far they are is no part of the host's timeline.
thread_local bool works = false;

struct Block {
  uint64_t number;
  size_t bytes;
  bool pinned;
};

/// An event as the guard's callers hold it; `recording` numbers what was last recorded.
struct Event {
  uint64_t recording = 0;
  int64_t queries = 0;
};

/// Bytes that the host must not see yet.
struct Delivery {
  uint64_t block;
  Clocks::Clock after;
  void* destination;
  std::string bytes;
  void now() const { std::memcpy(destination, bytes.data(), bytes.size()); }
};

struct State {
  std::mutex mutex;
  StreamLog log;
  Clocks clocks;  // as the log has come so far
  std::map<uintptr_t, Block> blocks;
  uint64_t blocks_made = 0, events_made = 0;
  int64_t streams_made = 0;
  std::map<StreamName, int> priorities;
  std::vector<Delivery> deliveries;
  int64_t waits_until_dropped = -1;
  std::function<bool(int64_t)> query_policy;
  std::map<StreamName, uint32_t> stalled;  // from which tick on
  std::atomic<int> threads_seen{0};
};

State& state() {
  static auto* instance = new State;
  return *instance;
}
std::atomic<bool> recording{false};

int thread_number() {
  thread_local const int number = state().threads_seen++;
  return number;
}

// ---- under the lock ----

void append(State& s, LogEntry entry) {
  works = true;
  entry.label = LogLabel::current();
  entry.thread = thread_number();
  s.log.push_back(std::move(entry));
}

std::optional<std::pair<uintptr_t, Block>> find_block(const State& s, const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto after = s.blocks.upper_bound(address);
  if (after == s.blocks.begin()) return std::nullopt;
  const auto& [start, block] = *std::prev(after);
  if (address >= start + std::max<size_t>(block.bytes, 1)) return std::nullopt;
  return {{start, block}};
}

bool is_device(const at::Tensor& tensor) { return tensor.device().type() == kType; }

void append_ranges(const State& s, const at::Tensor& tensor, std::vector<ByteRange>& ranges) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  const void* data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  const auto found = find_block(s, data);
  if (!is_device(tensor) && (!found || !found->second.pinned)) return;
  const size_t item = tensor.element_size();
  const auto before = static_cast<size_t>(found ? reinterpret_cast<uintptr_t>(data) - found->first : 0);
  const auto more =
      byte_ranges(found ? found->second.number : 0, before + static_cast<size_t>(tensor.storage_offset()) * item,
                  tensor.sizes().vec(), tensor.strides().vec(), item);
  ranges.insert(ranges.end(), more.begin(), more.end());
}

bool never_ends(State& s, const Clocks::Clock& clock) {
  for (const auto& [stream, tick] : s.stalled) {
    if (Clocks::tick(clock, s.clocks.line_of(stream)) >= tick) return true;
  }
  return false;
}

void check_ends(State& s, const Clocks::Clock& clock, const char* what) {
  TORCH_CHECK(!never_ends(s, clock), "the host would wait for ever for ", what, ": work before it never ends");
}

void deliver_known(State& s) {
  std::erase_if(s.deliveries, [&](const Delivery& delivery) {
    if (!Clocks::covers(s.clocks.host(), delivery.after)) return false;
    delivery.now();
    return true;
  });
}

c10::Stream as_stream(c10::Device device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

// ---- pinned memory ----

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t alignment = 64;
    void* data = std::aligned_alloc(alignment, (std::max<size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
    TORCH_CHECK(data != nullptr, "out of memory");
    std::memset(data, 0x7f, bytes);
    recorder::allocated(data, bytes, 0, /*pinned=*/true);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* data) {
    recorder::released(data);
    std::free(data);
  }
};

// ---- what RecordFunction sees ----

// Whether the operator itself touches what its tensors hold: those that look at them in another way, and those made of
// others, do not.
bool touches_memory(const c10::OperatorName& name, const c10::FunctionSchema& schema) {
  static const std::set<std::string> composed{"aten::copy_", "aten::clone", "aten::equal", "aten::_to_copy"};
  static const std::set<std::string> handles{"aten::set_", "aten::resize_", "aten::pin_memory", "aten::_pin_memory",
                                             "aten::is_pinned"};
  if (handles.contains(name.name)) return false;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
  }
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  return op && (composed.contains(name.name) || op->hasKernelForDispatchKey(c10::DispatchKey::CPU));
}

void note_host_access(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  const auto schema = function.operator_schema();
  if (inside > 0 || !name || !schema) return;
  LogEntry entry{.kind = Logged::host_access, .name = name->name};
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto* alias = i < schema->arguments().size() ? schema->arguments()[i].alias_info() : nullptr;
    auto& list = alias != nullptr && alias->isWrite() ? entry.writes : entry.reads;
    const auto see = [&](const at::Tensor& tensor) {
      if (tensor.defined() && is_device(tensor)) return false;
      append_ranges(s, tensor, list);
      return true;
    };
    if (inputs[i].isTensor()) {
      if (!see(inputs[i].toTensor())) return;  // the device's to note
    } else if (inputs[i].isTensorList()) {
      for (const at::Tensor& tensor : inputs[i].toTensorList()) {
        if (!see(tensor)) return;
      }
    }
  }
  if ((entry.reads.empty() && entry.writes.empty()) || !touches_memory(*name, *schema)) return;
  s.clocks.host_access();
  append(s, std::move(entry));
}

struct SpanLabel final : at::ObserverContext {
  explicit SpanLabel(std::string text) : label(std::move(text)) {}
  LogLabel label;
};

// Others may end on another thread than they began on.
std::unique_ptr<at::ObserverContext> begin_span(const at::RecordFunction& function) {
  const std::string name = function.name();
  if (!name.starts_with("FSDP::")) return nullptr;
  return std::make_unique<SpanLabel>(name);
}

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  note_host_access(function);
  return nullptr;
}

}  // namespace

// ---- recorded ----

namespace recorded {

StreamLog log() {
  std::lock_guard lock(state().mutex);
  return state().log;
}

size_t log_size() {
  std::lock_guard lock(state().mutex);
  return state().log.size();
}

void note(std::string text) { recorder::add({.kind = Logged::note, .name = std::move(text)}); }

void watch_operators() {
  static const bool once = [] {
    at::addGlobalCallback(at::RecordFunctionCallback(begin_span).scopes({at::RecordScope::USER_SCOPE}));
    at::addGlobalCallback(
        at::RecordFunctionCallback(begin_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    return true;
  }();
  (void)once;
}

void drop_wait(int64_t n) {
  std::lock_guard lock(state().mutex);
  state().waits_until_dropped = n;
}

void set_query_policy(std::function<bool(int64_t nth)> policy) {
  std::lock_guard lock(state().mutex);
  state().query_policy = std::move(policy);
}

void stall(c10::Stream stream) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto name = recorder::name_of(stream);
  const auto line = s.clocks.line_of(name);
  s.stalled.try_emplace(name, Clocks::tick(s.clocks.at(name), line) + 1);
}

void resume() {
  std::lock_guard lock(state().mutex);
  state().stalled.clear();
}

bool is_stalled(const c10::Stream& stream) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  return never_ends(s, s.clocks.at(recorder::name_of(stream)));
}

int priority(const c10::Stream& stream) {
  std::lock_guard lock(state().mutex);
  const auto found = state().priorities.find(recorder::name_of(stream));
  return found == state().priorities.end() ? 0 : found->second;
}

}  // namespace recorded

// ---- recorder ----

namespace recorder {

void start_recording() { recording = true; }
bool is_recording() { return recording; }

StreamName name_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

c10::Stream current_stream(c10::Device device) {
  return as_stream(device, current.at(static_cast<size_t>(device.index())));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto former = current_stream(stream.device());
  current.at(static_cast<size_t>(stream.device_index())) = stream.id();
  return former;
}

c10::Stream new_stream(c10::Device device, int priority) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto stream = as_stream(device, ++s.streams_made);
  s.priorities[name_of(stream)] = priority;
  return stream;
}

void record(void** event, const c10::Stream& stream, const char* why) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  if (*event == nullptr) *event = new Event;
  auto& recorded = *static_cast<Event*>(*event);
  recorded = {.recording = ++s.events_made};
  s.clocks.record(name_of(stream), recorded.recording);
  append(s, {.kind = Logged::record, .name = why, .stream = name_of(stream), .event = recorded.recording});
}

void block(void* event, const c10::Stream& stream, const char* why) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  if (s.waits_until_dropped >= 0 && s.waits_until_dropped-- == 0) return;
  const auto number = static_cast<Event*>(event)->recording;
  s.clocks.wait(name_of(stream), number);
  append(s, {.kind = Logged::wait, .name = why, .stream = name_of(stream), .event = number});
}

bool query(void* event) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  auto& recorded = *static_cast<Event*>(event);
  const auto& clock = *s.clocks.recorded(recorded.recording);
  if (!works) return !never_ends(s, clock);
  ++recorded.queries;
  const bool known = Clocks::covers(s.clocks.host(), clock);
  const bool complete = known || (!never_ends(s, clock) && s.query_policy && s.query_policy(recorded.queries));
  append(s, {.kind = Logged::query, .event = recorded.recording, .answer = complete});
  if (complete && !known) {
    s.clocks.host_wait(clock);
    deliver_known(s);
  }
  return complete;
}

bool query(const c10::Stream& stream) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  return Clocks::covers(s.clocks.host(), s.clocks.at(name_of(stream)));
}

void destroy(void* event) noexcept { delete static_cast<Event*>(event); }

void wait(void* event) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto number = static_cast<Event*>(event)->recording;
  const auto& clock = *s.clocks.recorded(number);
  check_ends(s, clock, "an event");
  append(s, {.kind = Logged::host_wait_event, .event = number});
  s.clocks.host_wait(clock);
  deliver_known(s);
}

void wait(const c10::Stream& stream, const char* why) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto clock = s.clocks.at(name_of(stream));
  check_ends(s, clock, "a stream");
  append(s, {.kind = Logged::host_wait_stream, .name = why, .stream = name_of(stream)});
  s.clocks.host_wait(clock);
  deliver_known(s);
}

void wait_device(c10::DeviceIndex device) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  Clocks after = s.clocks;
  after.host_wait_device(device);
  check_ends(s, after.host(), "a device");
  append(s, {.kind = Logged::host_wait_device, .stream = {device, 0}});
  s.clocks.host_wait_device(device);
  deliver_known(s);
}

void record_stream(const void* data, const c10::Stream& stream) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto found = find_block(s, data);
  append(s, {.kind = Logged::record_stream, .stream = name_of(stream), .block = found ? found->second.number : 0});
}

void allocated(const void* data, size_t bytes, c10::DeviceIndex device, bool pinned) {
  if (!recording) return;
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto number = ++s.blocks_made;
  s.blocks[reinterpret_cast<uintptr_t>(data)] = {number, bytes, pinned};
  append(s, {.kind = Logged::allocate,
             .stream = name_of(current_stream({kType, device})),
             .block = number,
             .bytes = bytes,
             .pinned = pinned});
}

void released(const void* data) noexcept {
  if (!recording) return;
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto found = s.blocks.find(reinterpret_cast<uintptr_t>(data));
  if (found == s.blocks.end()) return;  // older than the recording
  const auto number = found->second.number;
  append(s, {.kind = Logged::release, .block = number});
  s.blocks.erase(found);
  std::erase_if(s.deliveries, [&](const Delivery& delivery) { return delivery.block == number; });
}

bool is_pinned(const void* data) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto found = find_block(s, data);
  return found && found->second.pinned;
}

c10::Allocator* pinned_allocator() {
  static auto* instance = new PinnedMemory;
  return instance;
}

Inside::Inside() { ++inside; }
Inside::~Inside() { --inside; }
bool Inside::is_active() { return inside > 0; }

std::vector<ByteRange> ranges(const std::vector<at::Tensor>& tensors) {
  std::vector<ByteRange> result;
  std::lock_guard lock(state().mutex);
  for (const auto& tensor : tensors) append_ranges(state(), tensor, result);
  return result;
}

bool are_live(const std::vector<ByteRange>& ranges) {
  std::lock_guard lock(state().mutex);
  std::set<uint64_t> live;
  for (const auto& [start, block] : state().blocks) live.insert(block.number);
  return std::all_of(ranges.begin(), ranges.end(), [&](const ByteRange& range) { return live.contains(range.block); });
}

void launch(std::string name, c10::Device device, const std::vector<at::Tensor>& reads,
            const std::vector<at::Tensor>& writes) {
  add({.kind = Logged::launch,
       .name = std::move(name),
       .stream = name_of(current_stream(device)),
       .reads = ranges(reads),
       .writes = ranges(writes)});
}

void add(LogEntry entry) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  if (entry.kind == Logged::launch || entry.kind == Logged::collective) s.clocks.launch(entry.stream);
  append(s, std::move(entry));
}

void deliver_later(const c10::Stream& stream, const at::Tensor& destination, const at::Tensor& result) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto found = find_block(s, destination.const_data_ptr());
  TORCH_INTERNAL_ASSERT(found && found->second.pinned);
  std::memset(destination.mutable_data_ptr(), 0x7f, destination.nbytes());
  s.deliveries.push_back({found->second.number, s.clocks.at(name_of(stream)), destination.mutable_data_ptr(),
                          std::string(static_cast<const char*>(result.const_data_ptr()), result.nbytes())});
}

void deliver(const std::vector<at::Tensor>& tensors) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  if (s.deliveries.empty()) return;
  std::vector<ByteRange> touched;
  for (const auto& tensor : tensors) append_ranges(s, tensor, touched);
  std::erase_if(s.deliveries, [&](const Delivery& delivery) {
    if (std::none_of(touched.begin(), touched.end(), [&](auto& range) { return range.block == delivery.block; })) {
      return false;
    }
    delivery.now();
    return true;
  });
}

}  // namespace recorder
}  // namespace testing_support

#include "hsdp/comm_streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "hsdp/host.h"
#include "hsdp/wait_on_host.h"

namespace hsdp {
namespace {

std::optional<c10::Stream> high_priority_stream(c10::Device device) {
  try {
    // Devices that have priorities count downwards; the others ignore it.
    return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, /*priority=*/-1);
  } catch (const c10::Error&) {
    return std::nullopt;  // no such device here, or one without streams
  }
}

}  // namespace

const CommStreams* CommStreams::of(c10::Device device) {
  if (device.type() == kHost || !c10::impl::hasDeviceGuardImpl(device.type())) return nullptr;
  static std::mutex mutex;
  // Leaked: streams may be asked for until the process ends.
  static auto* known = new std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::unique_ptr<const CommStreams>>;
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!device.has_index()) device = guard.getDevice();
  std::lock_guard lock(mutex);
  const auto [entry, is_new] = known->try_emplace({device.type(), device.index()});
  if (is_new) {
    if (const auto gather = high_priority_stream(device)) {
      const auto reduce_scatter = high_priority_stream(device), all_reduce = high_priority_stream(device);
      entry->second.reset(new CommStreams(*gather, reduce_scatter.value(), all_reduce.value()));
    }
  }
  return entry->second.get();
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void order_after(const c10::Stream& later, const c10::Stream& earlier) {
  if (later == earlier) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

OnStream::OnStream(const c10::Stream* stream) : OnStream(stream, std::nullopt) {}

OnStream::OnStream(const c10::Stream* stream, const std::optional<c10::Stream>& earlier) {
  if (stream == nullptr) return;
  order_after(*stream, earlier ? *earlier : current_stream(stream->device()));
  guard_.emplace(*stream);
}

StreamMark::StreamMark(const c10::Stream& stream) : event_(stream.device_type()), device_(stream.device()) {
  event_.record(stream);
}

void wait_on_host(StreamMark& mark, const dtensor::DeviceMesh& mesh) {
  while (!mark.is_completed()) {
    for (int64_t axis = 0; axis < mesh.ndim() && mesh.has_groups(); ++axis) {
      if (mesh.size(axis) == 1) continue;
      // An empty group communicates nothing, and throws when a collective before has failed.
      mesh.communicator(axis).start_group();
      mesh.communicator(axis).end_group()->wait();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void StreamMark::wait() { event_.block(current_stream(device_)); }

}  // namespace hsdp

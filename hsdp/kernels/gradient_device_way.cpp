// The gradient kernels by launches of tables.
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>

#include "hsdp/kernels/gradient_kernel_ways.h"

namespace hsdp::kernels {
namespace {

// Blocks that every device takes in one launch.
constexpr int64_t kMostChunks = std::numeric_limits<int32_t>::max();

int64_t quotient_up(int64_t dividend, int64_t divisor) { return (dividend + divisor - 1) / divisor; }

template <typename T>
int32_t lead(Dtype dtype, const T* data, int32_t lanes) {
  return with_type(dtype, [&](auto type) { return lead_of<decltype(type)>(data, lanes); });
}

// Launches a table when it is full, and at the end.
template <typename Entry, typename Launch>
class Launcher {
 public:
  explicit Launcher(const Launch& launch) : launch_(launch) {}

  void add(Entry entry, int64_t positions, int64_t chunk) {
    const auto chunks = quotient_up(positions, chunk);
    TORCH_INTERNAL_ASSERT(chunks <= kMostChunks);
    if (table_.entries == table_.kCapacity || table_.chunks + chunks > kMostChunks) finish();
    entry.first_chunk = table_.chunks;
    table_.entry[table_.entries++] = entry;
    table_.chunks += static_cast<uint32_t>(chunks);
  }

  void finish() {
    if (table_.entries > 0) launch_(table_);
    table_.entries = table_.chunks = 0;
  }

 private:
  const Launch& launch_;
  Table<Entry> table_;
};

}  // namespace

void land_by_tables(const DeviceKernels& kernels, c10::ArrayRef<Landing> landings, double divisor) {
  const auto source = dtype_of(landings.front().source);
  const auto destination = dtype_of(landings.front().destination);
  const auto device = landings.front().source.device();
  const auto lanes = lanes_of(size_of(source), size_of(destination));
  const auto launch = [&](const LandTable& table) { kernels.land(table, source, destination, divisor, device); };
  Launcher<LandEntry, decltype(launch)> launcher(launch);
  for (const auto& landing : landings) {
    const auto numel = landing.source.numel();
    if (numel == 0) continue;
    LandEntry entry{};
    entry.destination = landing.destination.mutable_data_ptr();
    entry.source = landing.source.const_data_ptr();
    entry.numel = numel;
    entry.accumulate = landing.accumulate ? 1 : 0;
    launcher.add(entry, numel + lead(destination, entry.destination, lanes), chunk_of(lanes));
  }
  launcher.finish();
}

void pack_by_tables(const DeviceKernels& kernels, c10::ArrayRef<Packing> packings, double divisor) {
  const auto from = dtype_of(packings.front().whole);
  const auto to = dtype_of(packings.front().rows);
  const auto device = packings.front().whole.device();
  const auto lanes = lanes_of(size_of(from), size_of(to));
  const auto launch = [&](const PackTable& table) { kernels.pack(table, from, to, divisor, device); };
  Launcher<PackEntry, decltype(launch)> launcher(launch);
  for (const auto& [whole, rows] : packings) {
    if (rows.numel() == 0) continue;
    PackEntry entry{};
    entry.rows = rows.mutable_data_ptr();
    entry.whole = whole.const_data_ptr();
    entry.numel = whole.numel();
    entry.length = rows.size(1);
    entry.stride = rows.stride(0);
    TORCH_INTERNAL_ASSERT(rows.size(0) <= std::numeric_limits<uint32_t>::max());
    entry.ranks = static_cast<uint32_t>(rows.size(0));
    // Rows that do not begin on a vector reach into one more.
    const bool aligned = lead(to, entry.rows, lanes) == 0 && (entry.ranks == 1 || entry.stride % lanes == 0);
    entry.pitch = quotient_up(entry.length + (aligned ? 0 : lanes - 1), lanes) * lanes;
    launcher.add(entry, entry.ranks * entry.pitch, chunk_of(lanes));
  }
  launcher.finish();
}

}  // namespace hsdp::kernels

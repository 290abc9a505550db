#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hsdp/kernels/scalars.h"

/// What one launch works through, and what each thread of it does: plain functions of block and thread, which a test
/// runs on the host as they are. Tables are passed by value, so that nothing is read from the host after the launch.
///
/// A thread handles kUnroll vectors of lanes, a block of kThreads threads a chunk. Positions of a tensor are counted
/// from the address at or below its beginning that is a multiple of a vector, so that what is stored is aligned
/// wherever the tensor begins; lanes of a vector that lie outside of the tensor are left alone.
namespace hsdp::kernels {

inline constexpr int32_t kThreads = 256;
inline constexpr int32_t kUnroll = 2;
inline constexpr int64_t kVectorBytes = 16;

/// Lanes of a vector: 16 bytes of the larger dtype.
HSDP_HOST_DEVICE_CONSTANT int32_t lanes_of(int64_t one_size, int64_t other_size) {
  return static_cast<int32_t>(kVectorBytes / (one_size > other_size ? one_size : other_size));
}

/// Elements of a chunk.
HSDP_HOST_DEVICE_CONSTANT int64_t chunk_of(int32_t lanes) { return int64_t{kThreads} * kUnroll * lanes; }

struct LandEntry {
  void* destination;
  const void* source;
  int64_t numel;
  uint32_t first_chunk;  // of this entry among all chunks, which are the blocks of the launch
  uint32_t accumulate;
};

struct PackEntry {
  void* rows;
  const void* whole;
  int64_t numel;   // of whole
  int64_t length;  // of a row
  int64_t stride;  // between the beginnings of two rows, in elements
  int64_t pitch;   // positions of a row: a multiple of the lanes
  uint32_t first_chunk;
  uint32_t ranks;  // rows
};

/// With a Scale no more than 4 KiB, which every device takes.
template <typename Entry>
struct Table {
  static constexpr uint32_t kCapacity = static_cast<uint32_t>((4096 - 32) / sizeof(Entry));
  uint32_t entries = 0;
  uint32_t chunks = 0;
  Entry entry[kCapacity];
};

using LandTable = Table<LandEntry>;
using PackTable = Table<PackEntry>;
static_assert(sizeof(LandTable) + sizeof(Scale<double>) <= 4096);
static_assert(sizeof(PackTable) + sizeof(Scale<double>) <= 4096);

/// Elements between `data` and the aligned address at or below it.
template <typename T>
HSDP_HOST_DEVICE int32_t lead_of(const void* data, int32_t lanes) {
  return static_cast<int32_t>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % static_cast<uint32_t>(lanes));
}

template <typename T, int32_t kLanes>
struct alignas(sizeof(T) * kLanes) Lanes {
  T lane[kLanes];
};

template <typename T, int32_t kLanes>
HSDP_HOST_DEVICE bool is_aligned(const T* data) {
  return reinterpret_cast<uintptr_t>(data) % sizeof(Lanes<T, kLanes>) == 0;
}

/// In one access each. On the host, where a wrong address would go unnoticed, it ends the process.
template <typename T, int32_t kLanes>
HSDP_HOST_DEVICE void load_vector(const T* from, Lanes<T, kLanes>& lanes) {
#ifdef HSDP_ON_DEVICE
  lanes = *reinterpret_cast<const Lanes<T, kLanes>*>(from);
#else
  if (!is_aligned<T, kLanes>(from)) __builtin_trap();
  __builtin_memcpy(&lanes, from, sizeof(lanes));
#endif
}

template <typename T, int32_t kLanes>
HSDP_HOST_DEVICE void store_vector(T* to, const Lanes<T, kLanes>& lanes) {
#ifdef HSDP_ON_DEVICE
  // Of an assignment compilers make one access for each lane.
  constexpr size_t kWords = sizeof(lanes) / sizeof(uint32_t);
  uint32_t word[kWords];
  __builtin_memcpy(word, &lanes, sizeof(lanes));
  const size_t address = __cvta_generic_to_global(to);
  if constexpr (kWords == 4) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(word[0]), "r"(word[1]) : "memory");
  } else {
    static_assert(kWords == 1);
    asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(word[0]) : "memory");
  }
#else
  if (!is_aligned<T, kLanes>(to)) __builtin_trap();
  __builtin_memcpy(to, &lanes, sizeof(lanes));
#endif
}

/// The last entry that begins at or before `block`.
template <typename Entry>
HSDP_HOST_DEVICE const Entry& entry_of(const Table<Entry>& table, uint32_t block) {
  uint32_t low = 0;
  uint32_t high = table.entries;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (table.entry[middle].first_chunk <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return table.entry[low];
}

template <typename S, typename D>
HSDP_HOST_DEVICE void land_thread(const LandTable& table, const Scale<Wide<S>>& scale, uint32_t block,
                                  uint32_t thread) {
  constexpr int32_t kLanes = lanes_of(sizeof(S), sizeof(D));
  constexpr int64_t kStep = int64_t{kThreads} * kLanes;
  const LandEntry& entry = entry_of(table, block);
  D* const destination = static_cast<D*>(entry.destination);
  const S* const source = static_cast<const S*>(entry.source);
  const int64_t numel = entry.numel;
  const bool accumulate = entry.accumulate != 0;
  const int64_t begin = static_cast<int64_t>(block - entry.first_chunk) * chunk_of(kLanes) +
                        static_cast<int64_t>(thread) * kLanes - lead_of<D>(destination, kLanes);

  // All loads before the first store, which might be to the same memory for all that a compiler knows.
  Lanes<S, kLanes> given[kUnroll];
  Lanes<D, kLanes> result[kUnroll];
  HSDP_UNROLL
  for (int32_t u = 0; u < kUnroll; ++u) {
    const int64_t at = begin + u * kStep;
    if (at < 0 || at + kLanes > numel) continue;
    if (is_aligned<S, kLanes>(source + at)) {
      load_vector(source + at, given[u]);
    } else {
      HSDP_UNROLL
      for (int32_t i = 0; i < kLanes; ++i) given[u].lane[i] = source[at + i];
    }
    if (accumulate) load_vector(destination + at, result[u]);
  }
  HSDP_UNROLL
  for (int32_t u = 0; u < kUnroll; ++u) {
    const int64_t at = begin + u * kStep;
    if (at < 0 || at + kLanes > numel) continue;
    HSDP_UNROLL
    for (int32_t i = 0; i < kLanes; ++i) {
      result[u].lane[i] = landed<S, D>(given[u].lane[i], result[u].lane[i], accumulate, scale, scale.by_factor);
    }
    store_vector(destination + at, result[u]);
  }
  // The first and the last vector of a tensor may be in part outside of it.
  HSDP_NO_UNROLL
  for (int32_t u = 0; u < kUnroll; ++u) {
    const int64_t at = begin + u * kStep;
    if (at >= 0 && at + kLanes <= numel) continue;
    HSDP_NO_UNROLL
    for (int64_t i = at < 0 ? 0 : at; i < at + kLanes && i < numel; ++i) {
      destination[i] = landed<S, D>(source[i], destination[i], accumulate, scale, scale.by_factor);
    }
  }
}

/// Where a vector lies in the rows.
struct RowPlace {
  int64_t row;
  int64_t column;  // of the first lane; before the row's beginning where that is not aligned
  int64_t at;      // the first lane in `whole`
  bool is_whole;   // all lanes are elements of `whole`, or all are padding
};

/// Row and position in it of a block's first vector.
struct RowStart {
  int64_t row;
  int64_t position;
};

/// The place of the block's vector `index`.
template <typename D, int32_t kLanes>
HSDP_HOST_DEVICE RowPlace place_of(const PackEntry& entry, const RowStart& first, uint32_t index) {
  int64_t row = first.row;
  int64_t position = first.position + int64_t{index} * kLanes;
  if (entry.pitch >= chunk_of(kLanes)) {
    if (position >= entry.pitch) {
      position -= entry.pitch;
      ++row;
    }
  } else {
    // Below twice a chunk.
    const uint32_t rows = static_cast<uint32_t>(position) / static_cast<uint32_t>(entry.pitch);
    row += rows;
    position -= rows * entry.pitch;
  }
  if (row >= entry.ranks) return {row, 0, 0, false};
  const int64_t column = position - lead_of<D>(static_cast<D*>(entry.rows) + row * entry.stride, kLanes);
  const int64_t at = row * entry.length + column;
  const bool in_row = column >= 0 && column + kLanes <= entry.length;
  return {row, column, at, in_row && (at + kLanes <= entry.numel || at >= entry.numel)};
}

template <typename S, typename D>
HSDP_HOST_DEVICE void pack_thread(const PackTable& table, const Scale<Wide<D>>& scale, uint32_t block,
                                  uint32_t thread) {
  constexpr int32_t kLanes = lanes_of(sizeof(S), sizeof(D));
  const PackEntry& entry = entry_of(table, block);
  const S* const whole = static_cast<const S*>(entry.whole);
  const int64_t start = static_cast<int64_t>(block - entry.first_chunk) * chunk_of(kLanes);
  const RowStart first{start / entry.pitch, start % entry.pitch};

  Lanes<S, kLanes> given[kUnroll];
  HSDP_UNROLL
  for (int32_t u = 0; u < kUnroll; ++u) {
    const auto place = place_of<D, kLanes>(entry, first, thread + u * kThreads);
    if (!place.is_whole || place.at >= entry.numel) continue;
    const S* const from = whole + place.at;
    if (is_aligned<S, kLanes>(from)) {
      load_vector(from, given[u]);
    } else {
      HSDP_UNROLL
      for (int32_t i = 0; i < kLanes; ++i) given[u].lane[i] = from[i];
    }
  }
  HSDP_UNROLL
  for (int32_t u = 0; u < kUnroll; ++u) {
    const auto place = place_of<D, kLanes>(entry, first, thread + u * kThreads);
    if (!place.is_whole) continue;
    Lanes<D, kLanes> result{};
    if (place.at < entry.numel) {
      HSDP_UNROLL
      for (int32_t i = 0; i < kLanes; ++i) {
        result.lane[i] = packed<S, D>(given[u].lane[i], scale, scale.by_factor);
      }
    }
    store_vector(static_cast<D*>(entry.rows) + place.row * entry.stride + place.column, result);
  }
  // Where a row begins or ends, and where the padding begins.
  HSDP_NO_UNROLL
  for (int32_t u = 0; u < kUnroll; ++u) {
    const auto place = place_of<D, kLanes>(entry, first, thread + u * kThreads);
    if (place.is_whole || place.row >= entry.ranks) continue;
    D* const row = static_cast<D*>(entry.rows) + place.row * entry.stride;
    HSDP_NO_UNROLL
    for (int32_t i = 0; i < kLanes; ++i) {
      const int64_t column = place.column + i;
      if (column < 0 || column >= entry.length) continue;
      const int64_t at = place.at + i;
      row[column] = at < entry.numel ? packed<S, D>(whole[at], scale, scale.by_factor) : D{};
    }
  }
}

/// Thread i of 32 writes byte i, so that the address may be any.
struct Words {
  int64_t word[4];
};

HSDP_HOST_DEVICE void words_thread(uint8_t* bytes, const Words& words, uint32_t thread) {
  bytes[thread] = static_cast<uint8_t>(static_cast<uint64_t>(words.word[thread / 8]) >> (8 * (thread % 8)));
}

}  // namespace hsdp::kernels

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dtensor {

/// FNV-1a over words of 8 bytes, for ranks that only have to notice that they differ. `hash` is that of the bytes
/// before.
inline uint64_t hash_bytes(const void* bytes, size_t count, uint64_t hash = 14695981039346656037ull) {
  constexpr uint64_t kPrime = 1099511628211ull;
  const auto* at = static_cast<const unsigned char*>(bytes);
  for (; count >= sizeof(uint64_t); at += sizeof(uint64_t), count -= sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, at, sizeof(word));
    hash = (hash ^ word) * kPrime;
    hash ^= hash >> 32;  // Else high bits of a word would never reach the low ones.
  }
  for (; count > 0; ++at, --count) hash = (hash ^ *at) * kPrime;
  return hash;
}

}  // namespace dtensor

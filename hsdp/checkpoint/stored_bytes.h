#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace hsdp {

/// Numbers and texts as bytes, for a rank of the same build to read back in the same order.
class BytesWriter {
 public:
  void number(uint64_t value) { append(&value, sizeof(value)); }
  void text(const std::string& value) {
    number(value.size());
    append(value.data(), value.size());
  }
  template <class Integer>
  void numbers(const std::vector<Integer>& values) {
    static_assert(sizeof(Integer) == sizeof(uint64_t));
    number(values.size());
    append(values.data(), values.size() * sizeof(Integer));
  }
  std::string take() { return std::move(bytes_); }

 private:
  void append(const void* bytes, size_t count) { bytes_.append(static_cast<const char*>(bytes), count); }

  std::string bytes_;
};

/// `bytes` must outlive it.
class BytesReader {
 public:
  explicit BytesReader(const std::string& bytes) : bytes_(bytes) {}

  uint64_t number() {
    uint64_t value = 0;
    std::memcpy(&value, next(sizeof(value)), sizeof(value));
    return value;
  }
  std::string text() {
    const auto count = number();
    return {next(count), count};
  }
  template <class Integer>
  std::vector<Integer> numbers() {
    static_assert(sizeof(Integer) == sizeof(uint64_t));
    std::vector<Integer> values(number());
    if (!values.empty())
      std::memcpy(values.data(), next(values.size() * sizeof(Integer)), values.size() * sizeof(Integer));
    return values;
  }

 private:
  const char* next(size_t count) {
    TORCH_INTERNAL_ASSERT(count <= bytes_.size() - position_);
    const auto* at = bytes_.data() + position_;
    position_ += count;
    return at;
  }

  const std::string& bytes_;
  size_t position_ = 0;
};

}  // namespace hsdp

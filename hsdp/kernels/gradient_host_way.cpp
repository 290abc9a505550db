// The gradient kernels on the host's memory.
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "hsdp/kernels/gradient_kernel_ways.h"
#include "hsdp/kernels/host_passes.h"

namespace hsdp::kernels {
namespace {

// Elements that are worth a thread.
constexpr int64_t kTaskElements = 65536;

// Stretches of several lines of elements, for the threads that operators run on.
class Stretches {
 public:
  void add_line(int64_t length) {
    elements_ += length;
    lengths_.push_back(length);
    first_.push_back(first_.back() + (length + kTaskElements - 1) / kTaskElements);
  }

  // Calls function(line, begin, end) for stretches that cover all lines.
  template <typename Function>
  void for_each(const Function& function) const {
    const auto run = [&](int64_t task) {
      const auto next = std::upper_bound(first_.begin(), first_.end(), task);
      const auto line = static_cast<size_t>(next - first_.begin()) - 1;
      const auto begin = (task - first_[line]) * kTaskElements;
      function(line, begin, std::min(lengths_[line], begin + kTaskElements));
    };
    const auto tasks = first_.back();
    if (elements_ <= kTaskElements || at::get_num_threads() == 1 || at::in_parallel_region()) {
      for (size_t line = 0; line < lengths_.size(); ++line) function(line, int64_t{0}, lengths_[line]);
      return;
    }
    // at::parallel_for is serial in code that is compiled without OpenMP; an iterator of libtorch is not.
    auto marks = at::empty({tasks}, at::kByte);
    auto iterator = at::TensorIterator::nullary_op(marks);
    const auto* const base = static_cast<const char*>(marks.const_data_ptr());
    iterator.for_each(
        [&](char** data, const int64_t* strides, int64_t inner, int64_t outer) {
          for (int64_t j = 0; j < outer; ++j) {
            for (int64_t i = 0; i < inner; ++i) run(data[0] + j * strides[1] + i * strides[0] - base);
          }
        },
        /*grain_size=*/1);
  }

 private:
  int64_t elements_ = 0;
  std::vector<int64_t> lengths_;
  std::vector<int64_t> first_{0};  // task of each line, and their number
};

}  // namespace

void land_on_host(c10::ArrayRef<Landing> landings, double divisor) {
  const auto source = dtype_of(landings.front().source);
  const auto destination = dtype_of(landings.front().destination);
  const HostPass overwriting = host_land_pass(source, destination, false, divisor);
  const HostPass adding = host_land_pass(source, destination, true, divisor);
  Stretches stretches;
  for (const auto& landing : landings) stretches.add_line(landing.source.numel());
  stretches.for_each([&](size_t line, int64_t begin, int64_t end) {
    const auto& landing = landings[line];
    auto* const to = static_cast<char*>(landing.destination.mutable_data_ptr());
    const auto* const from = static_cast<const char*>(landing.source.const_data_ptr());
    (landing.accumulate ? adding : overwriting)(to + begin * size_of(destination), from + begin * size_of(source),
                                                end - begin, divisor);
  });
}

void pack_on_host(c10::ArrayRef<Packing> packings, double divisor) {
  const auto from_dtype = dtype_of(packings.front().whole);
  const auto to_dtype = dtype_of(packings.front().rows);
  const HostPass pass = host_pack_pass(from_dtype, to_dtype, divisor);
  Stretches stretches;
  for (const auto& packing : packings) stretches.add_line(packing.rows.numel());
  // The rows are read as one line.
  stretches.for_each([&](size_t line, int64_t begin, int64_t end) {
    const auto& whole = packings[line].whole;
    const auto& rows = packings[line].rows;
    const auto numel = whole.numel();
    const auto length = rows.size(1);
    const auto stride = rows.stride(0);
    const auto* const from = static_cast<const char*>(whole.const_data_ptr());
    auto* const to = static_cast<char*>(rows.mutable_data_ptr());
    for (int64_t at = begin; at < end;) {
      const auto column = at % length;
      const auto count = std::min(length - column, end - at);
      const auto present = std::clamp<int64_t>(numel - at, 0, count);
      auto* const row = to + (at / length * stride + column) * size_of(to_dtype);
      if (present > 0) pass(row, from + at * size_of(from_dtype), present, divisor);
      std::memset(row + present * size_of(to_dtype), 0, static_cast<size_t>((count - present) * size_of(to_dtype)));
      at += count;
    }
  });
}

void write_words_on_host(const at::Tensor& bytes, const Words& words) {
  std::memcpy(bytes.mutable_data_ptr(), &words, sizeof(words));
}

}  // namespace hsdp::kernels

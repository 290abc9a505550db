#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "hsdp/kernels/gradient_kernels.h"

/// The tests of the gradient kernels, for every way to carry them out: a file that includes this one instantiates the
/// suite GradientKernels with its ways. What is expected is what operators of libtorch make of the same numbers on the
/// host.
namespace testing_support {

namespace kernels = hsdp::kernels;

struct Way {
  std::string name;
  std::function<c10::Device()> device;  // that the tensors are on
  std::function<void(c10::ArrayRef<kernels::Landing>, double)> land = kernels::land_gradients;
  std::function<void(c10::ArrayRef<kernels::Packing>, double)> pack = kernels::pack_gradients;
  std::function<void(const at::Tensor&, const std::array<int64_t, 4>&)> write_words = kernels::write_words;
};

inline std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.name; }

inline constexpr at::ScalarType kGradientDtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
inline constexpr double kDivisors[] = {1, 2, 3, 7, 1e-3};

/// Numbers of all magnitudes, and among them those on which roundings and ranges turn. Other ones for another seed.
inline at::Tensor numbers(int64_t count, at::ScalarType dtype, int64_t seed) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  static const std::vector<double> special{
      0.0, -0.0, infinity, -infinity, std::numeric_limits<double>::quiet_NaN(),
      // denormal in float and in double; the least of half, its halves, and between
      1e-40, -1.4e-45, 1e-310, 0x1p-24, 0x1p-25, -0x1.8p-24, 0x1.000002p-25, 0x1.ffcp-15, 0x1p-14, 0x1p-126, 0x1p-133,
      // the largest of half, what rounds to it, and what does not
      65504, 65519.99, 65520, -65536, 131040,
      // the largest of bfloat16 and float, and what leaves their range
      0x1.fep127, 0x1.ffp127, 0x1.fffffep127, -0x1.ffffffp127, 1e300,
      // ties of half, bfloat16 and float
      1 + 0x1p-11, 1 + 0x1.8p-10, 1 + 0x1p-8, 1 + 0x1.8p-7, 1 + 0x1p-24, 1 + 0x1.8p-23, -1 - 0x1p-8};
  constexpr int64_t available = 1 << 21;
  static const at::Tensor all = [] {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{5});
    const auto exponents = at::rand({available}, generator, at::kDouble).mul(50).sub(30).floor();
    const auto mantissas = at::rand({available}, generator, at::kDouble).mul(4).sub(2);
    const auto which = at::randint(6 * static_cast<int64_t>(special.size()), {available}, generator, at::kLong);
    const auto specials = at::tensor(special, at::kDouble);
    const auto last = static_cast<int64_t>(special.size()) - 1;
    return at::where(which.le(last), specials.index_select(0, which.clamp_max(last)), mantissas.mul(exponents.exp2()));
  }();
  TORCH_CHECK(count <= available / 2, count);
  return all.narrow(0, seed * 7919 % (available / 2), count).to(dtype, false, true);
}

/// Bits as numbers, those of all NaNs the same.
inline at::Tensor bits_of(const at::Tensor& tensor) {
  const auto host = tensor.to(at::kCPU).contiguous();
  const auto size = host.element_size();
  const auto bits = host.view(size == 8 ? at::kLong : size == 4 ? at::kInt : at::kShort).to(at::kLong);
  return bits.masked_fill(host.isnan(), -1);
}

inline void expect_same_bits(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(found.numel(), expected.numel()) << what;
  const auto differ = bits_of(found).ne(bits_of(expected)).view({-1}).nonzero();
  if (differ.numel() == 0) return;
  const auto at = differ[0].item<int64_t>();
  ADD_FAILURE() << what << ": " << differ.numel() << " of " << found.numel() << " differ, the first at " << at << ": "
                << found.to(at::kCPU).reshape({-1})[at].to(at::kDouble).item<double>() << ", expected "
                << expected.reshape({-1})[at].to(at::kDouble).item<double>();
}

/// One stretch of memory that tensors are cut out of, at offsets that are anything but round, with numbers between them
/// that nobody may touch.
class Memory {
 public:
  Memory(at::ScalarType dtype, uint32_t seed) : dtype_(dtype), random_(seed), seed_(seed) {}
  /// Its offset.
  int64_t reserve(int64_t count) {
    const int64_t offset = end_ + random_() % 10;
    end_ = offset + count;
    return offset;
  }
  /// The numbers, on the host.
  at::Tensor fill() const { return numbers(end_ + 16, dtype_, seed_); }

 private:
  at::ScalarType dtype_;
  std::mt19937 random_;
  uint32_t seed_;
  int64_t end_ = 0;
};

inline std::string describe(at::ScalarType from, at::ScalarType to, double divisor) {
  return std::string(c10::toString(from)) + " to " + c10::toString(to) + " by " + std::to_string(divisor);
}

class GradientKernels : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    at::set_num_threads(1);  // idle ones would wait by spinning
    const auto device = GetParam().device();
    if (IsSkipped()) return;
    device_ = std::make_unique<c10::Device>(device);
  }

  at::Tensor on_device(const at::Tensor& tensor) const {
    return tensor.to(*device_, tensor.scalar_type(), false, true);
  }

  // Lands tensors of `sizes` cut out of memory, each overwriting or adding, and compares all of the memory afterwards.
  void land_and_compare(const std::vector<int64_t>& sizes, at::ScalarType from, at::ScalarType to, double divisor,
                        uint32_t seed) {
    Memory source_memory(from, seed), destination_memory(to, seed + 1);
    std::vector<int64_t> source_offsets, destination_offsets;
    for (const auto size : sizes) {
      source_offsets.push_back(source_memory.reserve(size));
      destination_offsets.push_back(destination_memory.reserve(size));
    }
    const auto source = source_memory.fill();
    const auto expected = destination_memory.fill();
    const auto device_source = on_device(source);
    const auto device_destination = on_device(expected);
    std::vector<kernels::Landing> landings;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const bool accumulate = (i + seed) % 2 == 0;
      landings.push_back({device_destination.narrow(0, destination_offsets[i], sizes[i]),
                          device_source.narrow(0, source_offsets[i], sizes[i]), accumulate});
      const auto quotient = source.narrow(0, source_offsets[i], sizes[i]).div(divisor).to(to);
      const auto destination = expected.narrow(0, destination_offsets[i], sizes[i]);
      accumulate ? destination.add_(quotient) : destination.copy_(quotient);
    }
    GetParam().land(landings, divisor);
    expect_same_bits(device_destination, expected, describe(from, to, divisor));
    expect_same_bits(device_source, source, "what is only read");
  }

  struct Rows {
    int64_t numel;
    int64_t ranks;
    int64_t length;
    int64_t stride;
  };

  void pack_and_compare(const std::vector<Rows>& cases, at::ScalarType from, at::ScalarType to, double divisor,
                        uint32_t seed) {
    Memory whole_memory(from, seed), rows_memory(to, seed + 1);
    std::vector<int64_t> whole_offsets, rows_offsets;
    for (const auto& one : cases) {
      whole_offsets.push_back(whole_memory.reserve(one.numel));
      rows_offsets.push_back(rows_memory.reserve((one.ranks - 1) * one.stride + one.length));
    }
    const auto whole = whole_memory.fill();
    const auto expected = rows_memory.fill();
    const auto device_whole = on_device(whole);
    const auto device_rows = on_device(expected);
    std::vector<kernels::Packing> packings;
    for (size_t i = 0; i < cases.size(); ++i) {
      const auto& one = cases[i];
      const auto rows_in = [&](const at::Tensor& memory) {
        return memory.as_strided({one.ranks, one.length}, {one.stride, 1}, rows_offsets[i]);
      };
      packings.push_back({device_whole.narrow(0, whole_offsets[i], one.numel), rows_in(device_rows)});
      const auto line = at::zeros({one.ranks * one.length}, to);
      line.narrow(0, 0, one.numel).copy_(whole.narrow(0, whole_offsets[i], one.numel).to(to).div(divisor));
      rows_in(expected).copy_(line.view({one.ranks, one.length}));
    }
    GetParam().pack(packings, divisor);
    expect_same_bits(device_rows, expected, describe(from, to, divisor));
    expect_same_bits(device_whole, whole, "what is only read");
  }

  std::unique_ptr<c10::Device> device_;
};

TEST_P(GradientKernels, LandInEveryDtype) {
  uint32_t seed = 1;
  for (const auto from : kGradientDtypes) {
    for (const auto to : kGradientDtypes) {
      for (const auto divisor : kDivisors) {
        land_and_compare({1, 0, 2, 3, 5, 8, 31, 32, 33, 257, 1000, 2048, 2053}, from, to, divisor, seed);
        land_and_compare({4096, 7, 1, 1, 15}, from, to, divisor, ++seed);
      }
    }
  }
}

TEST_P(GradientKernels, LandMoreTensorsThanOneLaunchTakes) {
  std::vector<int64_t> sizes(400);
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = static_cast<int64_t>(i % 7 * (i % 11 == 0 ? 500 : 1));
  land_and_compare(sizes, at::kFloat, at::kFloat, 3, 1);
  land_and_compare(sizes, at::kBFloat16, at::kFloat, 8, 2);
}

TEST_P(GradientKernels, LandLargeTensors) {
  land_and_compare({3, 300001, 1 << 18, 5}, at::kFloat, at::kFloat, 3, 1);
  land_and_compare({100003, 3}, at::kHalf, at::kHalf, 4, 2);
  land_and_compare({100003, 3}, at::kBFloat16, at::kDouble, 5, 3);
}

TEST_P(GradientKernels, LandAlignedTensors) {
  for (const auto from : kGradientDtypes) {
    const auto source = numbers(5000, from, 3);
    for (const auto to : kGradientDtypes) {
      auto expected = numbers(5000, to, 4);
      const auto destination = on_device(expected);
      GetParam().land({{destination, on_device(source), true}}, 6);
      expect_same_bits(destination, expected.add_(source.div(6).to(to)), describe(from, to, 6));
    }
  }
}

TEST_P(GradientKernels, LandWhereTheSourceIs) {
  for (const auto dtype : kGradientDtypes) {
    for (const bool accumulate : {false, true}) {
      const auto expected = numbers(3001, dtype, 5);
      const auto memory = on_device(expected);
      const auto part = expected.narrow(0, 3, 2991);
      accumulate ? part.add_(part.div(3)) : part.div_(3);
      const auto landed = memory.narrow(0, 3, 2991);
      GetParam().land({{landed, landed.view({3, 997}), accumulate}}, 3);
      expect_same_bits(memory, expected, c10::toString(dtype));
    }
  }
}

// Every half and bfloat16, and the floats around the middle between each two of them.
TEST_P(GradientKernels, RoundEveryHalfAndBFloat16) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    const auto every = at::arange(-32768, 32768, at::kInt).to(at::kShort).view(dtype);
    const auto wide = every.to(at::kFloat);
    const auto landed = on_device(at::zeros({65536}, at::kFloat));
    GetParam().land({{landed, on_device(every)}}, 1);
    expect_same_bits(landed, wide, "widened");

    // Magnitudes in their order, so that neighbours are neighbours; the 16 bits below those of a bfloat16, the 13 of
    // half.
    const auto between = wide.narrow(0, 32768, 32767).add(wide.narrow(0, 32769, 32767)).div(2);
    for (const int64_t step : {-1, 0, 1}) {
      const auto near = between.view(at::kInt).add(step).view(at::kFloat);
      const auto both = at::cat({near, near.neg()});
      const auto rounded = on_device(at::zeros({both.numel()}, dtype));
      GetParam().land({{rounded, on_device(both)}}, 1);
      expect_same_bits(rounded, both.to(dtype), "rounded");
    }
  }
}

TEST_P(GradientKernels, PackInEveryDtype) {
  const std::vector<Rows> cases{{1, 1, 1, 1},        {10, 4, 3, 3},      {7, 4, 2, 5},       {5, 4, 2, 2},
                                {0, 3, 2, 2},        {0, 2, 0, 0},       {12, 3, 4, 4},      {12, 2, 8, 16},
                                {1000, 8, 130, 131}, {33, 33, 1, 7},     {3, 40, 1, 1},      {4096, 2, 2048, 4096},
                                {2500, 7, 400, 400}, {600, 3, 240, 244}, {1, 3, 1000, 1003}, {2047, 1, 2048, 2048}};
  uint32_t seed = 1;
  for (const auto from : kGradientDtypes) {
    for (const auto to : kGradientDtypes) {
      for (const auto divisor : kDivisors) pack_and_compare(cases, from, to, divisor, ++seed);
    }
  }
}

TEST_P(GradientKernels, PackMoreTensorsThanOneLaunchTakes) {
  std::vector<Rows> cases;
  for (int64_t i = 0; i < 160; ++i) {
    const int64_t length = i % 9, ranks = 1 + i % 5;
    cases.push_back({std::max<int64_t>(length * ranks - i % 4, 0), ranks, length, length + i % 3});
  }
  pack_and_compare(cases, at::kFloat, at::kBFloat16, 1, 1);
  pack_and_compare(cases, at::kFloat, at::kHalf, 4, 2);
}

TEST_P(GradientKernels, PackLargeTensors) {
  // Rows longer and shorter than what a block takes, aligned and not; many ranks; padding of whole rows.
  pack_and_compare({{100003, 3, 33335, 33335}, {65536, 4, 16384, 16384}, {50000, 64, 800, 1000}}, at::kFloat,
                   at::kBFloat16, 1, 1);
  pack_and_compare({{3000, 1024, 3, 3}, {20000, 5, 8193, 8199}, {70000, 2, 70000, 70001}}, at::kBFloat16, at::kFloat, 3,
                   2);
  pack_and_compare({{100001, 2, 50001, 50001}, {2049, 2, 2049, 2056}}, at::kHalf, at::kHalf, 2, 3);
}

TEST_P(GradientKernels, WriteWordsIntoAnyTensor) {
  const std::array<int64_t, 4> words{-2, 0x0123456789abcdef, std::numeric_limits<int64_t>::min(), 255};
  const auto expected = at::tensor(at::ArrayRef<int64_t>(words.data(), words.size()), at::kLong);
  for (const auto dtype : {at::kByte, at::kHalf, at::kBFloat16, at::kFloat, at::kInt, at::kDouble, at::kLong}) {
    const auto count = static_cast<int64_t>(32 / c10::elementSize(dtype));
    for (const int64_t offset : {0, 1, 3}) {
      const auto raw = at::full({offset + count + 2}, 3, dtype);
      const auto memory = on_device(raw);
      GetParam().write_words(memory.narrow(0, offset, count), words);
      const auto found = memory.to(at::kCPU);
      const auto written = found.narrow(0, offset, count).clone().view(at::kLong);
      EXPECT_TRUE(written.equal(expected)) << dtype << " at " << offset << ": " << written;
      EXPECT_TRUE(found.narrow(0, 0, offset).equal(raw.narrow(0, 0, offset))) << dtype;
      EXPECT_TRUE(found.narrow(0, offset + count, 2).equal(raw.narrow(0, 0, 2))) << dtype;
    }
  }
}

TEST_P(GradientKernels, AreUnseenByAutograd) {
  const auto saved = on_device(at::ones({4})).set_requires_grad(true);
  const auto destination = saved.detach();
  const auto rows = on_device(at::ones({2, 2}));
  const auto bytes = on_device(at::zeros({8}));
  const auto product = saved * saved;  // keeps `saved` for its backward
  GetParam().land({{destination, on_device(at::full({4}, 6.0))}}, 2);
  GetParam().pack({{on_device(at::ones({4})).set_requires_grad(true), rows}}, 1);
  GetParam().write_words(bytes, {1, 2, 3, 4});
  EXPECT_EQ(destination._version(), 0);
  EXPECT_EQ(rows._version(), 0);
  EXPECT_EQ(bytes._version(), 0);
  EXPECT_FALSE(rows.requires_grad());
  product.sum().backward();
  EXPECT_TRUE(saved.grad().cpu().equal(at::full({4}, 6.0)));
}

TEST_P(GradientKernels, DoNothingForNothing) {
  GetParam().land({{on_device(at::empty({0})), on_device(at::empty({0, 3})), true}}, 3);
  GetParam().pack({{on_device(at::empty({0})), on_device(at::empty({4, 0}))}}, 3);
}

}  // namespace testing_support

// The gradient kernels on the host: its own way, the operators that serve other devices, and the kernels of devices,
// every thread of every block of which is run one after the other.
#include "hsdp/kernels/gradient_kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <vector>

#include "hsdp/kernels/gradient_kernel_ways.h"
#include "tests/testing/gradient_kernel_cases.h"

namespace {

using namespace hsdp::kernels;
using testing_support::GradientKernels;
using testing_support::Way;

// ---- a device on the host ----

template <typename Table, typename Function>
void run_grid(const Table& table, const Function& function) {
  ASSERT_GT(table.chunks, 0u);
  ASSERT_LE(table.entries, Table::kCapacity);
  for (uint32_t block = 0; block < table.chunks; ++block) {
    for (uint32_t thread = 0; thread < static_cast<uint32_t>(kThreads); ++thread) function(block, thread);
  }
}

constexpr DeviceKernels kGrid{[](const LandTable& table, Dtype source, Dtype destination, double divisor, c10::Device) {
                                with_type(source, [&](auto s) {
                                  with_type(destination, [&](auto d) {
                                    using S = decltype(s);
                                    const auto scale = Scale<Wide<S>>::of(divisor);
                                    run_grid(table, [&](uint32_t block, uint32_t thread) {
                                      land_thread<S, decltype(d)>(table, scale, block, thread);
                                    });
                                  });
                                });
                              },
                              [](const PackTable& table, Dtype whole, Dtype rows, double divisor, c10::Device) {
                                with_type(whole, [&](auto s) {
                                  with_type(rows, [&](auto d) {
                                    using D = decltype(d);
                                    const auto scale = Scale<Wide<D>>::of(divisor);
                                    run_grid(table, [&](uint32_t block, uint32_t thread) {
                                      pack_thread<decltype(s), D>(table, scale, block, thread);
                                    });
                                  });
                                });
                              },
                              [](void* bytes, const Words& words, c10::Device) {
                                for (uint32_t thread = 0; thread < sizeof(Words); ++thread) {
                                  words_thread(static_cast<uint8_t*>(bytes), words, thread);
                                }
                              }};

Words words_of(const std::array<int64_t, 4>& words) { return {{words[0], words[1], words[2], words[3]}}; }

std::vector<Way> ways() {
  const auto host = [] { return c10::Device(at::kCPU); };
  const auto threaded = [](const auto& function) {
    at::set_num_threads(2);
    function();
    at::set_num_threads(1);
  };
  return {{"Host", host},
          {"HostThreads", host,
           [=](auto landings, double divisor) { threaded([&] { land_gradients(landings, divisor); }); },
           [=](auto packings, double divisor) { threaded([&] { pack_gradients(packings, divisor); }); }},
          {"Grid", host, [](auto landings, double divisor) { land_by_tables(kGrid, landings, divisor); },
           [](auto packings, double divisor) { pack_by_tables(kGrid, packings, divisor); },
           [](const at::Tensor& bytes, const std::array<int64_t, 4>& words) {
             kGrid.write_words(bytes.mutable_data_ptr(), words_of(words), bytes.device());
           }},
          {"Operators", host, land_by_operators, pack_by_operators,
           [](const at::Tensor& bytes, const std::array<int64_t, 4>& words) {
             write_words_by_operators(bytes, words_of(words));
           }}};
}

INSTANTIATE_TEST_SUITE_P(Ways, GradientKernels, ::testing::ValuesIn(ways()),
                         [](const auto& which) { return which.param.name; });

// ---- tables ----

// What was launched, without anything being done: tensors need no memory.
struct Launches {
  std::vector<uint32_t> entries;
  std::vector<uint32_t> chunks;
  std::vector<int64_t> pitches;
};
Launches launches;

constexpr DeviceKernels kRecorder{[](const LandTable& table, Dtype, Dtype, double, c10::Device) {
                                    launches.entries.push_back(table.entries);
                                    launches.chunks.push_back(table.chunks);
                                  },
                                  [](const PackTable& table, Dtype, Dtype, double, c10::Device) {
                                    launches.entries.push_back(table.entries);
                                    launches.chunks.push_back(table.chunks);
                                    for (uint32_t i = 0; i < table.entries; ++i) {
                                      launches.pitches.push_back(table.entry[i].pitch);
                                    }
                                  },
                                  nullptr};

at::Tensor nowhere(at::IntArrayRef sizes, at::ScalarType dtype, uintptr_t address = 4096) {
  return at::from_blob(reinterpret_cast<void*>(address), sizes, at::TensorOptions(dtype));
}

TEST(GradientTables, CutWorkIntoLaunches) {
  launches = {};
  // 127 tensors a launch; a chunk of floats is 2048 elements.
  std::vector<Landing> landings(130, {nowhere({2049}, at::kFloat), nowhere({2049}, at::kFloat)});
  landings[3] = {nowhere({0}, at::kFloat), nowhere({0}, at::kFloat)};
  land_by_tables(kRecorder, landings, 2);
  EXPECT_EQ(launches.entries, (std::vector<uint32_t>{127, 2}));
  EXPECT_EQ(launches.chunks, (std::vector<uint32_t>{254, 4}));

  // Beyond 32 bits of elements, and beyond the blocks of one launch: 2^41 elements are 2^29 chunks of 4096.
  launches = {};
  const auto huge = nowhere({int64_t{1} << 41}, at::kBFloat16);
  const Landing landing{huge, nowhere({int64_t{1} << 41}, at::kBFloat16, 8192)};
  land_by_tables(kRecorder, std::vector<Landing>(5, landing), 2);
  EXPECT_EQ(launches.entries, (std::vector<uint32_t>{3, 2}));
  EXPECT_EQ(launches.chunks, (std::vector<uint32_t>{3u << 29, 2u << 29}));

  launches = {};
  land_by_tables(kRecorder, {{nowhere({4, 0}, at::kFloat), nowhere({0}, at::kFloat)}}, 2);
  EXPECT_TRUE(launches.entries.empty());

  // Rows of 10 floats: on vectors of 4 where all rows begin on one, else reaching into one more.
  const auto whole = nowhere({30}, at::kFloat);
  pack_by_tables(kRecorder, {{whole, nowhere({36}, at::kFloat).as_strided({3, 10}, {12, 1})}}, 1);
  pack_by_tables(kRecorder, {{whole, nowhere({36}, at::kFloat).as_strided({3, 10}, {10, 1})}}, 1);
  pack_by_tables(kRecorder, {{whole, nowhere({36}, at::kFloat, 4100).as_strided({3, 10}, {12, 1})}}, 1);
  EXPECT_EQ(launches.pitches, (std::vector<int64_t>{12, 16, 16}));
}

// The last block of tensors whose elements 32 bits do not count, in memory of which only what is touched is there.
class Reserved {
 public:
  explicit Reserved(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reserved() {
    if (*this) munmap(data_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  explicit operator bool() const { return data_ != MAP_FAILED; }
  uint16_t* data() const { return static_cast<uint16_t*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

TEST(GradientTables, CountElementsIn64Bits) {
  const int64_t numel = (int64_t{1} << 32) + 5;
  const Reserved from(static_cast<size_t>(2 * numel)), to(static_cast<size_t>(2 * numel) + 64);
  if (!from || !to) GTEST_SKIP() << "no address space";
  constexpr uint16_t two = 0x4000, one = 0x3f80;  // as bfloat16
  for (int64_t i = numel - 5; i < numel; ++i) from.data()[i] = two;

  LandTable table;
  table.entries = 1;
  table.entry[0] = {to.data() + 1, from.data(), numel, 0, 0};
  const auto scale = Scale<float>::of(2);
  for (uint32_t thread = 0; thread < uint32_t{kThreads}; ++thread) {
    land_thread<BFloat16, BFloat16>(table, scale, 1u << 20, thread);
  }
  for (int64_t i = numel - 4; i < numel; ++i) EXPECT_EQ(to.data()[i + 1], one) << i;
  EXPECT_EQ(to.data()[numel + 1], 0);

  // As two rows, the second of which begins beyond 31 bits and ends beyond 32.
  PackTable rows;
  const int64_t length = numel / 2 + 1;  // 2^31 + 3
  rows.entries = 1;
  rows.entry[0] = {to.data(), from.data(), numel, length, length, length / 8 * 8 + 16, 0, 2};
  for (int64_t i = numel - 8; i < numel + 8; ++i) to.data()[i] = 7;
  const auto last = static_cast<uint32_t>((2 * rows.entry[0].pitch - 1) / chunk_of(8));
  for (uint32_t block = last - 1; block <= last; ++block) {
    for (uint32_t thread = 0; thread < uint32_t{kThreads}; ++thread) {
      pack_thread<BFloat16, BFloat16>(rows, scale, block, thread);
    }
  }
  // One element of padding.
  for (int64_t i = numel - 5; i < numel; ++i) EXPECT_EQ(to.data()[i], one) << i;
  EXPECT_EQ(to.data()[numel], 0);
  EXPECT_EQ(to.data()[numel + 1], 7);
}

// ---- numbers ----

TEST(GradientScale, MultipliesByExactReciprocalsOnly) {
  for (const double divisor : {1., 2., -4., 0.5, 0x1p100, 0x1p-126, 0x1p126}) {
    EXPECT_TRUE(Scale<float>::of(divisor).by_factor) << divisor;
    EXPECT_EQ(Scale<float>::of(divisor).factor, static_cast<float>(1 / divisor));
  }
  // 2^127 has a denormal reciprocal, 2^-127 is denormal itself and has one out of range of its kind.
  for (const double divisor : {3., 6., 1e-3, 0x1p127, 0x1p-128, 0x1p-149}) {
    EXPECT_FALSE(Scale<float>::of(divisor).by_factor) << divisor;
  }
  EXPECT_TRUE(Scale<double>::of(0x1p127).by_factor);
  EXPECT_FALSE(Scale<double>::of(0x1p1023).by_factor);
}

TEST(GradientScale, GivesTheBitsOfADivision) {
  const auto source = testing_support::numbers(4096, at::kFloat, 9);
  for (const double divisor : {2., 1024., 0x1p-20, 0x1p120, 0x1p-120, 0x1p127, 0x1p-130, 0.1, -3.}) {
    auto landed = at::zeros_like(source);
    land_gradients({{landed, source}}, divisor);
    testing_support::expect_same_bits(landed, source.div(divisor), std::to_string(divisor));
  }
}

// ---- what callers must not ask for ----

TEST(GradientKernelArguments, AreChecked) {
  const auto a = at::ones({6}), b = at::ones({6});
  const auto land = [](const at::Tensor& destination, const at::Tensor& source, double divisor = 2) {
    land_gradients({{destination, source}}, divisor);
  };
  EXPECT_NO_THROW(land(a, b));
  EXPECT_NO_THROW(land(a, a.view({2, 3})));
  EXPECT_NO_THROW(land_gradients({}, 2));
  EXPECT_THROW(land(a, at::ones({5})), c10::Error);
  EXPECT_THROW(land(a, at::ones({6}, at::kInt)), c10::Error);
  EXPECT_THROW(land(at::ones({6}, at::kLong), b), c10::Error);
  EXPECT_THROW(land(a, at::ones({12}).slice(0, 0, 12, 2)), c10::Error);
  EXPECT_THROW(land(at::ones({3, 2}).t(), b), c10::Error);
  EXPECT_THROW(land(at::Tensor(), b), c10::Error);
  EXPECT_THROW(land(a, at::ones({6}, at::kMeta)), c10::Error);
  const auto memory = at::ones({8});
  EXPECT_THROW(land(memory.narrow(0, 0, 6), memory.narrow(0, 1, 6)), c10::Error);
  EXPECT_THROW(land(memory.narrow(0, 0, 6), memory.view(at::kInt).view(at::kHalf).narrow(0, 0, 6)), c10::Error);
  for (const double divisor : {0.0, std::nan(""), HUGE_VAL}) EXPECT_THROW(land(a, b, divisor), c10::Error);
  EXPECT_THROW(land_gradients({{a, b}, {at::ones({6}, at::kHalf), b}}, 2), c10::Error);
  EXPECT_THROW(land_gradients({{a, b}, {a, at::ones({6}, at::kHalf)}}, 2), c10::Error);
  EXPECT_TRUE(a.equal(at::full({6}, 0.25)));  // by the two that are allowed

  const auto pack = [](const at::Tensor& whole, const at::Tensor& rows) { pack_gradients({{whole, rows}}, 1); };
  EXPECT_NO_THROW(pack(a, at::ones({2, 3})));
  EXPECT_THROW(pack(a, at::ones({5, 1})), c10::Error);
  EXPECT_THROW(pack(a, at::ones({6})), c10::Error);
  EXPECT_THROW(pack(a, at::ones({3, 2}).t()), c10::Error);
  EXPECT_THROW(pack(a, at::ones({6}).as_strided({3, 3}, {1, 1})), c10::Error);
  EXPECT_THROW(pack(at::ones({2, 3}).t(), at::ones({2, 3})), c10::Error);
  EXPECT_THROW(pack(memory.narrow(0, 0, 6), memory.narrow(0, 2, 6).view({2, 3})), c10::Error);
  EXPECT_THROW(pack(a, at::ones({2, 3}, at::kByte)), c10::Error);

  EXPECT_THROW(write_words(at::empty({31}, at::kByte), {}), c10::Error);
  EXPECT_THROW(write_words(at::empty({64}, at::kByte).slice(0, 0, 64, 2), {}), c10::Error);
}

}  // namespace

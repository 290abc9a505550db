// Counting the memory of tensors on the host, which a process begins once.
#include <c10/core/Allocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "hsdp/launch/device.h"

namespace host_memory_test {

const c10::Device kDevice(at::kCPU);

TEST(HostMemory, IsThatOfTensorsOnceItIsCounted) {
  auto former = torch::ones({1000});
  EXPECT_EQ(hsdp::memory_bytes(kDevice), 0);
  EXPECT_GT(hsdp::peak_memory_bytes(kDevice), 1 << 20) << "of the whole process";
  hsdp::reset_peak_memory(kDevice);
  EXPECT_GT(hsdp::peak_memory_bytes(kDevice), 1 << 20) << "which nobody can reset";

  hsdp::count_host_memory();
  hsdp::count_host_memory();
  EXPECT_EQ(hsdp::memory_bytes(kDevice), 0);
  EXPECT_EQ(hsdp::peak_memory_bytes(kDevice), 0);
  {
    auto x = torch::empty({1000});
    EXPECT_EQ(hsdp::memory_bytes(kDevice), 4000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(x.data_ptr()) % 64, 0u);
    auto y = torch::empty({10}, torch::kFloat64);
    EXPECT_EQ(hsdp::memory_bytes(kDevice), 4080);
    auto view = x.narrow(0, 5, 10);
    EXPECT_EQ(hsdp::memory_bytes(kDevice), 4080);
    auto empty = torch::empty({0});
    EXPECT_EQ(hsdp::memory_bytes(kDevice), 4080);
    x = torch::Tensor();
    EXPECT_EQ(hsdp::memory_bytes(kDevice), 4080) << "a view keeps it";
    view = torch::Tensor();
    EXPECT_EQ(hsdp::memory_bytes(kDevice), 80);
    EXPECT_EQ(hsdp::peak_memory_bytes(kDevice), 4080);
    hsdp::reset_peak_memory(kDevice);
    EXPECT_EQ(hsdp::peak_memory_bytes(kDevice), 80);
    // What was made before is let go as it was, uncounted.
    former = torch::Tensor();
    EXPECT_EQ(hsdp::memory_bytes(kDevice), 80);
  }
  EXPECT_EQ(hsdp::memory_bytes(kDevice), 0);
  // By the pointer alone, as some operators do.
  auto* allocator = c10::GetAllocator(at::kCPU);
  void* raw = allocator->raw_allocate(100);
  EXPECT_EQ(hsdp::memory_bytes(kDevice), 100);
  allocator->raw_deallocate(raw);
  EXPECT_EQ(hsdp::memory_bytes(kDevice), 0);
  EXPECT_THROW(allocator->allocate(SIZE_MAX), c10::Error);
  EXPECT_EQ(hsdp::memory_bytes(kDevice), 0);
}

TEST(HostMemory, IsCountedOnAnyThread) {
  hsdp::count_host_memory();
  const auto before = hsdp::memory_bytes(kDevice);
  hsdp::reset_peak_memory(kDevice);
  std::vector<std::vector<torch::Tensor>> made(4);
  std::vector<std::thread> threads;
  for (auto& tensors : made) {
    threads.emplace_back([&tensors] {
      for (int i = 0; i < 1000; ++i) {
        torch::empty({100 + i % 7});
        tensors.push_back(torch::empty({2}));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(hsdp::memory_bytes(kDevice) - before, 4 * 1000 * 8);
  EXPECT_GE(hsdp::peak_memory_bytes(kDevice) - before, 4 * 1000 * 8);
  EXPECT_LE(hsdp::peak_memory_bytes(kDevice) - before, 4 * (1000 * 8 + 106 * 4));
  made.clear();
  EXPECT_EQ(hsdp::memory_bytes(kDevice), before);
}

}  // namespace host_memory_test

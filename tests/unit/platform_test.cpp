// dtensor/ and hsdp/ know no platform: what tells one device or backend from another stands in the files listed here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace platform_test {

namespace fs = std::filesystem;

using Words = std::set<std::string>;

/// The files that may, each with what it may name.
const std::map<std::string, Words>& platform_files() {
  static const std::map<std::string, Words> files{
      // Gathers and reduces another way where the backend copies too much.
      {"dtensor/c10d_communicator.cpp", {"gloo"}},
      // The compiler for devices, and the kernels.
      {"hsdp/kernels/gradient_kernels_cuda.cpp", {"cuda"}},
      {"hsdp/kernels/gradient_kernels_cuda.cu", {"cuda"}},
      {"hsdp/kernels/gradient_kernels_cuda.h", {"cuda"}},
      {"hsdp/kernels/host_device.h", {"cuda"}},
      {"hsdp/kernels/host_passes.cpp", {"cpu"}},
      // What "the host" is.
      {"hsdp/host.h", {"cpu"}},
      {"hsdp/launch/backend_builtin.cpp", {"gloo", "nccl"}},
      {"hsdp/launch/backend_builtin.h", {"cuda", "gloo", "nccl"}},
      {"hsdp/launch/backend_gloo.cpp", {"cpu", "gloo"}},
      {"hsdp/launch/backend_nccl.cpp", {"cuda", "nccl"}},
      {"hsdp/launch/backend_no_gloo.cpp", {"cpu", "gloo"}},
      {"hsdp/launch/backend_no_nccl.cpp", {"cuda", "gloo", "nccl"}},
      {"hsdp/launch/device_cuda.cpp", {"cuda"}},
      {"hsdp/launch/versions.cpp", {"cuda", "gloo", "nccl"}},
      // The allocator that keeps a history.
      {"hsdp/profiling/memory_snapshot_cuda.cpp", {"cuda"}},
      // What the profiler calls which device.
      {"hsdp/profiling/trace_activities.cpp", {"cpu", "cuda", "privateuse", "xpu"}},
  };
  return files;
}

/// Platforms that a text names, in code or comment: words and parts of words, as kCUDA, is_cpu, c10/cuda/,
/// CPUGenerator.
Words platforms_in(const std::string& text) {
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  Words found;
  for (const char* word : {"cpu", "cuda", "gpu", "nccl", "gloo", "rocm", "hccl", "xpu", "privateuse"}) {
    if (lower.find(word) != std::string::npos) found.insert(word);
  }
  return found;
}

std::string list(const Words& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

TEST(Platforms, AreNamedInTheirOwnFilesOnly) {
  const fs::path root = HSDP_SOURCE_DIR;
  size_t files = 0;
  auto expected = platform_files();
  for (const char* folder : {"dtensor", "hsdp"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const auto extension = entry.path().extension();
      if (extension != ".cpp" && extension != ".h" && extension != ".cu" && extension != ".cuh") continue;
      ++files;
      const auto name = entry.path().lexically_relative(root).string();
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      ASSERT_FALSE(text.empty()) << name;
      const auto found = platforms_in(text);
      const auto allowed = expected.find(name);
      if (allowed != expected.end()) {
        EXPECT_EQ(list(found), list(allowed->second)) << name;
        expected.erase(allowed);
      } else {
        EXPECT_EQ(list(found), "") << name << ": ask hsdp/host.h, hsdp/launch/device.h or the tensor's own device";
      }
    }
  }
  EXPECT_GT(files, 60u);
  for (const auto& [name, words] : expected) {
    // Of backend_x.cpp and backend_no_x.cpp both are in the folder whatever is compiled.
    ADD_FAILURE() << name << " is gone; it was to name " << list(words);
  }
}

TEST(Platforms, AreRecognised) {
  EXPECT_EQ(list(platforms_in("if (tensor.is_cuda()) return at::kCPU;")), "cpu, cuda");
  EXPECT_EQ(list(platforms_in("#include <c10/cuda/CUDAGuard.h>")), "cuda");
  EXPECT_EQ(list(platforms_in("at::detail::getDefaultCPUGenerator()")), "cpu");
  EXPECT_EQ(list(platforms_in("// as NCCL does on a GPU")), "gpu, nccl");
  EXPECT_EQ(list(platforms_in("backend == \"gloo\" || type == c10::DeviceType::PrivateUse1")), "gloo, privateuse");
  EXPECT_EQ(list(platforms_in("output.copy_(input)")), "");
}

}  // namespace platform_test

#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "hsdp/backend.h"
#include "hsdp/hsdp.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/private_device.h"
#include "tests/testing/staged_backend.h"

namespace testing_support {

/// For a test program's main: the private device and its backend, as an out-of-tree library registers them.
class PrivateDeviceRegistered : public ::testing::Environment {
 public:
  void SetUp() override {
    register_private_device();
    hsdp::register_backend("staged", c10::DeviceType::PrivateUse1, make_staged_backend);
  }
};

/// Ranks on devices npu:0, npu:1, ...; init finds the device and its backend by itself.
inline void run_on_device(int ranks, const std::function<void(RankContext&)>& body, RunOptions options = {}) {
  options.make_environment = false;
  run_ranks(
      ranks,
      [&](RankContext& context) {
        torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
        auto store = c10::make_intrusive<c10d::FileStore>(context.directory() + "/store", context.world_size());
        hsdp::InitOptions init;
        init.timeout = options.communication_timeout;
        context.set_environment(hsdp::init_from(std::move(store), context.rank(), context.world_size(), init));
        body(context);
      },
      options);
}

}  // namespace testing_support

#pragma once

#include <torch/torch.h>

#include <memory>

#include "dtensor/dtensor.h"
#include "hsdp/hsdp.h"

namespace testing_support {

/// A mesh of `ranks` along the axis "shard" as rank `rank` sees it, with no process group: layouts and state only.
inline std::shared_ptr<const dtensor::DeviceMesh> offline_mesh(int64_t ranks, int64_t rank,
                                                               c10::DeviceType device = c10::kCPU) {
  return dtensor::DeviceMesh::create(device, {ranks}, {"shard"}, rank);
}

/// A module with one parameter of the given shape, made by meta_init and sharded as rank `rank` of `ranks` sees it.
struct OneParameterImpl : torch::nn::Module {
  explicit OneParameterImpl(torch::IntArrayRef sizes, torch::ScalarType dtype = torch::kFloat) {
    weight = register_parameter("weight", torch::rand(sizes, dtype));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight; }
  torch::Tensor weight;
};
TORCH_MODULE(OneParameter);

struct ShardedOne {
  ShardedOne(torch::IntArrayRef sizes, int64_t ranks, int64_t rank)
      : net(hsdp::meta_init([&] { return OneParameter(sizes); })),
        model(hsdp::fully_shard(net, {.mesh = offline_mesh(ranks, rank)})) {}

  hsdp::ShardedParameter& parameter() { return model.core()->units().front()->parameters().front(); }
  dtensor::DTensorImpl& impl() { return parameter().impl(); }
  /// What the module registers, as opposed to its member.
  at::Tensor registered() { return net->named_parameters()["weight"]; }
  at::Tensor& slot() { return hsdp::ModuleAccess::parameters(*net)["weight"]; }

  OneParameter net;
  hsdp::FullySharded<OneParameterImpl> model;
};

}  // namespace testing_support

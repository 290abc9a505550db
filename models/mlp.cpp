#include "models/mlp.h"

#include <torch/torch.h>

#include <algorithm>
#include <stdexcept>

namespace models {
namespace {

torch::Tensor activate(const torch::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::relu:
      return torch::relu(x);
    case Activation::gelu:
      return torch::gelu(x);
    case Activation::silu:
      return torch::silu(x);
    case Activation::tanh:
      return torch::tanh(x);
  }
  TORCH_INTERNAL_ASSERT(false, "activation ", int(activation));
}

}  // namespace

MlpImpl::MlpImpl(const std::vector<int64_t>& sizes, Activation activation) : activation_(activation) {
  if (sizes.size() < 2 || *std::min_element(sizes.begin(), sizes.end()) <= 0) {
    throw std::invalid_argument(
        c10::str("[Mlp] sizes are ", sizes, ", expected two or more positive numbers, inputs first and outputs last"));
  }
  layers = register_module("layers", torch::nn::ModuleList());
  for (size_t i = 0; i + 1 < sizes.size(); ++i) layers->push_back(torch::nn::Linear(sizes[i], sizes[i + 1]));
}

torch::Tensor MlpImpl::forward(torch::Tensor x) {
  for (size_t i = 0; i < layers->size(); ++i) {
    if (i > 0) x = activate(x, activation_);
    x = layers->ptr(i)->as<torch::nn::Linear>()->forward(x);
  }
  return x;
}

}  // namespace models

#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace testing_support {

/// A module that lists the tensors that it holds without having registered them.
struct Listed : torch::nn::Module {
  virtual std::vector<at::Tensor> members() const { return {}; }
};

/// Something that constructors do.
struct Pattern {
  std::string name;
  std::function<std::shared_ptr<Listed>()> factory;
};
std::ostream& operator<<(std::ostream& out, const Pattern& pattern);

/// A module whose constructor runs `make` and holds all the tensors: the first as a parameter if it can have a
/// gradient, every second one as a buffer, the others unregistered.
Pattern tensors(std::string name, std::function<std::vector<at::Tensor>()> make);

/// Expects that the module made under meta_init and replayed equals the one constructed plainly after the same seed,
/// bit for bit, in every tensor that can be reached, and that the default generator goes on alike.
void expect_replay_matches(const std::function<std::shared_ptr<Listed>()>& factory);

}  // namespace testing_support

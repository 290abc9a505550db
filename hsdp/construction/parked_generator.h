#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace hsdp {

/// Takes the default generator out of use while construction is recorded: draws are not made, so the generator is
/// parked under seeds that nobody would choose. A constructor that sets the generator (torch::manual_seed, set_state)
/// shows by another seed. The destructor puts the state back that was there before.
class ParkedGenerator {
 public:
  ParkedGenerator();
  ~ParkedGenerator();
  ParkedGenerator(const ParkedGenerator&) = delete;
  ParkedGenerator& operator=(const ParkedGenerator&) = delete;

  /// The state before.
  const at::Tensor& entry_state() const { return entry_; }

  /// What a constructor did to the generator since it was parked; nothing if it left it alone. Throws NotSupportedError
  /// where something drew numbers past the operators, which no replay could repeat.
  struct Change {
    at::Tensor state;       // undefined: it went back to a position, by a state that it had read there
    uint64_t position = 0;  // number of advances before that state
  };
  std::optional<Change> poll() const;
  /// A draw or a change was recorded: from here on the generator stands for the next position.
  void advance();
  /// Parks again at the same position, after something drew numbers for their shape only.
  void park();

 private:
  mutable at::Generator generator_;
  at::Tensor entry_, parked_;
  uint64_t base_;
  uint64_t position_ = 0;
};

}  // namespace hsdp

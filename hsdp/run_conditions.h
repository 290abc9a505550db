#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <utility>
#include <vector>

/// What the result of an operator depends on beside its arguments, so that it can be computed a second time.
namespace hsdp {

/// For which device types autocast is on in this thread, and the dtype that it casts to.
class AutocastState {
 public:
  static AutocastState now();
  /// Puts it in force on this thread.
  void set() const;
  bool operator==(const AutocastState&) const = default;

 private:
  std::vector<std::pair<c10::DeviceType, c10::ScalarType>> on_;
};

/// Where default generators stand: those of the host, of `devices`, and of the devices on which modules train.
class RandomState {
 public:
  RandomState() = default;  // of no generator
  static RandomState now(c10::ArrayRef<c10::Device> devices);
  bool holds(const at::Generator& generator) const;
  /// The states now of the generators of this one.
  RandomState same_generators_now() const;
  void set() const;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// Puts both in force on this thread as long as it lives, and then the ones of before again. Casts of weights are not
/// kept in between: their graph goes with this run.
class RunConditionsScope {
 public:
  RunConditionsScope(const RandomState& random, const AutocastState& autocast);
  ~RunConditionsScope();
  RunConditionsScope(const RunConditionsScope&) = delete;
  RunConditionsScope& operator=(const RunConditionsScope&) = delete;

 private:
  RandomState random_;
  AutocastState autocast_;
  bool keeps_casts_;
};

}  // namespace hsdp

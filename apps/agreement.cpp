#include "apps/agreement.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <limits>
#include <string>

#include "dtensor/error.h"
#include "hsdp/init.h"

namespace apps {
namespace {

void all_reduce(const hsdp::Environment& environment, const at::Tensor& tensor, dtensor::ReduceOp op,
                const char* subject) {
  environment.communicator()->all_reduce(tensor, op, {"all_reduce", subject})->wait();
}

}  // namespace

void agree(const hsdp::Environment& environment, const std::function<void()>& work) {
  std::exception_ptr cause;
  try {
    work();
  } catch (...) {
    cause = std::current_exception();
  }
  const int64_t rank = environment.rank();
  const ExitCode code = cause ? describe(cause).code : ExitCode::success;
  // The smallest value over the ranks names the lowest rank that failed, and how.
  constexpr int64_t kNobody = std::numeric_limits<int64_t>::max();
  const int64_t mine = cause ? 2 * rank + (code == ExitCode::user_mistake ? 0 : 1) : kNobody;
  const at::Tensor lowest = at::full({1}, mine, at::TensorOptions(at::kLong).device(environment.device()));
  try {
    all_reduce(environment, lowest, dtensor::ReduceOp::min, "set-up");
  } catch (const dtensor::CommunicationError&) {
    // What this rank has to say is nearer to the origin than that the others are gone.
    if (cause) throw SetupFailure(code, cause, /*told_here=*/true);
    throw;
  }
  const int64_t value = lowest.item<int64_t>();
  if (value == kNobody) return;
  throw SetupFailure(value % 2 == 0 ? ExitCode::user_mistake : ExitCode::failure, cause,
                     /*told_here=*/cause && value / 2 == rank);
}

void check_same(const hsdp::Environment& environment, const std::vector<ConfigValue>& values) {
  std::vector<int64_t> hashes;
  for (const auto& entry : values) hashes.push_back(int64_t(std::hash<std::string>()(entry.value)));
  const at::Tensor smallest = at::tensor(hashes, at::kLong).to(environment.device());
  const at::Tensor largest = smallest.clone();
  all_reduce(environment, smallest, dtensor::ReduceOp::min, "configuration");
  all_reduce(environment, largest, dtensor::ReduceOp::max, "configuration");
  const at::Tensor differs = smallest.ne(largest).cpu();
  std::string names;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!differs[int64_t(i)].item<bool>()) continue;
    names += c10::str(names.empty() ? "" : ", ", values[i].name, " (", values[i].value, " on rank ", environment.rank(),
                      ")");
  }
  if (!names.empty()) {
    dtensor::raise<dtensor::ValueError>("config", "the ranks differ in ", names,
                                        ", expected the same on all; give every rank the same file and the same --set");
  }
}

}  // namespace apps

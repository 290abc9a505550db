#include "tests/testing/materialize.h"

#include <unordered_map>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "hsdp/construction/replay.h"
#include "hsdp/construction/tape.h"

namespace testing_support {

size_t materialize_whole(const at::Tensor& deferred) {
  const auto tape = hsdp::tape_of(deferred);
  TORCH_CHECK(tape != nullptr, "not a tensor made by meta_init");
  const auto live = tape->live();
  std::vector<hsdp::ValueId> wanted;
  std::unordered_map<hsdp::ValueId, std::vector<at::Tensor>> tensors;
  for (auto& value : live) {
    wanted.push_back(value.id);
    tensors[value.id].push_back(value.tensor);
  }
  hsdp::replay(*tape, wanted, [&](hsdp::ValueId id, const at::Tensor& full) {
    for (auto& tensor : tensors.at(id)) dtensor::dtensor_impl(tensor)->become_ordinary(full);
  });
  return live.size();
}

}  // namespace testing_support

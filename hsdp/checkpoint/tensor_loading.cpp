#include "hsdp/checkpoint/tensor_loading.h"

#include <ATen/ATen.h>

#include <cstring>
#include <utility>

#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/host.h"

namespace hsdp {
void TensorLoading::add(CheckpointedTensor target, const StoredTensor& stored,
                        std::vector<const StoredTensor*> equals) {
  auto reader = choice_.choose(target);
  items_.push_back({std::move(target), &stored, std::move(equals), std::move(reader)});
}

at::Tensor TensorLoading::read_box(const Item& item, const StoredTensor& stored) {
  auto values = at::empty(item.target.box.sizes, at::TensorOptions(kHost).dtype(stored.dtype));
  reader_.read(stored, item.target.box, values.mutable_data_ptr());
  return values;
}

void TensorLoading::read() {
  for (auto& item : items_) {
    if (item.reader != mesh_.coordinate() || item.target.local.numel() == 0) continue;
    auto& local = item.target.local;
    const auto& stored = *item.stored;
    if (local.device().type() == kHost && local.scalar_type() == stored.dtype) {
      reader_.read(stored, item.target.box, local.mutable_data_ptr());
    } else {
      local.copy_(read_box(item, stored));
    }
    for (const auto* other : item.equals) {
      const auto first = read_box(item, stored), second = read_box(item, *other);
      if (first.scalar_type() == second.scalar_type() &&
          std::memcmp(first.const_data_ptr(), second.const_data_ptr(), first.nbytes()) == 0) {
        continue;
      }
      dtensor::raise<dtensor::ValueError>(
          where_, "unlike ", first.scalar_type() == second.scalar_type() ? "values" : "dtypes", " for \"", stored.name,
          "\" and \"", other->name, "\", expected equal ones, since the module ties them; leave one of them out");
    }
  }
}

void TensorLoading::send() {
  for (auto& item : items_) {
    if (item.target.local.numel() == 0) continue;
    auto sent = dtensor::on_mesh_device(mesh_, item.target.local);
    // Along the first axis among those that lie as the reader along all others that the tensor is replicated over, and
    // so on: whoever takes part has the values along the axes before.
    bool moved = false;
    const auto replicated = [&](size_t axis) {
      return !item.target.layout || item.target.layout->placements()[axis].is_replicate();
    };
    for (size_t axis = 0; axis < item.reader.size(); ++axis) {
      if (!replicated(axis) || mesh_.size(static_cast<int64_t>(axis)) == 1) continue;
      moved = true;
      bool takes_part = true;
      for (size_t inner = axis + 1; inner < item.reader.size(); ++inner) {
        takes_part &= !replicated(inner) || mesh_.coordinate()[inner] == item.reader[inner];
      }
      if (!takes_part) continue;
      mesh_.communicator(static_cast<int64_t>(axis))
          .broadcast(sent.view({-1}).view(at::kByte), item.reader[axis], {"broadcast", item.target.name})
          ->wait();
    }
    if (moved && !sent.is_same(item.target.local)) item.target.local.copy_(sent);
  }
}

}  // namespace hsdp

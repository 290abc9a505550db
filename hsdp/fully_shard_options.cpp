#include "hsdp/fully_shard_options.h"

#include "dtensor/error.h"

namespace hsdp {

AllGatherExtension::~AllGatherExtension() = default;

int64_t ReshardAfterForward::group_of(int64_t shard_size) const {
  if (group_ == kAll) return shard_size;
  if (group_ < 1 || shard_size % group_ != 0) {
    dtensor::raise<dtensor::ValueError>("reshard_after_forward", "group of ", group_, " ranks on a shard axis of ",
                                        shard_size, ", expected a number that divides it; true frees everything");
  }
  return group_;
}

}  // namespace hsdp

// The gathering half of Unit: shards -> unsharded parameters, and back.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <utility>

#include "dtensor/call_site.h"
#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "hsdp/host.h"
#include "hsdp/scheduler.h"
#include "hsdp/shard_packing.h"
#include "hsdp/storage_memory.h"
#include "hsdp/unit.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;

}  // namespace

at::ScalarType Unit::gathered_dtype(size_t index) const {
  const auto dtype = parameters_[index].layout().dtype();
  const auto& policy = context_->mixed_precision.param_dtype;
  return policy && at::isFloatingType(dtype) && c10::elementSize(dtype) > 1 ? *policy : dtype;
}

bool Unit::is_sharded(size_t index) const { return shard_size() > 1 && parameters_[index].shard_dim().has_value(); }

bool Unit::is_own_memory(size_t index) const {
  const auto& parameter = parameters_[index];
  return !is_sharded(index) && !parameter.extension() && gathered_dtype(index) == parameter.layout().dtype() &&
         parameter.impl().local().device() == device();
}

bool Unit::needs_gather() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_own_memory(i)) return true;
  }
  return false;
}

bool Unit::is_stale() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& unsharded = unsharded_[i];
    if (unsharded.epoch != parameters_[i].impl().local_epoch() ||
        unsharded.version != parameters_[i].tensor()._version() ||
        unsharded.gathered_writes != unsharded.alias_writes) {
      return true;
    }
  }
  return false;
}

void Unit::set_reshard_after_forward(ReshardAfterForward reshard) {
  const auto group = reshard.group_of(shard_size());
  std::shared_ptr<Transport> transport;
  if (group > 1 && group < shard_size() && context_->mesh->has_groups()) {
    transport = context_->make_transport(context_->mesh->sub_communicator(context_->shard_axis(), group));
  }
  drop_part();  // it was cut for another number of ranks
  finish_gather();  // of parts, over the former group
  part_transport_ = std::move(transport);
  settings_.reshard_after_forward = reshard;
}

// A local that came from elsewhere (set_data, to(dtype)) is brought into padded form first.
void Unit::prepare_shards() {
  for (auto& parameter : parameters_) {
    if (!parameter.is_healthy()) parameter.commit_reset(parameter.plan_reset());
  }
}

void Unit::forget_unsharded(Unsharded& unsharded) {
  if (unsharded.flat.defined()) {
    auto* storage = unsharded.flat.storage().unsafeGetStorageImpl();
    dtensor::forget_unsharded_storage(storage);
    if (!unsharded.is_own_memory) {
      // Views may outlive the unit; reading one must say so.
      free_memory(unsharded.flat);
      say_when_read_without_memory(unsharded.flat, "[raw access] a view of unit \"" + name_ +
                                                       "\" is read after its sharded module is gone, expected it "
                                                       "alive; copy what is needed longer with clone()");
    }
  }
  const auto writes = unsharded.alias_writes;
  unsharded = Unsharded();
  unsharded.alias_writes = writes;
}

// Makes the tensors of one parameter. They stay for good, unless dtype or device change; those that are the shard's own
// memory follow it.
void Unit::prepare_unsharded(size_t index) {
  auto& unsharded = unsharded_[index];
  const auto& parameter = parameters_[index];
  const bool own = is_own_memory(index);
  const auto dtype = gathered_dtype(index);
  if (unsharded.flat.defined()) {
    const bool fits = unsharded.flat.scalar_type() == dtype && unsharded.flat.device() == device() &&
                      unsharded.is_own_memory == own &&
                      (!own || unsharded.flat.storage().is_alias_of(parameter.impl().local().storage()));
    if (fits) return;
    forget_unsharded(unsharded);
  }
  const auto& layout = parameter.layout();
  const auto numel = c10::multiply_integers(layout.padded_local_sizes()) * (is_sharded(index) ? shard_size() : 1);
  at::Tensor flat = own ? parameter.padded_shard() : at::empty({numel}, at::TensorOptions(device()).dtype(dtype));
  unsharded.flat = flat;
  unsharded.is_own_memory = own;
  auto whole = flat.as_strided(layout.sizes(), dtensor::row_major_strides(layout.sizes()), flat.storage_offset());
  unsharded.whole = dtensor::raw_alias(whole);
  if (!own) {
    say_when_read_without_memory(flat, "[raw access] a view of parameter \"" + parameter.name() +
                                           "\" has no memory outside a forward, expected to be read inside one; copy "
                                           "what is needed longer with clone()");
    free_memory(flat);
  }
  dtensor::register_unsharded_storage(flat.storage().unsafeGetStorageImpl(), weak_from_this(), index);
}

// What of one parameter takes part in the unit's collective. Where nothing is sharded its copy is filled at once.
void Unit::start_gather_of(size_t index, std::vector<TensorPair>& pairs) {
  const auto& parameter = parameters_[index];
  const auto flat = dtensor::raw_alias(unsharded_[index].flat);
  if (gathers_parts_ && kept_parts_[index].defined()) {
    pairs.push_back({flat, kept_parts_[index]});
    return;
  }
  const auto shard = parameter.padded_shard().to(device());
  const auto ranks = is_sharded(index) ? shard_size() : 1;
  const auto dim = parameter.shard_dim().value_or(0);
  Arrival arrival{index, {}, {}};
  if (ranks > 1 && dim != 0) arrival.rows = at::empty({ranks, shard.numel()}, flat.options());
  if (parameter.extension()) {
    for (auto& sent : parameter.extension()->pre_all_gather(shard)) {
      arrival.gathered.push_back(ranks == 1 ? sent : at::empty({ranks * sent.numel()}, sent.options()));
      if (ranks > 1) pairs.push_back({arrival.gathered.back(), sent});
    }
    arrivals_.push_back(std::move(arrival));
  } else if (ranks == 1) {
    flat.copy_(shard);
  } else {
    const auto sent = shard.to(flat.scalar_type());
    pairs.push_back({arrival.rows.defined() ? arrival.rows.view({-1}) : flat, sent});
    if (arrival.rows.defined()) arrivals_.push_back(std::move(arrival));
  }
}

void Unit::finish_arrivals() {
  for (auto& arrival : std::exchange(arrivals_, {})) {
    const auto& parameter = parameters_[arrival.index];
    const auto flat = dtensor::raw_alias(unsharded_[arrival.index].flat);
    if (parameter.extension()) {
      parameter.extension()->post_all_gather(arrival.gathered, arrival.rows.defined() ? arrival.rows.view({-1}) : flat);
    }
    if (arrival.rows.defined()) {
      unpack_rows(dtensor::raw_alias(unsharded_[arrival.index].whole), arrival.rows, parameter.layout(),
                  *parameter.shard_dim());
    }
  }
}

Transport* Unit::gathering_transport() const {
  return gathers_parts_ ? part_transport_.get() : context_->transport.get();
}

void Unit::start_gather() {
  TORCH_INTERNAL_ASSERT(state_ == State::sharded);
  Below below(dtensor::kDTensorKey);
  // Kept buffers must be ordinary tensors even where the user's code runs in inference mode.
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  prepare_shards();
  gathers_parts_ = !kept_parts_.empty() && part_transport_ && !is_stale();
  if (!gathers_parts_) drop_part();
  std::vector<TensorPair> pairs;
  read_since_gather_ = false;
  read_scope_ = kNoScope;
  state_ = State::gathering;
  try {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      prepare_unsharded(i);
      auto& unsharded = unsharded_[i];
      unsharded.epoch = parameters_[i].impl().local_epoch();
      unsharded.version = parameters_[i].tensor()._version();
      unsharded.gathered_writes = unsharded.alias_writes;
      if (unsharded.is_own_memory) continue;
      allocate_memory(unsharded.flat, static_cast<size_t>(unsharded.flat.numel()) * unsharded.flat.element_size());
      start_gather_of(i, pairs);
    }
    if (pairs.empty()) {
      finish_arrivals();
      state_ = State::gathered;
      return;
    }
    auto* transport = gathering_transport();
    if (transport == nullptr) {
      dtensor::raise<dtensor::StateError>("all_gather", "unit \"", name_, "\" lies on ", context_->mesh->to_string(),
                                          ", which was made without groups, expected one that can communicate; use "
                                          "env.mesh()");
    }
    // A few bytes beside the parameters say what this rank gathers: equal sizes alone do not prove equal units.
    const auto signature = scheduler()->next_signature(*this);
    const auto bytes = at::from_blob(const_cast<int64_t*>(signature.data()), {static_cast<int64_t>(sizeof(signature))},
                                     at::TensorOptions(at::kByte))
                           .clone();
    const auto& like = pairs.front().full;
    const auto shard = bytes.to(like.device()).view(like.scalar_type());
    signatures_ = at::empty({shard.numel() * transport->communicator().size()}, shard.options());
    pairs.push_back({signatures_, shard});
    gather_work_ = transport->all_gather(pairs, {"all_gather", name_});
  } catch (...) {
    reshard();
    throw;
  }
}

void Unit::finish_gather() {
  if (state_ != State::gathering) return;
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto work = std::move(gather_work_);
  try {
    work->wait();
    check_signatures();
    finish_arrivals();
  } catch (...) {
    reshard();
    throw;
  }
  drop_part();
  state_ = State::gathered;
}

void Unit::check_signatures() {
  auto& group = gathering_transport()->communicator();
  const auto table = signatures_.view(at::kByte).to(kHost).view(at::kLong).view({group.size(), -1});
  signatures_ = at::Tensor();
  const auto rank = group.rank();
  const auto* rows = table.const_data_ptr<int64_t>();
  const auto width = table.size(1);
  const auto* own = rows + rank * width;
  for (int64_t other = 0; other < group.size(); ++other) {
    const auto* row = rows + other * width;
    if (std::equal(row, row + width, own)) continue;
    auto scheduler = this->scheduler();
    if (std::equal(row, row + 3, own)) scheduler->raise_unlike_writes(rank, other);
    const auto& units = scheduler->units();
    dtensor::raise<dtensor::CommunicationError>(
        "all_gather", "rank ", rank, " gathers unit \"", name_, "\" as collective ", own[2], ", rank ", other,
        " gathers ",
        row[1] >= 0 && row[1] < static_cast<int64_t>(units.size()) ? "unit \"" + units[row[1]]->name() + "\""
                                                                   : "another",
        " as collective ", row[2],
        " or had other units, parameters or gradient divide factors before, expected the same on all ranks",
        dtensor::call_site(),
        "; every rank must call it: run the same forwards and use the same parameters on all ranks");
  }
}

void Unit::free_unsharded() {
  if (gather_work_) {
    try {
      gather_work_->wait();
    } catch (const std::exception&) {
      // A broken group reports itself at the next collective; here nobody needs the values any more.
    }
    gather_work_.reset();
  }
  arrivals_.clear();
  for (auto& unsharded : unsharded_) {
    if (unsharded.flat.defined() && !unsharded.is_own_memory) free_memory(unsharded.flat);
  }
  raw_accessed_ = false;
  state_ = State::sharded;
  read_since_gather_ = false;
  is_requested_ = false;
  read_scope_ = kNoScope;
}

void Unit::reshard() {
  if (state_ == State::gathered && raw_accessed_) {
    try {
      keep_raw_writes();
    } catch (const std::exception& error) {
      // Scopes end in destructors; the memory goes all the same.
      LOG(ERROR) << "hsdp: what was written into unit " << name_ << " through a raw pointer is lost: " << error.what();
    }
  }
  free_unsharded();
}

void Unit::reshard_for_backward() {
  if (state_ == State::gathered && part_transport_ && !is_stale()) {
    Below below(dtensor::kDTensorKey);
    c10::InferenceMode normal(false);
    at::NoGradGuard no_grad;
    auto& group = part_transport_->communicator();
    kept_parts_.resize(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!is_sharded(i)) continue;
      const auto length = unsharded_[i].flat.numel() / group.size();
      kept_parts_[i] = dtensor::raw_alias(unsharded_[i].flat).narrow(0, group.rank() * length, length).clone();
    }
  }
  reshard();
}

// What was written into whole parameters through a raw pointer is not seen by dispatch; this rank's part goes to the
// shard.
void Unit::keep_raw_writes() {
  Below below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  if (is_stale()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (unsharded_[i].is_own_memory) continue;
    const auto part = dtensor::narrow_to_box(dtensor::raw_alias(unsharded_[i].whole), parameters_[i].layout().local());
    const auto shard = parameters_[i].impl().local().to(part.options());
    // Not compared with the other ranks: only some of them need see a change in their part.
    if (parameters_[i].extension() || part.equal(shard)) continue;
    check_whole_write(i);
    write_back(i);
  }
}

int64_t Unit::unsharded_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_own_memory(i)) continue;
    bytes += c10::multiply_integers(parameters_[i].layout().padded_local_sizes()) * (is_sharded(i) ? shard_size() : 1) *
             static_cast<int64_t>(c10::elementSize(gathered_dtype(i)));
  }
  return bytes;
}

}  // namespace hsdp

// The gathering half of Unit: shards -> unsharded parameters, and back.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <utility>

#include "dtensor/call_site.h"
#include "dtensor/collective.h"
#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/graph_capture.h"
#include "hsdp/host.h"
#include "hsdp/kernels/gradient_kernels.h"
#include "hsdp/launch/device.h"
#include "hsdp/profiling/span.h"
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
  drop_part();      // it was cut for another number of ranks
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

// What of one parameter takes part in the unit's collective. Where nothing is sharded it is only copied.
void Unit::start_gather_of(size_t index, std::vector<TensorPair>& pairs, CopyIn& copies) {
  const auto& parameter = parameters_[index];
  const auto flat = dtensor::raw_alias(unsharded_[index].flat);
  if (gathers_parts_ && kept_parts_[index].defined()) {
    pairs.push_back({flat, kept_parts_[index]});
    return;
  }
  const auto shard = parameter.padded_shard().to(device(), /*non_blocking=*/home_stream_.has_value());
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
    copies.to.push_back(flat);
    copies.from.push_back(shard);
  } else {
    auto sent = shard;
    if (shard.scalar_type() != flat.scalar_type()) {
      sent = at::empty(shard.sizes(), flat.options());
      copies.to.push_back(sent);
      copies.from.push_back(shard);
    }
    pairs.push_back({arrival.rows.defined() ? arrival.rows.view({-1}) : flat, sent});
    if (arrival.rows.defined()) arrivals_.push_back(std::move(arrival));
  }
}

void Unit::finish_arrivals() {
  const auto arrivals = std::exchange(arrivals_, {});
  for (const auto& arrival : arrivals) {
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
  // What was unpacked came from the gathering stream's memory, and goes back there now.
  if (home_stream_ && !arrivals.empty()) order_after(*streams()->gather(), current_stream(device()));
  for (const auto& arrival : arrivals) {
    if (arrival.rows.defined()) dtensor::free_buffer(arrival.rows);
  }
}

Transport* Unit::gathering_transport() const {
  return gathers_parts_ ? part_transport_.get() : context_->transport.get();
}

void Unit::start_gather() {
  TORCH_INTERNAL_ASSERT(state_ == State::sharded);
  if (context_->offload.to_host && dtensor::is_capturing(device())) {
    dtensor::raise<dtensor::NotSupportedError>("all_gather", "unit \"", name_,
                                               "\" is offloaded and read while a graph is captured, expected shards on "
                                               "the device, because the host has to wait for copies");
  }
  Below below(dtensor::kDTensorKey);
  // Kept buffers must be ordinary tensors even where the user's code runs in inference mode.
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  prepare_shards();
  gathers_parts_ = !kept_parts_.empty() && part_transport_ && !is_stale();
  if (!gathers_parts_) drop_part();
  std::vector<TensorPair> pairs;
  std::vector<size_t> to_fill;
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
      to_fill.push_back(i);
    }
    const auto* streams = to_fill.empty() ? nullptr : this->streams();
    if (streams != nullptr) home_stream_ = current_stream(device());
    const OnStream on_gather(streams != nullptr ? streams->gather() : nullptr);
    {
      const Span span("all_gather_copy_in", name_);
      CopyIn copies;
      for (const auto i : to_fill) start_gather_of(i, pairs, copies);
      if (!copies.to.empty()) at::_foreach_copy_(copies.to, copies.from);
      if (streams != nullptr && context_->offload.to_host) {
        shards_read_ = std::make_shared<StreamMark>(*streams->gather());
      }
    }
    if (!pairs.empty()) {
      gather_work_ = start_collective(std::move(pairs));
    } else if (streams != nullptr) {
      gather_work_ = std::make_shared<StreamMark>(*streams->gather());
    } else {
      finish_arrivals();
      state_ = State::gathered;
    }
  } catch (...) {
    // What has started may still be at work on memory that goes away now.
    if (home_stream_) order_after(current_stream(device()), *streams()->gather());
    reshard();
    throw;
  }
}

std::shared_ptr<dtensor::Work> Unit::start_collective(std::vector<TensorPair> pairs) {
  auto* transport = gathering_transport();
  if (transport == nullptr) {
    dtensor::raise<dtensor::StateError>("all_gather", "unit \"", name_, "\" lies on ", context_->mesh->to_string(),
                                        ", which was made without groups, expected one that can communicate; use "
                                        "env.mesh()");
  }
  // A few bytes beside the parameters say what this rank gathers: equal sizes alone do not prove equal units. A
  // replayed graph would say the same at every replay.
  const auto signature = scheduler()->next_signature(*this);
  if (!dtensor::is_capturing(device())) {
    const auto options = pairs.front().full.options();
    const auto length = static_cast<int64_t>(sizeof(signature) / options.dtype().itemsize());
    const auto shard = at::empty({length}, options);
    kernels::write_words(shard, signature);
    signatures_ = at::empty({length * transport->communicator().size()}, options);
    pairs.push_back({signatures_, shard});
  }
  const Span span("all_gather", name_);
  return transport->all_gather(pairs, {"all_gather", name_});
}

void Unit::finish_gather() {
  if (state_ != State::gathering) return;
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto work = std::move(gather_work_);
  const Span span("all_gather_copy_out", name_);
  try {
    const bool on_stream = work->is_on_stream();
    work->wait();
    compare_signatures(on_stream);
    finish_arrivals();
    if (home_stream_) reader_stream_ = current_stream(device());
  } catch (...) {
    reshard();
    throw;
  }
  drop_part();
  state_ = State::gathered;
}

// On a device that works beside the host the comparison waits until the signatures have arrived by themselves.
void Unit::compare_signatures(bool on_stream) {
  if (!signatures_.defined()) return;
  const auto rank = gathering_transport()->communicator().rank();
  const auto bytes = std::exchange(signatures_, {}).view(at::kByte);
  if (!home_stream_ || !can_pin_memory_for(device().type())) return check_signatures(bytes.to(kHost), rank);
  auto table = at::empty(bytes.sizes(), at::TensorOptions(at::kByte).pinned_memory(true));
  const auto& gather = *streams()->gather();
  // The compute stream has waited for the gather; where that ran on its own stream, the copy need not wait in turn.
  const OnStream on_gather(&gather, on_stream ? gather : current_stream(device()));
  table.copy_(bytes, /*non_blocking=*/true);
  scheduler()->compare_later({shared_from_this(), std::move(table), rank, std::make_shared<StreamMark>(gather)});
}

void Unit::check_signatures(const at::Tensor& table, int64_t rank) const {
  constexpr int64_t width = 4;
  const auto ranks = table.numel() / static_cast<int64_t>(width * sizeof(int64_t));
  const auto* rows = static_cast<const int64_t*>(table.const_data_ptr());
  const auto* own = rows + rank * width;
  for (int64_t other = 0; other < ranks; ++other) {
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
  signatures_ = at::Tensor();
  arrivals_.clear();
  give_memory_home();
  for (auto& unsharded : unsharded_) {
    if (unsharded.flat.defined() && !unsharded.is_own_memory) free_memory(unsharded.flat);
  }
  raw_accessed_ = false;
  state_ = State::sharded;
  read_since_gather_ = false;
  is_requested_ = false;
  read_scope_ = kNoScope;
}

void Unit::wait_for_copies_from_host() {
  if (const auto read = std::exchange(shards_read_, nullptr)) read->synchronize();
}

// Memory goes back to the pool of the stream that it was made on, whose next work must not overtake readers elsewhere.
void Unit::give_memory_home() {
  if (!home_stream_) return;
  const auto current = current_stream(home_stream_->device());
  const auto captures = [](const c10::Stream& stream) {
    const c10::StreamGuard guard(stream);
    return dtensor::is_capturing(stream.device());
  };
  // A graph that is captured has not touched what was gathered before, and takes in every stream that waits for it.
  if (captures(current) == captures(*home_stream_)) order_after(*home_stream_, current);
  if (reader_stream_ && *reader_stream_ != current) order_after(*home_stream_, *reader_stream_);
  home_stream_.reset();
  reader_stream_.reset();
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

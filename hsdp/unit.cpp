#include "hsdp/unit.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Logging.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "dtensor/call_site.h"
#include "dtensor/dispatch.h"
#include "dtensor/dtensor.h"
#include "dtensor/error.h"
#include "dtensor/hash_bytes.h"
#include "hsdp/host.h"
#include "hsdp/scheduler.h"
#include "hsdp/storage_memory.h"
#include "hsdp/unit_backward.h"

namespace hsdp {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;

uint32_t version_of(const at::Tensor& tensor) { return tensor._version(); }

}  // namespace

Unit::Unit(std::string name, const torch::nn::Module* module, std::vector<ShardedParameter> parameters,
           bool reshard_after_forward)
    : name_(std::move(name)),
      module_(module),
      parameters_(std::move(parameters)),
      reshard_after_forward_(reshard_after_forward),
      unsharded_(parameters_.size()) {}

Unit::~Unit() {
  for (auto& unsharded : unsharded_) forget_unsharded(unsharded);
}

void Unit::adopt_parameters() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].impl().set_owner(weak_from_this(), i);
  }
  accumulators_.resize(parameters_.size());
  claim_accumulators();
}

void Unit::claim_accumulators() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& tensor = parameters_[i].tensor();
    auto& own = accumulators_[i];
    if (own &&
        (own->input_metadata(0).dtype() != tensor.dtype() || own->input_metadata(0).device() != tensor.device())) {
      own.reset();
    }
    if (!own) own = std::make_shared<ParameterAccumulator>(weak_from_this(), i, tensor);
    if (torch::autograd::impl::try_get_grad_accumulator(tensor) != own) {
      torch::autograd::impl::set_grad_accumulator(tensor, own);
    }
  }
}

bool Unit::is_relative_of(const Unit& other) const {
  const auto contains = [](const std::vector<Unit*>& units, const Unit* unit) {
    return std::find(units.begin(), units.end(), unit) != units.end();
  };
  return this == &other || contains(ancestors_, &other) || contains(other.ancestors_, this);
}

int64_t Unit::shard_size() const { return parameters_.front().layout().mesh()->size(); }

// ---- gather and free ----

bool Unit::is_stale() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (unsharded_[i].epoch != parameters_[i].impl().local_epoch() ||
        unsharded_[i].version != version_of(parameters_[i].tensor()) ||
        unsharded_[i].gathered_writes != unsharded_[i].alias_writes) {
      return true;
    }
  }
  return false;
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
    if (shard_size() > 1) {
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

// Makes the tensors of one parameter. They stay for good, unless dtype or device of the shard change; at one rank they
// are the shard's own memory and follow it.
void Unit::prepare_unsharded(size_t index) {
  auto& unsharded = unsharded_[index];
  const auto& parameter = parameters_[index];
  const auto shard = parameter.padded_shard();
  const bool alone = shard_size() == 1;
  if (unsharded.flat.defined()) {
    const bool fits = unsharded.flat.scalar_type() == shard.scalar_type() &&
                      unsharded.flat.device() == shard.device() &&
                      (!alone || unsharded.flat.storage().is_alias_of(shard.storage()));
    if (fits) return;
    forget_unsharded(unsharded);
  }
  const auto& layout = parameter.layout();
  at::Tensor flat = alone ? shard : at::empty({shard.numel() * shard_size()}, shard.options());
  unsharded.flat = flat;
  auto whole = flat.as_strided(layout.sizes(), dtensor::row_major_strides(layout.sizes()), flat.storage_offset());
  unsharded.whole = dtensor::raw_alias(whole);
  if (!alone) {
    say_when_read_without_memory(flat, "[raw access] a view of parameter \"" + parameter.name() +
                                           "\" has no memory outside a forward, expected to be read inside one; copy "
                                           "what is needed longer with clone()");
    free_memory(flat);
  }
  dtensor::register_unsharded_storage(flat.storage().unsafeGetStorageImpl(), weak_from_this(), index);
}

void Unit::start_gather() {
  TORCH_INTERNAL_ASSERT(state_ == State::sharded);
  Below below(dtensor::kDTensorKey);
  // Kept buffers must be ordinary tensors even where the user's code runs in inference mode.
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  prepare_shards();
  std::vector<TensorPair> pairs;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    prepare_unsharded(i);
    auto& unsharded = unsharded_[i];
    unsharded.epoch = parameters_[i].impl().local_epoch();
    unsharded.version = version_of(parameters_[i].tensor());
    unsharded.gathered_writes = unsharded.alias_writes;
    if (shard_size() == 1) continue;
    const auto bytes = static_cast<size_t>(unsharded.flat.numel()) * unsharded.flat.element_size();
    allocate_memory(unsharded.flat, bytes);
    pairs.push_back({dtensor::raw_alias(unsharded.flat), parameters_[i].padded_shard()});
  }
  read_since_gather_ = false;
  if (pairs.empty()) {
    state_ = State::gathered;
    return;
  }
  if (!transport_) {
    dtensor::raise<dtensor::StateError>(
        "all_gather", "unit \"", name_, "\" lies on ", parameters_.front().layout().mesh()->to_string(),
        ", which was made without groups, expected one that can communicate; use env.mesh()");
  }
  state_ = State::gathering;
  {
    // A few bytes beside the parameters say what this rank gathers: equal sizes alone do not prove equal units.
    const auto signature = scheduler()->next_signature(*this);
    const auto bytes = at::from_blob(const_cast<int64_t*>(signature.data()), {static_cast<int64_t>(sizeof(signature))},
                                     at::TensorOptions(at::kByte))
                           .clone();
    const auto& like = pairs.front().full;
    const auto shard = bytes.to(like.device()).view(like.scalar_type());
    signatures_ = at::empty({shard.numel() * shard_size()}, shard.options());
    pairs.push_back({signatures_, shard});
  }
  try {
    gather_work_ = transport_->all_gather(pairs, {"all_gather", name_});
  } catch (...) {
    reshard();
    throw;
  }
}

void Unit::finish_gather() {
  if (state_ != State::gathering) return;
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  auto work = std::move(gather_work_);
  try {
    work->wait();
    check_signatures();
  } catch (...) {
    reshard();
    throw;
  }
  state_ = State::gathered;
}

void Unit::check_signatures() {
  const auto table = signatures_.view(at::kByte).to(kHost).view(at::kLong).view({shard_size(), -1});
  signatures_ = at::Tensor();
  const auto rank = parameters_.front().layout().mesh()->rank();
  const auto own = table[rank];
  for (int64_t other = 0; other < shard_size(); ++other) {
    if (table[other].equal(own)) continue;
    auto scheduler = this->scheduler();
    if (table[other].narrow(0, 0, 3).equal(own.narrow(0, 0, 3))) {
      scheduler->raise_unlike_writes(rank, other);
    }
    const auto& units = scheduler->units();
    const auto index = table[other][1].item<int64_t>();
    dtensor::raise<dtensor::CommunicationError>(
        "all_gather", "rank ", rank, " gathers unit \"", name_, "\" as collective ", own[2].item<int64_t>(), ", rank ",
        other, " gathers ",
        index >= 0 && index < static_cast<int64_t>(units.size()) ? "unit \"" + units[index]->name() + "\"" : "another",
        " as collective ", table[other][2].item<int64_t>(),
        " or had other units, parameters or gradient divide factors before, expected the same on all ranks",
        dtensor::call_site(),
        "; every rank must call it: run the same forwards and use the same parameters on all ranks");
  }
}

void Unit::reshard() {
  if (gather_work_) {
    try {
      gather_work_->wait();
    } catch (const std::exception&) {
      // A broken group reports itself at the next collective; here nobody needs the values any more.
    }
    gather_work_.reset();
  }
  if (state_ != State::sharded && shard_size() > 1) {
    if (raw_accessed_ && state_ == State::gathered) {
      try {
        keep_raw_writes();
      } catch (const std::exception& error) {
        // Scopes end in destructors; the memory goes all the same.
        LOG(ERROR) << "hsdp: what was written into unit " << name_
                   << " through a raw pointer is lost: " << error.what();
      }
    }
    for (auto& unsharded : unsharded_) free_memory(unsharded.flat);
  }
  raw_accessed_ = false;
  state_ = State::sharded;
  read_since_gather_ = false;
}

// What was written into whole parameters through a raw pointer is not seen by dispatch; this rank's part goes to the
// shard.
void Unit::keep_raw_writes() {
  Below below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  if (is_stale()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto part = dtensor::narrow_to_box(dtensor::raw_alias(unsharded_[i].whole), parameters_[i].layout().local());
    // Not compared with the other ranks: only some of them need see a change in their part.
    if (!part.equal(parameters_[i].impl().local())) write_back(i);
  }
}

int64_t Unit::unsharded_bytes() const {
  int64_t bytes = 0;
  for (auto& parameter : parameters_) {
    const auto& layout = parameter.layout();
    bytes += c10::multiply_integers(layout.padded_local_sizes()) * shard_size() *
             static_cast<int64_t>(c10::elementSize(layout.dtype()));
  }
  return bytes;
}

// ---- reading ----

void Unit::connect(int64_t scope_token) {
  Below below(dtensor::kDTensorKey);
  c10::InferenceMode normal(false);
  claim_accumulators();
  std::vector<size_t> indices;
  torch::autograd::edge_list edges;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& tensor = parameters_[i].tensor();
    unsharded_[i].connected = at::Tensor();
    if (!tensor.requires_grad()) continue;
    indices.push_back(i);
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  auto node = std::shared_ptr<UnitBackward>(
      new UnitBackward(shared_from_this(), indices, scope_token, std::move(edges)), torch::autograd::deleteNode);
  for (auto i : indices) {
    at::Tensor connected;
    {
      at::NoGradGuard no_grad;
      connected = unsharded_[i].whole.detach();
    }
    torch::autograd::impl::set_gradient_edge(connected, {node, node->add_input_metadata(connected)});
    unsharded_[i].connected = std::move(connected);
  }
  scope_token_ = scope_token;
}

at::Tensor Unit::connected(size_t index, int64_t scope_token) {
  if (scope_token != scope_token_ || !unsharded_[index].connected.defined()) connect(scope_token);
  return unsharded_[index].connected;
}

void Unit::disconnect() {
  scope_token_ = -1;
  for (auto& unsharded : unsharded_) unsharded.connected = at::Tensor();
}

// ---- what backward needs ----

Unit::Hold::Hold(std::shared_ptr<Unit> unit, int64_t scope_token)
    : unit_(std::move(unit)), scheduler_(unit_->scheduler()), scope_token_(scope_token) {
  std::lock_guard lock(unit_->holds_mutex_);
  ++unit_->holds_[scope_token_];
}

Unit::Hold::~Hold() {
  {
    std::lock_guard lock(unit_->holds_mutex_);
    auto found = unit_->holds_.find(scope_token_);
    if (--found->second > 0) return;
    unit_->holds_.erase(found);
  }
  if (scheduler_) scheduler_->last_hold_released(*unit_);
}

int64_t Unit::holds(int64_t scope_token) const {
  std::lock_guard lock(holds_mutex_);
  auto found = holds_.find(scope_token);
  return found == holds_.end() ? 0 : found->second;
}

int64_t Unit::holds() const {
  std::lock_guard lock(holds_mutex_);
  int64_t sum = 0;
  for (auto& [token, count] : holds_) sum += count;
  return sum;
}

Unit::Generation Unit::generation(size_t index) const {
  return {parameters_[index].impl().local_epoch(), unsharded_[index].alias_writes,
          version_of(parameters_[index].tensor()), version_of(unsharded_[index].whole)};
}

// ---- dtensor::ParameterOwner ----

bool Unit::readable() const {
  auto scheduler = this->scheduler();
  return scheduler && scheduler->readable();
}

at::Tensor Unit::unsharded(size_t index, bool differentiable) {
  auto scheduler = this->scheduler();
  TORCH_INTERNAL_ASSERT(scheduler);
  scheduler->read(*this);
  if (!differentiable) return unsharded_[index].whole;
  return connected(index, scheduler->scope_token());
}

at::Tensor Unit::unsharded_for_raw_access(size_t index) {
  auto whole = unsharded(index, /*differentiable=*/false);
  raw_accessed_ = true;
  return whole;
}

void Unit::gather() {
  if (auto scheduler = this->scheduler()) scheduler->read(*this);
}

bool Unit::is_read_only() const {
  auto scheduler = this->scheduler();
  return scheduler && scheduler->is_summoned();
}

void Unit::check_write(size_t index) const {
  if (!is_read_only()) return;
  dtensor::raise<dtensor::StateError>("SummonFull", "parameter \"", parameters_[index].name(),
                                      "\" is changed inside hsdp::SummonFull, expected reads only, because other ranks "
                                      "need not do the same; change it after the scope");
}

void Unit::note_operand(uint64_t hash) {
  auto scheduler = this->scheduler();
  if (scheduler && shard_size() > 1) scheduler->note_write("state made like a parameter", hash);
}

void Unit::written(size_t index) {
  write_back(index);
  auto scheduler = this->scheduler();
  if (!scheduler || shard_size() == 1) return;
  // Each rank keeps its part of its own values, so that the next gather must find them equal.
  Below below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  const auto values = dtensor::raw_alias(unsharded_[index].whole).to(kHost);
  scheduler->note_write("\"" + parameters_[index].name() + "\"",
                        dtensor::hash_bytes(values.const_data_ptr(), values.nbytes()));
}

void Unit::write_back(size_t index) {
  Below below(dtensor::kDTensorKey);
  at::NoGradGuard no_grad;
  auto& parameter = parameters_[index];
  auto& unsharded = unsharded_[index];
  if (shard_size() == 1) {
    // The same memory: only the counter of the identity has to learn of it.
    parameter.impl().bump_version();
  } else {
    auto local = parameter.impl().local();
    local.copy_(dtensor::narrow_to_box(dtensor::raw_alias(unsharded.whole), parameter.layout().local()));
  }
  parameter.impl().set_has_values(true);
  unsharded.version = version_of(parameter.tensor());
}

}  // namespace hsdp

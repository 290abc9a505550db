#include "dtensor/dtensor_impl.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "dtensor/error.h"

namespace dtensor {

ParameterOwner::~ParameterOwner() = default;
bool ParameterOwner::holds_whole() const { return true; }
void ParameterOwner::check_write(size_t) const {}
void ParameterOwner::check_whole_write(size_t) const {}
std::optional<c10::ScalarType> ParameterOwner::input_dtype(size_t) const { return std::nullopt; }
std::optional<c10::Device> ParameterOwner::whole_device() const { return std::nullopt; }

bool ParameterOwner::is_read_only() const { return false; }

void ParameterOwner::note_operand(uint64_t) {}
DeferredValue::~DeferredValue() = default;
void DeferredValue::attach(DTensorImpl&) {}
void DeferredValue::detach(DTensorImpl&) {}

at::Tensor raw_alias(const at::Tensor& plain) {
  c10::impl::ExcludeDispatchKeyGuard below(kDTensorKey);
  return plain.variable_data();
}

DTensorImpl::DTensorImpl(at::Tensor local, std::shared_ptr<const Layout> layout)
    : DTensorImpl(std::move(local), layout->mesh(), layout->placements(), layout->sizes(), layout->strides()) {
  layout_ = std::move(layout);
}

DTensorImpl::DTensorImpl(at::Tensor local, std::shared_ptr<const DeviceMesh> mesh, Placements placements,
                         c10::IntArrayRef sizes, c10::IntArrayRef strides)
    : c10::TensorImpl(local.key_set().add(kDTensorKey), local.dtype(), local.device()),
      state_(State::distributed),
      mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      has_values_(std::make_shared<std::atomic<bool>>(!local.is_meta())) {
  set_custom_device(true);
  set_sizes_and_strides(sizes, strides);
  adopt(std::move(local));
}

DTensorImpl::DTensorImpl(at::Tensor value, std::shared_ptr<DeferredValue> deferred)
    : c10::TensorImpl(value.key_set().add(kDTensorKey), value.dtype(), value.device()),
      state_(State::deferred),
      has_values_(std::make_shared<std::atomic<bool>>(false)) {
  set_custom_device(true);
  set_deferred_value(std::move(value), std::move(deferred));
}

DTensorImpl::~DTensorImpl() { set_deferred(nullptr); }

const Placements& DTensorImpl::alias_placements() const { return layout_ ? layout_->alias_placements() : placements_; }

void DTensorImpl::set_name(std::string name) {
  name_ = std::move(name);
  raw_access_text_set_ = false;
}

std::string DTensorImpl::describe() const {
  std::string text = name_.empty() ? (is_parameter_ ? "a parameter" : "a tensor")
                                   : c10::str(is_parameter_ ? "parameter \"" : "tensor \"", name_, "\"");
  text += c10::str(" of shape ", sizes());
  if (state_ == State::distributed) text += " " + to_string(alias_placements());
  return text;
}

void DTensorImpl::adopt(at::Tensor local) {
  local_ = std::move(local);
  body_ = raw_alias(local_);
  ++local_epoch_;
  follow_local();
}

// Everything of the base class that callers read without a virtual call.
void DTensorImpl::follow_local() {
  // Autograd keys are kept even where the local is an inference tensor's alias: the identity belongs to autograd.
  const auto autograd = key_set_ & c10::autograd_dispatch_keyset;
  key_set_ = (local_.key_set() | autograd).add(kDTensorKey);
  data_type_ = local_.dtype();
  device_opt_ = local_.device();
  if (!local_.is_inference() && !is_inference()) set_version_counter(local_.unsafeGetTensorImpl()->version_counter());
  values_version_ = local_.is_inference() ? 0 : local_._version();
}

void DTensorImpl::distribute(at::Tensor local, std::shared_ptr<const Layout> layout) {
  TORCH_INTERNAL_ASSERT(state_ != State::ordinary);
  state_ = State::distributed;
  set_deferred(nullptr);
  storage_ = c10::Storage();
  mesh_ = layout->mesh();
  placements_ = layout->placements();
  set_geometry(layout->sizes(), layout->strides(), 0);
  layout_ = std::move(layout);
  adopt(std::move(local));
}

void DTensorImpl::install_local(at::Tensor local) {
  TORCH_INTERNAL_ASSERT(state_ == State::distributed);
  local_ = std::move(local);
  ++local_epoch_;
}

void DTensorImpl::exchange_body(at::Tensor& donor) { std::swap(body_, donor); }

void DTensorImpl::refresh_identity() {
  follow_local();
  if (layout_ && layout_->dtype() != local_.scalar_type()) layout_ = layout_->with_dtype(local_.scalar_type());
  if (auto* meta = autograd_meta(); meta != nullptr && meta->grad().defined()) {
    if (meta->grad().device() != local_.device()) meta->mutable_grad() = at::Tensor();
  }
}

void DTensorImpl::set_owner(std::weak_ptr<ParameterOwner> owner, size_t index) {
  owner_ = std::move(owner);
  owner_index_ = index;
}

bool DTensorImpl::has_values() const {
  // The shared flag is set by the rules; the counter sees writes through to_local(), which shares it.
  if (has_values_->load(std::memory_order_relaxed)) return true;
  return state_ == State::distributed && !local_.is_meta() && !local_.is_inference() &&
         local_._version() != values_version_;
}

void DTensorImpl::set_has_values(bool value) {
  has_values_->store(value, std::memory_order_relaxed);
  if (local_.defined() && !local_.is_inference()) values_version_ = local_._version();
}

// data() gives aliases whose metadata callers must not change; the library itself may.
void DTensorImpl::set_geometry(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  const bool allowed = allow_tensor_metadata_change();
  set_allow_tensor_metadata_change(true);
  set_sizes_and_strides(sizes, strides, offset);
  set_allow_tensor_metadata_change(allowed);
}

void DTensorImpl::set_deferred(std::shared_ptr<DeferredValue> deferred) {
  if (deferred_ == deferred) return;
  if (deferred) deferred->attach(*this);
  if (deferred_) deferred_->detach(*this);
  deferred_ = std::move(deferred);
}

void DTensorImpl::set_deferred_value(at::Tensor value, std::shared_ptr<DeferredValue> deferred) {
  TORCH_INTERNAL_ASSERT(state_ == State::deferred);
  set_geometry(value.sizes(), value.strides(), value.storage_offset());
  set_deferred(std::move(deferred));
  storage_ = c10::Storage();
  adopt(std::move(value));
}

void DTensorImpl::become_ordinary(const at::Tensor& value) {
  TORCH_INTERNAL_ASSERT(state_ != State::ordinary && dtensor_impl(value) == nullptr);
  state_ = State::ordinary;
  layout_.reset();
  mesh_.reset();
  placements_.clear();
  pending_fill_.reset();
  set_deferred(nullptr);
  local_ = at::Tensor();
  body_ = at::Tensor();
  set_custom_device(false);
  storage_ = value.storage();
  set_geometry(value.sizes(), value.strides(), value.storage_offset());
  key_set_ = value.key_set().remove(kDTensorKey);
  data_type_ = value.dtype();
  device_opt_ = value.device();
  if (!value.is_inference() && !is_inference()) set_version_counter(value.unsafeGetTensorImpl()->version_counter());
}

c10::Device DTensorImpl::device_custom() const {
  if (const auto owner = owner_.lock()) {
    // What a forward makes from a parameter's options must lie beside the whole parameter.
    if (const auto device = owner->whole_device()) return *device;
  }
  return local_.device();
}

std::string DTensorImpl::raw_access_text() const {
  return c10::str("[raw access] ", describe(),
                  " is sharded and has no storage of its own outside a forward; use hsdp::export_pt(model, path) to "
                  "save the module, hsdp::unsharded(p) for the whole value, to_local() for this rank's part, "
                  "hsdp::to_string(t) to print",
                  name_.ends_with(".grad") ? "; gradients are already reduced" : "");
}

bool DTensorImpl::has_storage() const {
  auto* self = const_cast<DTensorImpl*>(this);
  switch (state_) {
    case State::ordinary:
      return static_cast<bool>(storage_);
    case State::deferred:
      if (!deferred_ || !deferred_->expose(*self)) return false;
      // data_ptr() reads the member, not storage().
      self->storage_ = local_.storage();
      return true;
    case State::distributed:
      break;
  }
  if (auto owner = this->owner(); owner && owner->readable()) {
    self->storage_ = owner->unsharded_for_raw_access(owner_index_).storage();
    return true;
  }
  if (!raw_access_text_set_) {
    // The text of data_ptr()'s error can only be planted; storage() below throws by itself.
    raw_access_text_set_ = true;
    self->release_storage_and_set_meta_custom_data_ptr_error_msg_(raw_access_text());
  }
  self->storage_ = c10::Storage();
  return false;
}

const c10::Storage& DTensorImpl::storage() const {
  if (state_ != State::ordinary && !has_storage()) {
    if (state_ == State::distributed) throw StateError(raw_access_text());
    raise<StateError>("raw access", describe(),
                      " was made by meta_init and has no memory yet, expected materialized values; call "
                      "fully_shard(...) and materialize(device) first");
  }
  return storage_;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::alias(const c10::VariableVersion& version_counter,
                                                       bool allow_change) const {
  auto local = at::Tensor(local_.unsafeGetTensorImpl()->shallow_copy_and_detach(version_counter, allow_change));
  c10::intrusive_ptr<DTensorImpl> copy;
  if (state_ == State::deferred) {
    copy = c10::make_intrusive<DTensorImpl>(std::move(local), deferred_);
    // torch::load sets shape and storage of the impl itself, past the operators.
    copy->set_geometry(sizes(), strides(), storage_offset());
    copy->storage_ = storage_;
  } else {
    copy = c10::make_intrusive<DTensorImpl>(std::move(local), mesh_, placements_, sizes(), strides());
    copy->layout_ = layout_;
    copy->owner_ = owner_;
    copy->owner_index_ = owner_index_;
    copy->is_alias_ = true;
  }
  copy->has_values_ = has_values_;
  copy->name_ = name_;
  copy->pending_fill_ = pending_fill_;  // torch::zeros_like hands out an alias of what at::zeros_like made
  copy->set_allow_tensor_metadata_change(allow_change);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                                         bool allow_tensor_metadata_change) const {
  if (state_ == State::ordinary) {
    return c10::TensorImpl::shallow_copy_and_detach(version_counter, allow_tensor_metadata_change);
  }
  return alias(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                                         bool allow_tensor_metadata_change) const {
  if (state_ == State::ordinary) {
    return c10::TensorImpl::shallow_copy_and_detach(std::move(version_counter), allow_tensor_metadata_change);
  }
  return alias(version_counter, allow_tensor_metadata_change);
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) {
  if (state_ == State::ordinary) return c10::TensorImpl::shallow_copy_from(impl);
  auto source_tensor = at::Tensor(impl);
  auto* source = dtensor_impl(source_tensor);
  if (state_ == State::deferred) {
    if (source == nullptr || source->state_ != State::deferred) {
      raise<NotSupportedError>("set_data", describe(),
                               " was made by meta_init, expected another tensor made inside it; assign values after "
                               "materialize(device), or read a file with hsdp::load(model, path)");
    }
    // An alias: what changes one tensor's geometry in place leaves the other's alone.
    set_deferred_value(raw_alias(source->local_), source->deferred_);
    set_geometry(source->sizes(), source->strides(), source->storage_offset());
    storage_ = source->storage_;
    has_values_ = source->has_values_;
    return;
  }
  if (!source_tensor.sizes().equals(sizes())) {
    raise<ValueError>("set_data", describe(), " given a tensor of shape ", source_tensor.sizes(), ", expected ",
                      sizes(), "; a distributed tensor keeps its global shape");
  }
  if (auto owner = this->owner()) {
    owner->check_write(owner_index_);
    const bool has_home = !local_.is_meta();
    const bool stays =
        has_home ? source_tensor.device() == local_.device() : source_tensor.device().type() == mesh_->device_type();
    if (!stays) {
      const bool offloaded = has_home && local_.device().type() != mesh_->device_type();
      raise<ValueError>(
          "set_data", describe(), " given a tensor on ", source_tensor.device(), ", expected ",
          c10::DeviceTypeName(offloaded ? local_.device().type() : mesh_->device_type(), /*lower_case=*/true),
          offloaded ? ", where its shards are kept; only what is gathered is on the device of the mesh"
                    : " as its mesh has; a sharded module stays on the device of its mesh");
    }
  }
  if (source == nullptr) {
    if (!layout_) {
      raise<NotSupportedError>("set_data", describe(),
                               " has no layout to take a shard by; give it a distributed tensor");
    }
    at::Tensor shard = source_tensor;
    {
      c10::impl::ExcludeDispatchKeyGuard below(kDTensorKey);
      at::NoGradGuard no_grad;
      const auto& box = layout_->local();
      for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
        shard = shard.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
      }
      shard = shard.detach().clone(at::MemoryFormat::Contiguous);
    }
    install_local(std::move(shard));
  } else {
    if (source->state_ != State::distributed) {
      raise<StateError>("set_data",
                        "the source was made by meta_init and has no values, expected a materialized tensor");
    }
    const bool same = layout_ && source->layout_ ? layout_->same_distribution(*source->layout_)
                                                 : mesh_ == source->mesh_ && placements_ == source->placements_;
    if (!same && owner()) {
      raise<ValueError>("set_data", describe(), " given a tensor placed ", to_string(source->alias_placements()),
                        ", expected ", to_string(alias_placements()), " on the same mesh; redistribute it first");
    }
    layout_ = source->layout_;
    mesh_ = source->mesh_;
    placements_ = source->placements_;
    install_local(raw_alias(source->local_));
  }
  auto donor = raw_alias(local_);
  exchange_body(donor);
  refresh_identity();
  set_has_values(source == nullptr || source->has_values());
}

DTensorImpl* dtensor_impl(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kDTensorKey)) return nullptr;
  // Plain views of gathered parameters carry the key as well, on an impl of the base class.
  return dynamic_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl());
}

DTensorImpl* distributed_impl(const at::TensorBase& tensor) {
  auto* impl = dtensor_impl(tensor);
  return impl != nullptr && impl->state() == DTensorImpl::State::distributed ? impl : nullptr;
}

}  // namespace dtensor

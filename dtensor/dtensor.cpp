#include "dtensor/dtensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>
#include <vector>

#include "dtensor/collective.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"

namespace dtensor {
namespace {

using Below = c10::impl::ExcludeDispatchKeyGuard;

at::Tensor make(at::Tensor local, std::shared_ptr<const Layout> layout) {
  return at::detail::make_tensor<DTensorImpl>(std::move(local), std::move(layout));
}

// Global sizes from local ones: along a Shard axis the sum over its ranks.
std::vector<int64_t> infer_global_sizes(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  auto sizes = local.sizes().vec();
  for (size_t axis = placements.size(); axis-- > 0;) {
    if (!placements[axis].is_shard() || mesh.size(static_cast<int64_t>(axis)) == 1) continue;
    const auto dim = placements[axis].dim();
    if (dim >= local.dim()) continue;  // Layout::create refuses it by name.
    auto& length = sizes[static_cast<size_t>(dim)];
    if (!mesh.has_groups()) {
      length *= mesh.size(static_cast<int64_t>(axis));
      continue;
    }
    auto total = at::full({1}, length, at::TensorOptions(mesh.device_type()).dtype(at::kLong));
    mesh.communicator(static_cast<int64_t>(axis))
        .all_reduce(total, ReduceOp::sum, {"all_reduce", "DTensor::from_local shape"})
        ->wait();
    length = total.item<int64_t>();
  }
  return sizes;
}

at::Tensor gather_axis(const at::Tensor& local, const DTensorImpl& impl, int64_t axis, int64_t dim, int64_t length) {
  const auto& mesh = *impl.mesh();
  const auto ranks = mesh.size(axis);
  if (ranks == 1) return local;
  // Pads to the first rank's chunk, so that all ranks send equally much, and moves the dim to the front.
  const auto chunk = chunk_range(length, ranks, 0).end;
  auto rows = local.movedim(dim, 0);
  auto sizes = rows.sizes().vec();
  sizes[0] = chunk;
  auto padded = at::zeros(sizes, local.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  sizes[0] = chunk * ranks;
  auto gathered = at::empty(sizes, local.options());
  mesh.communicator(axis)
      .all_gather(gathered.view({-1}), padded.view({-1}),
                  {"all_gather", impl.name().empty() ? "full_tensor" : impl.name()})
      ->wait();
  free_buffer(padded);
  auto whole = gathered.narrow(0, 0, length).movedim(0, dim).contiguous();
  if (!whole.is_alias_of(gathered)) free_buffer(gathered);
  return whole;
}

}  // namespace

DTensor::DTensor(at::Tensor tensor) : tensor_(std::move(tensor)), impl_(distributed_impl(tensor_)) {
  if (impl_ == nullptr) {
    raise<ValueError>("DTensor", "given ", describe(tensor_),
                      ", expected a distributed tensor; make one with from_local");
  }
}

DTensor DTensor::from_local(const at::Tensor& local, std::shared_ptr<const DeviceMesh> mesh, Placements placements,
                            std::optional<std::vector<int64_t>> shape) {
  constexpr auto where = "DTensor::from_local";
  if (!local.defined()) raise<ValueError>(where, "the local tensor is undefined, expected this rank's part");
  if (dtensor_impl(local))
    raise<NotSupportedError>(where, describe(local), " is itself distributed; pass its to_local()");
  if (!mesh) raise<ValueError>(where, "the mesh is null, expected a DeviceMesh");
  if (!local.is_contiguous()) {
    raise<NotSupportedError>(where, "local of sizes ", local.sizes(), " has strides ", local.strides(),
                             ", expected a contiguous tensor; call contiguous()");
  }
  if (placements.size() != static_cast<size_t>(mesh->ndim())) {
    raise<ValueError>(where, placements.size(), " placements ", to_string(placements), " for ", mesh->to_string(),
                      ", expected one per mesh axis");
  }
  Below below(kDTensorKey);
  at::NoGradGuard no_grad;
  const auto sizes = shape ? *shape : infer_global_sizes(local, *mesh, placements);
  auto layout = Layout::create(std::move(mesh), std::move(placements), sizes, {}, local.scalar_type());
  if (!local.sizes().equals(layout->local().sizes)) {
    raise<ValueError>(where, "local of sizes ", local.sizes(), ", expected ", c10::IntArrayRef(layout->local().sizes),
                      " as this rank's part of ", layout->to_string());
  }
  auto tensor = make(local.detach(), std::move(layout));
  tensor.set_requires_grad(local.requires_grad());
  return DTensor(std::move(tensor));
}

DTensor DTensor::without_layout(const at::Tensor& local, std::shared_ptr<const DeviceMesh> mesh,
                                Placements placements) {
  return DTensor(at::detail::make_tensor<DTensorImpl>(local, std::move(mesh), std::move(placements), local.sizes(),
                                                      local.strides()));
}

DTensor DTensor::distribute(const at::Tensor& whole, std::shared_ptr<const DeviceMesh> mesh, Placements placements) {
  Below below(kDTensorKey);
  at::NoGradGuard no_grad;
  auto layout = Layout::create(std::move(mesh), std::move(placements), whole.sizes(), {}, whole.scalar_type());
  if (layout->is_partial()) {
    raise<NotSupportedError>("DTensor::distribute", "to ", layout->to_string(), ", expected Shard and Replicate only");
  }
  auto local = narrow_to_box(whole.detach(), layout->local()).clone(at::MemoryFormat::Contiguous);
  auto tensor = make(std::move(local), std::move(layout));
  tensor.set_requires_grad(whole.requires_grad());
  return DTensor(std::move(tensor));
}

at::Tensor DTensor::to_local() const {
  Below below(kDTensorKey);
  return impl().local().detach();
}

at::Tensor DTensor::full_tensor() const {
  const auto& layout = impl().layout();
  if (!layout) {
    raise<NotSupportedError>("DTensor::full_tensor", impl().describe(), " has no layout; make it with from_local");
  }
  if (impl().local().is_meta()) {
    raise<StateError>("DTensor::full_tensor", impl().describe(), " is on meta and has no values; materialize it first");
  }
  Below below(kDTensorKey);
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto whole = on_mesh_device(*impl().mesh(), impl().local().detach()).clone(at::MemoryFormat::Contiguous);
  const auto& placements = layout->placements();
  // Inner axes first: they cut what the outer ones had left. `lengths` are the sizes an axis sees before its own cut.
  std::vector<std::vector<int64_t>> lengths;
  auto current = layout->sizes().vec();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    lengths.push_back(current);
    if (!placements[axis].is_shard()) continue;
    auto& length = current[static_cast<size_t>(placements[axis].dim())];
    const auto range =
        chunk_range(length, impl().mesh()->size(static_cast<int64_t>(axis)), impl().mesh()->coordinate()[axis]);
    length = range.end - range.begin;
  }
  for (size_t axis = placements.size(); axis-- > 0;) {
    const auto mesh_axis = static_cast<int64_t>(axis);
    if (placements[axis].is_shard()) {
      const auto dim = placements[axis].dim();
      const auto part =
          std::exchange(whole, gather_axis(whole, impl(), mesh_axis, dim, lengths[axis][static_cast<size_t>(dim)]));
      if (!whole.is_alias_of(part)) free_buffer(part);
    } else if (placements[axis].is_partial() && impl().mesh()->size(mesh_axis) > 1) {
      const bool norm = placements[axis].op() == ReduceOp::norm;
      const double p = norm ? placements[axis].norm_type() : 1;
      if (norm) whole = whole.pow(p);
      impl()
          .mesh()
          ->communicator(mesh_axis)
          .all_reduce(whole, norm ? ReduceOp::sum : placements[axis].op(), {"all_reduce", "full_tensor"})
          ->wait();
      if (norm) free_buffer(std::exchange(whole, whole.pow(1 / p)));
    }
  }
  return whole;
}

DTensor DTensor::detach() const {
  auto copy = impl().shallow_copy_and_detach(impl().version_counter(), /*allow_tensor_metadata_change=*/true);
  return DTensor(at::Tensor(std::move(copy)));
}

DTensor DTensor::as_parameter(bool requires_grad) const {
  auto parameter = detach();
  parameter.impl().mark_parameter();
  parameter.tensor().set_requires_grad(requires_grad);
  return parameter;
}

DTensor DTensor::to(at::TensorOptions options, bool non_blocking, bool copy,
                    std::optional<at::MemoryFormat> memory_format) const {
  Below below(kDTensorKey);
  at::NoGradGuard no_grad;
  return DTensor(wrap_local(impl().local().to(options, non_blocking, copy, memory_format), impl()));
}

DTensor DTensor::to(at::Device device, at::ScalarType dtype, bool non_blocking, bool copy,
                    std::optional<at::MemoryFormat> memory_format) const {
  Below below(kDTensorKey);
  at::NoGradGuard no_grad;
  return DTensor(wrap_local(impl().local().to(device, dtype, non_blocking, copy, memory_format), impl()));
}

DTensor DTensor::to(at::ScalarType dtype, bool non_blocking, bool copy,
                    std::optional<at::MemoryFormat> memory_format) const {
  Below below(kDTensorKey);
  at::NoGradGuard no_grad;
  return DTensor(wrap_local(impl().local().to(dtype, non_blocking, copy, memory_format), impl()));
}

DTensor DTensor::to(const at::Tensor& other, bool non_blocking, bool copy,
                    std::optional<at::MemoryFormat> memory_format) const {
  // The overload with a tensor reads its dtype and device only; a distributed one answers both.
  return to(other.device(), other.scalar_type(), non_blocking, copy, memory_format);
}

DTensor DTensor::to_float() const { return to(at::kFloat); }

DTensor DTensor::data() const { return DTensor(tensor_.data()); }

void DTensor::set_data(const at::Tensor& source) const { tensor_.set_data(source); }

at::Tensor DTensor::body_alias() const { return raw_alias(impl().body()); }

at::Tensor wrap_local(at::Tensor local, const DTensorImpl& like) {
  if (!like.layout()) {
    return at::detail::make_tensor<DTensorImpl>(std::move(local), like.mesh(), like.alias_placements(), like.sizes(),
                                                like.strides());
  }
  auto layout = like.layout();
  if (layout->dtype() != local.scalar_type()) layout = layout->with_dtype(local.scalar_type());
  return make(std::move(local), std::move(layout));
}

at::Tensor narrow_to_box(at::Tensor whole, const Box& box) {
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    whole = whole.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  }
  return whole;
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  auto* impl = dtensor_impl(tensor);
  const auto plain = c10::str(tensor.scalar_type(), " ", tensor.sizes());
  if (impl == nullptr) return c10::str("plain ", plain, " ", tensor.device());
  if (impl->state() == DTensorImpl::State::deferred) return c10::str("deferred ", plain);
  return c10::str("DTensor ", plain, " ", to_string(impl->alias_placements()), " on ", impl->mesh()->to_string(),
                  ", local ", impl->local().sizes(), " ", impl->local().device());
}

}  // namespace dtensor

#include "hsdp/checkpoint/model_loading.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "dtensor/dtensor.h"
#include "dtensor/error.h"

namespace hsdp {
namespace {

bool lacks_memory(const RegisteredTensor& target) {
  return target.parameter != nullptr ? !target.parameter->is_materialized()
                                     : dtensor::dtensor_impl(target.tensor) != nullptr;
}

}  // namespace

ModelLoading::ModelLoading(const char* where, const std::string& what, ShardedModule& module,
                           const std::vector<RegisteredTensor>& registered, const StoredTensors& stored,
                           const Options& options, LoadReport& report)
    : where_(where), module_(module) {
  std::vector<ValueSource> sources;
  for (const auto& tensor : stored.tensors()) sources.push_back({tensor.name, tensor.dtype, tensor.sizes, nullptr});
  auto match =
      match_names(where, what, registered, sources,
                  {.strict = options.strict, .same_dtypes = !options.convert_dtypes, .unsaved_may_be_missing = true});
  for (size_t i = 0; i < registered.size(); ++i) {
    if (match.sources[i].empty()) continue;
    Item item{&registered[i], {}, {}};
    for (const auto source : match.sources[i]) item.stored.push_back(&stored.tensors()[source]);
    items_.push_back(std::move(item));
  }
  for (auto& name : match.missing) report.missing.push_back(std::move(name));
  for (auto& name : match.unexpected) report.unexpected.push_back(std::move(name));
}

bool ModelLoading::on_meta() const {
  return std::any_of(items_.begin(), items_.end(), [](auto& item) { return lacks_memory(*item.target); });
}

void ModelLoading::allocate(at::Device device, TensorLoading& loading) {
  const bool fresh = on_meta();
  if (fresh) module_.to_empty(device);
  for (auto& item : items_) {
    auto target = checkpointed(where_, item.stored.front()->name, item.target->tensor);
    // What has just been given memory has no values that could be lost.
    item.in_place = fresh && item.target->parameter != nullptr && target.local.is_contiguous();
    item.values = item.in_place ? target.local : at::empty(target.box.sizes, target.local.options());
    target.local = item.values;
    loading.add(std::move(target), *item.stored.front(), {item.stored.begin() + 1, item.stored.end()});
  }
}

void ModelLoading::commit(const std::map<std::string, at::Tensor>& own) {
  for (auto& item : items_) {
    if (item.target->parameter == nullptr) {
      const auto mine = own.find(item.target->names.front());
      set_value(*item.target, mine == own.end() ? item.values : mine->second);
    } else {
      set_local(*item.target->parameter, item.in_place ? at::Tensor() : item.values);
    }
  }
}

void refuse_unless_listed(const char* where, const std::string& what, const std::vector<std::string>& missing,
                          const std::vector<std::string>& unexpected, bool strict, LoadReport& report) {
  if (strict && !(missing.empty() && unexpected.empty())) {
    std::string text;
    if (!missing.empty()) text += quoted_list("missing", missing);
    if (!unexpected.empty()) text += (text.empty() ? "" : ", ") + quoted_list("unexpected", unexpected);
    dtensor::raise<dtensor::ValueError>(
        where, what, " does not fit: ", text,
        ", expected the same names on both sides; without LoadOptions::strict what fits "
        "is loaded");
  }
  report.missing.insert(report.missing.end(), missing.begin(), missing.end());
  report.unexpected.insert(report.unexpected.end(), unexpected.begin(), unexpected.end());
}

}  // namespace hsdp

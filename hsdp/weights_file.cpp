#include "hsdp/weights_file.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/serialization/unpickler.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <utility>

#include "dtensor/collective.h"
#include "dtensor/error.h"
#include "hsdp/host.h"
#include "hsdp/python_pickle.h"

namespace hsdp {
namespace {

using c10::IValue;
using dtensor::raise;
using dtensor::ValueError;

constexpr auto kWhere = "load";
constexpr auto kFormats =
    ", expected an archive of torch::save(module, path) or of Python's torch.save(module.state_dict(), path)";

// Unpickles with one class for all: an object is the dict of its attributes.
class ObjectAsDict {
 public:
  ObjectAsDict() : unit_(std::make_shared<torch::jit::CompilationUnit>()) {
    type_ = c10::ClassType::create(c10::QualifiedName("__torch__.Attributes"), unit_);
    type_->addAttribute("attributes", c10::AnyType::get());
  }
  c10::StrongTypePtr resolve(const c10::QualifiedName&) const { return {unit_, type_}; }
  c10::intrusive_ptr<c10::ivalue::Object> wrap(const IValue& attributes) const {
    auto object = c10::ivalue::Object::create(c10::StrongTypePtr(unit_, type_), 1);
    object->setSlot(0, attributes);
    return object;
  }

 private:
  std::shared_ptr<torch::jit::CompilationUnit> unit_;
  c10::ClassTypePtr type_;
};

// Visits the tensors below a value by name. Dicts may contain each other, in a file made by hand even in circles.
class TensorWalk {
 public:
  using Visit = std::function<void(const std::string&, const at::Tensor&)>;
  /// A file where each value has its place has fewer of them than bytes.
  TensorWalk(std::string label, size_t most_values, Visit visit)
      : label_(std::move(label)), values_left_(most_values), visit_(std::move(visit)) {}

  void descend(const IValue& value, const std::string& path = "", int depth = 0) {
    constexpr int kDeepest = 1000;
    if (depth > kDeepest)
      raise<ValueError>(kWhere, label_, " holds dicts nested more than ", kDeepest, " deep", kFormats);
    if (values_left_-- == 0)
      raise<ValueError>(kWhere, label_, " holds dicts that contain themselves or each other", kFormats);
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit_(path, value.toTensor());
    } else if (value.isObject()) {
      descend(value.toObjectRef().getSlot(0), path, depth + 1);
    } else if (value.isTuple()) {
      // An OrderedDict and its attributes, see with_plain_dicts.
      const auto& elements = value.toTupleRef().elements();
      if (elements.size() == 2 && elements[0].isGenericDict() && elements[1].isGenericDict()) {
        descend(elements[0], path, depth + 1);
      }
    } else if (value.isGenericDict()) {
      for (const auto& entry : value.toGenericDict()) {
        if (!entry.key().isString()) continue;
        const auto& name = entry.key().toStringRef();
        descend(entry.value(), path.empty() ? name : path + "." + name, depth + 1);
      }
    }
  }

 private:
  std::string label_;
  size_t values_left_;
  Visit visit_;
};

// What was unpickled. It ends container by container: libtorch would descend, as deep as a file says, and would keep
// what contains itself.
class Unpickled {
 public:
  explicit Unpickled(IValue root) : root_(std::move(root)) {}
  ~Unpickled() {
    std::vector<IValue> left{root_};
    while (!left.empty()) {
      const IValue value = std::move(left.back());
      left.pop_back();
      if (value.isGenericDict()) {
        auto dict = value.toGenericDict();
        for (const auto& entry : dict) left.push_back(entry.value());
        dict.clear();
      } else if (value.isList()) {
        auto list = value.toList();
        for (const IValue& element : list.vec()) left.push_back(element);
        list.clear();
      } else if (value.isTuple()) {
        for (const auto& element : value.toTupleRef().elements()) left.push_back(element);
        value.toTuple()->setElements(std::vector<IValue>());
      } else if (value.isObject()) {
        left.push_back(value.toObjectRef().getSlot(0));
        value.toObject()->setSlot(0, IValue());
      }
    }
  }
  Unpickled(const Unpickled&) = delete;
  Unpickled& operator=(const Unpickled&) = delete;

  const IValue& root() const { return root_; }

 private:
  IValue root_;
};

// The first sentence: libtorch goes on with advice for other situations.
std::string reason(const std::exception& error) {
  const auto text = dtensor::backend_message(error);
  return text.substr(0, text.find(". "));
}

}  // namespace

std::vector<TensorRecord> list_tensors(const std::string& pickle, const std::string& label) {
  const auto refuse = [&](const char* kind) {
    raise<dtensor::NotSupportedError>(kWhere, label, " holds a ", kind,
                                      " tensor, expected dense ones; convert it before saving");
  };
  // Before unpickling, which would read values of these, and there are none.
  if (pickle.find("ctorch._utils\n_rebuild_sparse_tensor\n") != std::string::npos) refuse("sparse");
  if (pickle.find("ctorch._utils\n_rebuild_qtensor\n") != std::string::npos) refuse("quantized");
  const ObjectAsDict objects;
  std::vector<TensorRecord> tensors;
  try {
    const auto text = with_plain_dicts(pickle);
    size_t position = 0;
    // No values are read: the memory of a storage is the name of its record.
    std::vector<std::unique_ptr<std::string>> names;
    torch::jit::Unpickler unpickler(
        [&](char* buffer, size_t wanted) -> size_t {
          const auto count = text.copy(buffer, wanted, position);
          position += count;
          return count;
        },
        [&](const c10::QualifiedName& name) { return objects.resolve(name); },
        [&](const c10::StrongTypePtr&, const IValue& attributes) { return objects.wrap(attributes); },
        [&](const std::string& record) {
          names.push_back(std::make_unique<std::string>(record));
          return at::DataPtr(names.back().get(), kHost);
        },
        kHost);
    const Unpickled unpickled(unpickler.parse_ivalue());
    TensorWalk walk(label, pickle.size(), [&](const std::string& name, const at::Tensor& tensor) {
      if (tensor.is_quantized()) refuse("quantized");
      const auto* storage = tensor.storage().unsafeGetStorageImpl();
      std::string record;
      if (tensor.numel() > 0 && storage->data() != nullptr) record = *static_cast<const std::string*>(storage->data());
      tensors.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(),
                         tensor.storage_offset(), std::move(record), storage->nbytes()});
    });
    walk.descend(unpickled.root());
  } catch (const dtensor::Error&) {
    throw;
  } catch (const std::exception& error) {
    raise<ValueError>(kWhere, label, " holds no tensors that can be listed: ", reason(error), kFormats);
  }
  return tensors;
}

WeightsFile::WeightsFile(const std::string& path) : path_(path) {
  {
    // The reader's own words for a missing file say nothing about why.
    errno = 0;
    std::ifstream probe(path, std::ios::binary);
    char first = 0;
    if (!probe || !probe.get(first)) {
      raise<ValueError>(kWhere, path, " cannot be read: ", errno != 0 ? std::strerror(errno) : "it is empty", kFormats);
    }
  }
  std::string pickle;
  try {
    reader_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path);
    auto [bytes, size] = reader_->getRecord("data.pkl");
    pickle.assign(static_cast<const char*>(bytes.get()), size);
  } catch (const std::exception& error) {
    raise<ValueError>(kWhere, path, " is damaged or no zip archive: ", reason(error), kFormats);
  }
  tensors_ = list_tensors(pickle, path);
  for (auto& tensor : tensors_) check(tensor);
}

WeightsFile::~WeightsFile() = default;

// All that can be told without reading values, so that what is refused is refused before anything changes.
void WeightsFile::check(const TensorRecord& tensor) {
  if (c10::multiply_integers(tensor.sizes) == 0) return;
  const auto record = "data/" + tensor.record;
  if (tensor.record.empty() || !reader_->hasRecord(record)) refuse(tensor, "it has no values");
  const auto size = reader_->getRecordSize(record);
  if (size < tensor.storage_bytes) refuse(tensor, c10::str("it has ", size, " of ", tensor.storage_bytes, " bytes"));
  bool fits = tensor.storage_offset >= 0;
  try {
    fits = fits && at::detail::computeStorageNbytes(tensor.sizes, tensor.strides, c10::elementSize(tensor.dtype),
                                                    static_cast<size_t>(tensor.storage_offset)) <= tensor.storage_bytes;
  } catch (const c10::Error&) {
    fits = false;  // The size overflows.
  }
  if (!fits) {
    refuse(tensor, c10::str("its strides ", c10::IntArrayRef(tensor.strides), " and offset ", tensor.storage_offset,
                            " reach beyond its ", tensor.storage_bytes, " bytes"));
  }
}

void WeightsFile::refuse(const TensorRecord& tensor, const std::string& reason) const {
  raise<ValueError>(kWhere, "tensor \"", tensor.name, "\" in ", path_, " cannot be read: ", reason,
                    ", expected values of sizes ", c10::IntArrayRef(tensor.sizes), "; write the file again");
}

at::Tensor WeightsFile::read(const TensorRecord& tensor) {
  const auto options = at::TensorOptions(kHost).dtype(tensor.dtype);
  if (tensor.record.empty()) return at::empty(tensor.sizes, options);
  try {
    if (tensor.record != last_record_) {
      last_record_.clear();
      last_bytes_ = at::Tensor();
      auto [bytes, size] = reader_->getRecord("data/" + tensor.record);
      c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(bytes), /*allocator=*/nullptr, false);
      last_bytes_ = at::empty({0}, options.dtype(at::kByte)).set_(storage, 0, {static_cast<int64_t>(size)}, {1});
      last_record_ = tensor.record;
    }
    return at::empty({0}, options).set_(last_bytes_.storage(), tensor.storage_offset, tensor.sizes, tensor.strides);
  } catch (const std::exception& error) {
    refuse(tensor, reason(error));
  }
}

}  // namespace hsdp

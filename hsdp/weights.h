#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <type_traits>

#include "hsdp/checkpoint/hugging_face.h"
#include "hsdp/fully_shard.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

/// Whole weights into and out of a sharded module: by name, from a plain module or a file.
namespace hsdp {

/// Gives parameters and buffers the values of the equally named ones of an unsharded module, each rank its part, in the
/// sharded module's dtype. No communication: every rank brings the same values, or the parts do not fit together.
/// Tensors that nobody registered are not among them: call replay_init() before, not after. Throws ValueError listing
/// missing and unexpected names, shapes, and complex values for real tensors; StateError before to_empty. All or
/// nothing.
void copy_values(const std::shared_ptr<ShardedModule>& sharded, const torch::nn::Module& plain);

/// Fills parameters and buffers from whole weights, converted to the sharded module's dtypes: a file that
/// torch::save(module, path) wrote, or Python's torch.save(module.state_dict(), path) or torch.jit.save; a .safetensors
/// file; a Hugging Face folder of such files; or a checkpoint of save(), of which the model counts. A module on meta is
/// given memory first; buffers are in the file, and members that nobody registered and that have no values yet are
/// replayed as replay_init() would. A collective. Of a torch::save file rank 0 alone reads, and one whole tensor at a
/// time exists on each rank; of the others each rank reads its own parts.
///
/// As torch::load does, keeps what lies below children whose is_serializable() is false where the file has none of it:
/// materialize(device) before.
///
/// Throws, alike on all ranks and before anything changes: ValueError for a file that cannot be read, for missing and
/// unexpected names, shapes, dtypes, and for tied parameters that differ in the file; NotSupportedError for sparse and
/// quantized tensors. What only reading the values of a torch::save file shows, a damaged record or a failing disk, is
/// a ValueError, too: parameters and buffers before it, in the order of their names, have the file's values then, it
/// and all after it their former ones.
void load(const std::shared_ptr<ShardedModule>& sharded, const std::string& path);

/// Writes parameters and buffers as a Hugging Face folder: `model.safetensors`, or several files and an index. A
/// collective: rank 0 writes, one whole tensor at a time exists on each rank; buffers are rank 0's, and of tied
/// parameters the first name is there. Throws, alike on all ranks, ValueError where it cannot be written or holds a
/// model already, StateError while tensors have no values.
void export_hf(const std::shared_ptr<ShardedModule>& sharded, const std::string& folder,
               const HuggingFaceOptions& options = {});

/// Writes parameters and buffers to a file that an unsharded program opens with torch::load(module, path). A
/// collective: rank 0 writes, one whole tensor at a time exists on each rank; buffers are rank 0's. The file appears
/// complete or not at all, and lacks, as that of torch::save, children whose is_serializable() is false. Throws, alike
/// on all ranks, ValueError where it cannot be written and StateError while tensors have no values.
void export_pt(const std::shared_ptr<ShardedModule>& sharded, const std::string& path);

template <class M, class N>
void copy_values(const FullySharded<M>& model, const N& plain) {
  if constexpr (std::is_base_of_v<torch::nn::Module, N>) {
    copy_values(model.core(), static_cast<const torch::nn::Module&>(plain));
  } else {
    copy_values(model.core(), static_cast<const torch::nn::Module&>(*plain));  // a holder or a shared_ptr
  }
}
template <class M>
void load(const FullySharded<M>& model, const std::string& path) {
  load(model.core(), path);
}
template <class M>
void export_hf(const FullySharded<M>& model, const std::string& folder, const HuggingFaceOptions& options = {}) {
  export_hf(model.core(), folder, options);
}
template <class M>
void export_pt(const FullySharded<M>& model, const std::string& path) {
  export_pt(model.core(), path);
}

namespace detail {
[[noreturn]] void refuse_torch_save();
[[noreturn]] void refuse_torch_load();
}  // namespace detail

/// torch::save(model, path) and torch::load(model, path) on the sharded model: NotSupportedError naming export_pt and
/// load, since they would do a rank's part alone.
template <class M>
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive&, const FullySharded<M>&) {
  detail::refuse_torch_save();
}
template <class M>
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive&, FullySharded<M>&) {
  detail::refuse_torch_load();
}

}  // namespace hsdp

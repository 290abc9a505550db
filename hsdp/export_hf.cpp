#include <ATen/ATen.h>

#include <exception>
#include <optional>
#include <vector>

#include "dtensor/error.h"
#include "hsdp/agreement.h"
#include "hsdp/checkpoint/hugging_face.h"
#include "hsdp/host.h"
#include "hsdp/registered_tensors.h"
#include "hsdp/weights.h"

namespace hsdp {

void export_hf(const std::shared_ptr<ShardedModule>& sharded, const std::string& folder,
               const HuggingFaceOptions& options) {
  constexpr auto kWhere = "export_hf";
  const auto& mesh = mesh_of(*sharded, kWhere);
  const auto device = device_of(*sharded);
  sharded->scheduler()->compare_writes(mesh);
  auto targets = registered_tensors(*sharded);
  std::erase_if(targets, [](const auto& target) { return !target.in_files; });
  std::vector<std::vector<size_t>> plan;
  std::optional<HuggingFaceWriter> writer;
  agree(mesh, device, kWhere, [&] {
    check_values(kWhere, *sharded);
    std::vector<HuggingFaceTensor> tensors;
    for (const auto& target : targets) {
      const auto dtype = exported_dtype(target.tensor.scalar_type(), options);
      tensors.push_back({target.names.front(), dtype, target.tensor.sizes().vec()});
    }
    plan = plan_hugging_face(kWhere, tensors, options.max_file_bytes);
    if (mesh.rank() == 0) writer.emplace(kWhere, folder, std::move(tensors), options.max_file_bytes);
  });
  // After a failure the others still gather: rank 0 goes along.
  std::exception_ptr failure;
  for (const auto& file : plan) {
    for (const auto index : file) {
      const auto whole = whole_for_rank_0(targets[index]);
      if (!writer || failure) continue;
      try {
        const auto host = whole.detach().to(kHost, exported_dtype(whole.scalar_type(), options));
        const auto values = host.resolve_conj().resolve_neg().contiguous();
        writer->write(values.const_data_ptr(), values.nbytes());
      } catch (...) {
        failure = std::current_exception();
      }
    }
  }
  agree(mesh, device, kWhere, [&] {
    try {
      if (failure) std::rethrow_exception(failure);
      if (writer) writer->complete();
    } catch (...) {
      writer.reset();  // Its files are gone before the others go on.
      throw;
    }
  });
}

}  // namespace hsdp

#include "hsdp/checkpoint/shard_file.h"

#include <ATen/ATen.h>

#include <unordered_map>

#include "hsdp/checkpoint/safetensors.h"
#include "hsdp/host.h"

namespace hsdp {

WrittenFile write_shard_file(const char* where, const std::string& path, const std::vector<ShardPiece>& pieces,
                             bool sharded) {
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string, const at::Tensor*> values;
  for (const auto& piece : pieces) {
    entries.push_back({piece.name, piece.values.scalar_type(), piece.values.sizes().vec(), piece.offsets, 0, 0});
    values[piece.name] = &piece.values;
  }
  const auto header = layout_safetensors(where, entries, sharded);
  FileWriter file(where, path);
  file.write(header.data(), header.size());
  for (const auto& entry : entries) {
    const auto host = values[entry.name]->to(kHost).resolve_conj().resolve_neg().contiguous();
    if (host.nbytes() > 0) file.write(host.const_data_ptr(), host.nbytes());
  }
  return file.complete();
}

}  // namespace hsdp

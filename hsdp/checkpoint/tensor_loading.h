#pragma once

#include <cstdint>
#include <vector>

#include "hsdp/checkpoint/checkpointed_tensors.h"
#include "hsdp/checkpoint/stored_reader.h"

namespace hsdp {

/// Fills this rank's boxes of many tensors from stored ones: each rank reads its own boxes, and of ranks that want the
/// same one reads and sends it to the others. One use: add all, then read, then send.
class TensorLoading {
 public:
  /// `stored` must outlive it.
  TensorLoading(const char* where, const StoredTensors& stored, const dtensor::DeviceMesh& mesh)
      : where_(where), mesh_(mesh), choice_(mesh), reader_(where, stored) {}

  /// `target.local` is contiguous, on any device, and takes the values in its dtype. `equals` are stored tensors that
  /// must hold the same bits, since the module ties what they are the values of. Every rank adds the same in the same
  /// order.
  void add(CheckpointedTensor target, const StoredTensor& stored, std::vector<const StoredTensor*> equals = {});
  /// No communication. Throws ValueError for what cannot be read or is damaged, and where `equals` differ.
  void read();
  /// A collective, after read() has succeeded on all ranks.
  void send();

  uint64_t bytes_read() const { return reader_.bytes_read(); }

 private:
  struct Item {
    CheckpointedTensor target;
    const StoredTensor* stored;
    std::vector<const StoredTensor*> equals;
    std::vector<int64_t> reader;  // its coordinate
  };
  at::Tensor read_box(const Item& item, const StoredTensor& stored);

  const char* where_;
  const dtensor::DeviceMesh& mesh_;
  ReplicaChoice choice_;
  StoredReader reader_;
  std::vector<Item> items_;
};

}  // namespace hsdp

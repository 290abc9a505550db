#include "hsdp/transport.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "dtensor/collective.h"
#include "dtensor/error.h"
#include "hsdp/storage_memory.h"

namespace hsdp {

using dtensor::CollectiveGuard;
using dtensor::OperationName;
using dtensor::raise;
using dtensor::untracked_alias;
using dtensor::ValueError;
using dtensor::Work;

Transport::~Transport() = default;

namespace {

/// Pairs of one dtype, as aliases that autograd does not see.
using Bucket = std::vector<TensorPair>;

/// Several collectives and what is left to do after them.
class TransportWork final : public Work {
 public:
  void add(std::shared_ptr<Work> work, std::function<void()> finish) {
    parts_.push_back({std::move(work), std::move(finish)});
  }

  void wait() override {
    // Parts that are done leave at once: a failure later on must not keep their buffers or unpack them twice.
    while (!parts_.empty()) {
      Part& part = parts_.front();
      part.work->wait();
      if (part.finish) {
        CollectiveGuard guard;
        part.finish();
      }
      parts_.erase(parts_.begin());
    }
  }

  bool is_completed() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.work->is_completed(); });
  }

  bool is_on_stream() const override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const Part& part) { return part.work->is_on_stream() && !part.finish; });
  }

 private:
  struct Part {
    std::shared_ptr<Work> work;
    std::function<void()> finish;
  };
  std::vector<Part> parts_;
};

void check_pair(const TensorPair& pair, size_t index, int64_t ranks, const OperationName& name) {
  const auto where = [&] { return c10::str("pair ", index, name.subject.empty() ? "" : " of ", name.subject, ": "); };
  if (!pair.full.defined() || !pair.shard.defined())
    raise<ValueError>(name.operation, where(), "a tensor is undefined");
  if (pair.full.dim() != 1 || pair.shard.dim() != 1) {
    raise<ValueError>(name.operation, where(), "full has sizes ", pair.full.sizes(), " and shard ", pair.shard.sizes(),
                      ", expected 1-D tensors; flatten them");
  }
  if (pair.full.device() != pair.shard.device()) {
    raise<ValueError>(name.operation, where(), "full is on ", pair.full.device(), " and shard on ", pair.shard.device(),
                      ", expected one device");
  }
  dtensor::check_gather_arguments(name.operation, pair.full, pair.shard, ranks);
}

/// Checks everything before anything starts, drops pairs without elements, and sorts by dtype in the order of first
/// appearance, which is the same on every rank.
enum class Kind { gather, reduce };
std::vector<Bucket> make_buckets(Kind kind, c10::ArrayRef<TensorPair> pairs, int64_t ranks, const OperationName& name) {
  for (const auto i : c10::irange(pairs.size())) {
    check_pair(pairs[i], i, ranks, name);
    if (kind == Kind::reduce) dtensor::check_reducible(name.operation, pairs[i].full);
  }
  std::vector<Bucket> buckets;
  for (const TensorPair& pair : pairs) {
    if (pair.full.numel() == 0) continue;
    auto bucket = std::find_if(buckets.begin(), buckets.end(), [&](const Bucket& candidate) {
      return candidate.front().full.scalar_type() == pair.full.scalar_type() &&
             candidate.front().full.device() == pair.full.device();
    });
    if (bucket == buckets.end()) bucket = buckets.insert(bucket, Bucket());
    bucket->push_back({untracked_alias(pair.full), untracked_alias(pair.shard)});
  }
  return buckets;
}

class TransportBase : public Transport {
 public:
  explicit TransportBase(std::shared_ptr<dtensor::Communicator> communicator)
      : communicator_(std::move(communicator)) {}
  dtensor::Communicator& communicator() const override { return *communicator_; }

 protected:
  int64_t ranks() const { return communicator_->size(); }

  std::shared_ptr<dtensor::Communicator> communicator_;
};

/// One buffer and one collective for each dtype. Row r of the buffer holds the slices of rank r, one pair after
/// another. Its memory goes back when the collective is over: a backend's own thread may keep the tensor longer.
class PackingTransport final : public TransportBase {
 public:
  using TransportBase::TransportBase;

  std::shared_ptr<Work> all_gather(c10::ArrayRef<TensorPair> pairs, OperationName name) override {
    CollectiveGuard guard;
    auto result = std::make_shared<TransportWork>();
    for (Bucket& bucket : make_buckets(Kind::gather, pairs, ranks(), name)) {
      if (bucket.size() == 1) {
        result->add(communicator_->all_gather(bucket[0].full, bucket[0].shard, name), nullptr);
        continue;
      }
      const at::Tensor rows = make_rows(bucket);
      // This rank's row is the input, in place.
      const at::Tensor own = rows.select(0, communicator_->rank());
      int64_t offset = 0;
      for (const TensorPair& pair : bucket) {
        own.narrow(0, offset, pair.shard.numel()).copy_(pair.shard);
        offset += pair.shard.numel();
      }
      auto work = communicator_->all_gather(rows.view({-1}), own, name);
      result->add(std::move(work), [rows, bucket = std::move(bucket)] {
        int64_t position = 0;
        for (const TensorPair& pair : bucket) {
          const int64_t length = pair.shard.numel();
          pair.full.view({rows.size(0), length}).copy_(rows.narrow(1, position, length));
          position += length;
        }
        dtensor::free_buffer(rows);
      });
    }
    return result;
  }

  std::shared_ptr<Work> reduce_scatter(c10::ArrayRef<TensorPair> pairs, OperationName name) override {
    CollectiveGuard guard;
    auto result = std::make_shared<TransportWork>();
    for (const Bucket& bucket : make_buckets(Kind::reduce, pairs, ranks(), name)) {
      if (bucket.size() == 1) {
        result->add(communicator_->reduce_scatter(bucket[0].shard, bucket[0].full, name), nullptr);
        continue;
      }
      const at::Tensor rows = make_rows(bucket);
      std::vector<at::Tensor> shards;
      int64_t offset = 0;
      for (const TensorPair& pair : bucket) {
        const int64_t length = pair.shard.numel();
        rows.narrow(1, offset, length).copy_(pair.full.view({rows.size(0), length}));
        offset += length;
        shards.push_back(pair.shard);
      }
      const at::Tensor reduced = at::empty({rows.size(1)}, rows.options());
      auto work = communicator_->reduce_scatter(reduced, rows.view({-1}), name);
      // The full gradients are packed: only the shards are needed from here on.
      result->add(std::move(work), [reduced, rows, shards = std::move(shards)] {
        int64_t position = 0;
        for (const at::Tensor& shard : shards) {
          shard.copy_(reduced.narrow(0, position, shard.numel()));
          position += shard.numel();
        }
        dtensor::free_buffer(rows);
      });
    }
    return result;
  }

 private:
  at::Tensor make_rows(const Bucket& bucket) const {
    int64_t length = 0;
    for (const TensorPair& pair : bucket) length += pair.shard.numel();
    return empty_buffer({ranks(), length}, bucket.front().full.options());
  }
};

/// One collective a pair, without copies, launched together.
class GroupedTransport final : public TransportBase {
 public:
  using TransportBase::TransportBase;

  bool packs() const override { return false; }

  std::shared_ptr<Work> all_gather(c10::ArrayRef<TensorPair> pairs, OperationName name) override {
    return grouped(Kind::gather, pairs, name,
                   [&](const TensorPair& pair) { communicator_->all_gather(pair.full, pair.shard, name); });
  }
  std::shared_ptr<Work> reduce_scatter(c10::ArrayRef<TensorPair> pairs, OperationName name) override {
    return grouped(Kind::reduce, pairs, name,
                   [&](const TensorPair& pair) { communicator_->reduce_scatter(pair.shard, pair.full, name); });
  }

 private:
  template <class Start>
  std::shared_ptr<Work> grouped(Kind kind, c10::ArrayRef<TensorPair> pairs, const OperationName& name,
                                const Start& start) {
    CollectiveGuard guard;
    auto result = std::make_shared<TransportWork>();
    // Backends launch one kind and one dtype at a time when they fuse.
    for (const Bucket& bucket : make_buckets(kind, pairs, ranks(), name)) {
      communicator_->start_group();
      try {
        for (const TensorPair& pair : bucket) start(pair);
      } catch (...) {
        // A group that stays open would refuse every later call.
        communicator_->end_group();
        throw;
      }
      result->add(communicator_->end_group(), nullptr);
    }
    return result;
  }
};

/// A group of one rank: nothing to gather and nothing to add, so a pair costs a copy, or nothing where both sides are
/// one memory.
class LocalTransport final : public TransportBase {
 public:
  using TransportBase::TransportBase;

  bool packs() const override { return false; }

  std::shared_ptr<Work> all_gather(c10::ArrayRef<TensorPair> pairs, OperationName name) override {
    return each(Kind::gather, pairs, name,
                [&](const TensorPair& pair) { communicator_->all_gather(pair.full, pair.shard, name)->wait(); });
  }
  std::shared_ptr<Work> reduce_scatter(c10::ArrayRef<TensorPair> pairs, OperationName name) override {
    return each(Kind::reduce, pairs, name,
                [&](const TensorPair& pair) { communicator_->reduce_scatter(pair.shard, pair.full, name)->wait(); });
  }

 private:
  template <class Run>
  std::shared_ptr<Work> each(Kind kind, c10::ArrayRef<TensorPair> pairs, const OperationName& name, const Run& run) {
    CollectiveGuard guard;
    for (const Bucket& bucket : make_buckets(kind, pairs, 1, name)) {
      for (const TensorPair& pair : bucket) {
        if (pair.full.data_ptr() != pair.shard.data_ptr()) run(pair);
      }
    }
    return dtensor::completed_work();
  }
};

}  // namespace

std::shared_ptr<Transport> make_transport(std::shared_ptr<dtensor::Communicator> communicator) {
  TORCH_INTERNAL_ASSERT(communicator, "a transport needs a communicator");
  if (communicator->size() == 1) return std::make_shared<LocalTransport>(std::move(communicator));
  if (communicator->prefers_groups()) return std::make_shared<GroupedTransport>(std::move(communicator));
  return std::make_shared<PackingTransport>(std::move(communicator));
}

}  // namespace hsdp

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dtensor/collective_call.h"

namespace dtensor {

/// A place beside a backend where the ranks of one group write what they are about to do and read what the others are:
/// to find out, over a backend that would wait for ever, which rank does something else or does not come.
///
/// Ownership: shared by the communicators over that backend, whose collectives have one order. Threads: one caller at a
/// time. Blocks the host at every call, so for debugging. Keeps at most two keys a rank in the store.
class CallBoard {
 public:
  /// `store` must be this group's alone (a c10d::PrefixStore). `timeout` is how long to wait for the other ranks.
  CallBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, std::chrono::milliseconds timeout);

  /// Writes the next call of this rank and returns those of all ranks as CollectiveCall::find_mismatch reads them.
  /// Throws std::runtime_error naming the ranks that did not come and the call they were to make; from then on at once.
  at::Tensor exchange(const CollectiveCall& call);

 private:
  std::string key(int64_t call, int64_t rank) const;
  void wait_for(int64_t rank, const CollectiveCall& call, std::chrono::steady_clock::time_point end);
  [[noreturn]] void raise_missing(int64_t first, const CollectiveCall& call);

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_, size_;
  std::chrono::milliseconds timeout_;
  int64_t calls_ = 0;
  std::string failure_;
};

}  // namespace dtensor

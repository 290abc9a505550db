#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace bench {

/// One forked rank, and where it meets the others.
struct Rank {
  int64_t rank;
  int64_t ranks;
  c10::intrusive_ptr<c10d::Store> store;

  /// Returns when all ranks have called it with this name; once a name.
  void meet(const std::string& name) const;
};

/// Forks `ranks` processes of one thread each and runs `body` in them. Returns whether all ended well; a rank that
/// throws says why on stderr, and the others are ended. Call it before anything starts threads or uses autograd.
bool run_ranks(int64_t ranks, const std::function<void(const Rank&)>& body);

}  // namespace bench

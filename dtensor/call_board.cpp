#include "dtensor/call_board.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "dtensor/collective.h"

namespace dtensor {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

CallBoard::CallBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t size, milliseconds timeout)
    : store_(std::move(store)), rank_(rank), size_(size), timeout_(timeout) {}

std::string CallBoard::key(int64_t call, int64_t rank) const { return c10::str("call_", call, "/", rank); }

void CallBoard::wait_for(int64_t rank, const CollectiveCall& call, steady_clock::time_point end) {
  // Not Store::wait, which keeps other threads from the store.
  while (!store_->check({key(calls_, rank)})) {
    if (steady_clock::now() >= end) raise_missing(rank, call);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void CallBoard::raise_missing(int64_t first, const CollectiveCall& call) {
  std::string missing = std::to_string(first);
  for (int64_t other = first + 1; other < size_; ++other) {
    if (!store_->check({key(calls_, other)})) missing += c10::str(", ", other);
  }
  throw std::runtime_error(c10::str(missing.find(',') == std::string::npos ? "rank " : "ranks ", missing,
                                    " did not come to call ", calls_, " of this group, which is ", call.to_string()));
}

at::Tensor CallBoard::exchange(const CollectiveCall& call) {
  if (!failure_.empty()) throw std::runtime_error(failure_);
  ++calls_;
  const auto own = call.encode();
  const auto* bytes = own.const_data_ptr<uint8_t>();
  auto table = at::empty({size_ * CollectiveCall::kEncodedBytes}, own.options());
  try {
    store_->set(key(calls_, rank_), std::vector<uint8_t>(bytes, bytes + own.numel()));
    const auto end = steady_clock::now() + timeout_;
    for (int64_t other = 0; other < size_; ++other) {
      if (other != rank_) wait_for(other, call, end);
      const auto record = store_->get(key(calls_, other));
      TORCH_INTERNAL_ASSERT(record.size() == static_cast<size_t>(CollectiveCall::kEncodedBytes));
      std::memcpy(table.mutable_data_ptr<uint8_t>() + other * CollectiveCall::kEncodedBytes, record.data(),
                  record.size());
    }
    // Whoever wrote this call has read all of the one before.
    if (calls_ > 1) store_->deleteKey(key(calls_ - 1, rank_));
  } catch (const std::exception& error) {
    failure_ = backend_message(error);
    throw std::runtime_error(failure_);
  }
  return table;
}

}  // namespace dtensor

#include "hsdp/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <string>

#include "dtensor/collective.h"
#include "dtensor/error.h"
#include "dtensor/mesh_collectives.h"
#include "hsdp/host.h"

namespace hsdp {
namespace {

enum class Kind : int64_t { value, not_supported, state, communication, other };

Kind kind_of(const std::exception& error) {
  if (dynamic_cast<const dtensor::ValueError*>(&error) != nullptr) return Kind::value;
  if (dynamic_cast<const dtensor::NotSupportedError*>(&error) != nullptr) return Kind::not_supported;
  if (dynamic_cast<const dtensor::StateError*>(&error) != nullptr) return Kind::state;
  if (dynamic_cast<const dtensor::CommunicationError*>(&error) != nullptr) return Kind::communication;
  return Kind::other;
}

struct Failure {
  int64_t rank;
  Kind kind;
  std::string text;
};

[[noreturn]] void throw_again(const char* where, const Failure& failure) {
  switch (failure.kind) {
    case Kind::value:
      throw dtensor::ValueError(failure.text);
    case Kind::not_supported:
      throw dtensor::NotSupportedError(failure.text);
    case Kind::state:
      throw dtensor::StateError(failure.text);
    case Kind::communication:
      throw dtensor::CommunicationError(failure.text);
    case Kind::other:
      break;
  }
  dtensor::raise<dtensor::CommunicationError>(where, "rank ", failure.rank, " failed: ", failure.text);
}

// That of the lowest rank that has one, on all ranks.
std::optional<Failure> lowest_failure(const dtensor::DeviceMesh& mesh, c10::Device device, const char* where,
                                      const std::optional<Failure>& mine) {
  dtensor::CollectiveGuard guard;
  constexpr int64_t kNobody = std::numeric_limits<int64_t>::max();
  const auto lowest = at::full({1}, mine ? mine->rank : kNobody, at::TensorOptions(device).dtype(at::kLong));
  dtensor::all_reduce(mesh, lowest, dtensor::ReduceOp::min, {"all_reduce", where});
  const auto failed = lowest.item<int64_t>();
  if (failed == kNobody) return std::nullopt;
  auto kind =
      at::full({1}, static_cast<int64_t>(mine ? mine->kind : Kind::other), at::TensorOptions(device).dtype(at::kLong));
  dtensor::broadcast(mesh, kind, failed, {"broadcast", where});
  return Failure{failed, static_cast<Kind>(kind.item<int64_t>()),
                 broadcast_text(mesh, device, where, mine ? mine->text : std::string(), failed)};
}

}  // namespace

std::string broadcast_text(const dtensor::DeviceMesh& mesh, c10::Device device, const char* where,
                           const std::string& text, int64_t root) {
  if (mesh.size() == 1) return text;
  dtensor::CollectiveGuard guard;
  const bool is_mine = mesh.rank() == root;
  const auto size = at::full({1}, static_cast<int64_t>(text.size()), at::TensorOptions(device).dtype(at::kLong));
  dtensor::broadcast(mesh, size, root, {"broadcast", where});
  std::string received = is_mine ? text : std::string(static_cast<size_t>(size.item<int64_t>()), '\0');
  // In pieces, for backends that count bytes in 32 bits.
  constexpr size_t kPiece = size_t{1} << 28;
  for (size_t begin = 0; begin < received.size(); begin += kPiece) {
    const auto count = std::min(kPiece, received.size() - begin);
    auto bytes = at::empty({static_cast<int64_t>(count)}, at::TensorOptions(kHost).dtype(at::kByte));
    std::memcpy(bytes.mutable_data_ptr(), received.data() + begin, count);
    bytes = bytes.to(device);
    dtensor::broadcast(mesh, bytes, root, {"broadcast", where});
    bytes = bytes.to(kHost);
    std::memcpy(received.data() + begin, bytes.const_data_ptr(), count);
  }
  return received;
}

void agree(const dtensor::DeviceMesh& mesh, c10::Device device, const char* where, const std::function<void()>& work) {
  std::exception_ptr cause;
  std::optional<Failure> mine;
  try {
    work();
  } catch (const std::exception& error) {
    cause = std::current_exception();
    const auto kind = kind_of(error);
    mine = Failure{mesh.rank(), kind, kind == Kind::other ? dtensor::backend_message(error) : error.what()};
  } catch (...) {
    cause = std::current_exception();
    mine = Failure{mesh.rank(), Kind::other, "with an exception that is no std::exception"};
  }
  if (mesh.size() == 1) {
    if (cause) std::rethrow_exception(cause);
    return;
  }
  std::optional<Failure> first;
  try {
    first = lowest_failure(mesh, device, where, mine);
  } catch (const dtensor::CommunicationError&) {
    // What this rank has to say is nearer to the origin than that the others are gone.
    if (cause) std::rethrow_exception(cause);
    throw;
  }
  if (!first) return;
  if (first->rank == mesh.rank()) std::rethrow_exception(cause);
  throw_again(where, *first);
}

}  // namespace hsdp

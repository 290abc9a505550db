#include "hsdp/agreement.h"

#include <ATen/ATen.h>

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
  const bool is_mine = mesh.rank() == failed;
  auto header = at::zeros({2}, at::TensorOptions(kHost).dtype(at::kLong));
  if (is_mine) {
    header[0] = static_cast<int64_t>(mine->kind);
    header[1] = static_cast<int64_t>(mine->text.size());
  }
  header = header.to(device);
  dtensor::broadcast(mesh, header, failed, {"broadcast", where});
  header = header.to(kHost);
  auto bytes = at::empty({header[1].item<int64_t>()}, at::TensorOptions(kHost).dtype(at::kByte));
  if (is_mine) std::memcpy(bytes.mutable_data_ptr(), mine->text.data(), mine->text.size());
  bytes = bytes.to(device);
  dtensor::broadcast(mesh, bytes, failed, {"broadcast", where});
  bytes = bytes.to(kHost);
  return Failure{failed,
                 static_cast<Kind>(header[0].item<int64_t>()),
                 {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())}};
}

}  // namespace

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

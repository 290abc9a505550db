#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/device_mesh.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace hsdp {

struct LauncherEnv;

struct InitOptions {
  /// A built-in backend (docs/devices.md) or a registered one (backend.h); "auto" is the first whose devices are
  /// visible.
  std::string backend = "auto";
  /// How long a rank waits for the others, at the start and in every collective.
  std::chrono::milliseconds timeout = std::chrono::seconds(300);
  /// Position on this host, which picks the device: by default what the launcher says, or with init_from() the rank.
  std::optional<int64_t> local_rank = {};

  bool operator==(const InitOptions&) const = default;
};

/// This process's place in the job: rank, device, and the groups it communicates in.
///
/// A handle: copies share one state, which lives as long as a copy or a mesh made from it does. Threads: one thread
/// calls the functions that communicate (make_mesh, barrier, shutdown), in the same order on every rank.
class Environment {
 public:
  int64_t rank() const;
  int64_t world_size() const;
  /// Position on this host.
  int64_t local_rank() const;
  /// Where this rank computes: the host, or the accelerator of the local rank.
  c10::Device device() const;
  /// The backend's name, or "none" for a world of one.
  const std::string& backend() const;
  const InitOptions& options() const;

  /// All ranks.
  const std::shared_ptr<dtensor::Communicator>& communicator() const;
  /// All ranks along one axis named "shard": what fully_shard uses unless told otherwise.
  const std::shared_ptr<const dtensor::DeviceMesh>& mesh() const;
  /// All ranks as an n-D mesh, in row-major order, with a group for each axis. Every rank must call it with the same
  /// arguments. Throws ValueError when the sizes do not multiply to the world size or the names do not fit.
  std::shared_ptr<const dtensor::DeviceMesh> make_mesh(std::vector<int64_t> sizes,
                                                       std::vector<std::string> names) const;
  /// Returns when every rank has come here; `purpose` is named in errors.
  void barrier(std::string_view purpose = "world") const;

 private:
  struct State;
  explicit Environment(std::shared_ptr<State> state) : state_(std::move(state)) {}

  /// With several ranks, connects to the launcher's store when `store` is null, and the ranks when `group` is.
  static Environment start(LauncherEnv launcher, const InitOptions& options, c10::intrusive_ptr<c10d::Store> store,
                           c10::intrusive_ptr<c10d::Backend> group);
  friend Environment init(const InitOptions& options);
  friend Environment init_from(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t world_size,
                               const InitOptions& options);
  friend Environment init_from(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> group,
                               const InitOptions& options);
  friend void shutdown();

  std::shared_ptr<State> state_;
};

/// Joins the job that the launcher describes (see launcher_env.h), or runs alone; rank 0 says so in one line on stderr.
/// A second call returns the same environment. Ranks that never called torch::manual_seed get one common seed. With
/// several ranks, SIGPIPE is ignored unless the program handles it, so that a rank that died becomes an error here and
/// not a silent death.
///
/// Throws ValueError for an incomplete or wrong environment, a local rank without a device, or an unknown backend;
/// NotSupportedError for a backend that this build lacks; StateError for a second call with other options;
/// CommunicationError when the ranks do not meet within the timeout.
Environment init(const InitOptions& options = {});

/// The same for a program that brings its own store and knows its rank; prints nothing. `store` is not used when
/// world_size is 1. Throws StateError when the process has an environment already.
Environment init_from(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t world_size,
                      const InitOptions& options = {});

/// The same for a program that has connected its ranks, too: `group` carries the collectives of all ranks (of a
/// c10d::ProcessGroup it is what getBackend() returns), and `store` is where those of a part of them meet. Trains on
/// the device that the group is bound to, else on the current one.
Environment init_from(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> group,
                      const InitOptions& options = {});

/// Whether this process has an environment.
bool is_initialized();

/// The environment of this process. Throws StateError before init().
Environment current_environment();

/// Waits for all ranks, so that none loses its store to another that has finished, and forgets the environment. Throws
/// CommunicationError when another rank has failed; the environment is gone all the same. Groups of devices are taken
/// down, unless the program brought them, so meshes that are left cannot communicate. Nothing happens before init().
void shutdown();

}  // namespace hsdp

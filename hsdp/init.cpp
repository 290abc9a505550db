#include "hsdp/init.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <csignal>
#include <cstdio>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "dtensor/call_board.h"
#include "dtensor/collective.h"
#include "dtensor/error.h"
#include "hsdp/host.h"
#include "hsdp/launch/backend_kind.h"
#include "hsdp/launch/device.h"
#include "hsdp/launch/job_seed.h"
#include "hsdp/launch/launcher_env.h"

namespace hsdp {

using dtensor::CommunicationError;
using dtensor::NotSupportedError;
using dtensor::raise;
using dtensor::StateError;
using dtensor::ValueError;

namespace {

constexpr const char* kWhere = "init";

/// What connects all ranks and makes groups of some of them. Shared by the environment and its meshes, which may need
/// further groups.
struct Connections {
  LauncherEnv launcher;
  std::chrono::milliseconds timeout{0};
  const BackendKind* kind = nullptr;
  c10::Device device{kHost};
  bool compares_calls = false;
  // In this order, so that groups end before the store they met in.
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;
  std::vector<c10::intrusive_ptr<c10d::Backend>> on_devices;  // made here; they expect to be shut down
  std::shared_ptr<dtensor::CallBoard> board;                  // of `backend`; null unless calls are compared
  // How often a group of the same ranks and axis was made: its members count alike, whatever other groups exist.
  std::map<std::string, int64_t> group_uses;
};

}  // namespace

struct Environment::State {
  LauncherEnv launcher;
  InitOptions options;
  std::string backend_name = "none";
  c10::Device device{kHost};
  std::shared_ptr<dtensor::Communicator> communicator;
  std::shared_ptr<const dtensor::DeviceMesh> mesh;
  dtensor::GroupFactory groups;
  std::shared_ptr<Connections> connections;  // null for one rank
};

namespace {

std::string seconds_text(std::chrono::milliseconds duration) {
  return c10::str(static_cast<double>(duration.count()) / 1000.0, " s");
}

/// c10d logs every failed attempt with a stack trace. The error that follows says it all in one line, so the log
/// is kept for those who ask for it. The level is the process's: a guard is held by one thread, while it connects.
class QuietLog {
 public:
  QuietLog() : level_(FLAGS_caffe2_log_level) {
    const bool asked = process_env("TORCH_CPP_LOG_LEVEL") || process_env("TORCH_SHOW_CPP_STACKTRACES");
    if (!asked) FLAGS_caffe2_log_level = kFatalOnly;
  }
  ~QuietLog() { FLAGS_caffe2_log_level = level_; }
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;

 private:
  static constexpr int kFatalOnly = 3;
  int level_;
};

/// Failures of c10d while ranks meet. The cause is usually another rank, so the text says what this one waited for.
template <class F>
auto meeting(const LauncherEnv& launcher, std::chrono::milliseconds timeout, const std::string& what, const F& body) {
  const QuietLog quiet;
  try {
    return body();
  } catch (const dtensor::Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string cause = dtensor::backend_message(error);
    const bool taken = cause.find("EADDRINUSE") != std::string::npos;
    raise<CommunicationError>(kWhere, what, " failed on rank ", launcher.rank, " of ", launcher.world_size,
                              " (timeout ", seconds_text(timeout), "): ", cause,
                              taken ? "; another job uses the port, set MASTER_PORT to a free one on every rank"
                                    : "; every rank must start, with the same addresses, within the timeout");
  }
}

void check_options(const InitOptions& options) {
  if (options.timeout <= std::chrono::milliseconds(0)) {
    raise<ValueError>(kWhere, "timeout ", seconds_text(options.timeout), ", expected more than 0");
  }
  if (options.local_rank.value_or(0) < 0) {
    raise<ValueError>(kWhere, "local rank ", *options.local_rank, ", expected 0 or more");
  }
}

/// "auto" is the first backend of which a device is visible.
const BackendKind& choose_backend(const InitOptions& options) {
  const auto kinds = backend_kinds();
  const bool automatic = options.backend == "auto";
  for (const auto* kind : kinds) {
    if (automatic ? kind->missing.empty() && device_count(kind->device_type) > 0 : kind->name == options.backend) {
      return *kind;
    }
  }
  if (automatic) return *kinds.back();
  std::string known = "auto";
  for (size_t i = kinds.size(); i-- > 0;) known += (i == 0 ? " or " : ", ") + kinds[i]->name;
  raise<ValueError>(kWhere, "backend '", options.backend, "', expected ", known);
}

/// The kind that a group of the program's own is of.
const BackendKind& kind_of(const c10d::Backend& group, const InitOptions& options) {
  const std::string name = group.getBackendName();
  if (options.backend != "auto" && options.backend != name) {
    raise<ValueError>("init_from", "backend ", options.backend, " and a group over ", name, ", expected auto or ",
                      name);
  }
  for (const auto* kind : backend_kinds()) {
    if (kind->name == name) return *kind;
  }
  raise<ValueError>("init_from", "a group over ", name,
                    ", expected a backend that is known; register_backend() says on which devices it works");
}

void check_backend(const BackendKind& backend, const LauncherEnv& launcher) {
  const bool on_host = backend.device_type == kHost;
  if (!backend.missing.empty() && (launcher.world_size > 1 || !on_host)) {
    raise<NotSupportedError>(kWhere, "backend ", backend.name, " ", backend.missing);
  }
}

/// Where this rank computes.
c10::Device choose_device(const BackendKind& backend, const LauncherEnv& launcher) {
  if (backend.device_type == kHost) return kHost;
  const int64_t devices = device_count(backend.device_type);
  const int64_t index = launcher.may_bind_devices && devices == 1 ? 0 : launcher.local_rank;
  if (index >= devices) {
    raise<ValueError>(kWhere, "local rank ", launcher.local_rank, " but ",
                      devices == 0 ? "no" : std::to_string(devices), " visible ",
                      c10::DeviceTypeName(backend.device_type), " devices, expected one device a rank; ",
                      devices == 0 ? "compute on the host, over " : "start fewer ranks on this host, or use ",
                      backend_kinds().back()->name);
  }
  return {backend.device_type, static_cast<c10::DeviceIndex>(index)};
}

/// Where the program's own group computes.
c10::Device device_of(const c10d::Backend& group, const BackendKind& backend) {
  if (backend.device_type == kHost) return kHost;
  const auto bound = group.getBoundDeviceId();
  return bound ? *bound : current_device(backend.device_type);
}

c10::intrusive_ptr<c10d::Store> connect_store(const LauncherEnv& launcher, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launcher.master_port);
  options.isServer = launcher.rank == 0 && !launcher.launcher_serves_store;
  options.numWorkers = static_cast<size_t>(launcher.world_size);
  options.timeout = timeout;
  options.multiTenant = true;
  const std::string what = c10::str("the store at ", launcher.master_addr, ":", launcher.master_port);
  auto store = meeting(launcher, timeout, what,
                       [&] { return c10::make_intrusive<c10d::TCPStore>(launcher.master_addr, options); });
  const std::string job = launcher.job.empty() ? "hsdp" : "hsdp/" + launcher.job;
  return c10::make_intrusive<c10d::PrefixStore>(c10::str(job, "/attempt_", launcher.restart_count), store);
}

constexpr const char* kCompareCalls = "HSDP_DEBUG_COLLECTIVES";

bool asks_to_compare_calls() {
  const auto value = process_env(kCompareCalls).value_or("");
  if (value.empty() || value == "0") return false;
  if (value == "1") return true;
  raise<ValueError>(kWhere, "environment variable ", kCompareCalls, " is '", value, "', expected 0 or 1");
}

/// All ranks must talk through the same backend, and in the same way: otherwise each would wait for a partner that
/// never comes.
void agree(c10d::Store& store, const LauncherEnv& launcher, const std::string& backend, bool compares_calls) {
  if (launcher.rank == 0) store.set("backend", backend);
  const std::string expected = store.get_to_str("backend");
  if (expected != backend) {
    raise<ValueError>(kWhere, "rank ", launcher.rank, " uses backend ", backend, " and rank 0 ", expected,
                      ", expected one backend for all ranks; set it explicitly");
  }
  const std::string compares = compares_calls ? "1" : "0";
  if (launcher.rank == 0) store.set(kCompareCalls, compares);
  if (const auto at_0 = store.get_to_str(kCompareCalls); at_0 != compares) {
    raise<ValueError>(kWhere, "environment variable ", kCompareCalls, " is ", compares, " on rank ", launcher.rank,
                      " and ", at_0, " on rank 0, expected one value for all ranks");
  }
  if (launcher.rank == 0) store.set("seed", std::to_string(offered_seed()));
  adopt_seed_if_never_seeded(std::stoull(store.get_to_str("seed")));
}

/// A group's name, which no other has, its axis, and its ranks in the world.
struct GroupNames {
  std::string name, axis;
  std::vector<int64_t> ranks;
};

/// What a backend says of a collective, in logs and in what it records of a run's last ones, names the group.
void name_group(c10d::Backend& backend, const GroupNames& names) {
  backend.setGroupUid(names.name);
  backend.setGroupDesc(names.axis);
  c10::intrusive_ptr<c10d::Backend::Options> options;
  try {
    options = backend.getBackendOptions();
  } catch (const c10::Error&) {
    return;  // It has none.
  }
  if (!options) return;
  options->group_name = names.name;
  options->group_desc = names.axis;
  options->global_ranks_in_group.assign(names.ranks.begin(), names.ranks.end());
}

c10::intrusive_ptr<c10d::Backend> make_backend(const BackendKind& kind, const c10::intrusive_ptr<c10d::Store>& store,
                                               int64_t rank, const GroupNames& names, std::chrono::milliseconds timeout,
                                               c10::Device device) {
  const auto size = static_cast<int64_t>(names.ranks.size());
  auto backend = kind.make(store, rank, size, timeout, device);
  if (!backend) {
    raise<ValueError>(kWhere, "the factory of backend ", kind.name, " returned nothing, expected a c10d backend");
  }
  // A barrier carries no tensor that would say where to run.
  if (device.has_index()) backend->setBoundDeviceId(device);
  name_group(*backend, names);
  return backend;
}

std::shared_ptr<dtensor::CallBoard> make_board(const Connections& connections, const std::string& group, int64_t rank,
                                               int64_t size) {
  if (!connections.compares_calls) return nullptr;
  auto store = c10::make_intrusive<c10d::PrefixStore>("calls/" + group, connections.store);
  return std::make_shared<dtensor::CallBoard>(std::move(store), rank, size, connections.timeout);
}

/// Every rank among `ranks` calls it, in the same order.
std::shared_ptr<dtensor::Communicator> make_group(Connections& connections, const std::vector<int64_t>& ranks,
                                                  const std::string& axis) {
  const auto size = static_cast<int64_t>(ranks.size());
  const auto timeout = connections.timeout;
  if (size == connections.launcher.world_size) {
    return dtensor::make_c10d_communicator(connections.backend, axis, timeout, connections.board);
  }
  std::string key = "group/" + axis;
  int64_t index = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    key += c10::str("/", ranks[i]);
    if (ranks[i] == connections.launcher.rank) index = static_cast<int64_t>(i);
  }
  key += c10::str("/use_", connections.group_uses[key]++);
  auto backend = meeting(connections.launcher, timeout, c10::str("connecting axis ", axis), [&] {
    const auto store = c10::make_intrusive<c10d::PrefixStore>(key, connections.store);
    return make_backend(*connections.kind, store, index, {key, axis, ranks}, timeout, connections.device);
  });
  if (connections.device.has_index()) connections.on_devices.push_back(backend);
  return dtensor::make_c10d_communicator(std::move(backend), axis, timeout, make_board(connections, key, index, size));
}

/// Backends write to sockets whose other end may be gone. Left at its default, the signal would end this process
/// without a word where it should say which collective failed. A handler of the program's own stays.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

struct Current {
  std::mutex mutex;
  std::optional<Environment> environment;
};

/// Never destroyed: at exit, threads of a backend may still run, and closing a group would wait for other ranks.
Current& current() {
  static auto* instance = new Current;
  return *instance;
}

/// For a program that is its own launcher. The caller holds the lock.
LauncherEnv own_launcher(int64_t rank, int64_t world_size) {
  if (current().environment) {
    raise<StateError>("init_from", "this process has an environment already; call shutdown() before");
  }
  LauncherEnv launcher;
  launcher.source = "init_from";
  launcher.rank = launcher.local_rank = rank;
  launcher.world_size = world_size;
  return launcher;
}

void announce(const Environment& environment, const std::string& source) {
  const int64_t ranks = environment.world_size();
  const std::string device = c10::DeviceTypeName(environment.device().type(), /*lower_case=*/true);
  std::string text = c10::str("hsdp: ", ranks, ranks == 1 ? " rank" : " ranks");
  text += source == "alone" ? ", alone" : " from " + source;
  if (ranks > 1) text += ", " + environment.backend();
  std::fprintf(stderr, "%s, %s\n", text.c_str(), device.c_str());
}

}  // namespace

Environment Environment::start(LauncherEnv launcher, const InitOptions& options, c10::intrusive_ptr<c10d::Store> store,
                               c10::intrusive_ptr<c10d::Backend> group) {
  check_options(options);
  if (options.local_rank) {
    launcher.local_rank = *options.local_rank;
    launcher.may_bind_devices = false;
  }
  auto state = std::make_shared<State>();
  state->launcher = launcher;
  state->options = options;
  const BackendKind& backend = group ? kind_of(*group, options) : choose_backend(options);
  check_backend(backend, launcher);
  state->device = group ? device_of(*group, backend) : choose_device(backend, launcher);
  if (state->device.type() != kHost) set_device(state->device);
  if (launcher.world_size == 1) {
    state->communicator = dtensor::make_self_communicator();
  } else {
    state->backend_name = backend.name;
    ignore_broken_pipes();
    auto connections = std::make_shared<Connections>();
    connections->launcher = launcher;
    connections->timeout = options.timeout;
    connections->kind = &backend;
    connections->device = state->device;
    connections->compares_calls = asks_to_compare_calls();
    connections->store = store ? std::move(store) : connect_store(launcher, options.timeout);
    meeting(launcher, options.timeout, c10::str("connecting ranks over ", backend.name), [&] {
      connections->store->setTimeout(options.timeout);
      agree(*connections->store, launcher, backend.name, connections->compares_calls);
      if (group) {
        // Tells whoever waits whether to block the host.
        if (state->device.has_index() && !group->getBoundDeviceId()) group->setBoundDeviceId(state->device);
        connections->backend = std::move(group);
        return;
      }
      const auto world = c10::make_intrusive<c10d::PrefixStore>("world", connections->store);
      std::vector<int64_t> ranks(static_cast<size_t>(launcher.world_size));
      std::iota(ranks.begin(), ranks.end(), 0);
      connections->backend =
          make_backend(backend, world, launcher.rank, {"world", "world", ranks}, options.timeout, state->device);
      if (state->device.has_index()) connections->on_devices.push_back(connections->backend);
    });
    state->connections = connections;
    connections->board = make_board(*connections, "world", launcher.rank, launcher.world_size);
    state->groups = [connections](const std::vector<int64_t>& ranks, const std::string& axis) {
      return make_group(*connections, ranks, axis);
    };
    std::vector<int64_t> all(static_cast<size_t>(launcher.world_size));
    std::iota(all.begin(), all.end(), 0);
    state->communicator = state->groups(all, "shard");
    // A rank that left early could take the store with it while others still connect.
    state->communicator->barrier({"barrier", "init"});
  }
  state->mesh =
      dtensor::DeviceMesh::from_communicator(state->device.type(), state->communicator, "shard", state->groups);
  return Environment(std::move(state));
}

int64_t Environment::rank() const { return state_->launcher.rank; }
int64_t Environment::world_size() const { return state_->launcher.world_size; }
int64_t Environment::local_rank() const { return state_->launcher.local_rank; }
c10::Device Environment::device() const { return state_->device; }
const std::string& Environment::backend() const { return state_->backend_name; }
const InitOptions& Environment::options() const { return state_->options; }
const std::shared_ptr<dtensor::Communicator>& Environment::communicator() const { return state_->communicator; }
const std::shared_ptr<const dtensor::DeviceMesh>& Environment::mesh() const { return state_->mesh; }

std::shared_ptr<const dtensor::DeviceMesh> Environment::make_mesh(std::vector<int64_t> sizes,
                                                                  std::vector<std::string> names) const {
  // Everything that can be refused is refused before the first group is made. Sizes that fit the world contain this
  // rank; for others any rank serves to have sizes and names checked.
  const auto plan = dtensor::DeviceMesh::create(state_->device.type(), sizes, names, 0);
  if (plan->size() != world_size()) {
    raise<ValueError>("make_mesh", plan->to_string(), " has ", plan->size(), " ranks and the world ", world_size(),
                      ", expected sizes that multiply to the world size");
  }
  auto mesh =
      dtensor::DeviceMesh::create(state_->device.type(), std::move(sizes), std::move(names), rank(), state_->groups);
  barrier("make_mesh");
  return mesh;
}

void Environment::barrier(std::string_view purpose) const { state_->communicator->barrier({"barrier", purpose}); }

Environment init(const InitOptions& options) {
  std::lock_guard lock(current().mutex);
  auto& environment = current().environment;
  if (environment) {
    if (environment->options() != options) {
      const bool other_place = environment->options().local_rank != options.local_rank;
      raise<StateError>(kWhere, "called again with backend ", options.backend, " and timeout ",
                        seconds_text(options.timeout), other_place ? " and another local rank" : "", ", first with ",
                        environment->options().backend, " and ", seconds_text(environment->options().timeout),
                        ", expected the same options; use current_environment(), or call shutdown() before");
    }
    return *environment;
  }
  const LauncherEnv launcher = read_launcher_env(process_env);
  environment = Environment::start(launcher, options, nullptr, nullptr);
  if (launcher.rank == 0) announce(*environment, launcher.source);
  return *environment;
}

Environment init_from(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t world_size,
                      const InitOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    raise<ValueError>("init_from", "rank ", rank, " of ", world_size, ", expected 0 <= rank < world size");
  }
  if (world_size > 1 && !store) raise<ValueError>("init_from", "no store for ", world_size, " ranks to meet in");
  std::lock_guard lock(current().mutex);
  const LauncherEnv launcher = own_launcher(rank, world_size);
  if (store) store = c10::make_intrusive<c10d::PrefixStore>("hsdp", std::move(store));
  current().environment = Environment::start(launcher, options, std::move(store), nullptr);
  return *current().environment;
}

Environment init_from(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> group,
                      const InitOptions& options) {
  if (!group) raise<ValueError>("init_from", "no group, expected one of all ranks");
  if (!store) raise<ValueError>("init_from", "no store beside the group, expected one where further groups can meet");
  std::lock_guard lock(current().mutex);
  const LauncherEnv launcher = own_launcher(group->getRank(), group->getSize());
  store = c10::make_intrusive<c10d::PrefixStore>("hsdp", std::move(store));
  current().environment = Environment::start(launcher, options, std::move(store), std::move(group));
  return *current().environment;
}

bool is_initialized() {
  std::lock_guard lock(current().mutex);
  return current().environment.has_value();
}

Environment current_environment() {
  std::lock_guard lock(current().mutex);
  if (!current().environment) {
    raise<StateError>("current_environment", "this process has no environment; call hsdp::init() first");
  }
  return *current().environment;
}

void shutdown() {
  std::optional<Environment> environment;
  {
    std::lock_guard lock(current().mutex);
    environment.swap(current().environment);
  }
  if (!environment) return;
  environment->barrier("shutdown");
  const auto& connections = environment->state_->connections;
  if (!connections) return;
  // The world's last: it was made first.
  auto& backends = connections->on_devices;
  for (auto backend = backends.rbegin(); backend != backends.rend(); ++backend) (*backend)->shutdown();
  backends.clear();
}

}  // namespace hsdp

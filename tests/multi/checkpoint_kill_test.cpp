// Runs that are killed while they save: every checkpoint that is found afterwards is whole, none that was complete is
// lost, and the next run goes on in the same folder. HSDP_KILLS says how many runs are killed at random points.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <tuple>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/blocks.h"
#include "tests/testing/damaged_checkpoint.h"
#include "tests/testing/disk_calls.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/scratch_folder.h"

namespace {

namespace fs = std::filesystem;
using namespace testing_support;
using Names = std::set<std::string>;
using Clock = std::chrono::steady_clock;

constexpr int64_t kKeepLatest = 2;

/// A model and momentum of some size, of which all values follow from the step.
struct SavedRun {
  SavedRun(RankContext& context, int64_t blocks, int64_t width)
      : net(hsdp::meta_init([&] { return Blocks(blocks, width); })),
        model(
            hsdp::fully_shard(net, {.mesh = context.environment().mesh(), .units = hsdp::each<torch::nn::Linear>()})) {
    model.materialize(at::kCPU);
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (auto& parameter : net->parameters()) {
      auto& slot = optimizer->state()[parameter.unsafeGetTensorImpl()];
      auto momentum = std::make_unique<torch::optim::SGDParamState>();
      momentum->momentum_buffer(torch::zeros_like(parameter));
      slot = std::move(momentum);
    }
    state.model = model.core();
    state.optimizers = {optimizer.get()};
  }

  void set(int64_t step) {
    torch::NoGradGuard no_grad;
    visit([&](const torch::Tensor& tensor, int64_t place) { tensor.fill_(value(step, place)); });
    state.progress.step = step;
    state.progress.tokens = 100 * step;
    state.values["text"] = "of step " + std::to_string(step);
  }
  /// All this rank has is of that step.
  void expect(int64_t step) {
    visit([&](const torch::Tensor& tensor, int64_t place) {
      const auto local = dtensor::DTensor(tensor).to_local();
      EXPECT_TRUE(local.eq(value(step, place)).all().item<bool>()) << "tensor " << place << " of step " << step;
    });
    EXPECT_EQ(state.progress.step, step);
    EXPECT_EQ(state.progress.tokens, 100 * step);
    EXPECT_EQ(std::get<std::string>(state.values["text"]), "of step " + std::to_string(step));
  }

  Blocks net;
  hsdp::FullySharded<BlocksImpl> model;
  std::unique_ptr<torch::optim::SGD> optimizer;
  hsdp::TrainingState state;

 private:
  static double value(int64_t step, int64_t place) { return static_cast<double>(step * 64 + place); }
  template <class Visit>
  void visit(const Visit& each) {
    int64_t place = 0;
    for (auto& parameter : net->parameters()) {
      each(parameter, place++);
      auto& momentum = static_cast<torch::optim::SGDParamState&>(*optimizer->state()[parameter.unsafeGetTensorImpl()]);
      each(momentum.momentum_buffer(), place++);
    }
  }
};

/// In ranks that had no part in writing them: whatever is found is whole. Returns the steps.
std::vector<int64_t> expect_all_whole(RankContext& context, SavedRun& run, const std::string& path) {
  std::vector<int64_t> steps;
  for (const auto& found : hsdp::find_checkpoints(path)) {
    hsdp::verify_files("test", found.path, hsdp::read_manifest("test", found.path), /*checksums=*/true);
    hsdp::load(run.state, found.path);
    run.expect(found.step);
    steps.push_back(found.step);
  }
  context.environment().barrier("verified");
  return steps;
}

Names names_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

// ---- at random points ----

constexpr int64_t kBlocks = 6, kWidth = 400;  // 4 MB of parameters, and as much of momentum

void wait_for(const std::string& path) {
  while (!fs::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void write_whole(const std::string& path, const std::string& text) {
  write_bytes(path + ".part", text);
  fs::rename(path + ".part", path);
}

/// Ranks 0 and 1 save until they die. What a killed run had completed is in the file `completed`.
void save_for_ever(RankContext& context, const std::string& path, bool async) {
  hsdp::InitOptions init;
  init.backend = "gloo";
  init.timeout = std::chrono::seconds(20);
  context.set_environment(hsdp::init_from(
      c10::make_intrusive<c10d::FileStore>(context.directory() + "/store-of-two", 2), context.rank(), 2, init));
  SavedRun run(context, kBlocks, kWidth);
  hsdp::CheckpointFolder folder(context.environment(), path, {.keep_latest = kKeepLatest, .async = async});
  int64_t step = 0;
  if (const auto newest = folder.newest()) {
    hsdp::load(run.state, newest->path);
    run.expect(newest->step);
    step = newest->step;
  }
  const auto left = context.rank() == 0 ? names_in(path) : Names();
  write_whole(context.directory() + "/process-" + std::to_string(context.rank()), std::to_string(::getpid()));
  constexpr int kMeasured = 3;
  auto begin = Clock::now();
  for (int saves = 0;; ++saves) {
    if (saves == 1) begin = Clock::now();  // the first cleans up
    run.set(++step);
    folder.save(run.state);
    if (async) {
      while (!folder.poll()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (context.rank() != 0) continue;
    write_whole(path + "-completed", std::to_string(step));
    if (saves == 0) {
      // What the run before left is gone.
      for (const auto& name : names_in(path)) {
        if (left.contains(name) && name.starts_with("step-") && name.find('.') != std::string::npos) {
          write_whole(path + "-left", name);
        }
      }
    }
    if (saves == kMeasured) {
      const std::chrono::duration<double> one = (Clock::now() - begin) / kMeasured;
      write_whole(context.directory() + "/seconds", std::to_string(one.count()));
    }
  }
}

/// Rank 2 kills them: after their first saves, at any point of one.
void kill_after(RankContext& context, double saves, const std::vector<int>& victims) {
  wait_for(context.directory() + "/seconds");
  const auto seconds = std::stod(read_bytes(context.directory() + "/seconds"));
  std::this_thread::sleep_for(std::chrono::duration<double>(saves * seconds));
  for (const int victim : victims) {
    const auto process = context.directory() + "/process-" + std::to_string(victim);
    wait_for(process);
    ::kill(static_cast<pid_t>(std::stoi(read_bytes(process))), SIGKILL);
  }
}

int kills() {
  const auto* text = std::getenv("HSDP_KILLS");
  return text == nullptr ? 6 : std::stoi(text);
}

TEST(Killed, AtRandomPoints) {
  const ScratchFolder scratch;
  const auto path = scratch / "run";
  const auto seed = std::random_device{}();
  std::cout << "seed " << seed << std::endl;
  std::mt19937 random(seed);
  int in_the_middle = 0;
  for (int kill = 0; kill < kills(); ++kill) {
    const bool async = kill % 2 == 1;
    const auto saves = std::uniform_real_distribution(0.0, 2.0)(random);
    // One rank alone now and then: the other one ends, with an error.
    const int who = std::uniform_int_distribution(0, 3)(random);
    const auto victims = who < 2 ? std::set{who} : std::set{0, 1};
    SCOPED_TRACE("kill " + std::to_string(kill) + (async ? ", async" : ", sync") + ", after " + std::to_string(saves) +
                 " saves, of rank " + (who < 2 ? std::to_string(who) : "0 and 1"));
    run_ranks(3,
              [&](RankContext& context) {
                if (context.rank() == 2) return kill_after(context, saves, {victims.begin(), victims.end()});
                try {
                  save_for_ever(context, path, async);
                } catch (const dtensor::CommunicationError&) {
                  EXPECT_FALSE(victims.contains(context.rank()));
                }
                context.set_environment(std::nullopt);
              },
              {.timeout = std::chrono::seconds(300), .killed = victims, .make_environment = false});
    ASSERT_TRUE(fs::exists(path + "-completed"));
    EXPECT_FALSE(fs::exists(path + "-left")) << read_bytes(path + "-left");
    const auto completed = std::stoll(read_bytes(path + "-completed"));
    const auto names = names_in(path);
    in_the_middle += std::any_of(names.begin(), names.end(), [](auto& name) { return name.ends_with(".writing"); });
    run_ranks(2, [&](RankContext& context) {
      SavedRun run(context, kBlocks, kWidth);
      const auto steps = expect_all_whole(context, run, path);
      ASSERT_FALSE(steps.empty());
      EXPECT_GE(steps.back(), completed);
      EXPECT_LE(steps.back(), completed + 1);
      EXPECT_GE(steps.size(), std::min<size_t>(kKeepLatest, static_cast<size_t>(completed)));
    });
    if (::testing::Test::HasFailure()) break;
  }
  std::cout << in_the_middle << " of " << kills() << " kills left a checkpoint half-written" << std::endl;
  EXPECT_GE(in_the_middle, kills() / 10);
}

// ---- at every step to the disk ----

// Whether saves are in the background, who is killed, and whether the step was saved before.
using AtEach = std::tuple<bool, int, bool>;

class KilledAtEachDiskCall : public ::testing::TestWithParam<AtEach> {
 protected:
  /// Saves steps 1 and 2, and, with the disk hook, 3, or 2 again.
  static void save(RankContext& context, const std::string& path, const DiskHook& hook) {
    const auto [async, victim, replaces] = GetParam();
    SavedRun run(context, 2, 5);
    hsdp::CheckpointFolder folder(context.environment(), path, {.keep_latest = kKeepLatest, .async = async});
    for (const int64_t step : {1, 2}) {
      run.set(step);
      folder.save(run.state);
      folder.finish();
    }
    if (context.rank() == victim) set_disk_hook(hook);
    run.set(last_step());
    run.state.values["again"] = true;
    folder.save(run.state);
    folder.finish();
  }
  static int64_t last_step() { return std::get<2>(GetParam()) ? 2 : 3; }
};

TEST_P(KilledAtEachDiskCall, LosesNothing) {
  const ScratchFolder scratch;
  const auto victim = std::get<1>(GetParam());
  // How many there are.
  run_ranks(2, [&](RankContext& context) {
    int64_t calls = 0;
    save(context, scratch / "counted", [&](const std::string&, const std::string&, int64_t number) {
      calls = number + 1;
      return 0;
    });
    set_disk_hook({});
    if (context.rank() == victim) write_bytes(scratch / "calls", std::to_string(calls));
  });
  const auto calls = std::stoll(read_bytes(scratch / "calls"));
  ASSERT_GE(calls, 5);
  for (int64_t last = 0; last < calls; ++last) {
    SCOPED_TRACE("killed at disk call " + std::to_string(last) + " of " + std::to_string(calls));
    run_ranks(2,
              [&](RankContext& context) {
                try {
                  save(context, scratch / std::to_string(last),
                       [&](const std::string&, const std::string&, int64_t number) {
                         if (number == last) context.kill_self();
                         return 0;
                       });
                } catch (const dtensor::CommunicationError&) {
                }
                context.set_environment(std::nullopt);
              },
              {.killed = {victim}});
  }
  run_ranks(2,
            [&](RankContext& context) {
              SavedRun run(context, 2, 5);
              std::set<bool> last_is_there;
              for (int64_t last = 0; last < calls; ++last) {
                SCOPED_TRACE("killed at disk call " + std::to_string(last) + " of " + std::to_string(calls));
                const auto path = scratch / std::to_string(last);
                const auto steps = expect_all_whole(context, run, path);
                const std::vector<int64_t> before = {1, 2}, after = {2, 3}, meanwhile = {1, 2, 3};
                EXPECT_TRUE(steps == before || (last_step() == 3 && (steps == after || steps == meanwhile)))
                    << ::testing::PrintToString(steps);
                const auto newest = hsdp::find_checkpoints(path).back();
                hsdp::load(run.state, newest.path);
                last_is_there.insert(newest.step == last_step() && run.state.values.contains("again"));
                // Another run goes on.
                hsdp::CheckpointFolder folder(context.environment(), path, {.keep_latest = kKeepLatest});
                run.set(4);
                folder.save(run.state);
                context.environment().barrier("saved");
                EXPECT_EQ(names_in(path), (Names{".lock", "step-4", "step-" + std::to_string(newest.step)}));
              }
              // Rank 0 gives the checkpoint its name in the end, and a rank that dies before leaves it without one.
              EXPECT_TRUE(last_is_there.contains(false));
              EXPECT_EQ(last_is_there.contains(true), victim == 0);
            },
            {.timeout = std::chrono::seconds(300)});
}

std::string name_of_each(const ::testing::TestParamInfo<AtEach>& info) {
  const auto [async, victim, replaces] = info.param;
  return std::string(async ? "Async" : "Sync") + "Rank" + std::to_string(victim) + (replaces ? "Replacing" : "New");
}
INSTANTIATE_TEST_SUITE_P(Calls, KilledAtEachDiskCall,
                         ::testing::Values(AtEach{false, 0, true}, AtEach{true, 0, false}, AtEach{false, 1, false}),
                         name_of_each);
INSTANTIATE_TEST_SUITE_P(Nightly, KilledAtEachDiskCall,
                         ::testing::Values(AtEach{false, 0, false}, AtEach{true, 0, true}, AtEach{false, 1, true},
                                           AtEach{true, 1, false}, AtEach{true, 1, true}),
                         name_of_each);

}  // namespace

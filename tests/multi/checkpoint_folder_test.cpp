// CheckpointFolder: which checkpoints are found and kept, one run at a time, saves in the background and their errors,
// and what other runs left half-written.
#include "hsdp/checkpoint/checkpoint_folder.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <tuple>
#include <vector>

#include "hsdp/hsdp.h"
#include "tests/testing/checkpointed_training.h"
#include "tests/testing/damaged_checkpoint.h"
#include "tests/testing/disk_calls.h"
#include "tests/testing/expect.h"
#include "tests/testing/file_size_limit.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/scratch_folder.h"

namespace {

namespace fs = std::filesystem;
using namespace testing_support;
using hsdp::CheckpointFolder;
using Names = std::set<std::string>;
using Steps = std::vector<int64_t>;

/// Of all but the lock.
Names names_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  names.erase(".lock");
  return names;
}

Steps steps_in(const std::string& folder) {
  Steps steps;
  for (const auto& found : hsdp::find_checkpoints(folder)) steps.push_back(found.step);
  return steps;
}

/// No rank changes anything while another looks.
void expect_names(RankContext& context, const std::string& folder, const Names& expected) {
  context.environment().barrier("before looking");
  EXPECT_EQ(names_in(folder), expected);
  context.environment().barrier("after looking");
}

/// Something to save, of which `step` is all that differs.
struct Saved {
  explicit Saved(RankContext& context) : training(context, 7, 1) {}
  hsdp::TrainingState& at(int64_t step) {
    training.state.progress.step = step;
    torch::NoGradGuard no_grad;
    training.run.net->gate.fill_(step);
    return training.state;
  }
  /// A collective.
  static void expect_at(RankContext& context, const std::string& path, int64_t step) {
    CheckpointedTraining fresh(context, 9);
    hsdp::load(fresh.state, path);
    EXPECT_EQ(fresh.state.progress.step, step);
    EXPECT_EQ(whole_of(fresh.run.net->gate).item<double>(), static_cast<double>(step));
  }
  CheckpointedTraining training;
};

// ---- finding ----

void make_complete(const std::string& path) {
  fs::create_directories(path);
  write_bytes(path + "/manifest.json", "{}");
}

TEST(FindCheckpoints, ByStepAndNothingElse) {
  ScratchFolder scratch;
  EXPECT_TRUE(hsdp::find_checkpoints(scratch / "nothing").empty());
  EXPECT_TRUE(hsdp::find_checkpoints(scratch.path()).empty());
  for (const auto* name : {"step-0",         "step-9",         "step-10",         "step-9223372036854775807",
                           "step-007",       "step--1",        "step-1x",         "step-",
                           "step-+1",        "step- 1",        "step-00",         "step-9223372036854775808",
                           "Step-1",         "step_1",         "xstep-1",         "step-0x1",
                           "step-1.5",       "step-2.writing", "step-2.removing", "step-2.replaced.removing",
                           "step-x.replaced"}) {
    make_complete(scratch / name);
  }
  fs::create_directory(scratch / "step-3");  // incomplete
  write_bytes(scratch / "step-4", "a file");
  // Of a run that was killed between the two renames of replacing it, and one that was not.
  make_complete(scratch / "step-5.replaced");
  make_complete(scratch / "step-6.replaced");
  make_complete(scratch / "step-6");
  fs::create_directory(scratch / "step-8.replaced");
  std::map<int64_t, std::string> found;
  Steps steps;
  for (const auto& each : hsdp::find_checkpoints(scratch.path() + "/")) {
    steps.push_back(each.step);
    found[each.step] = fs::path(each.path).filename();
    EXPECT_TRUE(fs::exists(each.path + "/manifest.json"));
  }
  EXPECT_EQ(steps, (Steps{0, 5, 6, 9, 10, std::numeric_limits<int64_t>::max()}));
  EXPECT_EQ(found[5], "step-5.replaced");
  EXPECT_EQ(found[6], "step-6");
  expect_error<dtensor::ValueError>([&] { hsdp::find_checkpoints(scratch / "step-4"); },
                                    "[checkpoints] " + scratch / "step-4" + " is a file, expected a folder");
}

// ---- keeping ----

struct Keeping {
  int64_t keep_latest, keep_every;
  std::vector<int64_t> saved, kept;
};
void PrintTo(const Keeping& keeping, std::ostream* out) {
  *out << keeping.keep_latest << " latest, every " << keeping.keep_every << "th";
}

class Kept : public ::testing::TestWithParam<std::tuple<Keeping, bool>> {};

TEST_P(Kept, TheLatestAndEveryMth) {
  on_two_ranks([](RankContext& context) {
    const auto& [keeping, async] = GetParam();
    const auto path = context.directory() + "/run";
    Saved saved(context);
    {
      CheckpointFolder folder(context.environment(), path,
                              {.keep_latest = keeping.keep_latest, .keep_every = keeping.keep_every, .async = async});
      for (const auto step : keeping.saved) {
        folder.save(saved.at(step));
        const auto completed = folder.finish();
        EXPECT_EQ(completed, async ? std::optional(path + "/step-" + std::to_string(step)) : std::nullopt);
        const auto newest = folder.newest();
        ASSERT_TRUE(newest);
        EXPECT_EQ(newest->step, step);
        EXPECT_EQ(newest->path, path + "/step-" + std::to_string(step));
      }
    }
    Names expected;
    for (const auto step : keeping.kept) expected.insert("step-" + std::to_string(step));
    expect_names(context, path, expected);
    for (const auto step : keeping.kept) Saved::expect_at(context, path + "/step-" + std::to_string(step), step);
  });
}

const Keeping kKeeping[] = {
    {0, 0, {1, 2, 3, 4}, {1, 2, 3, 4}},
    {0, 2, {1, 2, 3}, {1, 2, 3}},
    {1, 0, {0, 1, 2, 10}, {10}},
    {2, 0, {1, 2, 3, 9, 10}, {9, 10}},
    {2, 5, {0, 3, 5, 7, 10, 11, 12, 13}, {0, 5, 10, 12, 13}},
    {1, 1, {1, 2, 3}, {1, 2, 3}},
    {3, 0, {4, 5}, {4, 5}},
};
std::string name_of_kept(const ::testing::TestParamInfo<std::tuple<Keeping, bool>>& info) {
  const auto& [keeping, async] = info.param;
  return std::to_string(keeping.keep_latest) + "LatestEvery" + std::to_string(keeping.keep_every) +
         (async ? "Async" : "Sync") + std::to_string(info.index);
}
INSTANTIATE_TEST_SUITE_P(Numbers, Kept, ::testing::Combine(::testing::ValuesIn(kKeeping), ::testing::Bool()),
                         name_of_kept);

TEST(Keeping, CountsNothingButCompleteOnes) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run";
    on_rank_0(context, [&] {
      for (const auto* name : {"step-1", "step-3", "step-20", "step-5x", "notes"}) {
        fs::create_directories(path + "/" + name);
        write_bytes(path + "/" + name + "/notes.txt", "mine");
      }
      write_bytes(path + "/step-6", "mine");
    });
    Saved saved(context);
    CheckpointFolder folder(context.environment(), path + "//", {.keep_latest = 2});
    EXPECT_EQ(folder.path(), path);
    EXPECT_FALSE(folder.newest());
    for (const auto step : {2, 4, 8}) folder.save(saved.at(step));
    expect_names(context, path, {"step-1", "step-3", "step-4", "step-5x", "step-6", "step-8", "step-20", "notes"});
    EXPECT_EQ(steps_in(path), (Steps{4, 8}));
    for (const auto* name : {"step-1", "step-3", "step-20", "step-5x", "notes"}) {
      EXPECT_EQ(read_bytes(path + "/" + name + "/notes.txt"), "mine");
    }
  });
}

TEST(Keeping, RefusesNumbersBelowZero) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run";
    for (const auto& options : {hsdp::CheckpointFolderOptions{.keep_latest = -1}, {.keep_every = -2}}) {
      value_error_of(context, [&] { CheckpointFolder(context.environment(), path, options); });
    }
    EXPECT_FALSE(fs::exists(path));
  });
}

// ---- steps ----

TEST(SavedSteps, AreReplacedAndNeverGoBack) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run";
    for (const bool async : {false, true}) {
      Saved saved(context);
      CheckpointFolder folder(context.environment(), path, {.async = async});
      const auto save = [&](int64_t step) {
        folder.save(saved.at(step));
        folder.finish();
      };
      save(5);
      // Again, with other values.
      saved.training.state.values["seed"] = 11;
      save(5);
      expect_names(context, path, {"step-5"});
      CheckpointedTraining fresh(context, 9);
      hsdp::load(fresh.state, path + "/step-5");
      EXPECT_EQ(std::get<int64_t>(fresh.state.values["seed"]), 11);
      const auto before = contents(path);
      expect_parts(value_error_of(context, [&] { save(4); }),
                   {"[checkpoints] " + path + " has a checkpoint of step 5, expected none later than step 4"});
      expect_parts(value_error_of(context, [&] { save(-1); }), {"step", "-1", "expected "});
      EXPECT_TRUE(contents(path) == before);
      save(6);
      expect_names(context, path, {"step-5", "step-6"});
      on_rank_0(context, [&] { fs::remove_all(path); });
    }
  });
}

TEST(SavedSteps, NeverReplaceWhatIsNoCheckpoint) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run";
    on_rank_0(context, [&] {
      fs::create_directories(path + "/step-5");
      write_bytes(path + "/step-5/notes.txt", "mine");
      write_bytes(path + "/step-6", "mine");
    });
    for (const bool async : {false, true}) {
      Saved saved(context);
      CheckpointFolder folder(context.environment(), path, {.async = async});
      const auto before = contents(path);
      for (const auto* name : {"5", "6"}) {
        expect_parts(value_error_of(context, [&] { folder.save(saved.at(std::stoll(name))); }),
                     {"[save] " + path + "/step-" + name + " is a ", "expected "});
        context.environment().barrier("refused");
        EXPECT_TRUE(contents(path) == before);
        EXPECT_FALSE(folder.finish());
      }
      folder.save(saved.at(7));
      folder.finish();
      expect_names(context, path, {"step-5", "step-6", "step-7"});
      on_rank_0(context, [&] { fs::remove_all(path + "/step-7"); });
    }
  });
}

// ---- one run at a time ----

void wait_for(const std::string& path) {
  while (!fs::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

// Ranks 0 and 1 are one run, 2 and 3 another.
TEST(TwoRuns, CannotWriteToOneFolder) {
  run_ranks(4,
            [](RankContext& context) {
              const auto run = context.rank() / 2;
              hsdp::InitOptions init;
              init.backend = "gloo";
              init.timeout = std::chrono::seconds(20);
              auto environment = hsdp::init_from(
                  c10::make_intrusive<c10d::FileStore>(context.directory() + "/store-" + std::to_string(run), 2),
                  context.rank() % 2, 2, init);
              RankContext own(context.rank() % 2, 2, context.directory());
              own.set_environment(environment);
              const auto path = context.directory() + "/run", held = path + "-held", refused = path + "-refused",
                         released = path + "-released";
              Saved saved(own);
              if (run == 0) {
                auto folder = std::make_unique<CheckpointFolder>(environment, path);
                folder->save(saved.at(1));
                on_rank_0(own, [&] {
                  write_bytes(held + ".part", std::to_string(::getpid()));
                  fs::rename(held + ".part", held);
                });
                wait_for(refused);
                folder->save(saved.at(2));
                folder.reset();
                on_rank_0(own, [&] { write_bytes(released, ""); });
              } else {
                wait_for(held);
                std::string host(256, '\0');
                ::gethostname(host.data(), host.size() - 1);
                expect_parts(value_error_of(own, [&] { CheckpointFolder(environment, path); }),
                             {"[checkpoints] " + path + "/.lock is held by process " + read_bytes(held) + " on " +
                              host.c_str() + ", expected nobody else to write here"});
                on_rank_0(own, [&] { write_bytes(refused, ""); });
                wait_for(released);
                CheckpointFolder folder(environment, path);
                EXPECT_EQ(folder.newest()->step, 2);
                folder.save(saved.at(3));
                EXPECT_EQ(steps_in(path), (Steps{1, 2, 3}));
              }
            },
            {.make_environment = false});
}

TEST(TwoRuns, CannotSaveToOnePath) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run/step-1";
    Saved saved(context);
    auto pending = hsdp::save_async(saved.at(1), path);
    expect_parts(value_error_of(context, [&] { hsdp::save(saved.at(2), path); }),
                 {"[save] " + path + ".writing", " is held by process ", "expected nobody else to write here"});
    pending.wait();
    Saved::expect_at(context, path, 1);
    // And in one program.
    CheckpointFolder folder(context.environment(), context.directory() + "/run");
    value_error_of(context, [&] { CheckpointFolder(context.environment(), context.directory() + "/run/"); });
    folder.save(saved.at(3));
  });
}

TEST(TwoRuns, WhatAKilledOneLeft) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run";
    Saved saved(context);
    CheckpointFolder folder(context.environment(), path);
    folder.save(saved.at(4));
    const Names left = {"step-3.writing",  "step-4.writing",  "step-5.writing",
                        "step-1.removing", "step-4.replaced", "step-4.replaced.removing"};
    const Names others = {"other.writing", "step-x.writing", "step-1.writing.txt", "notes"};
    on_rank_0(context, [&] {
      for (const auto& name : left) fs::copy(path + "/step-4", path + "/" + name, fs::copy_options::recursive);
      for (const auto& name : others) fs::copy(path + "/step-4", path + "/" + name, fs::copy_options::recursive);
      // It is all that is left of step 2.
      fs::copy(path + "/step-4", path + "/step-2.replaced", fs::copy_options::recursive);
    });
    folder.save(saved.at(5));
    auto expected = others;
    expected.insert({"step-2.replaced", "step-4", "step-5"});
    expect_names(context, path, expected);
    EXPECT_EQ(steps_in(path), (Steps{2, 4, 5}));
    Saved::expect_at(context, hsdp::find_checkpoints(path).front().path, 4);
  });
}

// ---- in the background ----

TEST(InTheBackground, OneSaveAtATime) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run";
    Saved saved(context);
    CheckpointFolder folder(context.environment(), path, {.async = true});
    EXPECT_FALSE(folder.poll());
    EXPECT_FALSE(folder.finish());
    {
      HeldDisk held;
      folder.save(saved.at(1));
      for (int i = 0; i < 3; ++i) EXPECT_FALSE(folder.poll());
      expect_names(context, path, {"step-1.writing"});
      EXPECT_FALSE(folder.newest());
      // Rank 1 alone is not enough.
      if (context.rank() == 1) held.release();
      for (int i = 0; i < 3; ++i) EXPECT_FALSE(folder.poll());
      held.release();
      std::optional<std::string> completed;
      while (!completed) completed = folder.poll();
      EXPECT_EQ(*completed, path + "/step-1");
    }
    EXPECT_FALSE(folder.poll());
    EXPECT_EQ(folder.newest()->step, 1);
    // The next save finishes the one before.
    folder.save(saved.at(2));
    folder.save(saved.at(3));
    EXPECT_TRUE(fs::exists(path + "/step-2/manifest.json"));
    EXPECT_EQ(folder.finish(), path + "/step-3");
    EXPECT_EQ(steps_in(path), (Steps{1, 2, 3}));
    for (const auto step : {1, 2, 3}) Saved::expect_at(context, path + "/step-" + std::to_string(step), step);
  });
}

class FailedInTheBackground : public ::testing::TestWithParam<std::tuple<int, std::string>> {};

TEST_P(FailedInTheBackground, SurfacesAtTheNextCall) {
  on_two_ranks([](RankContext& context) {
    const auto& [full, call] = GetParam();
    const auto path = context.directory() + "/run";
    Saved saved(context);
    CheckpointFolder folder(context.environment(), path, {.async = true});
    folder.save(saved.at(1));
    folder.finish();
    {
      std::optional<FileSizeLimit> limit;
      if (full < 0 || full == context.rank()) limit.emplace(100);
      folder.save(saved.at(2));
      const auto text = value_error_of(context, [&] {
        if (call == "poll") {
          // Until all ranks have written, or failed.
          while (!folder.poll()) {
          }
        } else if (call == "finish") {
          folder.finish();
        } else {
          folder.save(saved.at(3));
        }
      });
      expect_parts(text, {"[save] " + path + "/step-2.writing/", " cannot be written: File too large"});
    }
    EXPECT_FALSE(folder.poll());
    EXPECT_FALSE(folder.finish());
    expect_names(context, path, {"step-1"});
    Saved::expect_at(context, path + "/step-1", 1);
    folder.save(saved.at(3));
    EXPECT_EQ(folder.finish(), path + "/step-3");
    EXPECT_EQ(steps_in(path), (Steps{1, 3}));
    Saved::expect_at(context, path + "/step-3", 3);
  });
}
INSTANTIATE_TEST_SUITE_P(Calls, FailedInTheBackground,
                         ::testing::Combine(::testing::Values(0, 1, -1), ::testing::Values("poll", "finish", "save")),
                         [](const auto& which) {
                           const auto full = std::get<0>(which.param);
                           return std::get<1>(which.param) + (full < 0 ? "AllRanks" : "Rank" + std::to_string(full));
                         });

TEST(InTheBackground, ASaveThatNobodyFinishes) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run";
    Saved saved(context);
    {
      CheckpointFolder folder(context.environment(), path, {.async = true});
      folder.save(saved.at(1));
      folder.finish();
      folder.save(saved.at(2));
    }
    context.environment().barrier("thrown away");
    EXPECT_EQ(steps_in(path), Steps{1});
    CheckpointFolder folder(context.environment(), path, {.async = true});
    EXPECT_EQ(folder.newest()->step, 1);
    folder.save(saved.at(2));
    folder.finish();
    expect_names(context, path, {"step-1", "step-2"});
    Saved::expect_at(context, path + "/step-2", 2);
  });
}

// What could not be saved is no reason to remove what was.
TEST(InTheBackground, FailuresRemoveNothing) {
  on_two_ranks([](RankContext& context) {
    const auto path = context.directory() + "/run";
    Saved saved(context);
    CheckpointFolder folder(context.environment(), path, {.keep_latest = 2, .async = true});
    for (const auto step : {1, 2}) folder.save(saved.at(step));
    folder.finish();
    for (const auto step : {3, 4, 5}) {
      FileSizeLimit limit(100);
      folder.save(saved.at(step));
      value_error_of(context, [&] { folder.finish(); });
    }
    expect_names(context, path, {"step-1", "step-2"});
    for (const auto step : {1, 2}) Saved::expect_at(context, path + "/step-" + std::to_string(step), step);
  });
}

// ---- paths ----

TEST(Folder, OfAllForms) {
  on_two_ranks([](RankContext& context) {
    fs::current_path(context.directory());
    Saved saved(context);
    for (const auto* path : {"relative", "of/some/folders", "./dotted/", "slashes///"}) {
      SCOPED_TRACE(path);
      CheckpointFolder folder(context.environment(), path, {.keep_latest = 1});
      for (const auto step : {0, 1}) folder.save(saved.at(step));
      expect_names(context, path, {"step-1"});
      Saved::expect_at(context, folder.newest()->path, 1);
    }
    on_rank_0(context, [] { fs::create_directory("inside"); });
    fs::current_path("inside");
    CheckpointFolder folder(context.environment(), ".", {.keep_latest = 1});
    for (const auto step : {0, 1}) folder.save(saved.at(step));
    expect_names(context, ".", {"step-1"});
    Saved::expect_at(context, folder.newest()->path, 1);
  });
}

}  // namespace

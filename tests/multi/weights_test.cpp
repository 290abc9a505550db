// Whole weights into and out of a sharded module: copy_values from a plain module, load from files of torch::save,
// export_pt for torch::load; and that a failure of one rank is one of all.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/agreement.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/weights_net.h"

namespace weights_test {

using namespace testing_support;
namespace fs = std::filesystem;

// ---- copy_values ----

TEST_P(Weights, CopiedFromAPlainModule) {
  on_ranks([](RankContext& context) {
    auto plain = plain_net(3);
    fill(*plain, 2);
    auto model = sharded_net(context, 3);
    model.materialize(at::kCPU);
    dtensor::reset_collective_counts();
    hsdp::copy_values(model, plain);
    EXPECT_EQ(dtensor::collective_counts().all_gathers + dtensor::collective_counts().broadcasts, 0);
    expect_values(model, *plain);
    expect_trains_alike(model, plain);
    // Again, in another dtype and in the other spellings.
    fill(*plain, 4);
    plain->to(torch::kFloat32);
    hsdp::copy_values(model, *plain);
    expect_values(model, *plain);
    fill(*plain, 5);
    hsdp::copy_values(model, plain.ptr());
    expect_values(model, *plain);
    EXPECT_EQ(model.module().out->weight.scalar_type(), torch::kFloat64);
  });
}

TEST_P(Weights, CopiedWithoutWhatNobodyRegistered) {
  on_ranks([](RankContext& context) {
    auto plain = plain_net(3);
    auto model = sharded_net(context, 3);
    expect_error<dtensor::StateError>(
        [&] { hsdp::copy_values(model, plain); },
        "[copy_values] tensor \"head\" is on meta, expected memory; call to_empty(device) "
        "or materialize(device) first");
    model.to_empty(at::kCPU);
    hsdp::copy_values(model, plain);
    expect_error<dtensor::StateError>([&] { model->forward(tokens()); },
                                      "[forward] 2 tensors have no values: \"unregistered member of shape [5]\"");
    model.replay_init();
    fill(*plain, 3);
    hsdp::copy_values(model, plain);
    expect_values(model, *plain);
    expect_trains_alike(model, plain);
  });
}

TEST_P(Weights, CopiesThatDoNotFitChangeNothing) {
  on_ranks([](RankContext& context) {
    auto plain = plain_net(3);
    auto model = sharded_net(context, 3);
    model.materialize(at::kCPU);
    Other other;
    expect_error<dtensor::ValueError>([&] { hsdp::copy_values(model, other); },
                                      std::string("[copy_values] the source") + kMisfit);
    auto complex = plain_net(4);
    complex->out->bias.set_data(torch::zeros({5}, torch::kComplexDouble));
    expect_error<dtensor::ValueError>([&] { hsdp::copy_values(model, complex); },
                                      "\"out.bias\" of dtype ComplexDouble, expected Double");
    auto source = sharded_net(context, 3);
    expect_error<dtensor::ValueError>([&] { hsdp::copy_values(model, source.module()); },
                                      "[copy_values] tensor \"head\" of the source is DTensor Double [11, 5]",
                                      "expected a plain one; between two sharded modules copy_ each parameter");
    expect_values(model, *plain);
    expect_trains_alike(model, plain);
  });
}

// ---- load ----

TEST_P(Weights, LoadedBeforeAndAfterMaterialize) {
  on_ranks([](RankContext& context) {
    const auto path = context.directory() + "/weights.pt";
    auto plain = plain_net(3);
    fill(*plain, 2);
    if (context.rank() == 0) torch::save(plain, path);
    for (const bool before : {true, false}) {
      auto model = sharded_net(context, 3);
      if (!before) model.materialize(at::kCPU);
      if (!before) fill(model.module(), 7);
      dtensor::reset_collective_counts();
      hsdp::load(model, path);  // The other ranks wait for rank 0, which has written it.
      const auto counts = dtensor::collective_counts();
      // What kind of file it is, dtypes, seven parameters, three buffers.
      EXPECT_EQ(counts.broadcasts, context.world_size() > 1 ? 12 : 0);
      expect_values(model, *plain);
      auto reference = plain_net(3);
      torch::load(reference, path);
      expect_trains_alike(model, reference);
    }
  });
}

// ---- export_pt ----

TEST_P(Weights, ExportedForAPlainProgram) {
  const auto folder = fs::temp_directory_path() / ("hsdp_weights_test_" + std::to_string(::getpid()));
  fs::create_directory(folder);
  const auto path = (folder / "model.pt").string();
  on_ranks([&](RankContext& context) {
    auto model = sharded_net(context, 3);
    expect_error<dtensor::StateError>(
        [&] { hsdp::export_pt(model, path); }, "[export_pt] 12 tensors have no values, the first is \"",
        "(on meta), expected all to be set; call materialize(device) or load(path) first");
    model.materialize(at::kCPU);
    fill(model.module(), 2);
    model.module().out->weight.set_requires_grad(false);
    dtensor::reset_collective_counts();
    hsdp::export_pt(model, path);
    // One whole parameter at a time, tied ones once.
    EXPECT_EQ(dtensor::collective_counts().all_gathers, context.world_size() > 1 ? 7 : 0);
    hsdp::export_pt(model, path);  // over the first
    // The way back, and training goes on.
    auto again = sharded_net(context, 3);
    hsdp::load(again, path);
    auto plain = plain_net(3);
    fill(*plain, 2);
    expect_values(again, *plain);
    model.module().out->weight.set_requires_grad(true);
    expect_trains_alike(model, plain);
  });
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1) << "a temporary file is left";
  // A process that has never sharded anything.
  run_ranks(1, [&](RankContext&) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    auto plain = plain_net(9), expected = plain_net(3);
    fill(*expected, 2);
    torch::load(plain, path);
    const auto parameters = expected->named_parameters();
    for (auto& entry : plain->named_parameters()) {
      EXPECT_TRUE(torch::equal(entry.value(), parameters[entry.key()])) << entry.key();
      EXPECT_TRUE(entry.value().requires_grad());
      EXPECT_EQ(entry.value().device(), torch::Device(torch::kCPU));
    }
    const auto buffers = expected->named_buffers();
    for (auto& entry : plain->named_buffers()) {
      EXPECT_TRUE(torch::equal(entry.value(), buffers[entry.key()])) << entry.key();
    }
    EXPECT_TRUE(plain->head.is_same(plain->embedding->weight));
    plain->forward(tokens()).sum().backward();
    // The same bytes of values as torch::save would write.
    torch::save(expected, path + ".plain");
    EXPECT_NEAR(static_cast<double>(fs::file_size(path + ".plain")), static_cast<double>(fs::file_size(path)), 1024);
  });
  fs::remove_all(folder);
}

TEST_P(Weights, ExportsThatFailLeaveTheFormerFile) {
  on_ranks([](RankContext& context) {
    const auto folder = context.directory();
    auto model = sharded_net(context, 3);
    model.materialize(at::kCPU);
    hsdp::export_pt(model, folder + "/model.pt");
    auto plain = plain_net(3);
    fill(model.module(), 5);
    const std::string hint = ", expected a path in a folder that can be written, with room for the whole file";
    expect_error<dtensor::ValueError>(
        [&] { hsdp::export_pt(model, folder + "/none/model.pt"); },
        "[export_pt] " + folder + "/none/model.pt cannot be created: No such file or directory" + hint);
    expect_error<dtensor::ValueError>([&] { hsdp::export_pt(model, folder); },
                                      "[export_pt] " + folder + " cannot be replaced: Is a directory", hint);
    // A disk that is full half-way.
    rlimit former{};
    if (context.rank() == 0) {
      std::signal(SIGXFSZ, SIG_IGN);
      getrlimit(RLIMIT_FSIZE, &former);
      rlimit small{4096, former.rlim_max};
      setrlimit(RLIMIT_FSIZE, &small);
    }
    expect_error<dtensor::ValueError>([&] { hsdp::export_pt(model, folder + "/model.pt"); },
                                      "[export_pt] " + folder + "/model.pt cannot be written: File too large" + hint);
    if (context.rank() == 0) setrlimit(RLIMIT_FSIZE, &former);
    for (auto& entry : fs::directory_iterator(folder)) {
      EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
    }
    auto former_values = sharded_net(context, 3);
    hsdp::load(former_values, folder + "/model.pt");
    expect_values(former_values, *plain);
    fill(*plain, 5);
    expect_trains_alike(model, plain);
  });
}

/// A child that torch::save and torch::load pass over, tied to one that they do not.
struct UnsavedImpl : torch::nn::Module {
  UnsavedImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {
    tied = register_parameter("tied", torch::ones({5}));
    count = register_buffer("count", torch::full({2}, 3.0));
  }
  bool is_serializable() const override { return false; }
  torch::Tensor forward(torch::Tensor x) { return linear(x) * tied; }
  torch::nn::Linear linear{nullptr};
  torch::Tensor tied, count;
};
TORCH_MODULE(Unsaved);

struct SavedImpl : torch::nn::Module {
  explicit SavedImpl(const torch::Tensor& other) : linear(register_module("linear", torch::nn::Linear(5, 5))) {
    tied = register_parameter("scale", other);
  }
  torch::Tensor forward(torch::Tensor x) { return linear(x) * tied; }
  torch::nn::Linear linear{nullptr};
  torch::Tensor tied;
};
TORCH_MODULE(Saved);

struct PartlySavedImpl : torch::nn::Module {
  PartlySavedImpl()
      : unsaved(register_module("unsaved", Unsaved())), saved(register_module("saved", Saved(unsaved->tied))) {}
  torch::Tensor forward(torch::Tensor x) { return saved(unsaved(x)); }
  Unsaved unsaved{nullptr};
  Saved saved{nullptr};
};
TORCH_MODULE(PartlySaved);

TEST_P(Weights, ChildrenThatTorchSavePassesOver) {
  on_ranks([](RankContext& context) {
    const auto sharded = [&](uint64_t seed) {
      torch::manual_seed(seed);
      auto net = hsdp::meta_init([] { return PartlySaved(); });
      return hsdp::fully_shard(net, {.mesh = context.environment().mesh()});
    };
    const auto expect_alike = [](const auto& model, PartlySaved& plain) {
      const auto parameters = plain->named_parameters();
      for (auto& entry : model.module().named_parameters()) {
        EXPECT_TRUE(torch::equal(whole_of(entry.value()), parameters[entry.key()])) << entry.key();
      }
      EXPECT_TRUE(torch::equal(model.module().unsaved->count, plain->unsaved->count));
    };
    const auto path = context.directory() + "/model.pt", plain_path = context.directory() + "/plain.pt";
    torch::manual_seed(3);
    PartlySaved plain;
    auto model = sharded(3);
    model.materialize(at::kCPU);
    expect_alike(model, plain);
    fill(*plain, 2);
    fill(model.module(), 2);
    hsdp::export_pt(model, path);
    if (context.rank() == 0) {
      torch::save(plain, plain_path);
      torch::manual_seed(4);
      PartlySaved theirs;
      torch::manual_seed(4);
      PartlySaved ours;
      torch::load(ours, path);
      torch::load(theirs, plain_path);
      for (auto& entry : theirs->named_parameters()) {
        EXPECT_TRUE(torch::equal(entry.value(), ours->named_parameters()[entry.key()])) << entry.key();
      }
      EXPECT_EQ(ours->unsaved->count[0].item<double>(), 3);
      EXPECT_EQ(ours->saved->tied[1].item<double>(), 3.0 / 50);
    }
    // Loading leaves them as they were.
    torch::manual_seed(4);
    PartlySaved expected;
    auto again = sharded(4);
    again.materialize(at::kCPU);
    hsdp::load(again, plain_path);
    torch::load(expected, plain_path);
    expect_alike(again, expected);
    EXPECT_FALSE(torch::equal(expected->unsaved->linear->weight, plain->unsaved->linear->weight));
    // On meta they have no values, and a forward says so.
    auto third = sharded(4);
    hsdp::load(third, plain_path);
    expect_error<dtensor::StateError>(
        [&] {
          third->forward(torch::ones({2, 5}));
        },
        "[forward] 2 tensors have no values: ", "unsaved.linear.weight");
    third.materialize(at::kCPU);
    hsdp::load(third, plain_path);
    expect_alike(third, expected);
  });
}

// ---- agreement ----

TEST_P(Weights, WhatOneRankMeetsAllRanksThrow) {
  on_ranks([](RankContext& context) {
    const auto& mesh = *context.environment().mesh();
    const int last = context.world_size() - 1;
    hsdp::agree(mesh, at::kCPU, "test", [] {});
    expect_error<dtensor::NotSupportedError>(
        [&] {
          hsdp::agree(mesh, at::kCPU, "test", [&] {
            if (context.rank() == last) dtensor::raise<dtensor::NotSupportedError>("test", "planted on ", last);
          });
        },
        "[test] planted on " + std::to_string(last));
    if (last == 0) return;
    const auto foreign = [&] {
      hsdp::agree(mesh, at::kCPU, "test", [&] {
        if (context.rank() == last) throw std::runtime_error("planted");
      });
    };
    if (context.rank() == last) {
      EXPECT_THROW(foreign(), std::runtime_error);
    } else {
      expect_error<dtensor::CommunicationError>(foreign, "[test] rank " + std::to_string(last) + " failed: planted");
    }
    // No class that anybody knows.
    const auto number = [&] {
      hsdp::agree(mesh, at::kCPU, "test", [&] {
        if (context.rank() == last) throw 42;
      });
    };
    if (context.rank() == last) {
      EXPECT_THROW(number(), int);
    } else {
      expect_error<dtensor::CommunicationError>(
          number, "[test] rank " + std::to_string(last) + " failed: with an exception that is no std::exception");
    }
    // The lowest speaks for all, also for one that has something to say itself.
    expect_error<dtensor::CommunicationError>(
        [&] {
          hsdp::agree(mesh, at::kCPU, "test", [&] {
            if (context.rank() == last - 1) dtensor::raise<dtensor::CommunicationError>("test", "planted on the lower");
            if (context.rank() == last) dtensor::raise<dtensor::ValueError>("test", "planted on the last");
          });
        },
        "[test] planted on the lower");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Weights, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace weights_test

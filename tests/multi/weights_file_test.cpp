// Files that hsdp::load reads: of Python, of tied parameters with other values, damaged, made by hand; what does not
// fit is refused on all ranks and changes nothing.
#include "hsdp/weights_file.h"

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

#include "dtensor/communicator.h"
#include "dtensor/error.h"
#include "hsdp/hsdp.h"
#include "tests/testing/expect.h"
#include "tests/testing/multi_process.h"
#include "tests/testing/weights_net.h"

namespace {

using namespace testing_support;
namespace fs = std::filesystem;

/// What torch::save writes, but for a value of its own for the tied parameter's second name.
void save_with_head(const Net& plain, const torch::Tensor& head, const std::string& path) {
  torch::serialize::OutputArchive archive;
  archive.write("head", head);
  for (auto& child : plain->named_children()) {
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    child.value()->save(nested);
    archive.write(child.key(), nested);
  }
  archive.save_to(path);
}

TEST_P(Weights, LoadedFromAFileOfPython) {
  on_ranks([](RankContext& context) {
    auto model = sharded_net(context, 3);
    hsdp::load(model, HSDP_SOURCE_DIR "/tests/data/python_state_dict.pt");
    // Python's torch.save(net.state_dict(), path) of a module with these names, its parameters filled with eighths that
    // count on from tensor to tensor.
    double next = 0;
    auto& net = model.module();
    for (auto& tensor : {net.embedding->weight, net.body->linear->weight, net.body->linear->bias,
                         net.body->norm->weight, net.body->norm->bias, net.out->weight, net.out->bias}) {
      const auto expected = torch::arange(next, next + static_cast<double>(tensor.numel())).view(tensor.sizes()) / 8;
      EXPECT_TRUE(torch::equal(hsdp::unsharded(tensor), expected)) << next;
      next += static_cast<double>(tensor.numel());
    }
    EXPECT_EQ(net.body->norm->running_mean[6].item<double>(), 0.25);
    EXPECT_EQ(net.body->norm->running_var[0].item<double>(), 2.5);
    EXPECT_EQ(net.body->norm->num_batches_tracked.item<int64_t>(), 3);
    auto plain = plain_net(3);
    {
      torch::NoGradGuard no_grad;
      for (auto& entry : plain->named_parameters()) {
        entry.value().copy_(hsdp::unsharded(net.named_parameters()[entry.key()]));
      }
      for (auto& entry : plain->named_buffers()) entry.value().copy_(net.named_buffers()[entry.key()]);
    }
    expect_trains_alike(model, plain);
  });
}

TEST_P(Weights, FilesThatDoNotFitChangeNothing) {
  on_ranks([](RankContext& context) {
    const auto folder = context.directory();
    auto plain = plain_net(3);
    if (context.rank() == 0) {
      torch::save(plain, folder + "/whole.pt");
      std::ifstream whole(folder + "/whole.pt", std::ios::binary);
      std::string bytes((std::istreambuf_iterator<char>(whole)), {});
      std::ofstream(folder + "/truncated.pt", std::ios::binary) << bytes.substr(0, bytes.size() / 2);
      std::ofstream(folder + "/empty.pt");
      std::ofstream(folder + "/text.pt") << "this is no archive of anything, but it is long enough to look at its end";
      torch::save(Other(), folder + "/other.pt");
      save_with_head(plain, plain->head + 1, folder + "/untied.pt");
      save_with_head(plain, plain->head.to(torch::kFloat32), folder + "/dtypes.pt");
    }
    for (const bool materialized : {true, false}) {
      auto model = sharded_net(context, 3);
      if (materialized) model.materialize(at::kCPU);
      const auto refused = [&](const std::string& file, const std::string& text) {
        expect_error<dtensor::ValueError>([&] { hsdp::load(model, folder + file); }, "[load] " + folder + file + text);
      };
      const std::string formats =
          ", expected an archive of torch::save(module, path) or of Python's torch.save(module.state_dict(), path)";
      refused("/none.pt", " cannot be read: No such file or directory" + formats);
      refused("/empty.pt", " cannot be read: it is empty" + formats);
      refused("/truncated.pt",
              " is damaged or no zip archive: PytorchStreamReader failed reading zip archive: failed "
              "finding central directory" +
                  formats);
      refused("/text.pt",
              " is damaged or no zip archive: PytorchStreamReader failed reading zip archive: failed "
              "finding central directory" +
                  formats);
      refused("/other.pt", kMisfit);
      refused("/untied.pt",
              " has unlike values for \"head\" and \"embedding.weight\", expected equal ones, since the "
              "module ties them; leave one of them out");
      refused(
          "/dtypes.pt",
          " has unlike dtypes Float and Double for \"head\" and \"embedding.weight\", expected equal ones, since the "
          "module ties them; leave one of them out");
      if (materialized) {
        expect_values(model, *plain);
      } else {
        EXPECT_EQ(model.core()->tensors_without_values().size(), 12u);
      }
      hsdp::load(model, folder + "/whole.pt");
      auto reference = plain_net(3);
      expect_trains_alike(model, reference);
    }
  });
}

TEST_P(Weights, TiedParametersThatAreNotNumbersAreEqual) {
  on_ranks([](RankContext& context) {
    const auto path = context.directory() + "/nan.pt";
    auto plain = plain_net(3);
    torch::NoGradGuard no_grad;
    plain->head[3][2] = std::numeric_limits<double>::quiet_NaN();
    if (context.rank() == 0) save_with_head(plain, plain->head.clone(), path);
    auto model = sharded_net(context, 3);
    hsdp::load(model, path);
    EXPECT_TRUE(torch::allclose(whole_of(model.module().head), plain->head, 0, 0, /*equal_nan=*/true));
  });
}

/// Spoils the local header of a tensor's record: the reader finds another entry there than it was told of.
void damage(const std::string& path, const std::string& tensor_name) {
  std::string record;
  const hsdp::WeightsFile listed(path);
  for (auto& tensor : listed.tensors()) {
    if (tensor.name == tensor_name) record = fs::path(path).stem().string() + "/data/" + tensor.record;
  }
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  // A header ends with the length of the name, another one, and the name.
  auto name = bytes.find(record);
  while (name != std::string::npos && static_cast<size_t>(bytes[name - 4]) != record.size()) {
    name = bytes.find(record, name + 1);
  }
  ASSERT_NE(name, std::string::npos);
  ASSERT_EQ(bytes.substr(name - 30, 2), "PK");
  file.clear();
  file.seekp(static_cast<std::streamoff>(name) - 30);
  file << "XXXX";
}

TEST_P(Weights, RecordsThatAreDamagedAreAnErrorOnAllRanks) {
  on_ranks([](RankContext& context) {
    const auto path = context.directory() + "/damaged.pt";
    for (const std::string damaged : {"body.linear.weight", "out.weight"}) {
      auto saved = plain_net(3), expected = plain_net(3);
      fill(*saved, 2);
      fill(*expected, 7);
      if (context.rank() == 0) {
        torch::save(saved, path);
        damage(path, damaged);
      }
      auto model = sharded_net(context, 3);
      model.materialize(at::kCPU);
      fill(model.module(), 7);
      expect_error<dtensor::ValueError>([&] { hsdp::load(model, path); },
                                        "[load] tensor \"" + damaged + "\" in " + path + " cannot be read: ",
                                        ", expected values of sizes [", "; write the file again");
      // What comes before it is loaded, nothing else has changed.
      const auto parameters = expected->named_parameters();
      for (auto& entry : saved->named_parameters()) {
        if (entry.key() == damaged) break;
        torch::NoGradGuard no_grad;
        parameters[entry.key()].copy_(entry.value());
      }
      expect_values(model, *expected);
      expect_trains_alike(model, expected);
    }
  });
}

/// A file of torch.save's format that has this pickle and these values.
void write_archive(const std::string& path, const std::string& pickle,
                   const std::vector<std::pair<std::string, std::string>>& values) {
  caffe2::serialize::PyTorchStreamWriter writer(path);
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  for (auto& [name, bytes] : values) writer.writeRecord("data/" + name, bytes.data(), bytes.size());
  writer.writeEndOfFile();
}

// Pickles by hand, opcode by opcode.
std::string pickled(const std::string& text) {
  return std::string("X") + static_cast<char>(text.size()) + std::string(3, '\0') + text;
}
std::string pickled(int32_t number) {
  std::string result = "J";
  for (int i = 0; i < 4; ++i) result += static_cast<char>(static_cast<uint32_t>(number) >> (8 * i) & 0xff);
  return result;
}
std::string pickled_file(const std::string& value) { return "\x80\x02" + value + "."; }
/// { "head": a float64 tensor of one axis in the record "0" }
std::string pickled_head(int32_t storage_size, int32_t offset, int32_t size, int32_t stride) {
  const auto storage = "(" + pickled("storage") + "ctorch\nDoubleStorage\n" + pickled("0") + pickled("cpu") +
                       pickled(storage_size) + "tQ";
  const auto tensor = "ctorch._utils\n_rebuild_tensor_v2\n(" + storage + pickled(offset) + "(" + pickled(size) + "t(" +
                      pickled(stride) + "t\x89" + "ccollections\nOrderedDict\n)RtR";
  return pickled_file("}" + pickled("head") + tensor + "s");
}

TEST_P(Weights, FilesMadeByHandAreRefused) {
  on_ranks([](RankContext& context) {
    const auto path = context.directory() + "/by_hand.pt";
    auto plain = plain_net(3);
    auto model = sharded_net(context, 3);
    model.materialize(at::kCPU);
    const auto refused = [&](const std::string& pickle, const std::string& text) {
      const std::string values(55 * sizeof(double), '\0');
      if (context.rank() == 0) write_archive(path, pickle, {{"0", values}});
      expect_error<dtensor::ValueError>([&] { hsdp::load(model, path); }, text);
    };
    const auto deep = "[load] " + path + " holds dicts nested more than 1000 deep, expected an archive of torch::save";
    const auto get = [](int place) { return std::string("h") + static_cast<char>(place); };
    const auto put = [](int place) { return std::string("q") + static_cast<char>(place); };
    const auto circular = "[load] " + path + " holds dicts that contain themselves or each other, expected an archive";
    refused(pickled_file("}" + put(0) + pickled("itself") + get(0) + "s"), circular);
    std::string nest;
    for (int i = 0; i < 300000; ++i) nest += "}" + pickled("next");
    refused(pickled_file(nest + "}" + std::string(300000, 's')), deep);
    // Each dict twice in the one around it.
    std::string doubled, ends;
    for (int i = 0; i < 100; ++i) {
      doubled += "}" + put(i) + pickled("a");
      ends = "s" + pickled("b") + get(i + 1) + "s" + ends;
    }
    refused(pickled_file(doubled + "}" + put(100) + ends), circular);
    // Tensors that their values do not suffice for.
    const auto head = "[load] tensor \"head\" in " + path + " cannot be read: ";
    const std::string hint = ", expected values of sizes [55]; write the file again";
    refused(pickled_head(55, 100, 55, 1), head + "its strides [1] and offset 100 reach beyond its 440 bytes" + hint);
    refused(pickled_head(55, 0, 55, 2), head + "its strides [2] and offset 0 reach beyond its 440 bytes" + hint);
    refused(pickled_head(55, -1, 55, 1), head + "its strides [1] and offset -1 reach beyond its 440 bytes" + hint);
    refused(pickled_head(0, 0, 55, 1), head + "it has no values" + hint);
    refused(pickled_head(-9, 0, 55, 1), "[load] " + path + " holds no tensors that can be listed: ");
    refused(pickled_head(56, 0, 55, 1), head + "it has 440 of 448 bytes" + hint);
    // One that has them gets as far as the names.
    refused(pickled_head(55, 0, 55, 1), "does not fit the module: missing \"body.linear.weight\"");
    expect_values(model, *plain);
    expect_trains_alike(model, plain);
  });
}

TEST_P(Weights, FilesOfSparseAndQuantizedTensorsAreRefused) {
  on_ranks([](RankContext& context) {
    const auto path = context.directory() + "/kinds.pt";
    auto model = sharded_net(context, 3);
    model.materialize(at::kCPU);
    const auto refused = [&](const torch::Tensor& head, const std::string& kind) {
      torch::serialize::OutputArchive archive;
      archive.write("head", head);
      if (context.rank() == 0) archive.save_to(path);
      expect_error<dtensor::NotSupportedError>(
          [&] { hsdp::load(model, path); },
          "[load] " + path + " holds a " + kind + " tensor, expected dense ones; convert it before saving");
    };
    refused(torch::eye(5).to_sparse(), "sparse");
    refused(torch::eye(5).to_sparse_csr(), "sparse");
    const auto scales = torch::full({11}, 0.1, torch::kFloat64), zeros = torch::zeros({11}, torch::kLong);
    const auto values = torch::ones({11, 5}, torch::kFloat32);
    refused(torch::quantize_per_channel(values, scales, zeros, 0, torch::kQInt8), "quantized");
    refused(torch::quantize_per_tensor(values, 0.1, 0, torch::kQInt8), "quantized");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Weights, ::testing::Values(1, 3),
                         [](const auto& which) { return "Ranks_" + std::to_string(which.param); });

}  // namespace

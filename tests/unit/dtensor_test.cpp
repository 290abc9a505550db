// DTensor: construction, metadata, conversions, data and set_data. No process group.
#include "dtensor/dtensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "dtensor/error.h"
#include "dtensor/inspect.h"
#include "tests/testing/expect.h"
#include "tests/testing/offline_mesh.h"

namespace dtensor_test {

using namespace testing_support;
using dtensor::DTensor;
using dtensor::inspect;
using dtensor::Placements;
using dtensor::Replicate;
using dtensor::Shard;

struct Placed {
  std::vector<int64_t> local;
  std::vector<int64_t> mesh;
  Placements placements;
  std::vector<int64_t> global;
};

class FromLocal : public ::testing::TestWithParam<Placed> {};

TEST_P(FromLocal, HasGlobalShapeStridesAndNumel) {
  const auto& c = GetParam();
  std::vector<std::string> names;
  for (size_t i = 0; i < c.mesh.size(); ++i) names.push_back("axis" + std::to_string(i));
  auto mesh = dtensor::DeviceMesh::create(at::kCPU, c.mesh, names, 0);
  auto tensor = DTensor::from_local(torch::rand(c.local), mesh, c.placements);
  EXPECT_EQ(tensor.tensor().sizes(), c.global);
  EXPECT_EQ(tensor.tensor().numel(), c10::multiply_integers(c.global));
  EXPECT_EQ(tensor.tensor().strides(), dtensor::row_major_strides(c.global));
  EXPECT_EQ(tensor.tensor().dim(), static_cast<int64_t>(c.global.size()));
  EXPECT_EQ(tensor.to_local().sizes(), c.local);
  EXPECT_TRUE(tensor.tensor().is_cpu());
  EXPECT_TRUE(tensor.tensor().is_contiguous());
}

INSTANTIATE_TEST_SUITE_P(Meshes, FromLocal,
                         ::testing::Values(Placed{{8, 8}, {2, 4}, {Replicate(), Replicate()}, {8, 8}},
                                           Placed{{8, 8}, {2, 4}, {Shard(0), Replicate()}, {16, 8}},
                                           Placed{{8, 8}, {2, 4}, {Replicate(), Shard(1)}, {8, 32}},
                                           Placed{{8, 8}, {2, 4}, {Shard(0), Shard(1)}, {16, 32}},
                                           Placed{{3}, {4}, {Shard(0)}, {12}},
                                           Placed{{2, 3, 4}, {3}, {Shard(2)}, {2, 3, 12}},
                                           Placed{{2, 2}, {2, 2}, {Shard(0), Shard(0)}, {8, 2}}));

TEST(FromLocalWithShape, GivesUnevenPartsTheirTrueGlobalShape) {
  auto tensor = DTensor::from_local(torch::rand({2, 3}), offline_mesh(2, 1), {Shard(0)}, {{5, 3}});
  EXPECT_EQ(tensor.tensor().sizes(), (std::vector<int64_t>{5, 3}));
  auto empty = DTensor::from_local(torch::rand({0, 3}), offline_mesh(4, 3), {Shard(0)}, {{2, 3}});
  EXPECT_EQ(empty.tensor().numel(), 6);
}

TEST(FromLocalRefuses, WhatDoesNotFit) {
  auto mesh = offline_mesh(2, 0);
  auto part = torch::rand({2, 3});
  expect_error<dtensor::ValueError>([&] { DTensor::from_local(at::Tensor(), mesh, {Shard(0)}); }, "undefined");
  expect_error<dtensor::ValueError>([&] { DTensor::from_local(part, nullptr, {Shard(0)}); }, "mesh is null");
  expect_error<dtensor::ValueError>(
      [&] {
        DTensor::from_local(part, mesh, {Shard(0), Shard(1)});
      },
      "2 placements", "one per mesh axis");
  expect_error<dtensor::ValueError>([&] { DTensor::from_local(part, mesh, {Shard(2)}); }, "2");
  expect_error<dtensor::ValueError>(
      [&] {
        DTensor::from_local(part, mesh, {Shard(0)}, {{5, 3}});
      },
      "sizes [2, 3]", "expected [3, 3]");
  expect_error<dtensor::NotSupportedError>([&] { DTensor::from_local(part.t(), mesh, {Shard(0)}); }, "strides [1, 3]",
                                           "contiguous()");
  auto tensor = DTensor::from_local(part, mesh, {Shard(0)});
  expect_error<dtensor::NotSupportedError>([&] { DTensor::from_local(tensor.tensor(), mesh, {Shard(0)}); },
                                           "to_local()");
  expect_error<dtensor::ValueError>([&] { DTensor wrong(part); }, "expected a distributed tensor");
}

TEST(FromLocal, KeepsRequiresGradAndReusesLayouts) {
  auto mesh = offline_mesh(2, 0);
  auto a = DTensor::from_local(torch::rand({2, 3}).set_requires_grad(true), mesh, {Shard(0)});
  auto b = DTensor::from_local(torch::rand({2, 3}), mesh, {Shard(0)});
  EXPECT_TRUE(a.tensor().requires_grad());
  EXPECT_FALSE(b.tensor().requires_grad());
  EXPECT_EQ(a.layout(), b.layout());
  EXPECT_NE(a.layout(), DTensor::from_local(torch::rand({3, 3}), mesh, {Shard(0)}).layout());
}

TEST(FromLocal, SharesMemoryAndVersionCounter) {
  auto local = torch::zeros({2, 3});
  auto tensor = DTensor::from_local(local, offline_mesh(2, 0), {Shard(0)});
  const auto before = tensor.tensor()._version();
  tensor.to_local().add_(1);
  EXPECT_TRUE(torch::equal(local, torch::ones({2, 3})));
  EXPECT_EQ(tensor.tensor()._version(), before + 1);
  tensor.tensor().mul_(3);
  EXPECT_TRUE(torch::equal(local, torch::full({2, 3}, 3.f)));
  EXPECT_EQ(tensor.tensor()._version(), before + 2);
}

// ---- to() and float(): the five tests that need neither hardware nor a process group ----

TEST(DTensorTo, ForwardsItsArgumentsToTheLocalTensor) {
  auto mesh = offline_mesh(2, 0);
  auto tensor = DTensor::from_local(torch::rand({2, 3}), mesh, {Shard(0)});
  const auto same = [&](const DTensor& a) { return dtensor::same_memory(a.impl().local(), tensor.impl().local()); };
  EXPECT_EQ(tensor.to(torch::kFloat64).impl().local().scalar_type(), torch::kFloat64);
  EXPECT_EQ(tensor.to(at::Device(at::kMeta), torch::kBFloat16).impl().local().device().type(), at::kMeta);
  EXPECT_EQ(tensor.to(at::Device(at::kMeta), torch::kBFloat16).tensor().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(tensor.to(torch::TensorOptions().dtype(torch::kHalf)).impl().local().scalar_type(), torch::kHalf);
  EXPECT_EQ(tensor.to(torch::rand({1}, torch::kFloat64)).impl().local().scalar_type(), torch::kFloat64);
  // `copy` decides whether an unchanged tensor gets memory of its own.
  EXPECT_TRUE(same(tensor.to(torch::kFloat)));
  EXPECT_FALSE(same(tensor.to(torch::kFloat, false, /*copy=*/true)));
  // `memory_format` arrives: the local of a 4-D tensor changes its strides.
  auto images = DTensor::from_local(torch::rand({2, 3, 4, 5}), mesh, {Shard(0)});
  EXPECT_TRUE(images.to(torch::kFloat, false, true, at::MemoryFormat::ChannelsLast)
                  .impl()
                  .local()
                  .is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(DTensorTo, KeepsTheMesh) {
  auto mesh = offline_mesh(2, 0);
  auto tensor = DTensor::from_local(torch::rand({2, 3}), mesh, {Shard(0)});
  EXPECT_EQ(tensor.to(torch::kFloat64).mesh(), mesh);
  EXPECT_EQ(tensor.to_float().mesh(), mesh);
  EXPECT_EQ(tensor.to(torch::kFloat64).tensor().sizes(), (std::vector<int64_t>{4, 3}));
}

TEST(DTensorTo, UsesAliasPlacementsWhereALayoutExists) {
  auto tensor = DTensor::from_local(torch::rand({2, 3}), offline_mesh(2, 0), {Shard(1)});
  ASSERT_NE(tensor.layout(), nullptr);
  auto converted = tensor.to(torch::kFloat64);
  ASSERT_NE(converted.layout(), nullptr);
  EXPECT_EQ(converted.placements(), tensor.layout()->alias_placements());
  EXPECT_EQ(converted.layout()->dtype(), torch::kFloat64);
}

TEST(DTensorTo, UsesPlainPlacementsWhereNoLayoutExists) {
  auto tensor = DTensor::without_layout(torch::rand({2, 3}), offline_mesh(2, 0), {Shard(1)});
  ASSERT_EQ(tensor.layout(), nullptr);
  auto converted = tensor.to(torch::kFloat64);
  EXPECT_EQ(converted.layout(), nullptr);
  EXPECT_EQ(converted.placements(), (Placements{Shard(1)}));
  EXPECT_EQ(converted.tensor().scalar_type(), torch::kFloat64);
}

TEST(DTensorTo, FloatDelegatesToTheLocal) {
  auto tensor = DTensor::from_local(torch::rand({2, 3}, torch::kFloat64), offline_mesh(2, 0), {Shard(0)});
  auto converted = tensor.to_float();
  EXPECT_TRUE(torch::equal(converted.to_local(), tensor.to_local().to(torch::kFloat)));
  EXPECT_EQ(converted.tensor().scalar_type(), torch::kFloat);
}

TEST(DTensorTo, TheTensorMethodLandsInTheSameRule) {
  auto mesh = offline_mesh(2, 0);
  auto parameter = DTensor::from_local(torch::rand({2, 3}), mesh, {Shard(0)}).as_parameter(true);
  at::Tensor plain_handle = parameter.tensor();
  torch::NoGradGuard no_grad;
  auto converted = plain_handle.to(torch::kFloat64);
  ASSERT_TRUE(DTensor::is_dtensor(converted));
  EXPECT_FALSE(DTensor(converted).is_parameter());
  EXPECT_EQ(DTensor(converted).mesh(), mesh);
  EXPECT_EQ(DTensor(converted).placements(), (Placements{Shard(0)}));
  EXPECT_TRUE(plain_handle.to(torch::kFloat).is_same(plain_handle));
}

// ---- data, set_data, detach ----

TEST(DTensorSetData, MovesLayoutBodyAndLocalAndKeepsTheIdentity) {
  auto mesh = offline_mesh(2, 0);
  auto tensor = DTensor::from_local(torch::zeros({2, 3}), mesh, {Shard(0)});
  auto source = DTensor::from_local(torch::ones({2, 3}, torch::kFloat64), mesh, {Shard(0)});
  const auto* identity = tensor.tensor().unsafeGetTensorImpl();
  tensor.set_data(source.tensor());
  EXPECT_EQ(tensor.tensor().unsafeGetTensorImpl(), identity);
  const auto seen = inspect(tensor.tensor());
  EXPECT_EQ(seen.body.storage, seen.local.storage);
  EXPECT_EQ(seen.local.storage, inspect(source.tensor()).local.storage);
  EXPECT_EQ(tensor.tensor().scalar_type(), torch::kFloat64);
  EXPECT_EQ(tensor.layout()->dtype(), torch::kFloat64);
}

TEST(DTensorSetData, TakesItsShardOfAPlainTensor) {
  auto tensor = DTensor::from_local(torch::zeros({2, 3}), offline_mesh(2, 1), {Shard(0)}, {{5, 3}});
  auto whole = torch::arange(15).to(torch::kFloat).view({5, 3});
  tensor.set_data(whole);
  EXPECT_TRUE(torch::equal(tensor.to_local(), whole.narrow(0, 3, 2)));
  // Its own memory: the source may go on changing.
  whole.fill_(-1);
  EXPECT_EQ(tensor.to_local()[0][0].item<float>(), 9);
}

TEST(DTensorSetData, RefusesAnotherShapeAndAPlainTarget) {
  auto tensor = DTensor::from_local(torch::zeros({2, 3}), offline_mesh(2, 0), {Shard(0)});
  expect_error<dtensor::ValueError>([&] { tensor.set_data(torch::zeros({2, 3})); }, "shape [2, 3]", "expected [4, 3]");
  auto plain = torch::zeros({4, 3});
  expect_error<dtensor::ValueError>([&] { plain.set_data(tensor.tensor()); }, "full_tensor()");
  EXPECT_TRUE(torch::equal(plain, torch::zeros({4, 3})));
}

TEST(DTensorData, IsAliasWithAVersionCounterOfItsOwn) {
  auto tensor = DTensor::from_local(torch::zeros({2, 3}), offline_mesh(2, 0), {Shard(0)});
  const auto before = tensor.tensor()._version();
  tensor.tensor().data().fill_(5);
  EXPECT_EQ(tensor.tensor()._version(), before);
  EXPECT_TRUE(torch::equal(tensor.to_local(), torch::full({2, 3}, 5.f)));
  auto detached = tensor.tensor().detach();
  detached.fill_(6);
  EXPECT_EQ(tensor.tensor()._version(), before + 1);
}

// ---- raw access ----

TEST(RawAccess, IsRefusedByName) {
  auto tensor = DTensor::from_local(torch::zeros({2, 3}), offline_mesh(2, 0), {Shard(0)});
  tensor.impl().set_name("blocks.0.weight");
  const auto check = [](const std::string& text) {
    EXPECT_NE(text.find("[raw access] tensor \"blocks.0.weight\""), std::string::npos) << text;
    EXPECT_NE(text.find("hsdp::unsharded(p)"), std::string::npos) << text;
  };
  const std::vector<std::function<void()>> accesses{
      [&] { tensor.tensor().data_ptr(); },
      [&] { tensor.tensor().data_ptr<float>(); },
      [&] { tensor.tensor().storage(); },
      [&] { (void)tensor.tensor().accessor<float, 2>(); },
      [&] { (void)tensor.tensor().is_alias_of(torch::zeros({1})); },
  };
  for (auto& access : accesses) {
    try {
      access();
      ADD_FAILURE() << "was not refused";
    } catch (const c10::Error& error) {
      check(error.what_without_backtrace());
    } catch (const dtensor::StateError& error) {
      check(error.what());
    }
  }
}

TEST(RawAccess, PrintingAndSavingAreRefused) {
  auto tensor = DTensor::from_local(torch::zeros({2, 3}), offline_mesh(2, 0), {Shard(0)});
  tensor.impl().set_name("w");
  std::ostringstream out, archive;
  const std::vector<std::function<void()>> accesses{[&] { out << tensor.tensor(); },
                                                    [&] { torch::save(tensor.tensor(), archive); }};
  for (auto& access : accesses) {
    try {
      access();
      ADD_FAILURE() << "was not refused";
    } catch (const std::exception& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("[raw access] tensor \"w\""), std::string::npos) << text;
      EXPECT_NE(
          text.find(
              "hsdp::export_pt(model, path) to save the module, hsdp::unsharded(p) for the whole value, to_local() for "
              "this rank's part, hsdp::to_string(t) to print"),
          std::string::npos)
          << text;
    }
  }
}

TEST(RawAccess, ToStringShowsTheRanksPartWithoutCommunication) {
  auto tensor = DTensor::from_local(torch::full({2, 3}, 4.f), offline_mesh(2, 0), {Shard(0)});
  const auto text = hsdp::to_string(tensor.tensor());
  EXPECT_NE(text.find("DTensor Float [4, 3] (Shard(0))"), std::string::npos) << text;
  EXPECT_NE(text.find("4  4  4"), std::string::npos) << text;
}

TEST(FullTensor, OfAWorldOfOneIsACopy) {
  auto local = torch::rand({3, 2});
  auto tensor = DTensor::from_local(local, offline_mesh(1, 0), {Shard(0)});
  auto whole = tensor.full_tensor();
  EXPECT_TRUE(torch::equal(whole, local));
  EXPECT_FALSE(whole.is_alias_of(local));
}

TEST(FullTensor, WithoutGroupsIsRefused) {
  auto tensor = DTensor::from_local(torch::rand({3, 2}), offline_mesh(2, 0), {Shard(0)});
  expect_error<dtensor::StateError>([&] { tensor.full_tensor(); }, "mesh");
}

}  // namespace dtensor_test

// The seven measured conclusions about how the Python system builds and repairs its DTensors, each as a test of this
// one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dtensor/dtensor.h"
#include "dtensor/inspect.h"
#include "tests/testing/offline_mesh.h"

namespace tensor_identity_test {

using namespace testing_support;
using dtensor::DTensor;
using dtensor::inspect;
using dtensor::Inspection;

DTensor sharded(const at::Tensor& local) { return DTensor::from_local(local, offline_mesh(2, 0), {dtensor::Shard(0)}); }

TEST(TensorIdentity, Conclusion1_FreshBodyAndLocalAreTwoImplsOnOneStorage) {
  auto local = torch::rand({3, 2});
  auto tensor = sharded(local);
  const Inspection seen = inspect(tensor.tensor());
  EXPECT_TRUE(seen.distributed);
  EXPECT_NE(seen.body.impl, seen.local.impl);
  EXPECT_NE(seen.identity, seen.body.impl);
  EXPECT_NE(seen.identity, seen.local.impl);
  EXPECT_EQ(seen.body.storage, seen.local.storage);
  EXPECT_EQ(seen.local.storage, local.storage().unsafeGetStorageImpl());
}

TEST(TensorIdentity, Conclusion2_EveryReadOfDataIsANewObjectOnTheBodysStorage) {
  auto tensor = sharded(torch::rand({3, 2}));
  const auto* storage = inspect(tensor.tensor()).body.storage;
  auto first = tensor.body_alias();
  auto second = tensor.body_alias();
  EXPECT_NE(first.unsafeGetTensorImpl(), second.unsafeGetTensorImpl());
  EXPECT_EQ(inspect(first).body.storage, storage);
  EXPECT_EQ(inspect(second).body.storage, storage);
  EXPECT_FALSE(DTensor::is_dtensor(first));
  // The public data() that stock code calls stays distributed: a fresh identity and body on the same storage.
  auto alias = tensor.tensor().data();
  ASSERT_TRUE(DTensor::is_dtensor(alias));
  const auto seen = inspect(alias);
  EXPECT_NE(seen.identity, inspect(tensor.tensor()).identity);
  EXPECT_NE(seen.body.impl, inspect(tensor.tensor()).body.impl);
  EXPECT_EQ(seen.body.storage, storage);
  EXPECT_EQ(DTensor(alias).layout(), tensor.layout());
}

TEST(TensorIdentity, Conclusion3_AParameterIsANewDTensorMadeThroughDetach) {
  auto tensor = sharded(torch::rand({3, 2}));
  auto parameter = tensor.as_parameter(true);
  EXPECT_NE(parameter.tensor().unsafeGetTensorImpl(), tensor.tensor().unsafeGetTensorImpl());
  EXPECT_TRUE(parameter.is_parameter());
  EXPECT_FALSE(tensor.is_parameter());
  EXPECT_TRUE(parameter.tensor().requires_grad());
  EXPECT_TRUE(parameter.tensor().is_leaf());
  EXPECT_EQ(inspect(parameter.tensor()).body.storage, inspect(tensor.tensor()).body.storage);
  EXPECT_NE(inspect(parameter.tensor()).local.impl, inspect(tensor.tensor()).local.impl);
  EXPECT_EQ(parameter.layout(), tensor.layout());
}

TEST(TensorIdentity, Conclusion4_InTheHealthyStateBodyLocalAndDataAliasShareOneStorage) {
  ShardedOne one({5, 3}, 2, 1);
  one.model.to_empty(at::kCPU);
  const auto seen = inspect(one.net->weight);
  auto alias = DTensor(one.net->weight).body_alias();
  EXPECT_EQ(seen.body.storage, seen.local.storage);
  EXPECT_EQ(inspect(alias).body.storage, seen.local.storage);
  EXPECT_NE(seen.body.impl, seen.local.impl);
  EXPECT_NE(static_cast<const void*>(alias.unsafeGetTensorImpl()), seen.body.impl);
  EXPECT_NE(seen.body.data, nullptr);
}

TEST(TensorIdentity, Conclusion5_AfterOnlyTheLocalIsUpdatedTheBodyIsOnMetaStorage) {
  ShardedOne one({4, 2}, 2, 0);
  one.impl().install_local(torch::ones({2, 2}));
  const auto seen = inspect(one.net->weight);
  EXPECT_EQ(seen.body.storage_device.type(), at::kMeta);
  EXPECT_EQ(seen.local.storage_device.type(), at::kCPU);
  EXPECT_NE(seen.body.storage, seen.local.storage);
  // Read through the local, the device looks materialised already.
  EXPECT_EQ(one.net->weight.device().type(), at::kCPU);
}

TEST(TensorIdentity, Conclusion6_ADonorAliasOfTheLocalRepairsTheBodyAndLeavesTheLocalAlone) {
  ShardedOne one({4, 2}, 2, 0);
  auto& impl = one.impl();
  impl.install_local(torch::ones({2, 2}));
  const auto before = inspect(one.net->weight);
  auto donor = dtensor::raw_alias(impl.local());
  const auto* donor_impl = donor.unsafeGetTensorImpl();
  impl.exchange_body(donor);
  impl.refresh_identity();
  const auto after = inspect(one.net->weight);
  EXPECT_EQ(after.identity, before.identity);
  EXPECT_EQ(after.body.impl, donor_impl);
  EXPECT_EQ(after.body.storage, after.local.storage);
  EXPECT_EQ(after.local.impl, before.local.impl);
  // The donor leaves with the meta impl.
  EXPECT_EQ(static_cast<const void*>(donor.unsafeGetTensorImpl()), before.body.impl);
  EXPECT_TRUE(donor.is_meta());
}

TEST(TensorIdentity, Conclusion7_ExchangingTwoAliasesChangesNothingAndWithTheLocalItHandsOverTheMetaImpl) {
  ShardedOne one({4, 2}, 2, 0);
  auto& impl = one.impl();
  impl.install_local(torch::ones({2, 2}));
  const auto before = inspect(one.net->weight);
  auto body_alias = DTensor(one.net->weight).body_alias();
  auto local_alias = dtensor::raw_alias(impl.local());
  std::swap(body_alias, local_alias);
  const auto after = inspect(one.net->weight);
  EXPECT_EQ(after.body.impl, before.body.impl);
  EXPECT_EQ(after.local.impl, before.local.impl);
  EXPECT_EQ(after.body.storage_device.type(), at::kMeta);
  // Exchanged with the local itself, whoever holds the local holds the meta impl afterwards: hence the donor.
  at::Tensor local = impl.local();
  impl.exchange_body(local);
  EXPECT_TRUE(local.is_meta());
}

TEST(TensorIdentity, SamenessIsStorageOffsetAndGeometryNotThePointer) {
  auto a = torch::rand({4});
  EXPECT_TRUE(dtensor::same_memory(a, a.detach()));
  EXPECT_FALSE(dtensor::same_memory(a, a.clone()));
  EXPECT_FALSE(dtensor::same_memory(a.narrow(0, 0, 2), a.narrow(0, 2, 2)));
  EXPECT_FALSE(dtensor::same_memory(a, a.view({2, 2})));
  // Meta and empty tensors all have the pointer 0.
  EXPECT_FALSE(dtensor::same_memory(torch::empty({4}, at::kMeta), torch::empty({4}, at::kMeta)));
  EXPECT_FALSE(dtensor::same_memory(torch::empty({0}), torch::empty({0})));
}

}  // namespace tensor_identity_test

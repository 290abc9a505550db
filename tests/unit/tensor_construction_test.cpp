#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/construction.h"

namespace tensor_construction_test {

using namespace torch::indexing;
using testing_support::expect_replay_matches;
using testing_support::Pattern;
using testing_support::tensors;
using torch::Tensor;

std::vector<float> numbers(int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) * 0.25f;
  return values;
}

// Files that constructors load, written before any of them runs.
std::string saved(const std::function<void(std::ostream&)>& write) {
  std::stringstream stream;
  write(stream);
  return stream.str();
}
const std::string kSavedTensors = saved([](std::ostream& out) {
  const auto some = torch::arange(9000, torch::kFloat);
  torch::save(std::vector<Tensor>{some.slice(0, 0, 10).clone(), some.view({90, 100}).t(), some.view({90, 100}).t()[3]},
              out);
});
const std::string kSavedLinear = saved([](std::ostream& out) {
  torch::nn::Linear linear(70, 70);
  torch::nn::init::constant_(linear->weight, 2);
  torch::save(linear, out);
});

const Pattern kPatterns[] = {
    tensors("TensorFromShortList",
            [] {
              return std::vector{torch::tensor({1.f, 2.f, 3.f}), torch::tensor(5)};
            }),
    tensors("TensorFromLongVector",
            [] {
              return std::vector{torch::tensor(numbers(5000)), torch::tensor(numbers(4097)) * 2};
            }),
    tensors("NestedList",
            [] {
              return std::vector{torch::tensor({{1.5, 2.5}, {3.5, 4.5}})};
            }),
    tensors("AccessorOnSmall",
            [] {
              auto t = torch::zeros({4, 5});
              auto a = t.accessor<float, 2>();
              for (int i = 0; i < 4; ++i) a[i][i] = static_cast<float>(i + 1);
              auto u = torch::rand({4, 5}) * t;
              a[0][4] = 9;  // after an operator read it
              return std::vector{t, u, u + t};
            }),
    tensors("AccessorOnLarge",
            [] {
              auto t = torch::ones({100, 100});
              auto view = t[7];
              auto a = t.accessor<float, 2>();
              a[7][3] = 5;
              t.data_ptr<float>()[1] = 2;
              return std::vector{t, view + torch::rand({100}), view};
            }),
    tensors("AccessorOnLargeComputed",
            [] {
              auto t = torch::arange(5000, torch::kFloat).reciprocal();
              t.slice(0, 10, 20).fill_(3);
              auto* p = t.data_ptr<float>();
              p[0] = p[15] + p[4999];
              return std::vector{t};
            }),
    tensors("FillByView",
            [] {
              auto w = torch::randn({90, 90});
              w[3].fill_(0.5);
              w.slice(1, 4, 8).mul_(2);
              w.diagonal().add_(1);
              w.index_put_({torch::tensor({1, 2}), torch::tensor({3, 4})}, torch::tensor({7.f, 8.f}));
              w.index_put_({torch::tensor({5, 6})}, torch::randn({2, 90}));
              w.index_put_({w > 1}, 0.25);
              return std::vector{w};
            }),
    tensors("MaskOfConstants",
            [] {
              auto w = torch::randn({80, 80});
              auto mask = torch::ones({80, 80}).tril(-1).to(torch::kBool);
              w.masked_fill_(mask, 2);
              w.index_put_({torch::eye(80).to(torch::kBool)}, torch::arange(80, torch::kFloat));
              auto picked = torch::arange(6400).view({80, 80}).masked_select(mask);
              return std::vector{w, picked, mask.nonzero()};
            }),
    tensors("RandomIntoConstant",
            [] {
              auto t = torch::zeros({10, 4});
              auto row = t[2];
              auto alias = t.data();
              row.uniform_();
              alias[3].fill_(2);
              return std::vector{t, row, alias, t.detach()};
            }),
    tensors("OverwrittenAgain",
            [] {
              auto t = torch::rand({70, 70});
              auto row = t[1];
              t.normal_();
              auto kept = t.clone();
              t.zero_();
              row.fill_(4);
              auto bias = torch::rand({8});
              bias.zero_();
              bias.accessor<float, 1>()[2] = 1;
              return std::vector{t, row, kept, bias};
            }),
    tensors("SetData",
            [] {
              auto t = torch::rand({70, 70});
              auto u = torch::zeros({3});
              auto before = t.data();
              t.set_data(torch::randn({5000}));
              u.set_data(t);
              t.mul_(2);
              u.unsqueeze_(0);
              return std::vector{t, u, before};
            }),
    tensors("ChangesOfShapeInPlace",
            [] {
              auto t = torch::rand({70, 71});
              auto other = t.data();
              t.t_();
              t.unsqueeze_(0);
              auto small = torch::arange(6, torch::kFloat);
              auto small_other = small.data();
              small.resize_({2, 3});
              small.transpose_(0, 1);
              small[0][1] = 9;
              return std::vector{t, other, small, small_other};
            }),
    tensors("Chunks",
            [] {
              auto parts = torch::randn({90, 60}).chunk(3);
              parts[1].zero_();
              auto stacked = torch::stack(parts);
              auto pieces = torch::arange(12).split(5);
              return std::vector{parts[0], parts[1], parts[2], stacked, pieces[2], pieces[0]};
            }),
    tensors("ManualSeedInside",
            [] {
              auto a = torch::rand({4000});
              torch::manual_seed(99);
              auto b = torch::rand({5000});
              torch::manual_seed(3);
              return std::vector{a, b};
            }),
    tensors("ManualSeedAndBack",
            [] {
              auto a = torch::randn({5});
              auto generator = at::globalContext().defaultGenerator(at::kCPU);
              const auto state = generator.get_state();
              torch::manual_seed(99);
              auto b = torch::randn({5});
              generator.set_state(state);
              return std::vector{a, b, torch::randn({5})};
            }),
    tensors("LikeFactories",
            [] {
              auto w = torch::randn({80, 70}).t();
              auto ones = torch::ones_like(w), noise = torch::rand_like(w), few = torch::zeros_like(w[0]);
              few.accessor<float, 1>()[1] = 3;  // not random, though made like something that is
              auto wide = w.new_full({4, 4}, 2), cast = torch::arange(5).to(w), typed = torch::arange(5).type_as(w);
              cast.accessor<float, 1>()[0] = 4;
              return std::vector{ones, noise, few, wide, cast, typed, torch::ones({1}).expand_as(w)};
            }),
    tensors("ReadsConstants",
            [] {
              auto steps = torch::linspace(0, 0.5, 12);
              auto large = torch::arange(6000).to(torch::kFloat);
              const auto scale = steps[3].item<double>() + large.sum().item<double>() + large[4500].item<double>();
              EXPECT_TRUE(large.equal(torch::arange(6000).to(torch::kFloat)));
              return std::vector{torch::rand({10}) * scale, steps};
            }),
    tensors("Factories",
            [] {
              return std::vector{torch::eye(90),
                                 torch::linspace(0, 1, 5000),
                                 torch::logspace(0, 1, 5),
                                 torch::full({9}, 2),
                                 torch::hann_window(6000),
                                 torch::tril_indices(100, 100),
                                 torch::randperm(50),
                                 torch::randperm(6000),
                                 torch::randint(0, 9, {8}),
                                 torch::normal(1.0, 2.0, {70, 70}),
                                 torch::bernoulli(torch::full({5000}, 0.5)),
                                 torch::arange(0, 1, 0.125)};
            }),
    tensors(
        "Initialisers",
        [] {
          namespace init = torch::nn::init;
          auto t = torch::empty({100, 100});
          init::orthogonal_(t);
          auto wide = init::orthogonal_(torch::empty({20, 40})), tall = init::orthogonal_(torch::empty({120, 60}));
          auto eye = init::eye_(torch::empty({100, 100})), sparse = init::sparse_(torch::empty({80, 80}), 0.3);
          auto dirac = init::dirac_(torch::empty({20, 20, 3, 5})), xavier = init::xavier_normal_(torch::empty({7, 9}));
          auto kaiming = init::kaiming_normal_(torch::empty({100, 90}));
          auto small_eye = init::eye_(torch::empty({5, 5}));
          return std::vector{t, eye, wide, tall, sparse, dirac, xavier, kaiming, small_eye};
        }),
    tensors("Decompositions",
            [] {
              auto w = torch::randn({70, 70});
              auto q = std::get<0>(torch::linalg_qr(w));
              auto s = std::get<1>(torch::linalg_svd(w));
              auto c = torch::linalg_svdvals(torch::arange(12, torch::kFloat).view({3, 4}));
              return std::vector{w / s[0], q, c / c[0].item<float>()};
            }),
    tensors(
        "FromOutside",
        [] {
          static const auto large = torch::arange(10000, torch::kFloat);
          static const auto few = torch::arange(10, torch::kFloat);
          std::vector<float> blob = numbers(6000);
          auto borrowed = torch::from_blob(blob.data(), {6000}).clone();
          auto reshaped = torch::from_blob(blob.data(), {60, 100}) * 2;
          return std::vector{borrowed, large.view({100, 100}), large + 1, few * 2, few + torch::rand({10}), reshaped};
        }),
    tensors("Complex",
            [] {
              auto z = torch::polar(torch::ones({70, 70}), torch::rand({70, 70}));
              auto few = torch::polar(torch::ones({3}), torch::arange(3, torch::kFloat));
              return std::vector{torch::view_as_real(z), z.conj(), few.conj(), few.conj() * torch::rand({3})};
            }),
    tensors("NamesDevices",
            [] {
              auto w = torch::rand({70, 70}, torch::TensorOptions(torch::kCPU));
              auto u = torch::zeros({3}, w.options()).to(w.device());
              return std::vector{w.to(torch::kCPU), u, w.cpu() + 1};
            }),
    tensors("OtherDefaultType",
            [] {
              torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
              auto a = torch::rand({70, 70});
              torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
              return std::vector{a, torch::rand({3})};
            }),
    tensors("Dropouts",
            [] {
              auto few = torch::arange(5, torch::kFloat);
              auto same = torch::dropout(few, 0.5, /*train=*/false);
              few[0] = 8;
              return std::vector{torch::dropout(torch::ones({6000}), 0.5, true), same, torch::dropout(few, 0.5, true)};
            }),
    tensors("ExpandAs",
            [] {
              auto c = torch::zeros({4});
              auto e = c.expand_as(torch::rand({3, 4}));
              c.accessor<float, 1>()[1] = 5;
              auto s = e + torch::rand({3, 4});
              c.add_(1);
              return std::vector{s, e, c, e * 2};
            }),
    tensors("Broadcast",
            [] {
              auto c = torch::arange(6, torch::kFloat).slice(0, 1, 5);
              auto r = torch::rand({3, 4});
              auto b = torch::broadcast_tensors({c, r});
              c[0] = 5;
              r[0][0] = 3;
              return std::vector{b[0], b[1], c, r};
            }),
    tensors("LoadTensor",
            [] {
              std::stringstream s;
              s.str(kSavedTensors);
              std::vector<torch::Tensor> v;
              torch::load(v, s);
              v[0][2] = 8;
              return std::vector{v[0] + torch::rand({10}), v[1] * 2, v[0], v[1], v[2]};
            }),
    tensors("LoadModule",
            [] {
              std::stringstream s;
              s.str(kSavedLinear);
              torch::nn::Linear l(70, 70);
              torch::load(l, s);
              return std::vector{l->weight.detach() + 1, l->bias.detach(), torch::rand({3})};
            }),
    tensors("ParamsToVector",
            [] {
              torch::nn::Linear l(70, 70);
              auto v = torch::nn::utils::parameters_to_vector(l->parameters());
              torch::NoGradGuard g;
              auto w = (v * 3).detach();
              torch::nn::utils::vector_to_parameters(w, l->parameters());
              w.add_(1);
              return std::vector{l->weight.detach(), l->bias.detach(), w};
            }),
    tensors("GateBias",
            [] {
              torch::nn::LSTM l(20, 30);
              torch::NoGradGuard g;
              for (auto& p : l->named_parameters()) {
                if (p.key().find("bias") != std::string::npos)
                  p.value().slice(0, 30, 60).fill_(1.0);
                else
                  torch::nn::init::orthogonal_(p.value());
              }
              std::vector<Tensor> out;
              for (auto& p : l->parameters()) out.push_back(p.detach());
              return out;
            }),
    tensors("Resize",
            [] {
              auto t = torch::rand({70, 70});
              auto v = t[0];
              t.resize_({10, 10});
              t.resize_({80, 80});
              t.fill_(1);
              auto s = torch::arange(5);
              s.resize_({2});
              s.resize_({7});
              s.fill_(2);
              return std::vector{t, s};
            }),
    tensors("SetTensor",
            [] {
              auto t = torch::rand({70, 70});
              auto u = torch::empty({0});
              u.set_(t);
              u.mul_(2);
              auto c = torch::arange(5, torch::kFloat), d = torch::empty({0});
              d.set_(c);
              d.add_(1);
              return std::vector{t, u, c, d};
            }),
    tensors("Inference",
            [] {
              auto t = torch::rand({70, 70});
              auto c = torch::ones({70});
              Tensor made;
              {
                c10::InferenceMode g;
                made = torch::rand({70, 70}) + c;
                made[0] = 5;
              }
              return std::vector{t, c, made + 1};
            }),
    tensors("Print",
            [] {
              auto c = torch::arange(6, torch::kFloat).view({2, 3});
              std::stringstream s;
              s << c;
              EXPECT_NE(s.str().find("5"), std::string::npos);
              return std::vector{c};
            }),
    tensors("StridesInPlace",
            [] {
              auto t = torch::rand({70, 1, 71});
              t.squeeze_(1);
              t.swapaxes_(0, 1);
              t.as_strided_({5, 4}, {2, 3}, 7);
              t.mul_(2);
              return std::vector{t};
            }),
    tensors("Numbers",
            [] {
              auto r = torch::rand({70, 70});
              return std::vector{
                  1.0 - r,          2 / (r + 1),          torch::ones({3}, torch::kInt) * 2.5,   r.pow(2.0),
                  torch::pow(2, r), 1 - torch::arange(3), r * torch::tensor(2.0, torch::kDouble)};
            }),
    tensors("Empty",
            [] {
              auto e = torch::empty({0});
              auto r = torch::randn({0, 5});
              r.normal_();
              auto z = torch::zeros({});
              z.uniform_();
              auto f = torch::full({}, 3.0);
              e.resize_({2});
              e.fill_(1);
              return std::vector{z, r, e, f, torch::cat({torch::empty({0}), torch::rand({3})})};
            }),
    tensors("DtypeViews",
            [] {
              auto r = torch::rand({70, 70});
              auto i = r.view(torch::kInt);
              i.bitwise_and_(0x7fffff00);
              auto c = torch::arange(4, torch::kFloat);
              auto ci = c.view(torch::kInt);
              ci[1] = 0;
              ci.accessor<int, 1>()[2] = 0;
              c.add_(torch::rand({4}));
              return std::vector{r, i, c, ci};
            }),
    tensors("Types",
            [] {
              return std::vector{torch::rand({70, 70}, torch::kDouble),      torch::rand({70, 70}).to(torch::kHalf),
                                 torch::rand({70, 70}).to(torch::kBFloat16), torch::tensor({true, false}),
                                 torch::rand({3}).to(torch::kBFloat16),      torch::ones({2}, torch::kBFloat16)};
            }),
    tensors("DummyForwards",
            [] {
              namespace nn = torch::nn;
              nn::LSTM lstm(20, 30);
              nn::GRU gru(20, 30);
              nn::TransformerEncoder enc(nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(32, 4)), 2);
              nn::ConvTranspose2d ct(3, 5, 3);
              nn::Embedding em(100, 32);
              nn::Conv1d c1(4, 5, 3);
              nn::Conv3d c3(2, 3, 3);
              auto o = std::get<0>(lstm(torch::randn({5, 2, 20})));
              auto p = std::get<0>(gru(torch::randn({5, 2, 20})));
              auto q = enc(em(torch::randint(0, 100, {7, 2})));
              auto r = ct(torch::randn({1, 3, 8, 8}));
              auto s = c1(torch::randn({1, 4, 8})), t = c3(torch::randn({1, 2, 5, 5, 5}));
              auto u = at::scaled_dot_product_attention(torch::randn({1, 2, 5, 8}), torch::randn({1, 2, 5, 8}),
                                                        torch::randn({1, 2, 5, 8}));
              std::vector<Tensor> out{torch::rand(
                  {int64_t(o.numel() + p.size(2) + q.size(1) + r.size(3) + s.size(2) + t.size(2) + u.size(3))})};
              return out;
            }),
    tensors("DummyForwardValues",
            [] {
              namespace nn = torch::nn;
              nn::Sequential f(nn::Conv2d(3, 4, 3), nn::BatchNorm2d(4), nn::ReLU());
              f->forward(torch::randn({2, 3, 8, 8}));
              f->forward(torch::ones({2, 3, 8, 8}));
              auto b = f[1]->as<nn::BatchNorm2d>();
              nn::InstanceNorm2d in(nn::InstanceNorm2dOptions(3).track_running_stats(true));
              in(torch::randn({2, 3, 8, 8}));
              return std::vector{b->running_mean, b->running_var, b->num_batches_tracked, in->running_mean};
            }),
    tensors("Functions",
            [] {
              auto a = torch::randn({40, 30}), b = torch::randn({30, 20});
              auto e = torch::einsum("ij,jk->ik", {a, b});
              auto s = torch::softmax(e, -1);
              auto [v, i] = s.topk(3);
              auto srt = std::get<1>(e.sort());
              return std::vector{e,
                                 s,
                                 v,
                                 i,
                                 srt,
                                 torch::where(a > 0, a, torch::zeros({1})),
                                 a.cumsum(0),
                                 torch::one_hot(torch::arange(5), 7),
                                 torch::kron(b, b),
                                 torch::block_diag({a, b}),
                                 torch::linalg_norm(a),
                                 torch::linalg_matrix_exp(torch::randn({5, 5})),
                                 torch::cdist(a, a),
                                 torch::meshgrid({torch::arange(3), torch::arange(70)}, "ij")[1],
                                 torch::pinverse(b),
                                 torch::fft_fft(a).abs(),
                                 torch::roll(a, 1),
                                 torch::flip(a, {0}),
                                 torch::repeat_interleave(a, 2),
                                 torch::searchsorted(torch::arange(10.0), a),
                                 torch::histc(a, 5),
                                 torch::bincount(torch::arange(6)),
                                 std::get<0>(torch::_unique2(torch::arange(6)))};
            }),
    tensors("Inverse",
            [] {
              auto a = torch::randn({40, 40});
              return std::vector{torch::linalg_inv(a),
                                 torch::linalg_cholesky(a.mm(a.t()) + 40 * torch::eye(40)),
                                 std::get<0>(torch::linalg_eigh(a + a.t())),
                                 torch::linalg_det(a),
                                 torch::linalg_solve(a, a),
                                 std::get<0>(torch::slogdet(a))};
            }),
    tensors("TensorRequiresGrad",
            [] {
              auto a = torch::rand({70, 70}, torch::requires_grad()),
                   b = torch::tensor({1.f, 2.f}, torch::requires_grad()), c = torch::zeros({3}).set_requires_grad(true);
              EXPECT_TRUE(a.requires_grad() && b.requires_grad() && c.requires_grad());
              auto d = a.detach();
              d.add_(1);
              a.mutable_grad() = torch::zeros_like(a);
              return std::vector{a, a.grad(), d, b};
            }),
    tensors("IndexGet",
            [] {
              auto w = torch::randn({80, 80});
              auto t = torch::arange(12).view({3, 4});
              w.index({Slice(), 2}) += 1;
              w.index({0, "..."}).zero_();
              w[2] = 1;
              w[3] = torch::rand({80});
              w.index_put_({Slice(0, 3), torch::tensor({0, 2})}, 5);
              return std::vector{w.index({torch::randint(0, 80, {5})}),
                                 w,
                                 t.index({1, Slice(None, None, 2)}),
                                 w.index({torch::tensor({1, 3})}),
                                 w.index({torch::arange(80) > 40}),
                                 t.index({t > 4}),
                                 w.index({"...", None})};
            }),
    tensors("ForeachAndOut",
            [] {
              auto a = torch::rand({70, 70}), b = torch::zeros({3}), c = torch::empty({70, 70}), d = torch::empty({3});
              at::_foreach_add_({a, b}, 2);
              torch::mul_out(c, a, a);
              torch::add_out(d, b, b);
              torch::arange_out(d, 3);
              d[1] = 7;
              auto e = torch::empty({0});
              torch::mul_out(e, a, 2);
              return std::vector{a, b, c, d, e};
            }),
    tensors("SwapAndMove",
            [] {
              auto a = torch::rand({70, 70}), b = torch::zeros({70, 70});
              std::swap(a, b);
              a = a + 1;
              b = std::move(a);
              a = torch::rand({2});
              return std::vector{a, b};
            }),
    tensors("DataCopy",
            [] {
              torch::nn::Linear l(70, 80);
              l->weight.data().copy_(torch::eye(80, 70));
              l->bias.data().normal_(0, 0.1);
              l->weight.data()[3] = 4;
              l->weight.mutable_grad() = torch::Tensor();
              l->to(torch::kBFloat16);
              l->weight.data().add_(1);
              l->to(torch::kFloat);
              return std::vector{l->weight.detach(), l->bias.detach(), l->weight.data()};
            }),
    tensors("Contiguous",
            [] {
              auto r = torch::rand({3, 70, 70}).permute({1, 2, 0});
              auto c = torch::arange(6).view({2, 3}).t();
              auto x = torch::rand({2, 3, 40, 40}).contiguous(at::MemoryFormat::ChannelsLast);
              return std::vector{r.contiguous(),  r,        c.contiguous(), c,
                                 r.reshape({-1}), x,        x + 1,          x.to(at::kDouble),
                                 r.flatten(0, 1), r.clone()};
            }),
};

class TensorConstruction : public testing::TestWithParam<Pattern> {};

TEST_P(TensorConstruction, ReplayIsBitIdentical) { expect_replay_matches(GetParam().factory); }

INSTANTIATE_TEST_SUITE_P(Patterns, TensorConstruction, testing::ValuesIn(kPatterns),
                         [](const auto& which) { return which.param.name; });

}  // namespace tensor_construction_test

// Things that constructors do: each module, constructed plainly and in meta_init, has the same parameters, buffers and
// unregistered members bit for bit, and trains alike.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "hsdp/hsdp.h"
#include "tests/testing/construction_parity.h"

namespace {

using namespace testing_support;
using namespace torch::indexing;
using torch::Tensor;
namespace nn = torch::nn;
namespace init = torch::nn::init;

struct Row {
  std::string name;
  std::function<Made()> make;
  bool whole_batch = false;
  double tolerance = 1e-11;
};

std::ostream& operator<<(std::ostream& out, const Row& made) { return out << made.name; }

Row row(std::string name, std::function<void(MadeImpl&)> construct) {
  return {std::move(name), [construct = std::move(construct)] { return Made(construct); }};
}

/// For statistics over the batch.
Row whole_batch(std::string name, std::function<void(MadeImpl&)> construct) {
  auto made = row(std::move(name), std::move(construct));
  made.whole_batch = true;
  return made;
}

Row single_precision(std::string name, std::function<void(MadeImpl&)> construct) {
  auto made = row(std::move(name), std::move(construct));
  made.tolerance = 1e-5;
  return made;
}

template <class Module>
void fill(Module& module, double value) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) parameter.fill_(value);
}

void xavier(nn::Module& module) {
  auto* linear = module.as<nn::Linear>();
  if (linear == nullptr) return;
  torch::NoGradGuard no_grad;
  init::xavier_normal_(linear->weight);
  linear->bias.zero_();
}

std::vector<double> numbers(int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = static_cast<double>(i % 17) * 0.25;
  return values;
}

/// What an archive on disk holds, written before any of the constructors runs.
const std::string kSaved = [] {
  std::ostringstream stream;
  torch::save(std::vector<Tensor>{torch::arange(36, torch::kFloat64).view({6, 6}) / 36,
                                  torch::arange(9000, torch::kFloat64) / 9000},
              stream);
  return stream.str();
}();

std::vector<Tensor> load_saved() {
  std::istringstream stream(kSaved);
  std::vector<Tensor> tensors;
  torch::load(tensors, stream);
  return tensors;
}

// ---- parameters ----

const Row kParameters[] = {
    row("ParametersByAnExpression",
        [](MadeImpl& m) {
          const double k = 1 / std::sqrt(6.0);
          auto w = m.register_parameter("w", torch::rand({7, 6}) * (2 * k) - k);
          auto b = m.register_parameter("b", torch::zeros({7}) + 0.1);
          m.run = [w, b](Tensor x) { return torch::linear(x, w, b); };
        }),
    row("DataNormal",
        [](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 7));
          linear->weight.data().normal_(0, 0.2);
          linear->bias.data()[2] = 0.5;
          m.run = [linear](Tensor x) mutable { return linear(x); };
        }),
    row("SetData",
        [](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 7));
          linear->weight.set_data(torch::randn({5, 6}) * 0.1);  // Another shape.
          linear->bias.set_data(torch::full({5}, 0.25));
          m.run = [linear](Tensor x) mutable { return linear(x); };
        }),
    row("EveryInitialiser",
        [](MadeImpl& m) {
          std::vector<Tensor> weights;
          const auto add = [&](const std::function<void(Tensor)>& initialise) {
            auto w = m.register_parameter("w" + std::to_string(weights.size()), torch::empty({6, 6}));
            initialise(w);
            weights.push_back(w);
          };
          add([](Tensor w) { init::constant_(w, 0.1); });
          add([](Tensor w) { init::eye_(w); });
          add([](Tensor w) { init::normal_(w, 0.1, 0.2); });
          add([](Tensor w) { init::ones_(w); });
          add([](Tensor w) { init::orthogonal_(w); });
          add([](Tensor w) { init::orthogonal_(w, init::calculate_gain(torch::kReLU)); });
          add([](Tensor w) { init::sparse_(w, 0.3, 0.1); });
          add([](Tensor w) { init::uniform_(w, -0.1, 0.1); });
          add([](Tensor w) { init::kaiming_normal_(w, 0.1, torch::kFanOut, torch::kReLU); });
          add([](Tensor w) { init::kaiming_uniform_(w, std::sqrt(5)); });
          add([](Tensor w) { init::xavier_normal_(w); });
          add([](Tensor w) { init::xavier_uniform_(w, 0.5); });
          add([](Tensor w) { init::zeros_(w); });
          auto kernel = m.register_parameter("kernel", torch::empty({4, 2, 3}));
          init::dirac_(kernel);
          auto tall = m.register_parameter("tall", init::orthogonal_(torch::empty({9, 6})));
          m.run = [=](Tensor x) {
            auto sum = torch::conv1d(x.view({-1, 2, 3}), kernel).flatten(1) + torch::linear(x, tall).mean(1, true);
            for (auto& w : weights) sum = torch::cat({sum, torch::linear(x, w)}, 1);
            return sum;
          };
        }),
    row("ElementFills",
        [](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 7));
          torch::NoGradGuard no_grad;
          auto& w = linear->weight;
          w[0][1] = 2;
          w[3] = torch::rand({6});
          w.index_put_({torch::tensor({1, 2}), torch::tensor({3, 4})}, torch::tensor({0.7, 0.8}));
          w.index_put_({Slice(4, 6), 0}, 0.5);
          w.index_put_({w > 0.4}, 0.3);
          w.index({6, "..."}).zero_();
          w.diagonal().add_(1);
          m.run = [linear](Tensor x) mutable { return linear(x); };
        }),
    row("ElementFillsOfWhatIsLarge",
        [](MadeImpl& m) {
          auto w = m.register_parameter("w", torch::zeros({900, 6}));
          torch::NoGradGuard no_grad;
          w.narrow(0, 0, 6).fill_diagonal_(0.5);
          w[7][1] = 2;
          w.accessor<double, 2>()[8][1] = 3;  // Not random: real whenever somebody looks.
          w.mul_(0.1);
          m.run = [w](Tensor x) { return torch::linear(x, w).narrow(1, 0, 12); };
        }),
    row("ApplyInTheConstructor",
        [](MadeImpl& m) {
          auto net = m.add("net", nn::Sequential(nn::Linear(6, 7), nn::Tanh(), nn::Linear(7, 5)));
          m.apply(xavier);
          m.run = [net](Tensor x) mutable { return net->forward(x); };
        }),
    {"ApplyAfterConstruction",
     [] {
       Made net([](MadeImpl& m) {
         auto layers = m.add("net", nn::Sequential(nn::Linear(6, 7), nn::Tanh(), nn::Linear(7, 5)));
         m.run = [layers](Tensor x) mutable { return layers->forward(x); };
       });
       net->apply(xavier);
       net->apply([](const std::string& name, nn::Module& module) {
         torch::NoGradGuard no_grad;
         if (name == "net.2" || name.ends_with(".2")) module.as<nn::Linear>()->bias.fill_(0.25);
       });
       return net;
     }},
    row("ParameterLists",
        [](MadeImpl& m) {
          nn::ParameterList list(torch::randn({6, 7}) * 0.2, torch::randn({7, 7}) * 0.2);
          list->append(torch::full({7}, 0.1, torch::requires_grad()));
          list[0].set_requires_grad(true);
          list[1].set_requires_grad(true);
          m.add("list", list);
          nn::ParameterDict dict;
          dict->insert("scale", torch::ones({7}, torch::requires_grad()));
          dict->insert("fixed", torch::rand({7}));
          m.add("dict", dict);
          m.run = [list, dict](Tensor x) mutable {
            return torch::tanh(x.mm(list[0])).mm(list[1]) + list[2] * dict["scale"] + dict["fixed"];
          };
        }),
    row("FrozenParameters",
        [](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 7));
          auto table = m.register_parameter("table", torch::randn({7, 7}), /*requires_grad=*/false);
          linear->bias.set_requires_grad(false);
          m.run = [=](Tensor x) mutable { return linear(x).mm(table); };
        }),
};

// ---- stock modules ----

Tensor sequence(const Tensor& x) { return torch::stack({x, x * 2, x - 1}); }

const Row kStock[] = {
    row("TransformerEncoder",
        [](MadeImpl& m) {
          auto layer =
              nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(6, 2).dropout(0).dim_feedforward(9));
          auto encoder = m.add("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 2).norm(
                                              nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({6}))))));
          m.run = [encoder](Tensor x) mutable { return encoder(sequence(x)).mean(0); };
        }),
    row("TransformerDecoder",
        [](MadeImpl& m) {
          auto layer =
              nn::TransformerDecoderLayer(nn::TransformerDecoderLayerOptions(6, 2).dropout(0).dim_feedforward(9));
          auto decoder = m.add("decoder", nn::TransformerDecoder(nn::TransformerDecoderOptions(layer, 2)));
          m.run = [decoder](Tensor x) mutable { return decoder(sequence(x), sequence(x + 1)).mean(0); };
        }),
    row("Transformer",
        [](MadeImpl& m) {
          auto options = nn::TransformerOptions(6, 2, 2, 1).dim_feedforward(9).dropout(0).activation(torch::kGELU);
          auto transformer = m.add("transformer", nn::Transformer(options));
          auto mask = nn::TransformerImpl::generate_square_subsequent_mask(3);
          m.kept = {mask};
          m.run = [=](Tensor x) mutable {
            return transformer(sequence(x), sequence(x + 1), Tensor(), mask.to(x.dtype())).mean(0);
          };
        }),
    row("MultiheadAttention",
        [](MadeImpl& m) {
          auto same = m.add("same", nn::MultiheadAttention(nn::MultiheadAttentionOptions(6, 3)));
          auto other = m.add(
              "other", nn::MultiheadAttention(
                           nn::MultiheadAttentionOptions(6, 2).kdim(7).vdim(7).add_bias_kv(true).add_zero_attn(true)));
          m.run = [=](Tensor x) mutable {
            auto s = sequence(x);
            auto y = std::get<0>(same(s, s, s));
            auto wide = torch::cat({s, s.narrow(2, 0, 1)}, 2);
            return std::get<0>(other(y, wide, wide * 2)).mean(0);
          };
        }),
    row("RecurrentNetworks",
        [](MadeImpl& m) {
          auto rnn = m.add("rnn", nn::RNN(nn::RNNOptions(6, 5).nonlinearity(torch::kReLU)));
          auto lstm = m.add("lstm", nn::LSTM(nn::LSTMOptions(5, 4).num_layers(2).bidirectional(true)));
          auto projected = m.add("projected", nn::LSTM(nn::LSTMOptions(8, 6).proj_size(3)));
          auto gru = m.add("gru", nn::GRU(nn::GRUOptions(3, 5).bias(false)));
          m.run = [=](Tensor x) mutable {
            auto s = std::get<0>(projected(std::get<0>(lstm(std::get<0>(rnn(sequence(x)))))));
            return std::get<0>(gru(s)).mean(0);
          };
        }),
    row("RecurrentCells",
        [](MadeImpl& m) {
          auto rnn = m.add("rnn", nn::RNNCell(6, 5));
          auto lstm = m.add("lstm", nn::LSTMCell(5, 4));
          auto gru = m.add("gru", nn::GRUCell(4, 3));
          m.run = [=](Tensor x) mutable { return gru(std::get<0>(lstm(rnn(x)))); };
        }),
    whole_batch("Normalisations",
                [](MadeImpl& m) {
                  auto one = m.add("one", nn::BatchNorm1d(6));
                  auto two = m.add("two", nn::BatchNorm2d(nn::BatchNorm2dOptions(2).momentum(0.3)));
                  auto three = m.add("three", nn::BatchNorm3d(nn::BatchNorm3dOptions(2).affine(false)));
                  auto instance =
                      m.add("instance",
                            nn::InstanceNorm1d(nn::InstanceNorm1dOptions(2).affine(true).track_running_stats(true)));
                  auto group = m.add("group", nn::GroupNorm(nn::GroupNormOptions(2, 6)));
                  auto layer = m.add("layer", nn::LayerNorm(nn::LayerNormOptions({6})));
                  m.run = [=](Tensor x) mutable {
                    x = two(one(x).view({-1, 2, 3, 1}));
                    x = instance(three(x.unsqueeze(4)).view({-1, 2, 3}));
                    return layer(group(x.view({-1, 6})));
                  };
                }),
    row("Convolutions",
        [](MadeImpl& m) {
          auto one = m.add("one", nn::Conv1d(nn::Conv1dOptions(2, 4, 2).groups(2)));
          auto two =
              m.add("two", nn::Conv2d(nn::Conv2dOptions(4, 3, 2).padding(1).padding_mode(torch::kZeros).bias(false)));
          auto three = m.add("three", nn::Conv3d(3, 2, 1));
          auto up = m.add("up", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2, 3, 2).stride(2)));
          m.run = [=](Tensor x) mutable {
            x = two(one(x.view({-1, 2, 3})).unsqueeze(3));
            return up(three(x.unsqueeze(4)).squeeze(4)).flatten(1);
          };
        }),
    row("Embeddings",
        [](MadeImpl& m) {
          auto table = m.add("table", nn::Embedding(nn::EmbeddingOptions(11, 4).padding_idx(3)));
          auto pretrained = m.add(
              "pretrained", nn::Embedding::from_pretrained(torch::arange(44).view({11, 4}).to(torch::kFloat64) / 44));
          auto thawed = m.add("thawed", nn::Embedding::from_pretrained(
                                            torch::randn({11, 4}), nn::EmbeddingFromPretrainedOptions().freeze(false)));
          auto bag = m.add("bag", nn::EmbeddingBag(nn::EmbeddingBagOptions(11, 4).mode(torch::kSum)));
          auto given = m.add("given", nn::EmbeddingBag::from_pretrained(torch::randn({11, 4})));
          m.run = [=](Tensor x) mutable {
            auto tokens = tokens_of(x, 11);
            return (table(tokens) + pretrained(tokens) * thawed(tokens)).mean(1) + bag(tokens) + given(tokens);
          };
        }),
    row("OthersWithParameters",
        [](MadeImpl& m) {
          auto bilinear = m.add("bilinear", nn::Bilinear(6, 6, 5));
          auto prelu = m.add("prelu", nn::PReLU(nn::PReLUOptions().num_parameters(5)));
          auto linear = m.add("linear", nn::Linear(nn::LinearOptions(5, 8).bias(false)));
          auto softmax =
              m.add("softmax",
                    nn::AdaptiveLogSoftmaxWithLoss(nn::AdaptiveLogSoftmaxWithLossOptions(8, 10, {3, 6}).div_value(2)));
          m.run = [=](Tensor x) mutable { return softmax->log_prob(linear(prelu(bilinear(x, x + 1)))); };
        }),
};

// ---- buffers, members, constants ----

const Row kBuffers[] = {
    row("MembersNeverRegistered",
        [](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 7));
          auto noise = torch::randn({7}), table = torch::tensor({1.5, 2.5, 3.5}), large = torch::rand({80, 80});
          auto corner = large.narrow(0, 0, 7).narrow(1, 0, 7);
          m.kept = {noise, table, large, corner, Tensor()};
          m.run = [=](Tensor x) mutable { return linear(x).mm(corner) + noise * table[1].item<double>(); };
        }),
    row("Buffers",
        [](MadeImpl& m) {
          auto positions = m.register_buffer("positions", torch::arange(6));
          auto table = torch::zeros({7, 6});
          auto angles = torch::arange(7, torch::kFloat64).unsqueeze(1) *
                        torch::exp(torch::arange(0, 6, 2, torch::kFloat64) * (-std::log(10000.0) / 6));
          table.index_put_({Slice(), Slice(0, None, 2)}, torch::sin(angles));
          table.index_put_({Slice(), Slice(1, None, 2)}, torch::cos(angles));
          table = m.register_buffer("table", table.unsqueeze(0));
          auto mask = m.register_buffer("mask", torch::triu(torch::ones({7, 7}), 1).to(torch::kBool));
          auto bias = m.register_buffer("bias", torch::zeros({7, 7}).masked_fill_(mask, -4));
          auto linear = m.add("linear", nn::Linear(6, 7));
          m.run = [=](Tensor x) mutable {
            auto y = torch::softmax(torch::linear(linear(x + table.sum(1)), bias), 1);
            return y.masked_fill(mask[2], 0.1) + positions.to(torch::kFloat64).mean();
          };
        }),
    row("BuffersReassigned",
        [](MadeImpl& m) {
          auto table = m.register_buffer("table", torch::rand({7, 6}));
          table = table.t().contiguous() + 1;                        // The member; the buffer is what it was.
          m.named_buffers()["table"].set_data(torch::rand({3, 6}));  // The buffer.
          auto norm = m.add("norm", nn::BatchNorm1d(6));
          norm->running_mean = torch::full({6}, 0.5);  // The member alone.
          auto linear = m.add("linear", nn::Linear(7, 7));
          m.kept = {table, norm->running_mean};
          m.run = [=](Tensor x) mutable { return linear(x.mm(table)); };
        }),
    row("BuffersRegisteredAtTheEnd",
        [](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 7));
          auto counts = torch::zeros({7});
          for (int64_t i = 0; i < 7; ++i) counts[i] = i * i;
          auto scaled = counts / counts.sum();
          torch::NoGradGuard no_grad;
          linear->weight.mul_(scaled.unsqueeze(1) + 1);
          m.register_buffer("counts", counts);
          m.register_buffer("scaled", scaled);
          m.run = [=](Tensor x) mutable { return linear(x) * scaled + counts; };
        }),
    row("TensorsFromLists",
        [](MadeImpl& m) {
          auto few = m.register_buffer("few", torch::tensor({1.0, 2.0, 3.0}));
          auto nested = m.register_buffer("nested", torch::tensor({{0.1, 0.2, 0.3}, {0.4, 0.5, 0.6}}));
          auto many = m.register_parameter("many", torch::tensor(numbers(6 * 1000)).view({1000, 6}));
          auto flags = m.register_buffer("flags", torch::tensor({true, false, true}));
          m.kept = {torch::tensor(numbers(4097)), torch::tensor(5),
                    torch::from_blob(numbers(9).data(), {9}).clone() * 0};
          m.run = [=](Tensor x) {
            return torch::linear(x, many).narrow(1, 0, 3) * few + nested.sum(0) * flags.to(torch::kFloat64);
          };
        }),
    row("ValuesOfConstants",
        [](MadeImpl& m) {
          auto rates = torch::linspace(0, 0.5, 4);
          auto linear = m.add("linear", nn::Linear(6, rates.sum().item<double>() > 0.9 ? 7 : 5));
          auto w = m.register_parameter("w", torch::rand({7}) * rates[1].item<double>());
          auto table = torch::zeros({3, 7});
          auto access = table.accessor<double, 2>();
          for (int i = 0; i < 3; ++i) access[i][2 * i] = i + rates[i].item<double>();
          auto large = torch::zeros({100, 70});
          large.data_ptr<double>()[3] = 0.25;
          m.register_buffer("table", table);
          m.register_buffer("large", large);
          m.run = [=](Tensor x) mutable { return linear(x) * w + table.sum(0) + large.sum(); };
        }),
    row("LoadedAndBorrowed",
        [](MadeImpl& m) {
          auto loaded = load_saved();
          auto w = m.register_parameter("w", loaded[0]);
          auto large = m.register_buffer("large", loaded[1]);
          auto blob = numbers(6 * 900);
          auto table = m.register_parameter("table", torch::from_blob(blob.data(), {900, 6}, torch::kFloat64).clone());
          auto few = m.register_buffer("few", torch::from_blob(blob.data() + 1, {6}, torch::kFloat64) * 2);
          blob.assign(blob.size(), 0);  // What was read counts.
          m.kept = {few};
          m.run = [=](Tensor x) {
            return torch::linear(x, w) + torch::linear(x, table).narrow(1, 0, 6) + large[99] + few;
          };
        }),
    row("Decompositions",
        [](MadeImpl& m) {
          auto w = torch::randn({6, 6});
          auto [u, s, vh] = torch::linalg_svd(w);
          auto basis = std::get<0>(torch::linalg_qr(torch::randn({6, 6})));
          auto factor = torch::linalg_cholesky(w.mm(w.t()) + torch::eye(6));
          auto values = std::get<0>(torch::linalg_eigh(w + w.t()));
          auto fixed = torch::linalg_svdvals(torch::arange(12, torch::kFloat64).view({3, 4}));
          auto solved = torch::linalg_solve(torch::eye(6) * fixed[0].item<double>(), w);
          auto p = m.register_parameter("p", u.mm(vh) * 0.3);
          auto q = m.register_parameter("q", (w / s[0]).contiguous());
          auto r = m.register_parameter("r", basis.contiguous());
          m.kept = {factor, values, fixed, solved, torch::pinverse(w)};
          m.run = [=](Tensor x) { return x.mm(p).mm(q) + x.mm(r) + values; };
        }),
};

// ---- structure ----

struct Config {
  int64_t width = 7;
  std::vector<int64_t> hidden = {7, 5};
};

struct TakesReferencesImpl : nn::Module {
  TakesReferencesImpl(const Config& config, Tensor& shared, nn::Linear& first, std::vector<Tensor>& made)
      : linear(first), scale(register_parameter("scale", shared * 2)) {
    register_module("linear", linear);
    shared = torch::rand({config.width});
    made.push_back(scale);
  }
  Tensor forward(Tensor x) { return linear(x) * scale; }
  nn::Linear linear;
  Tensor scale;
};
TORCH_MODULE(TakesReferences);

/// Options of cloneable modules are taken by value; a reset() makes the tensors.
struct ClonedImpl : nn::Cloneable<ClonedImpl> {
  explicit ClonedImpl(int64_t width) : width_(width) { reset(); }
  void reset() override {
    w = register_parameter("w", torch::rand({width_, width_}) - 0.5);
    steps = register_buffer("steps", torch::arange(width_));
  }
  Tensor forward(Tensor x) { return x.mm(w) + steps; }
  int64_t width_;
  Tensor w, steps;
};
TORCH_MODULE(Cloned);

nn::Sequential make_layers(const std::vector<int64_t>& sizes) {
  nn::Sequential layers;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    layers->push_back("linear" + std::to_string(i), nn::Linear(sizes[i], sizes[i + 1]));
    layers->push_back("act" + std::to_string(i), nn::Functional(torch::tanh));
  }
  return layers;
}

const Row kStructure[] = {
    row("Containers",
        [](MadeImpl& m) {
          std::vector<nn::Linear> held;
          for (int i = 0; i < 2; ++i) held.push_back(m.add("held" + std::to_string(i), nn::Linear(6, 6)));
          nn::ModuleList list(nn::Linear(6, 5), nn::LayerNorm(nn::LayerNormOptions({5})));
          m.add("list", list);
          list->push_back(nn::Linear(5, 5));  // After its registration.
          nn::ModuleDict dict;
          dict->update(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{{"a", nn::Linear(5, 4).ptr()},
                                                                                        {"b", nn::Linear(5, 4).ptr()}});
          m.add("dict", dict);
          nn::Sequential sequence({{"first", nn::AnyModule(nn::Linear(4, 4))}, {"act", nn::AnyModule(nn::Tanh())}});
          m.add("sequence", sequence);
          nn::AnyModule any(nn::Linear(4, 3));
          m.add("any", any.ptr());
          auto layers = m.add("layers", make_layers({3, 7, 2}));
          m.run = [=](Tensor x) mutable {
            for (auto& linear : held) x = torch::tanh(linear(x));
            x = list[2]->as<nn::Linear>()->forward(
                list[1]->as<nn::LayerNorm>()->forward(list[0]->as<nn::Linear>()->forward(x)));
            x = dict["a"]->as<nn::Linear>()->forward(x) + dict["b"]->as<nn::Linear>()->forward(x);
            return layers->forward(any.forward<Tensor>(sequence->forward(x)));
          };
        }),
    row("RegisteredLate",
        [](MadeImpl& m) {
          nn::Linear first(6, 7);
          auto w = torch::randn({7, 7}) * 0.2;
          nn::Linear second(nn::LinearOptions(7, 5).bias(false));
          fill(second, 0.1);
          torch::rand({3});
          m.add("second", second);
          m.add("first", first);
          m.register_parameter("w", w);
          w.requires_grad_();
          m.run = [=](Tensor x) mutable { return second(first(x).mm(w)); };
        }),
    row("ArgumentsByReference",
        [](MadeImpl& m) {
          Config config;
          auto shared = torch::rand({config.width});
          nn::Linear linear(6, config.width);
          std::vector<Tensor> made;
          auto one = m.add("one", TakesReferences(config, shared, linear, made));
          nn::Linear other(config.width, config.width);
          auto two = m.add("two", TakesReferences(config, shared, other, made));
          m.kept = {shared};
          m.run = [=](Tensor x) mutable { return two(one(x)) + made[0].sum(); };
        }),
    row("Clones",
        [](MadeImpl& m) {
          auto first = m.add("first", Cloned(6));
          std::vector<std::shared_ptr<ClonedImpl>> copies;
          for (int i = 0; i < 2; ++i) {
            copies.push_back(std::dynamic_pointer_cast<ClonedImpl>(first->clone()));
            m.add("copy" + std::to_string(i), copies.back());
          }
          torch::NoGradGuard no_grad;
          copies[1]->w.mul_(2);
          m.run = [=](Tensor x) mutable { return copies[1]->forward(copies[0]->forward(first(x) * 0.1) * 0.1); };
        }),
    row("ReplacedAndUnregisteredModules",
        [](MadeImpl& m) {
          m.add("body", nn::Linear(6, 7));
          m.add("gone", nn::Linear(60, 70));
          auto head = m.add("head", nn::Linear(7, 3));
          head = nn::Linear(7, 5);
          m.replace_module("head", head);
          m.unregister_module("gone");
          auto body = std::dynamic_pointer_cast<nn::LinearImpl>(m.named_children()["body"]);
          m.run = [=](Tensor x) mutable { return head(body->forward(x)); };
        }),
    row("HeldAfterUnregistering",
        [](MadeImpl& m) {
          // Computes in forward, trains in no optimizer.
          auto frozen = m.add("frozen", nn::Linear(6, 6));
          for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
          m.unregister_module("frozen");
          auto head = m.add("head", nn::Linear(6, 5));
          m.kept = frozen->parameters();
          m.run = [=](Tensor x) mutable { return head(torch::tanh(frozen(x))); };
        }),
    row("ProbesASize",
        [](MadeImpl& m) {
          auto features = m.add("features", nn::Sequential(nn::Conv1d(2, 4, 2), nn::ReLU(), nn::Flatten()));
          auto probe = features->forward(torch::zeros({1, 2, 3}));
          auto head = m.add("head", nn::Linear(probe.size(1), 5));
          m.run = [=](Tensor x) mutable { return head(features->forward(x.view({-1, 2, 3}))); };
        }),
    whole_batch("ProbesASizeAndLeavesStatistics",
                [](MadeImpl& m) {
                  auto features =
                      m.add("features", nn::Sequential(nn::Linear(6, 4), nn::BatchNorm1d(4), nn::Dropout(0.5)));
                  auto probe = features->forward(torch::randn({3, 6}));  // Draws, and moves the running mean.
                  features[2]->eval();
                  auto head = m.add("head", nn::Linear(probe.size(-1), 5));
                  m.run = [=](Tensor x) mutable { return head(features->forward(x)); };
                }),
};

// ---- tied parameters ----

/// Registers a tensor that somebody else has made.
struct ProjectionImpl : nn::Module {
  explicit ProjectionImpl(Tensor shared) : weight(register_parameter("weight", std::move(shared))) {}
  Tensor forward(Tensor x) { return torch::linear(x, weight); }
  Tensor weight;
};
TORCH_MODULE(Projection);

void tie(MadeImpl& m, bool apply_before, bool apply_after) {
  auto table = m.add("table", nn::Embedding(11, 6));
  auto middle = m.add("middle", nn::Linear(6, 6));
  auto head = m.add("head", nn::Linear(6, 11));
  const auto initialise = [](nn::Module& module) {
    torch::NoGradGuard no_grad;
    if (auto* linear = module.as<nn::Linear>()) linear->weight.normal_(0, 0.2);
    if (auto* embedding = module.as<nn::Embedding>()) embedding->weight.normal_(0, 0.3);
  };
  if (apply_before) m.apply(initialise);
  head->weight = table->weight;
  if (apply_after) m.apply(initialise);
  m.kept = {head->weight};
  m.run = [=](Tensor x) mutable { return head(torch::tanh(middle(table(tokens_of(x, 11)).mean(1)))); };
}

const Row kTied[] = {
    row("TiedByRegisteringTwice",
        [](MadeImpl& m) {
          auto table = m.add("table", nn::Embedding(11, 6));
          auto head = m.add("head", Projection(table->weight));
          m.run = [=](Tensor x) mutable { return head(torch::tanh(table(tokens_of(x, 11)).mean(1))); };
        }),
    row("TiedByAssigningAMember", [](MadeImpl& m) { tie(m, false, false); }),
    row("TiedByAssigningAMemberBeforeApply", [](MadeImpl& m) { tie(m, false, true); }),
    row("TiedByAssigningAMemberAfterApply", [](MadeImpl& m) { tie(m, true, false); }),
    row("OneModuleTwice",
        [](MadeImpl& m) {
          nn::Linear shared(6, 6);
          m.add("one", shared);
          m.add("two", shared);
          m.run = [=](Tensor x) mutable { return shared(torch::tanh(shared(x))); };
        }),
};

// ---- dtypes, devices, modes, failures ----

const Row kPlacement[] = {
    row("DtypesInside",
        [](MadeImpl& m) {
          auto linear = m.add("linear", nn::Linear(6, 7));
          linear->to(torch::kFloat32);
          auto norm = m.add("norm", nn::LayerNorm(nn::LayerNormOptions({7})));
          auto table = m.register_buffer("table", torch::rand({7}, torch::TensorOptions().dtype(torch::kFloat32)));
          m.to(torch::kFloat64);
          {
            torch::NoGradGuard no_grad;
            linear->weight.add_(1e-12);
          }
          m.run = [=](Tensor x) mutable { return norm(linear(x)) * table; };
        }),
    single_precision("DefaultDtypeChangesInside",
                     [](MadeImpl& m) {
                       torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat32));
                       auto narrow = m.add("narrow", nn::Linear(6, 7));
                       auto scale = torch::rand({7});
                       torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
                       auto wide = m.add("wide", nn::Linear(7, 5));
                       m.kept = {scale};
                       m.run = [=](Tensor x) mutable {
                         return wide((narrow(x.to(torch::kFloat32)) * scale).to(torch::kFloat64));
                       };
                     }),
    row("ModesInside",
        [](MadeImpl& m) {
          torch::NoGradGuard no_grad;
          auto linear = m.add("linear", nn::Linear(6, 7));
          linear->weight.mul_(2).clamp_(-0.5, 0.5);
          Tensor table;
          {
            torch::AutoGradMode grad(true);
            auto leaf = torch::ones({7}, torch::requires_grad());
            table = (leaf * 3).detach();
          }
          {
            c10::InferenceMode inference;
            table = table + torch::rand({7});
          }
          m.register_buffer("table", table.clone());
          m.run = [linear, &m](Tensor x) mutable { return linear(x) + m.named_buffers()["table"]; };
        }),
    row("FailuresCaughtInside",
        [](MadeImpl& m) {
          auto w = torch::rand({6, 7});
          EXPECT_THROW(torch::mm(w, w), c10::Error);
          EXPECT_THROW(m.register_module("a.b", nn::Linear(2, 2)), c10::Error);
          try {
            nn::Linear half(3, 3);
            throw std::runtime_error("planned");
          } catch (const std::runtime_error&) {
            w = torch::rand({6, 5});
          }
          w = m.register_parameter("w", w);
          m.run = [=](Tensor x) { return x.mm(w); };
        }),
};

struct Run {
  Row row;
  int ranks;
};

std::ostream& operator<<(std::ostream& out, const Run& run) { return out << run.row << " on " << run.ranks; }

std::vector<Run> runs_of(std::initializer_list<c10::ArrayRef<Row>> groups) {
  std::vector<Run> runs;
  for (auto& group : groups) {
    for (auto& made : group) {
      for (int ranks : {1, 3}) runs.push_back({made, ranks});
    }
  }
  return runs;
}

class Habit : public ::testing::TestWithParam<Run> {};

TEST_P(Habit, ConstructsAndTrainsAsPlainly) {
  const auto& [made, ranks] = GetParam();
  run_ranks(ranks, [&made = made](RankContext& context) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
    const bool has_children = !made.make()->children().empty();
    auto c = training_case<Made>(made.make);
    if (has_children) c.options.units = hsdp::each("*");
    c.whole_batch_everywhere = made.whole_batch;
    c.loss_tolerance = c.parameter_tolerance = made.tolerance;
    expect_constructed_alike<Made>(context, made.make, c.options.units);
    expect_parity(context, c);
  });
}

INSTANTIATE_TEST_SUITE_P(Rows, Habit,
                         ::testing::ValuesIn(runs_of({kParameters, kStock, kBuffers, kStructure, kTied, kPlacement})),
                         [](const auto& which) {
                           return which.param.row.name + "_Ranks_" + std::to_string(which.param.ranks);
                         });

}  // namespace

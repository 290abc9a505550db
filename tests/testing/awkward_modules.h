#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/construction.h"

/// Six modules as people write them, plain libtorch, each of which combines many habits that a sharded run must bear.
/// All take rows of 6 numbers in float64 and return rows.
namespace testing_support {

// ---- a language model: sine table, mask never registered, tied head, apply() at the end, layers in a std::vector ----

struct SineTableImpl : torch::nn::Module {
  SineTableImpl(int64_t length, int64_t width) {
    using namespace torch::indexing;
    table = torch::zeros({length, width});
    auto position = torch::arange(0, length, torch::kFloat64).unsqueeze(1);
    auto rate =
        torch::exp(torch::arange(0, width, 2, torch::kFloat64) * (-std::log(10000.0) / static_cast<double>(width)));
    table.index_put_({"...", Slice(0, None, 2)}, torch::sin(position * rate));
    table.index_put_({"...", Slice(1, None, 2)}, torch::cos(position * rate));
    table = table.unsqueeze(0);
    register_buffer("table", table);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + table.narrow(1, 0, x.size(1)); }
  torch::Tensor table;
};
TORCH_MODULE(SineTable);

struct AwkwardBlockImpl : torch::nn::Module {
  AwkwardBlockImpl(int64_t width, const torch::Tensor& shared_mask) : mask(shared_mask), width_(width) {
    const double k = 1 / std::sqrt(static_cast<double>(width));
    packed = register_parameter("packed", torch::rand({3 * width, width}) * (2 * k) - k);
    feed->push_back(torch::nn::Linear(width, 2 * width));
    feed->push_back(torch::nn::GELU());
    feed->push_back(torch::nn::Linear(2 * width, width));
    register_module("feed", feed);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    scale = 1 / torch::sqrt(torch::tensor(static_cast<double>(width))).item<double>();
  }
  torch::Tensor forward(torch::Tensor x) {
    auto parts = torch::linear(norm(x), packed).chunk(3, -1);
    auto scores = parts[0].matmul(parts[1].transpose(1, 2)) * scale + mask;
    x = x + torch::softmax(scores, -1).matmul(parts[2]);
    return x + feed->forward(x);
  }
  torch::nn::Sequential feed;
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor packed, mask;
  double scale = 0;
  int64_t width_;
};
TORCH_MODULE(AwkwardBlock);

struct LanguageModelImpl : Listed {
  LanguageModelImpl() {
    mask = torch::zeros({6, 6}).masked_fill_(torch::ones({6, 6}).triu(1).to(torch::kBool), -1e9);
    auto embedding_of_head = torch::nn::Embedding(torch::nn::EmbeddingOptions(13, 8).padding_idx(0));
    for (int i = 0; i < 3; ++i) layers.push_back(AwkwardBlock(8, mask));
    sine = register_module("sine", SineTable(10, 8));
    embedding = register_module("embedding", embedding_of_head);
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(8, 13).bias(false)));
    head->weight = embedding->weight;
    for (size_t i = 0; i < layers.size(); ++i) register_module("layer" + std::to_string(i), layers[i]);
    apply([](torch::nn::Module& module) {
      torch::NoGradGuard no_grad;
      if (auto* linear = module.as<torch::nn::Linear>()) {
        torch::nn::init::normal_(linear->weight, 0, 0.2);
        if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
      }
      if (auto* table = module.as<torch::nn::Embedding>()) table->weight.normal_(0, 0.3);
    });
    torch::NoGradGuard no_grad;
    embedding->weight[0].zero_();
    layers[1]->packed.narrow(0, 0, 8).mul_(0.5);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = sine(embedding((x * 5).abs().to(torch::kLong).clamp(0, 12)));
    for (auto& layer : layers) h = layer(h);
    return torch::log_softmax(head(h), -1).mean(1);
  }
  std::vector<torch::Tensor> members() const override { return {mask, layers[0]->mask, head->weight}; }
  SineTable sine{nullptr};
  torch::nn::Embedding embedding{nullptr};
  std::vector<AwkwardBlock> layers;
  torch::nn::Linear head{nullptr};
  torch::Tensor mask;
};
TORCH_MODULE(LanguageModel);

// ---- a convolutional network: built from a list, sizes probed by a forward, a dictionary of heads, a device ----

struct ConvNetConfig {
  std::vector<int64_t> channels{4, 3};
  torch::Device device = torch::kCPU;
  std::string activation = "elu";
};

inline torch::nn::AnyModule make_activation(const std::string& name) {
  if (name == "elu") return torch::nn::AnyModule(torch::nn::ELU());
  return torch::nn::AnyModule(torch::nn::ReLU());
}

struct ConvNetImpl : Listed {
  explicit ConvNetImpl(const ConvNetConfig& config) {
    using namespace torch::nn;
    int64_t in = 1;
    for (auto out : config.channels) {
      auto conv = Conv2d(Conv2dOptions(in, out, 2).padding(1).bias(in != 1));
      if (out == in) throw std::invalid_argument("channels");
      init::dirac_(conv->weight);
      conv->weight.data().add_(torch::randn_like(conv->weight), 0.1);
      features->push_back(conv);
      features->push_back(BatchNorm2d(out));
      features->push_back(make_activation(config.activation));
      in = out;
    }
    register_module("features", features);
    int64_t flat = 0;
    {
      torch::NoGradGuard no_grad;
      features->eval();
      flat = features->forward(torch::zeros({1, 1, 2, 3})).flatten(1).size(1);
      features->train();
    }
    heads->update(std::vector<std::pair<std::string, std::shared_ptr<Module>>>{{"classes", Linear(flat, 5).ptr()},
                                                                               {"boxes", Linear(flat, 2).ptr()}});
    register_module("heads", heads);
    for (auto& parameter : heads->named_parameters()) {
      if (parameter.value().dim() == 2) init::orthogonal_(parameter.value(), init::calculate_gain(torch::kReLU));
    }
    prior = register_buffer("prior", torch::tensor({0.1, 0.2, 0.3, 0.2, 0.2}, torch::TensorOptions(config.device)));
    anchors =
        torch::stack(torch::meshgrid({torch::arange(2, torch::kFloat64), torch::arange(2, torch::kFloat64)}, "ij"));
    this->to(config.device);
    this->to(torch::kFloat64);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = features->forward(x.view({-1, 1, 2, 3})).flatten(1);
    auto classes = heads["classes"]->as<torch::nn::Linear>()->forward(h) + prior.log();
    auto boxes = heads["boxes"]->as<torch::nn::Linear>()->forward(h) + anchors.to(x.device()).sum();
    return torch::cat({torch::softmax(classes, 1), boxes}, 1);
  }
  std::vector<torch::Tensor> members() const override { return {anchors}; }
  torch::nn::Sequential features;
  torch::nn::ModuleDict heads;
  torch::Tensor prior, anchors;
};
TORCH_MODULE(ConvNet);

// ---- experts: parameter lists, a generator of its own, a helper that is no module, routing that depends on data ----

/// Holds tensors, is no module.
struct Quantiles {
  explicit Quantiles(int64_t count) : edges(torch::empty({count})) {
    auto* data = edges.data_ptr<double>();
    for (int64_t i = 0; i < count; ++i) data[i] = -1 + 2 * static_cast<double>(i) / static_cast<double>(count - 1);
    centres = (edges.slice(0, 1) + edges.slice(0, 0, -1)) / 2;
  }
  torch::Tensor edges, centres;
};

struct ExpertsImpl : Listed {
  explicit ExpertsImpl(uint64_t seed) : quantiles(std::make_unique<Quantiles>(5)) {
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(seed);
    for (int i = 0; i < 4; ++i) {
      experts->append(torch::randn({6, 5}, generator) / std::sqrt(6.0 + i));
      experts[static_cast<size_t>(i)].set_requires_grad(true);
    }
    register_module("experts", experts);
    gates->insert("router", torch::empty({4, 6}));
    gates->insert("temperature", torch::ones({1}));
    gates["router"].set_requires_grad(true);
    gates["temperature"].set_requires_grad(true);
    {
      torch::NoGradGuard no_grad;
      gates["router"].uniform_(-0.4, 0.4, generator);
      gates["router"].index_put_({torch::tensor({0, 3}), torch::tensor({1, 2})}, torch::tensor({0.5, -0.5}));
    }
    register_module("gates", gates);
    balance = register_buffer("balance", torch::zeros({4}));
    balance.index_put_({1}, 0.25);
    used = register_buffer("used", torch::zeros({4}, torch::kLong));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto scores = torch::linear(x, gates["router"]) / gates["temperature"] + balance;
    auto [weights, chosen] = torch::softmax(scores, 1).topk(2, 1);
    auto out = torch::zeros({x.size(0), 5}, x.options());
    for (int64_t i = 0; i < 4; ++i) {
      auto rows = (chosen == i).any(1).nonzero().squeeze(1);  // On some ranks none.
      auto weight = (weights * (chosen == i)).sum(1).index_select(0, rows).unsqueeze(1);
      out = out.index_add(0, rows, x.index_select(0, rows).mm(experts[static_cast<size_t>(i)]) * weight);
    }
    return out + torch::bucketize(x, quantiles->edges).to(x.dtype()).mean(1, true) * quantiles->centres.abs().sum();
  }
  std::vector<torch::Tensor> members() const override { return {quantiles->edges, quantiles->centres}; }
  torch::nn::ParameterList experts;
  torch::nn::ParameterDict gates;
  std::unique_ptr<Quantiles> quantiles;
  torch::Tensor balance, used;
};
TORCH_MODULE(Experts);

// ---- a recurrent model: orthogonal and gate initialisation, frozen embedding, filter bank by hand, replaced output
// ----

struct SpeakerImpl : Listed {
  SpeakerImpl() {
    using namespace torch::nn;
    std::vector<double> vectors(13 * 6);
    for (size_t i = 0; i < vectors.size(); ++i) vectors[i] = std::sin(static_cast<double>(i));
    auto pretrained = torch::from_blob(vectors.data(), {13, 6}, torch::kFloat64).clone();
    words =
        register_module("words", Embedding::from_pretrained(pretrained, EmbeddingFromPretrainedOptions().freeze(true)));
    lstm = register_module("lstm", LSTM(LSTMOptions(6, 5).num_layers(2).batch_first(true)));
    cell = register_module("cell", GRUCell(5, 7));
    out = register_module("out", Linear(7, 100));
    for (auto& entry : lstm->named_parameters()) {
      torch::NoGradGuard no_grad;
      auto parameter = entry.value();
      if (entry.key().find("weight_hh") != std::string::npos) {
        for (auto& gate : parameter.chunk(4)) init::orthogonal_(gate);
      } else if (entry.key().find("weight_ih") != std::string::npos) {
        init::xavier_uniform_(parameter);
      } else {
        parameter.zero_();
        parameter.slice(0, 5, 10).fill_(1.0);
      }
    }
    filters = torch::zeros({6, 4});
    auto access = filters.accessor<double, 2>();
    for (int64_t band = 0; band < 4; ++band) {
      for (int64_t i = 0; i < 6; ++i)
        access[i][band] = std::max(0.0, 1 - std::abs(static_cast<double>(i - band - 1)) / 2);
    }
    filters = filters / filters.sum(0, true);
    register_buffer("filters", filters);
    window = register_buffer("window", torch::hann_window(6, /*periodic=*/false, torch::kFloat64));
    out = Linear(LinearOptions(7 + 4, 3));
    replace_module("out", out);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = std::get<0>(lstm(words((x * 5).abs().to(torch::kLong).clamp(0, 12))));
    auto state = cell(h.select(1, 5));
    for (int i = 0; i < 2; ++i) state = cell(h.select(1, i), state);
    return out(torch::cat({state, (x * window).mm(filters)}, 1));
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRUCell cell{nullptr};
  torch::nn::Linear out{nullptr};
  torch::Tensor filters, window;
};
TORCH_MODULE(Speaker);

// ---- a student and its teacher: clones, a frozen half, an average kept in forward, a seed, a decomposition ----

struct EncoderImpl : torch::nn::Cloneable<EncoderImpl> {
  explicit EncoderImpl(int64_t out) : width(out) { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 7));
    second = register_module("second", torch::nn::Linear(7, width));
    gain = register_parameter("gain", torch::ones({width}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))) * gain; }
  int64_t width;
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor gain;
};
TORCH_MODULE(Encoder);

struct StudentImpl : Listed {
  StudentImpl() {
    torch::manual_seed(123);
    student = register_module("student", Encoder(5));
    teacher = std::dynamic_pointer_cast<EncoderImpl>(student->clone());
    register_module("teacher", teacher);
    for (auto& parameter : teacher->parameters()) parameter.set_requires_grad(false);
    auto basis = std::get<0>(torch::linalg_qr(torch::randn({5, 5})));
    rotation = register_buffer("rotation", basis.contiguous());
    centre = register_buffer("centre", torch::zeros({1, 5}));
    register_module("scratch", torch::nn::Linear(30, 30));
    unregister_module("scratch");
    predictor = register_module("predictor", torch::nn::Linear(5, 5));
    {
      torch::NoGradGuard no_grad;
      predictor->weight.copy_(rotation);
      predictor->weight.diagonal().add_(0.1);
      for (auto& entry : teacher->named_parameters())
        entry.value().copy_(student->named_parameters()[entry.key()]).mul_(0.9);
    }
    again = register_parameter("again", predictor->weight);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor target;
    {
      torch::NoGradGuard no_grad;
      auto from = student->parameters(), to = teacher->parameters();
      if (is_training()) {
        for (size_t i = 0; i < from.size(); ++i) to[i].mul_(0.9).add_(from[i], 0.1);
      }
      target = teacher->forward(x).mm(rotation) - centre;
    }
    auto seen = predictor(student(x));
    return (seen - target) + torch::linear(seen, again);
  }
  Encoder student{nullptr};
  std::shared_ptr<EncoderImpl> teacher;
  torch::nn::Linear predictor{nullptr};
  torch::Tensor rotation, centre, again;
};
TORCH_MODULE(Student);

// ---- adapters on a stock model: wrapped layers put in the tree, frozen bases, normalised weights, dtypes on the way
// ----

struct AdapterImpl : torch::nn::Module {
  AdapterImpl(torch::nn::Linear base, int64_t rank, double alpha) : inner(std::move(base)) {
    register_module("inner", inner);
    for (auto& parameter : inner->parameters()) parameter.set_requires_grad(false);
    down = register_parameter(
        "down", torch::randn({rank, inner->options.in_features()}) / std::sqrt(static_cast<double>(rank)));
    up = register_parameter("up", torch::zeros({inner->options.out_features(), rank}));
    torch::nn::init::kaiming_uniform_(up, std::sqrt(5));
    direction = register_parameter("direction", inner->weight.detach().clone());
    scaling = torch::tensor({alpha, static_cast<double>(rank)});
    strength = scaling[0].item<double>() / scaling[1].item<double>();
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto unit = direction / direction.norm(2, 1, /*keepdim=*/true);
    return inner(x) + torch::linear(torch::linear(x, down), up) * strength + torch::linear(x, unit) * 0.1;
  }
  torch::nn::Linear inner;
  torch::Tensor down, up, direction, scaling;
  double strength = 0;
};
TORCH_MODULE(Adapter);

struct AdaptedImpl : Listed {
  AdaptedImpl() {
    using namespace torch::nn;
    const auto former = torch::get_default_dtype();
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat32));
    auto layer = TransformerEncoderLayer(TransformerEncoderLayerOptions(6, 2).dropout(0).dim_feedforward(9));
    auto decoder = TransformerDecoderLayer(TransformerDecoderLayerOptions(6, 3).dropout(0).dim_feedforward(7));
    body = register_module("body", TransformerEncoder(layer, 2));
    tail = register_module("tail", TransformerDecoder(decoder, 1));
    projection = register_module("projection", Linear(6, 4));
    torch::set_default_dtype(former);
    to(torch::kFloat64);
    for (auto& entry : body->named_parameters())
      entry.value().set_requires_grad(entry.key().find("norm") != std::string::npos);
    projection_adapter = Adapter(projection, 2, 3.0);
    replace_module("projection", projection_adapter);
    skips = {Linear(6, 6), Linear(6, 6)};
    register_module("skip0", skips[0]);
    register_module("skip1", skips[0]);  // The same twice.
    register_module("skip2", skips[1]);
    steps = register_buffer("steps", torch::arange(3));
    register_buffer("order", steps.flip({0}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto sequence = torch::stack({x, skips[0](x), skips[1](skips[0](x))}).index_select(0, steps);
    auto h = tail(body(sequence), sequence);
    return projection_adapter(h.mean(0));
  }
  std::vector<torch::Tensor> members() const override { return {projection_adapter->scaling}; }
  torch::nn::TransformerEncoder body{nullptr};
  torch::nn::TransformerDecoder tail{nullptr};
  torch::nn::Linear projection{nullptr};
  Adapter projection_adapter{nullptr};
  std::vector<torch::nn::Linear> skips;
  torch::Tensor steps;
};
TORCH_MODULE(Adapted);

}  // namespace testing_support

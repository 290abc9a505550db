#pragma once

#include <cstdint>

namespace models {

/// Shape of a decoder-only transformer. The names are those of a Llama `config.json`, shortened where they are long.
struct TransformerConfig {
  int64_t vocab_size = 256;
  /// Width of the residual stream.
  int64_t hidden_size = 256;
  /// Width inside the SwiGLU feed-forward.
  int64_t intermediate_size = 688;
  int64_t n_layers = 4;
  int64_t n_heads = 4;
  /// Key and value heads, each shared by n_heads / n_kv_heads query heads. 0 means n_heads.
  int64_t n_kv_heads = 0;
  /// Longest sequence that forward accepts.
  int64_t max_sequence_length = 256;
  /// Base of the rotary wavelengths.
  double rope_theta = 10000.0;
  double norm_eps = 1e-5;
  /// True: the output head uses the embedding's weight and there is no `lm_head.weight`.
  bool tie_embeddings = false;

  int64_t kv_heads() const { return n_kv_heads == 0 ? n_heads : n_kv_heads; }
  int64_t head_dim() const { return hidden_size / n_heads; }

  /// Throws std::invalid_argument, naming the entry, for sizes that are not positive, a hidden_size that n_heads does
  /// not divide into an even head size, an n_heads that n_kv_heads does not divide, or a theta or eps that is not a
  /// positive number.
  void validate() const;
};

}  // namespace models

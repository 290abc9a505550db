#pragma once

#include "models/transformer.h"

namespace testing_support {

/// A transformer of odd sizes, for 17 tokens and sequences of up to 16, that trains in milliseconds.
inline models::Transformer small_transformer(int64_t layers, bool tied = false) {
  models::TransformerConfig config;
  config.vocab_size = 17;
  config.hidden_size = 24;
  config.intermediate_size = 37;
  config.n_layers = layers;
  config.n_heads = 4;
  config.n_kv_heads = 2;
  config.max_sequence_length = 16;
  config.tie_embeddings = tied;
  return models::Transformer(config);
}

}  // namespace testing_support

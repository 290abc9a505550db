#include "models/transformer_config.h"

#include <c10/util/StringUtil.h>

#include <cmath>
#include <stdexcept>

namespace models {
namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(c10::str("[TransformerConfig] ", parts...));
}

void require_positive(const char* name, int64_t value) {
  if (value <= 0) refuse(name, " is ", value, ", expected a positive number");
}

void require_positive(const char* name, double value) {
  if (!(std::isfinite(value) && value > 0)) refuse(name, " is ", value, ", expected a positive finite number");
}

}  // namespace

void TransformerConfig::validate() const {
  require_positive("vocab_size", vocab_size);
  require_positive("hidden_size", hidden_size);
  require_positive("intermediate_size", intermediate_size);
  require_positive("n_layers", n_layers);
  require_positive("n_heads", n_heads);
  require_positive("max_sequence_length", max_sequence_length);
  require_positive("rope_theta", rope_theta);
  require_positive("norm_eps", norm_eps);
  if (n_kv_heads < 0) refuse("n_kv_heads is ", n_kv_heads, ", expected a positive number, or 0 for as many as n_heads");
  if (n_heads % kv_heads() != 0) {
    refuse("n_heads ", n_heads, " is not a multiple of n_kv_heads ", kv_heads(),
           ", expected the same number of query heads for each key head");
  }
  // Rotary positions turn pairs of features, so a head has an even number of them.
  if (hidden_size % (2 * n_heads) != 0) {
    refuse("hidden_size ", hidden_size, " with n_heads ", n_heads,
           " gives no even head size, expected hidden_size to be a multiple of ", 2 * n_heads);
  }
}

}  // namespace models

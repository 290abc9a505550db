#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace dtensor {

/// How per-rank values of a Partial tensor combine into the global value. `norm` combines p-norms: (sum of x^p)^(1/p).
enum class ReduceOp { sum, max, min, norm };

/// How a tensor lies on one mesh axis: sharded along a tensor dim, replicated, or as partial values still to be
/// reduced. A plain value type; the words and meaning are those of PyTorch's DTensor.
class Placement {
 public:
  enum class Kind { shard, replicate, partial };

  Kind kind() const { return kind_; }
  bool is_shard() const { return kind_ == Kind::shard; }
  bool is_replicate() const { return kind_ == Kind::replicate; }
  bool is_partial() const { return kind_ == Kind::partial; }

  /// Tensor dim of a Shard; throws ValueError for other kinds.
  int64_t dim() const;
  /// Reduction of a Partial; throws ValueError for other kinds.
  ReduceOp op() const;
  /// Exponent of a norm Partial (infinity is spelled ReduceOp::max); throws ValueError for other kinds.
  double norm_type() const;

  bool operator==(const Placement& other) const = default;

  /// `Shard(0)`, `Replicate()`, `Partial(sum)`, `Partial(norm 2)`.
  std::string to_string() const;

 protected:
  Placement(Kind kind, int64_t dim, ReduceOp op, double norm_type)
      : kind_(kind), op_(op), dim_(dim), norm_type_(norm_type) {}

 private:
  Kind kind_;
  ReduceOp op_;
  int64_t dim_;
  double norm_type_;
};

/// Chunks of tensor dim `dim`, one a rank, by the rule of `torch.chunk`: ceil-sized, short or empty at the tail.
struct Shard : Placement {
  explicit Shard(int64_t dim);
};

/// Every rank of the axis holds the whole value.
struct Replicate : Placement {
  Replicate();
};

/// Every rank holds a value that still has to be reduced over the axis.
struct Partial : Placement {
  explicit Partial(ReduceOp op = ReduceOp::sum);
  /// Local p-norms, 0 < p < infinity.
  static Partial norm(double p);

 private:
  Partial(ReduceOp op, double norm_type);
};

using Placements = std::vector<Placement>;

std::ostream& operator<<(std::ostream& out, const Placement& placement);
/// `(Shard(0), Replicate())`
std::string to_string(const Placements& placements);

}  // namespace dtensor

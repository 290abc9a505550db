#include "dtensor/placement.h"

#include <ostream>

#include "dtensor/error.h"

namespace dtensor {

int64_t Placement::dim() const {
  if (!is_shard()) raise<ValueError>("Placement::dim", "asked of ", to_string(), ", expected a Shard");
  return dim_;
}

ReduceOp Placement::op() const {
  if (!is_partial()) raise<ValueError>("Placement::op", "asked of ", to_string(), ", expected a Partial");
  return op_;
}

double Placement::norm_type() const {
  if (!is_partial() || op_ != ReduceOp::norm) {
    raise<ValueError>("Placement::norm_type", "asked of ", to_string(), ", expected a Partial(norm p)");
  }
  return norm_type_;
}

std::string Placement::to_string() const {
  switch (kind_) {
    case Kind::shard:
      return c10::str("Shard(", dim_, ")");
    case Kind::replicate:
      return "Replicate()";
    case Kind::partial:
      break;
  }
  switch (op_) {
    case ReduceOp::sum:
      return "Partial(sum)";
    case ReduceOp::max:
      return "Partial(max)";
    case ReduceOp::min:
      return "Partial(min)";
    case ReduceOp::norm:
      break;
  }
  return c10::str("Partial(norm ", norm_type_, ")");
}

Shard::Shard(int64_t dim) : Placement(Kind::shard, dim, ReduceOp::sum, 0) {
  if (dim < 0) {
    raise<ValueError>("Shard", "tensor dim ", dim, " is negative, expected >= 0; count dims from the front");
  }
}

Replicate::Replicate() : Placement(Kind::replicate, 0, ReduceOp::sum, 0) {}

Partial::Partial(ReduceOp op) : Partial(op, 0) {
  if (op == ReduceOp::norm) {
    raise<ValueError>("Partial", "a norm needs its exponent; write Partial::norm(p)");
  }
}

Partial::Partial(ReduceOp op, double norm_type) : Placement(Kind::partial, 0, op, norm_type) {}

Partial Partial::norm(double p) {
  // The negation also refuses NaN.
  if (!(p > 0) || p > 1e300) raise<ValueError>("Partial::norm", "exponent ", p, ", expected 0 < p < infinity");
  return Partial(ReduceOp::norm, p);
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << placement.to_string(); }

std::string to_string(const Placements& placements) {
  std::string text = "(";
  for (size_t i = 0; i < placements.size(); ++i) text += (i ? ", " : "") + placements[i].to_string();
  return text + ")";
}

}  // namespace dtensor

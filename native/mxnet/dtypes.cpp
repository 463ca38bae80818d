#include "mxnet/dtypes.hpp"

namespace kvstore_hvd::mxnet {

std::optional<DType> dtype_of(const View& view) {
  using Kind = View::Kind;
  const auto is = [&](Kind kind, int bits) { return view.kind() == kind && view.bits() == bits; };
  if (is(Kind::kFloat, 32)) return DType::kFloat32;
  if (is(Kind::kFloat, 16)) return DType::kFloat16;
  if (is(Kind::kFloat, 64)) return DType::kFloat64;
  if (is(Kind::kBFloat, 16)) return DType::kBFloat16;
  if (is(Kind::kInt, 8)) return DType::kInt8;
  if (is(Kind::kUInt, 8)) return DType::kUInt8;
  if (is(Kind::kInt, 32)) return DType::kInt32;
  if (is(Kind::kInt, 64)) return DType::kInt64;
  return std::nullopt;
}

std::string describe_unsupported(const View& view) {
  if (view.kind() == View::Kind::kUInt && view.bits() == 1) return "bool";
  const char* kind = view.kind() == View::Kind::kInt ? "int" : view.kind() == View::Kind::kUInt ? "uint" : "float";
  return kind + std::to_string(view.bits());
}

}  // namespace kvstore_hvd::mxnet

// Element types, reduction operations and collectives: the vocabulary of every other header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore_hvd {

// The numeric values are part of the shared-memory protocol and of the Python binding.
enum class DType : std::uint8_t {
  kFloat16 = 0,
  kBFloat16 = 1,
  kFloat32 = 2,
  kFloat64 = 3,
  kInt8 = 4,
  kUInt8 = 5,
  kInt32 = 6,
  kInt64 = 7,
};
inline constexpr int kDTypes = 8;

// Average is a sum whose postscale is divided by the ranks' weights, 1 each as a rule; it is a separate value only so
// that ranks that disagree about it are told so in the user's own words.
enum class ReduceOp : std::uint8_t { kSum = 0, kAverage = 1, kMin = 2, kMax = 3, kProduct = 4 };
inline constexpr int kReduceOps = 5;

// Whether Reduction::as_half has an effect.
constexpr bool can_be_half(DType type, ReduceOp op) {
  return (type == DType::kFloat32 || type == DType::kFloat64) && (op == ReduceOp::kSum || op == ReduceOp::kAverage);
}

// Exchange: every rank takes what it wants of every rank's input (allgather, alltoall). See Request::parts.
enum class Collective : std::uint8_t { kAllreduce = 0, kBroadcast = 1, kExchange = 2, kReduceScatter = 3 };
inline constexpr int kCollectives = 4;

constexpr std::size_t size_of(DType type) {
  switch (type) {
    case DType::kInt8:
    case DType::kUInt8:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  return 0;
}

constexpr const char* name_of(DType type) {
  constexpr const char* kNames[kDTypes] = {"float16", "bfloat16", "float32", "float64",
                                           "int8",    "uint8",    "int32",   "int64"};
  return kNames[static_cast<int>(type)];
}

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* kNames[kReduceOps] = {"sum", "average", "min", "max", "product"};
  return kNames[static_cast<int>(op)];
}

constexpr const char* name_of(Collective collective) {
  constexpr const char* kNames[kCollectives] = {"allreduce", "broadcast", "exchange", "reducescatter"};
  return kNames[static_cast<int>(collective)];
}

}  // namespace kvstore_hvd

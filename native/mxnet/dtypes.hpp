// MXNet's dtypes as this package's.
#pragma once

#include <optional>
#include <string>

#include "base/types.hpp"
#include "mxnet/engine_abi.hpp"

namespace kvstore_hvd::mxnet {

// Nothing for a dtype that cannot be reduced.
std::optional<DType> dtype_of(const View& view);

// How errors name a dtype that cannot be reduced.
std::string describe_unsupported(const View& view);

}  // namespace kvstore_hvd::mxnet

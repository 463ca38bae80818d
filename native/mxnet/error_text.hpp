// How a Status travels through MXNet, which carries text only.
#pragma once

#include <string>

#include "base/status.hpp"

namespace kvstore_hvd::mxnet {

// "ClassName: text", where ClassName is the exception class in kvstore_hvd/errors.py. MXNet's Python side raises the
// class that is registered under what stands before the first colon.
std::string error_text(const Status& status);

// Whether a text that MXNet raised is error_text(status).
bool is_error_text(const std::string& raised, const Status& status);

}  // namespace kvstore_hvd::mxnet

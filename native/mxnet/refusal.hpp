// What becomes of an operation that MXNet's engine does not take: the rank announces it nevertheless, as one that
// failed here. So it stays in step with the other ranks, where requests of one name are counted; the operation fails
// with kInputFailed on every rank, and on this one the call that asked for it says so.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.hpp"
#include "request/request.hpp"

namespace kvstore_hvd::mxnet {

// Of MXNet's text; the others are a stack trace.
std::string first_line(const std::string& text);

// What is announced. `why`: MXNet's text, of which the first line is kept.
Request as_refused(Request request, const std::string& why);

// What the call returns. `prefix`: how the error begins. `others`: how many operations of the same call were refused
// besides.
Status refusal(const std::string& prefix, const std::string& why, std::size_t others = 0);

// What this rank is told when the computation of an input failed here; `whose` names whose input that may be.
Status failed_input(const std::string& prefix, const std::string& whose = "");

}  // namespace kvstore_hvd::mxnet

#include "request/request.hpp"

#include <cmath>

namespace kvstore_hvd {

std::string fault_of(const Request& request, int ranks) {
  if (request.inputs.empty() || request.outputs.empty()) return "inputs and outputs must not be empty";
  if (request.collective == Collective::kBroadcast) {
    if (request.inputs.size() != 1) return "broadcast takes one input";
    if (request.root < 0 || request.root >= ranks) {
      return "root " + std::to_string(request.root) + " is not a rank of a world of " + std::to_string(ranks);
    }
  }
  const bool absent = request.weight == Request::kAbsent;
  if (!absent && (!(request.weight >= 0.0) || std::isinf(request.weight))) {
    return "its weight is neither a number of 0 or more nor -1";
  }
  const bool scatters = request.collective == Collective::kReduceScatter;
  if (!scatters && request.collective != Collective::kExchange) return "";
  if (request.inputs.size() != 1 || request.outputs.size() != 1) return "it takes one input and one output";
  if (scatters && request.parts.size() != 1) return "it gives each rank one part of the result";
  if (!scatters && request.contributed > request.count) return "a rank contributes more than count elements";
  for (const Part& part : request.parts) {
    if (part.rank < 0 || part.rank >= ranks) return "a part is of rank " + std::to_string(part.rank);
    const std::size_t most = bytes_of(request);
    if (part.from > most || part.bytes > most - part.from) return "a part lies outside of the inputs";
    if (part.from % size_of(request.dtype) != 0 || part.bytes % size_of(request.dtype) != 0)
      return "a part cuts elements";
  }
  return "";
}

}  // namespace kvstore_hvd

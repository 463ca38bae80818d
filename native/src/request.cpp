#include "kvstore_hvd/request.hpp"

namespace kvstore_hvd {

std::string fault_of(const Request& request, int ranks) {
  if (request.inputs.empty() || request.outputs.empty()) return "inputs and outputs must not be empty";
  if (request.collective == Collective::kBroadcast) {
    if (request.inputs.size() != 1) return "broadcast takes one input";
    if (request.root < 0 || request.root >= ranks) {
      return "root " + std::to_string(request.root) + " is not a rank of a world of " + std::to_string(ranks);
    }
  }
  return "";
}

}  // namespace kvstore_hvd

#include "request/request.hpp"

#include <algorithm>
#include <cmath>

namespace kvstore_hvd {
namespace {

std::string advice(ErrorCode code, bool is_over_hosts) {
  switch (code) {
    case ErrorCode::kPeerLost:
      return std::string("\n  Fix: restart the job from its last checkpoint") +
             (is_over_hosts ? ""
                            : ", or train within kvstore_hvd.elastic.run under `kvhvdrun --min-np`, which replaces "
                              "workers") +
             "; if all workers are alive, call reset() on every one.";
    case ErrorCode::kTimeout:
      return "\n  Fix: see what that rank is doing, and whether all ranks call the same operations; "
             "KVHVD_TIMEOUT (seconds) allows longer waits.";
    default:
      return "\n  Fix: restart, or call reset() on every rank.";
  }
}

// The text without the first `part`, if it ends there at a word's end.
std::string without(std::string text, const std::string& part) {
  const std::size_t place = text.find(part + " ");
  return place == std::string::npos ? text : text.erase(place, part.size());
}

}  // namespace

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

std::string describe_operation(const Request& request) {
  return std::string(name_of(request.collective)) + " " + (request.label.empty() ? request.name : request.label);
}

std::string Messages::prefix() const { return error_prefix(world_, rank_); }

std::string Messages::prefix(const Request& request) const { return prefix() + describe_operation(request) + ": "; }

Status Messages::invalid(const Request& request, const std::string& fact) const {
  return Status(ErrorCode::kInvalid,
                prefix(request) + fact + ".\n  Fix: correct the arguments; nothing was submitted.");
}

Status Messages::disagreement(const Request& request, const Slot& slot) const {
  if (slot.error == 0) return Status();
  return Status(static_cast<ErrorCode>(slot.error), prefix(request) + std::string(slot.error_text, slot.error_length));
}

Status Messages::lost(const Request& request) const {
  return lost(prefix(request), without(world_.failure.fact(), " in " + describe_operation(request)));
}

Status Messages::lost() const { return lost(prefix(), world_.failure.fact()); }

// A fact about this rank does not name it again: "[rank 0/2] rank 0 waited" is "[rank 0/2] waited".
Status Messages::lost(const std::string& prefix, std::string fact) const {
  const std::string own = rank_name(world_, rank_) + " waited ";
  if (fact.rfind(own, 0) == 0) fact.erase(0, own.size() - std::string("waited ").size());
  const ErrorCode code = world_.failure.code();
  // The fact may have a fix of its own.
  const std::size_t fix = std::min(fact.find("\n  Fix: "), fact.size());
  const std::string what_helps = fix < fact.size() ? fact.substr(fix) + "." : advice(code, world_.has_link());
  std::string arrays = ".\n  The arrays of this step are undefined.";
  if (arrays_stay_shared_.load(std::memory_order_relaxed)) {
    arrays += " Other workers may still change them: the system has no memory for a private copy.";
  }
  return Status(code, prefix + fact.substr(0, fix) + arrays + what_helps);
}

Status Messages::left(const Request& request) const { return left(prefix(request)); }

Status Messages::left(const std::string& prefix) {
  return Status(ErrorCode::kShutdown,
                prefix + "this rank has shut down.\n  Fix: call init() before communicating again.");
}

std::string Messages::left_early(const std::string& leaver, const std::string& waiter, const std::string& operation) {
  return leaver + " ended its program without an exception, or called shutdown(), while " + waiter + " is waiting in " +
         operation +
         "\n  Fix: call the same operations on all workers, in the same number of steps; or let some have fewer steps "
         "(docs/join.md): train within kvstore_hvd.Join([trainer]), or end the loop with hvd.join()";
}

Status Messages::forked(const std::string& prefix) {
  return Status(ErrorCode::kShutdown, prefix +
                                          "this is a forked child; only the parent may communicate.\n"
                                          "  Fix: call the KVStore from the process that created it.");
}

}  // namespace kvstore_hvd

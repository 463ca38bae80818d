#include "kvstore_hvd/messages.hpp"

#include "kvstore_hvd/describe.hpp"

namespace kvstore_hvd {
namespace {

std::string advice(ErrorCode code) {
  switch (code) {
    case ErrorCode::kPeerLost:
      return "\n  Fix: restart the job from its last checkpoint, or train within kvstore_hvd.elastic.run, which goes "
             "on by itself; if all workers are alive, call reset() on every one.";
    case ErrorCode::kTimeout:
      return "\n  Fix: see what that rank is doing; if such a wait is legitimate, raise KVHVD_TIMEOUT (seconds).";
    default:
      return "\n  Fix: restart, or call reset() on every rank.";
  }
}

}  // namespace

std::string describe_operation(const Request& request) {
  return std::string(name_of(request.collective)) + " " + (request.label.empty() ? request.name : request.label);
}

std::string Messages::prefix() const { return describe_speaker(world_, rank_); }

std::string Messages::prefix(const Request& request) const { return prefix() + describe_operation(request) + ": "; }

Status Messages::invalid(const Request& request, const std::string& fact) const {
  return Status(ErrorCode::kInvalid, prefix(request) + fact + ".");
}

Status Messages::disagreement(const Request& request, const Slot& slot) const {
  if (slot.error == 0) return Status();
  return Status(static_cast<ErrorCode>(slot.error), prefix(request) + std::string(slot.error_text, slot.error_length));
}

Status Messages::lost(const Request& request) const {
  const Status status = lost();
  return Status(status.code(), prefix(request) + status.text().substr(prefix().size()));
}

Status Messages::lost() const {
  const ErrorCode code = world_.failure.code();
  return Status(code, prefix() + world_.failure.fact() + ".\n  This step's buffers are undefined." + advice(code));
}

Status Messages::left(const Request& request) const { return left(prefix(request)); }

Status Messages::left(const std::string& prefix) {
  return Status(ErrorCode::kShutdown, prefix +
                                          "this rank has shut down.\n  Fix: call init() before communicating again; "
                                          "what was prepared for an earlier world has to be prepared anew.");
}

Status Messages::forked() {
  return Status(ErrorCode::kShutdown,
                "this is a forked child; only the parent may communicate.\n"
                "  Fix: call the KVStore from the process that created it.");
}

}  // namespace kvstore_hvd

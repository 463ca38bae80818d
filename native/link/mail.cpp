#include "link/mail.hpp"

#include <algorithm>
#include <cstring>
#include <random>

namespace kvstore_hvd {
namespace {

std::uint64_t random_number() {
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device()) | 1;  // never 0
}

}  // namespace

Mail::Mail(Transport& transport, int host, std::uint64_t build)
    : transport_(transport), host_(host), build_(build), own_(random_number()), sent_(kMessage), received_(kMessage) {
  receiving_ = transport_.receive(host_, kRecords, received_.data(), received_.size());
}

bool Mail::progress(const std::function<void(const char*)>& handle) {
  const bool received = receive(handle);
  return send() || received;
}

bool Mail::send() {
  if (sending_ != 0) {
    if (!transport_.test(sending_)) return false;
    sending_ = 0;
    n_sent_ += n_sending_;
    n_sending_ = 0;
  }
  const bool is_met = peer() == Peer::kMet;
  if (!greets_ && (!is_met || outgoing_.empty())) return false;
  const Head head{build_, own_, other_, is_met ? std::min(outgoing_.size(), kMessage - sizeof(Head)) : 0};
  std::memcpy(sent_.data(), &head, sizeof(head));
  std::memcpy(sent_.data() + sizeof(head), outgoing_.data(), head.bytes);
  outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<std::ptrdiff_t>(head.bytes));
  sending_ = transport_.send(host_, kRecords, sent_.data(), sizeof(head) + head.bytes);
  n_sending_ = head.bytes;
  greets_ = false;
  return true;
}

bool Mail::receive(const std::function<void(const char*)>& handle) {
  if (!transport_.test(receiving_)) return false;
  Head head;
  std::memcpy(&head, received_.data(), sizeof(head));
  if (is_for_us(head)) {
    const char* const begin = received_.data() + sizeof(head);
    incoming_.insert(incoming_.end(), begin, begin + head.bytes);
  }
  receiving_ = transport_.receive(host_, kRecords, received_.data(), received_.size());
  std::size_t at = 0;
  RecordHeader header;
  while (incoming_.size() - at >= sizeof(header)) {
    std::memcpy(&header, incoming_.data() + at, sizeof(header));
    if (incoming_.size() - at < header.bytes) break;
    handle(incoming_.data() + at);
    at += header.bytes;
  }
  incoming_.erase(incoming_.begin(), incoming_.begin() + static_cast<std::ptrdiff_t>(at));
  return true;
}

// The other end's messages come in the order in which they were sent: those of an earlier attempt before those of the
// present one, so another number after both have met is that of a later attempt.
bool Mail::is_for_us(const Head& head) {
  const auto turn_into = [this](Peer peer) { peer_.store(peer, std::memory_order_relaxed); };
  if (head.build != build_) {
    turn_into(Peer::kOtherBuild);
  } else if (peer() == Peer::kUnknown) {
    if (head.to == own_) {
      was_met_.store(true, std::memory_order_relaxed);
      turn_into(Peer::kMet);
    }
    greets_ = greets_ || head.from != other_;
    other_ = head.from;
  } else if (head.from != other_) {
    turn_into(Peer::kStartedOver);
  }
  return peer() == Peer::kMet && head.to == own_;
}

bool Mail::close() {
  if (!is_closed_ && receiving_ != 0) transport_.cancel(receiving_);
  is_closed_ = true;
  if (receiving_ != 0) transport_.test(receiving_);
  if (sending_ != 0) transport_.test(sending_);
  return receiving_ == 0 && sending_ == 0;
}

}  // namespace kvstore_hvd

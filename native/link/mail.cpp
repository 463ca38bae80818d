#include "link/mail.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

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

bool Mail::progress(const Handle& handle) {
  const bool received = receive(handle);
  return send() || received;
}

bool Mail::send() {
  if (sending_ != 0 && !transport_.test(sending_)) return false;
  const bool is_met = peer() == Peer::kMet;
  if (!greets_ && (!is_met || outgoing_.empty())) return false;
  const Head head{build_, own_, other_, is_met ? std::min(outgoing_.size(), kMessage - sizeof(Head)) : 0};
  std::memcpy(sent_.data(), &head, sizeof(head));
  std::memcpy(sent_.data() + sizeof(head), outgoing_.data(), head.bytes);
  outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<std::ptrdiff_t>(head.bytes));
  sending_ = transport_.send(host_, kRecords, sent_.data(), sizeof(head) + head.bytes);
  greets_ = false;
  return true;
}

bool Mail::receive(const Handle& handle) {
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
    handle(header.kind, RecordReader(incoming_.data() + at + sizeof(header)));
    at += header.bytes;
  }
  incoming_.erase(incoming_.begin(), incoming_.begin() + static_cast<std::ptrdiff_t>(at));
  return true;
}

// The other end's messages come in the order in which they were sent: those of an earlier attempt before those of the
// present one, so another number after both have met is that of a later attempt.
bool Mail::is_for_us(const Head& head) {
  Peer peer = this->peer();
  if (peer >= Peer::kMet) {
    if (head.build != build_ || head.from != other_) peer = Peer::kStartedOver;
  } else if (head.build != build_) {
    peer = Peer::kOtherBuild;
  } else if (peer == Peer::kUnknown) {
    if (head.to == own_) peer = Peer::kMet;
    greets_ = greets_ || head.from != other_;
    other_ = head.from;
  }
  peer_.store(peer, std::memory_order_relaxed);
  return peer == Peer::kMet && head.to == own_;
}

bool Mail::close() {
  if (!std::exchange(is_closed_, true) && receiving_ != 0) transport_.cancel(receiving_);
  if (receiving_ != 0) transport_.test(receiving_);
  if (sending_ != 0) transport_.test(sending_);
  return receiving_ == 0 && sending_ == 0;
}

}  // namespace kvstore_hvd

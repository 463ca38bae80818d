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
    : transport_(transport), host_(host), build_(build), own_(random_number()) {
  receiving_ = transport_.receive(host_, kRecords, received_.data(), received_.size());
}

bool Mail::progress(const Handle& handle) {
  const bool received = receive(handle);
  return send() || received;
}

bool Mail::send() {
  if (sending_ != 0 && !transport_.test(sending_)) return false;
  const bool is_met = peer() == Peer::kMet;
  if (!greets_ && !(is_met && has_outgoing())) return false;
  const std::size_t bytes = is_met ? std::min(outgoing_.size(), kMessage) : sizeof(Head);
  const Head head{build_, own_, other_, bytes - sizeof(Head)};
  sent_.swap(outgoing_);
  outgoing_.resize(sizeof(head));
  outgoing_.insert(outgoing_.end(), sent_.begin() + static_cast<std::ptrdiff_t>(bytes), sent_.end());
  std::memcpy(sent_.data(), &head, sizeof(head));
  sending_ = transport_.send(host_, kRecords, sent_.data(), bytes);
  greets_ = false;
  return true;
}

bool Mail::receive(const Handle& handle) {
  std::size_t bytes = 0;
  if (!transport_.test(receiving_, &bytes)) return false;
  received_.swap(read_);
  receiving_ = transport_.receive(host_, kRecords, received_.data(), received_.size());
  has_received_ = true;
  if (!is_ignored_) read(bytes, handle);
  return true;
}

void Mail::read(std::size_t bytes, const Handle& handle) {
  Head head;
  expect(bytes >= sizeof(head));
  std::memcpy(&head, read_.data(), sizeof(head));
  if (!is_for_us(head)) return;
  expect(head.bytes == bytes - sizeof(head));
  const char *at = read_.data() + sizeof(head), *end = at + head.bytes;
  if (!begun_.empty()) {
    begun_.insert(begun_.end(), at, end);
    at = begun_.data();
    end = at + begun_.size();
  }
  RecordHeader header;
  while (end - at >= static_cast<std::ptrdiff_t>(sizeof(header))) {
    std::memcpy(&header, at, sizeof(header));
    expect(header.bytes >= sizeof(header) && header.bytes <= kLongest);
    if (end - at < static_cast<std::ptrdiff_t>(header.bytes)) break;
    handle(header.kind, RecordReader(at + sizeof(header), at + header.bytes));
    at += header.bytes;
  }
  begun_ = std::vector<char>(at, end);
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

// What links tell each other beside operations, and what they look at from time to time: which hosts live, who has
// left, who is late, what ranks do, and failures.
#include <algorithm>
#include <cstring>
#include <limits>

#include "link/link.hpp"
#include "shm/liveness.hpp"

namespace kvstore_hvd {
namespace {

constexpr std::chrono::milliseconds kBeat{500}, kLook{100};
// How old an operation is before a link announces it early, and marks the late ranks.
constexpr std::chrono::milliseconds kPatience{500};
// Limit on sending a failure to the others, and on completing what is complete on the host that failed.
constexpr std::chrono::seconds kAbort{1};

}  // namespace

void Link::send_beat() {
  const bool has_failed = world_.failure.is_set();
  std::vector<int> left;
  for (int r = 0; r < world_.ranks; ++r) {
    const RankState& rank = world_.rank(r);
    // Acquire: what it did before it left.
    if (rank.presence.load(std::memory_order_acquire) == Presence::kLeft) left.push_back(rank.rank_of_world);
  }
  std::vector<LateRank> late;
  for (const Missed& one : table_.missed(256, false).value_or(std::vector<Missed>())) {
    const TensorId id = id_of(one.name);
    for (const int r : table_.late(one.slot)) late.push_back({id, world_.rank(r).rank_of_world});
    const auto known = tensors_.find(id);
    mark_late(id, one.slot, known == tensors_.end() ? nullptr : &known->second);
  }
  const Observed observed = world_.host < kObservers ? observed_[world_.host] : Observed();
  send_all(RecordKind::kBeat, has_failed ? world_.failure.code() : ErrorCode::kOk,
           has_failed ? world_.failure.fact() : std::string(), chunks_.arrived(), n_ready_, left, late, told(late),
           observed.compared, observed.by_rank);
  sent_left_ = static_cast<std::uint32_t>(left.size());
  has_sent_end_ = has_failed || left.size() == ranks_[world_.host].size();
}

std::vector<Link::Told> Link::told(const std::vector<LateRank>& late) {
  std::vector<Told> all;
  for (const int rank : ranks_[world_.host]) {
    const Member& own = world_.member(rank);
    const Counts& counts = own.counts;
    // Relaxed, all: sent again.
    Told one{own.doing.waits.load(std::memory_order_relaxed),
             counts.operations.load(std::memory_order_relaxed),
             counts.bytes.load(std::memory_order_relaxed),
             static_cast<std::uint64_t>(counts.waited.load(std::memory_order_relaxed)),
             {}};
    const auto is_it = [rank](const LateRank& each) { return each.rank == rank; };
    const bool is_late = std::any_of(late.begin(), late.end(), is_it);
    if (is_late && Liveness::is_stopped(world_, own.local_rank)) one.waits = kStopped;
    own.doing.text.read().copy(one.text.data(), one.text.size());
    all.push_back(one);
  }
  return all;
}

// Relaxed, all: for messages, figures and deadlines, which are looked at again and again.
void Link::note_told(int host, const std::vector<Told>& told) {
  for (std::size_t i = 0; i < told.size(); ++i) {
    Member& of = world_.member(ranks_[host][i]);
    of.doing.waits.store(static_cast<std::uint32_t>(told[i].waits), std::memory_order_relaxed);
    of.doing.text.write({told[i].text.data(), strnlen(told[i].text.data(), told[i].text.size())});
    of.counts.operations.store(told[i].operations, std::memory_order_relaxed);
    of.counts.bytes.store(told[i].bytes, std::memory_order_relaxed);
    of.counts.waited.store(static_cast<std::int64_t>(told[i].waited), std::memory_order_relaxed);
  }
}

void Link::note_observed() {
  for (int rank = 0; rank < world_.size; ++rank) {
    std::uint64_t compared = 0, last = 0, behind = 0;
    for (const Observed& one : observed_) {
      compared += one.compared;
      last += one.by_rank[rank][0];
      behind += one.by_rank[rank][1];
    }
    Counts& of = world_.member(rank).counts;
    of.compared.store(compared, std::memory_order_relaxed);
    of.last.store(last, std::memory_order_relaxed);
    of.behind.store(static_cast<std::int64_t>(behind), std::memory_order_relaxed);
  }
}

void Link::on_beat(int host, RecordReader& record) {
  Peer& peer = peers_.at(host);
  Abort abort{ErrorCode::kOk, {}, 0, {}, Patience(kAbort)};
  std::vector<int> left;
  std::vector<LateRank> late;
  std::vector<Told> told;
  Observed observed;
  record.get(abort.error, abort.text, abort.arrived, abort.n_ready, left, late, told, observed.compared,
             observed.by_rank);
  const auto is_there = [&](int rank) { return rank >= 0 && rank < world_.size && world_.member(rank).host == host; };
  expect(static_cast<int>(abort.error) < kErrorCodes && abort.n_ready.size() == n_ready_.size());
  expect(abort.error == ErrorCode::kOk || Status(abort.error, "").latches());
  expect(std::all_of(left.begin(), left.end(), is_there));
  expect(std::all_of(late.begin(), late.end(), [&](const LateRank& one) { return is_there(one.rank); }));
  const auto is_chain = [](const Told& one) { return one.waits <= kMostWaits || one.waits == kStopped; };
  expect(told.size() == ranks_[host].size() && std::all_of(told.begin(), told.end(), is_chain));
  expect(observed.by_rank.size() == (host < kObservers ? static_cast<std::size_t>(world_.size) : 0));
  note_told(host, told);
  if (host < kObservers) observed_[host] = std::move(observed);
  note_observed();
  peer.left = std::move(left);
  peer.late = std::move(late);
  peer.has_left = peer.left.size() == ranks_[host].size();
  if (abort.error == ErrorCode::kOk || peer.has_failed) return;
  peer.has_failed = true;
  if (!abort_) abort_ = std::move(abort);
}

void Link::fail(const std::string& fact) {
  if (abort_) alarm_.raise(abort_->error, abort_->text);  // it was first
  alarm_.raise(ErrorCode::kTransport, fact);
  if (after_failure_) is_over_ = true;  // a second failure: it cannot be sent
  if (!after_failure_) after_failure_.emplace(2 * kAbort);
}

// A connection has ended; not an error when its host's ranks have all left, or it has sent its failure.
void Link::lose(int host, const std::string& why) {
  Peer& peer = peers_.at(host);
  if (peer.has_left || peer.has_failed) return;
  peer.has_failed = true;
  alarm_.raise(ErrorCode::kPeerLost, describe_host(world_, host) + " is lost: the connection to it has ended (" + why +
                                         ")\n  Fix: see whether that host is up, and what its workers have printed");
}

// Ignores what the host sends from now on, and does not wait for it.
void Link::distrust(int host, const char* what) {
  Peer& peer = peers_.at(host);
  peer.mail.ignore();
  peer.has_failed = true;
  alarm_.raise(ErrorCode::kTransport,
               describe_host(world_, host) + " sent what is no record of this version of kvstore_hvd (" +
                   std::string(what) +
                   ")\n  Fix: install the same version on every host; if it is, something else writes into the "
                   "traffic between hosts, see Security in docs/elastic.md");
}

// As soon as everything that is complete on the host that failed is complete here.
void Link::raise_abort() {
  if (world_.failure.is_set()) return;
  bool is_late = chunks_.arrived() < abort_->arrived;
  for (int host = 0; host < world_.hosts; ++host) is_late = is_late || n_ready_[host] < abort_->n_ready[host];
  if (!is_late || abort_->patience.is_over()) alarm_.raise(abort_->error, abort_->text);
}

void Link::look(Clock::time_point now) {
  // Acquire, both: what happened before.
  const bool has_failed = world_.failure.is_set();
  const bool has_news = has_failed || world_.left.load(std::memory_order_acquire) > sent_left_;
  if (!has_sent_end_ && (has_news || now - beat_ >= kBeat)) {
    beat_ = now;
    send_beat();
  }
  if (has_failed) return;
  const std::chrono::nanoseconds asked_at(world_.asked_at.load(std::memory_order_relaxed));  // a hint
  const bool asks = now.time_since_epoch() - asked_at < kPatience;
  const bool is_due = now - looked_ >= kLook;
  if (!is_due && !asks) return;
  // By host: the number of the patient operation in which its ranks wait, see is_patient(). Later announcements of that
  // host are not announced early before it is over.
  std::vector<std::uint64_t> waits_since(world_.hosts, std::numeric_limits<std::uint64_t>::max());
  for (const auto& [id, tensor] : tensors_) {
    if (!is_patient(tensor.name)) continue;
    for (int host = 0; host < world_.hosts; ++host) {
      const auto& one = tensor.by_host[host];
      if (!one.empty()) waits_since[host] = std::min(waits_since[host], one.front().number);
    }
  }
  for (auto& [id, tensor] : tensors_) {
    const bool is_old = now - tensor.since >= kPatience;
    if (tensor.slot == kNoSlot) {
      if (!tensor.is_early && (asks || is_old)) announce_early(tensor, waits_since);
    } else if (is_due) {
      if (is_old) mark_late(id, tensor.slot, &tensor);
      check_left(tensor);
    }
  }
  if (!is_due) return;
  looked_ = now;
  check_peers();
}

void Link::hear() {
  for (auto& [host, peer] : peers_) {
    const bool has_bytes = transport_->has_received(host), has_message = chunks_.has_received(host);
    has_received_ = has_received_ || has_bytes;
    if (has_bytes || has_message || peer.mail.has_received()) peer.silence = Patience(options_.silence);
  }
}

void Link::check_peers() {
  for (auto& [host, peer] : peers_) {
    if (peer.has_left || peer.has_failed) continue;
    peer.mail.greet();  // what was sent before may have been for an earlier attempt of that host
    const Mail::State state = peer.mail.state();
    if (state == Mail::State::kOtherBuild) {
      return alarm_.raise(ErrorCode::kTransport,
                          describe_host(world_, host) + " and " + describe_host(world_, world_.host) +
                              " run different versions of kvstore_hvd, or with other settings\n  Fix: install the same "
                              "version on every host, and set KVHVD_LINK_COMPRESSION and KVHVD_THRESHOLDS alike");
    }
    if (state == Mail::State::kStartedOver) {
      return alarm_.raise(ErrorCode::kPeerLost, describe_host(world_, host) + " could not join, and started over");
    }
    if (state == Mail::State::kMet && peer.silence.is_over()) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(options_.silence).count();
      return alarm_.raise(ErrorCode::kPeerLost,
                          describe_host(world_, host) + " has not been heard of for " + std::to_string(seconds) +
                              " s by " + describe_host(world_, world_.host) +
                              "\n  Fix: see whether that host, its first rank and the network are up; "
                              "KVHVD_LINK_TIMEOUT (seconds) allows longer silences");
    }
  }
}

// A rank that has left has completed all that it had announced. So it will never take part in an operation that its
// host has not announced by then. For a host that has failed see raise_abort().
void Link::check_left(const Tensor& tensor) {
  for (const auto& [host, peer] : peers_) {
    if (!tensor.by_host[host].empty() || peer.left.empty() || peer.has_failed) continue;
    const Announcement& own = world_.announcement(tensor.slot, 0);
    const std::string operation = std::string(name_of(own.signature.collective)) + " " + own.note;
    const std::string leaver = describe_member(world_, peer.left.front());
    return alarm_.raise(ErrorCode::kPeerLost, Messages::left_early(leaver, rank_name(world_, 0), operation));
  }
}

// Marks the ranks elsewhere that have not announced the operation; all of a host, unless its last BEAT says which.
void Link::mark_late(const TensorId& id, std::uint32_t slot, const Tensor* tensor) {
  std::atomic<std::uint64_t>* const bits = world_.late(slot);
  // Relaxed, all: for messages; written by the link only.
  for (std::uint64_t i = 0; i < world_.layout.late_words; ++i) bits[i].store(0, std::memory_order_relaxed);
  for (const auto& [host, peer] : peers_) {
    if (tensor != nullptr && !tensor->by_host[host].empty()) continue;
    std::vector<int> late;
    for (const LateRank& one : peer.late) {
      if (one.id == id) late.push_back(one.rank);
    }
    for (const int rank : late.empty() ? ranks_[host] : late) {
      bits[rank / 64].fetch_or(std::uint64_t{1} << (rank % 64), std::memory_order_relaxed);
    }
  }
}

void Link::announce_early(Tensor& tensor, const std::vector<std::uint64_t>& waits_since) {
  for (std::size_t host = 0; host < tensor.by_host.size(); ++host) {
    const auto& one = tensor.by_host[host];
    if (one.empty() || one.front().number > waits_since[host]) continue;
    tensor.is_early = table_.announce_early(tensor.name, one.front().announcement).has_value();
    return;
  }
}

// A link may end once every peer knows that its ranks have left, or that it has failed.
bool Link::may_end() {
  const bool has_failed = world_.failure.is_set();
  if (has_failed && !after_failure_) after_failure_.emplace(2 * kAbort);
  if (has_failed && after_failure_->is_over()) return true;
  if (!has_sent_end_ || !(has_failed || chunks_.is_empty())) return false;
  return std::all_of(peers_.begin(), peers_.end(), [&](const auto& each) {
    const Peer& peer = each.second;
    return (peer.has_left || (has_failed && peer.has_failed)) && peer.mail.has_sent_all();
  });
}

}  // namespace kvstore_hvd

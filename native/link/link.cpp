#include "link/link.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "shm/liveness.hpp"

namespace kvstore_hvd {
namespace {

// Bytes ordered and not yet arrived everywhere: what a tensor of higher priority may have to wait for. With less the
// network would wait for the next order.
constexpr std::uint64_t kWindow = std::uint64_t{4} << 20;
constexpr int kConductor = 0;
constexpr std::uint64_t kAlong = std::uint64_t{64} << 10;  // see rides_along()
constexpr std::chrono::milliseconds kBeat{500}, kLook{100};
// How old an operation is before a link announces it early, and marks the late ranks.
constexpr std::chrono::milliseconds kPatience{500};
// Limit on sending a failure to the others, and on completing what is complete on the host that failed.
constexpr std::chrono::seconds kAbort{1};

constexpr std::uint64_t kMostBytes = std::numeric_limits<std::ptrdiff_t>::max();  // of an array

// Where a rank's array lies: in its arena, or with its announcement.
char* array_of(World& world, std::uint32_t slot, int rank, std::size_t bytes) {
  const std::uint64_t place = world.mark(slot, rank).place;
  return place == kNoPlace ? world.payload(slot, rank, bytes) : world.arena(rank) + place;
}

// Whether the host's sum goes with the announcement: always if the ranks' announcements carry it, else if all arrays
// lie in arenas, and a hop less is worth more than the bytes.
bool rides_along(World& world, std::uint32_t slot, const Signature& signature) {
  if (signature.collective != Collective::kAllreduce || signature.on_device != 0) return false;
  const std::uint64_t bytes = bytes_of(signature);
  if (bytes <= world.thresholds.inlined) return true;
  if (bytes * static_cast<std::uint64_t>(world.hosts - 1) > kAlong || world.is_narrow_on_link(signature) ||
      bytes * static_cast<std::uint64_t>(world.ranks) > world.thresholds.inlined_direct) {
    return false;
  }
  for (int r = 0; r < world.ranks; ++r) {
    if (world.mark(slot, r).place == kNoPlace) return false;
  }
  return true;
}

}  // namespace

Link::Link(std::shared_ptr<Segment> segment, std::shared_ptr<Transport> transport, const LinkOptions& options)
    : segment_(std::move(segment)), transport_(std::move(transport)), options_(options) {
  for (int rank = 0; rank < world_.size; ++rank) ranks_[world_.member(rank).host].push_back(rank);
  for (int host = 0; host < world_.hosts; ++host) {
    if (host != world_.host) peers_.try_emplace(host, *transport_, host, options);
  }
  for (Observed& one : observed_) one.by_rank.resize(static_cast<std::size_t>(world_.size));
  world_.link_dtype = options.dtype;
  // Relaxed: ranks look again and again, see Watcher.
  world_.link_silence_ns.store(options.silence.count(), std::memory_order_relaxed);
}

std::vector<int> Link::missing() const {
  std::vector<int> ranks;
  for (const auto& [host, peer] : peers_) {
    if (peer.mail.state() < Mail::State::kMet) ranks.insert(ranks.end(), ranks_[host].begin(), ranks_[host].end());
  }
  return ranks;
}

bool Link::step(Clock::time_point now) {
  world_.link_steps.fetch_add(1, std::memory_order_relaxed);  // for Watcher, which looks again
  if (is_over_) return false;
  bool moved = false;
  int from = 0;
  try {
    for (auto& each : peers_) {
      const int host = each.first;
      const auto handle_one = [this, host](RecordKind kind, RecordReader record) { handle(host, kind, record); };
      from = host;
      if (each.second.mail.progress(handle_one)) moved = true;
    }
    from = kConductor;  // of orders
    while (const auto slot = world_.link().inbox.get(taken_)) {
      ++taken_;
      announced_here(*slot, now);
      moved = true;
    }
    while (publish_next()) moved = true;
    if (chunks_.progress(!has_sent_end_)) moved = true;
    hear();
    if (abort_) raise_abort();
    look(now);
  } catch (const TransportError& error) {
    if (error.kind == TransportError::Kind::kLost) {
      lose(error.host, error.what());
      return true;
    }
    if (error.kind == TransportError::Kind::kForeign) {
      distrust(error.host, error.what());
      return true;
    }
    const std::string who = error.host < 0 ? "another host" : describe_host(world_, error.host);
    fail("a message to or from " + who + " failed (" + error.what() +
         ")\n  Fix: see whether its workers live, and what they have printed");
  } catch (const ForeignRecord& error) {
    distrust(from, error.what());
    return true;
  } catch (const std::exception& error) {
    fail("the link of " + describe_host(world_, world_.host) + " failed (" + error.what() + ")");
  }
  if (may_end()) is_over_ = true;
  return moved;
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

bool Link::close() {
  bool is_idle = true;
  try {
    for (auto& [host, peer] : peers_) is_idle = peer.mail.close() && is_idle;
    return chunks_.close() && is_idle;
  } catch (const TransportError&) {
    return false;
  }
}

Link::Tensor& Link::tensor(const TensorId& id, std::string_view name, Clock::time_point now) {
  const auto [found, is_new] = tensors_.try_emplace(id);
  Tensor& tensor = found->second;
  if (is_new) {
    tensor.name = name;
    tensor.by_host.resize(static_cast<std::size_t>(world_.hosts));
    tensor.since = now;
  }
  return tensor;
}

// -- Announcements --------------------------------------------------------------------------------------------------

void Link::announced_here(std::uint32_t slot, Clock::time_point now) {
  const std::string_view name(world_.slots[slot].name, world_.slots[slot].name_length);
  const TensorId id = id_of(name);
  ids_[slot] = id;
  Tensor& tensor = this->tensor(id, name, now);
  tensor.slot = slot;
  tensor.since = now;
  HostAnnouncement own{};
  own.announcement = world_.announcement(slot, 0);
  own.last = world_.rank(world_.slots[slot].last).rank_of_world;
  for (int r = 0; r < world_.ranks; ++r) own.weights.add(world_.mark(slot, r).weight);
  const Signature& signature = own.announcement.signature;
  if (!table_.all_announced_the_same(slot)) own.by_rank = kvstore_hvd::announced_here(world_, slot);
  const std::size_t bytes = bytes_of(signature);
  own.is_inline = own.by_rank.empty() && rides_along(world_, slot, signature);
  if (own.is_inline && bytes > 0) {
    own.sum.resize(bytes);
    std::vector<const void*> inputs;
    for (int r = 0; r < world_.ranks; ++r) inputs.push_back(array_of(world_, slot, r, bytes));
    void* sum = own.sum.data();
    reduce(reduction_within_host(signature), inputs.data(), world_.ranks, &sum, 1, signature.count);
  }
  send_all(RecordKind::kReady, tensor.name, own.announcement, own.weights, own.is_inline, own.by_rank, own.sum,
           own.last);
  add(id, tensor, world_.host, std::move(own));
}

void Link::add(const TensorId& id, Tensor& tensor, int host, HostAnnouncement ready) {
  ready.number = ++n_ready_[host];
  ready.at = Clock::now();
  tensor.by_host[host].push_back(std::move(ready));
  const auto is_empty = [](const auto& one) { return one.empty(); };
  if (tensor.by_host[host].size() == 1 && std::none_of(tensor.by_host.begin(), tensor.by_host.end(), is_empty)) {
    all_announced(id, tensor);
  }
}

void Link::all_announced(const TensorId& id, Tensor& tensor) {
  observe(tensor);
  const auto is_inline = [](const auto& one) { return one.front().is_inline; };
  if (!is_the_same(tensor)) {
    disagree(tensor);
    end(id);
  } else if (std::all_of(tensor.by_host.begin(), tensor.by_host.end(), is_inline)) {
    const std::uint32_t slot = tensor.slot;
    carry_out(tensor);
    end(id);
    table_.close_operation(slot);
    tell_inline(world_, slot, world_.ranks);
  } else {
    table_.agree_over_hosts(tensor.slot, weights(tensor));
    tensor.is_agreed = true;
    if (world_.host == kConductor) schedule_.add(tensor.slot, world_.slots[tensor.slot].priority);
  }
}

bool Link::is_the_same(const Tensor& tensor) const {
  const Signature& first = tensor.by_host[0].front().announcement.signature;
  return std::all_of(tensor.by_host.begin(), tensor.by_host.end(), [&](const auto& one) {
    const Signature& signature = one.front().announcement.signature;
    return one.front().by_rank.empty() && std::memcmp(&signature, &first, sizeof(first)) == 0;
  });
}

// As World::weights(), over hosts.
double Link::weights(const Tensor& tensor) const {
  WeightSums sums{};
  for (const auto& one : tensor.by_host) sums.add(one.front().weights);
  return sums.total();
}

// Counts who came last. A host that comes late itself may have read the others' announcements late.
void Link::observe(const Tensor& tensor) {
  std::vector<std::pair<Clock::time_point, std::int32_t>> arrivals;
  for (const auto& one : tensor.by_host) arrivals.emplace_back(one.front().at, one.front().last);
  std::sort(arrivals.begin(), arrivals.end());
  const auto [at, rank] = arrivals.back();
  if (world_.host != (world_.member(rank).host == kConductor ? 1 : kConductor)) return;
  Observed& own = observed_[world_.host];
  ++own.compared;
  ++own.by_rank[rank][0];
  own.by_rank[rank][1] += std::chrono::nanoseconds(at - arrivals[(arrivals.size() - 1) / 2].first).count();
}

void Link::carry_out(Tensor& tensor) {
  const std::uint32_t slot = tensor.slot;
  const Signature& agreed = world_.announcement(slot, 0).signature;
  const std::size_t bytes = bytes_of(agreed);
  world_.slots[slot].error = 0;
  if (bytes == 0) return;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (const auto& one : tensor.by_host) inputs.push_back(one.front().sum.data());
  for (int r = 0; r < world_.ranks; ++r) outputs.push_back(array_of(world_, slot, r, bytes));
  reduce(reduction_over_hosts(agreed, weights(tensor)), inputs.data(), world_.hosts, outputs.data(), world_.ranks,
         agreed.count);
}

// The text is the same on all hosts.
void Link::disagree(Tensor& tensor) {
  std::vector<AnnouncedBy> all;
  for (int host = 0; host < world_.hosts; ++host) {
    const HostAnnouncement& ready = tensor.by_host[host].front();
    all.insert(all.end(), ready.by_rank.begin(), ready.by_rank.end());
    if (!ready.by_rank.empty()) continue;
    for (const int rank : ranks_[host]) all.push_back({world_.member(rank).rank_of_all, ready.announcement});
  }
  std::sort(all.begin(), all.end(), [](const AnnouncedBy& a, const AnnouncedBy& b) { return a.rank < b.rank; });
  const Disagreement why = describe_disagreement(world_, all);
  table_.agree_over_hosts(tensor.slot, 0.0);
  table_.disagree(tensor.slot, why.code, why.text);
  failing_.push_back(tensor.slot);
}

// The operation that all hosts have announced is published, or over.
void Link::end(const TensorId& id) {
  const auto found = tensors_.find(id);
  Tensor& tensor = found->second;
  bool is_idle = true;
  for (auto& one : tensor.by_host) {
    one.pop_front();
    is_idle = is_idle && one.empty();
  }
  tensor.slot = kNoSlot;
  tensor.is_agreed = tensor.is_early = false;
  tensor.since = Clock::now();
  if (is_idle) tensors_.erase(found);
}

// -- The schedule ---------------------------------------------------------------------------------------------------

bool Link::publish_next() {
  if (!chunks_.has_room() || world_.failure.is_set()) return false;
  Entry entry{};
  if (!failing_.empty()) {
    entry.algorithm = Algorithm::kFail;
    entry.n_pieces = 1;
    entry.pieces[0].slot = failing_.front();
    failing_.pop_front();
  } else if (world_.host == kConductor) {
    if (chunks_.bytes_under_way() >= kWindow) return false;
    const auto decision = schedule_.decide(entry);
    if (!decision) return false;
    Schedule::remove(*decision);
    send_order(entry);
  } else {
    if (orders_.empty()) return false;
    const Order& order = orders_.front();
    entry = order.entry;
    for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
      const auto found = tensors_.find(order.ids[i]);
      // The announcement of a third host may be on its way to this one.
      if (found == tensors_.end() || !found->second.is_agreed) return false;
      entry.pieces[i].slot = found->second.slot;
    }
    orders_.pop_front();
    expect(schedule_.follow(entry));
  }
  publish(entry);
  return true;
}

void Link::publish(const Entry& entry) {
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    const bool is_failed = entry.algorithm == Algorithm::kFail;
    const bool is_last = piece.offset + piece.bytes == world_.slots[piece.slot].bytes;
    if (!is_failed && is_last) end(ids_[piece.slot]);
    // Ranks may announce the next operation as soon as they see this.
    if (is_failed || piece.offset == 0) table_.close_operation(piece.slot);
  }
  chunks_.publish(entry);
}

void Link::send_order(const Entry& entry) {
  const std::vector<Piece> pieces(entry.pieces, entry.pieces + entry.n_pieces);
  std::vector<TensorId> ids;
  for (const Piece& piece : pieces) ids.push_back(ids_[piece.slot]);
  send_all(RecordKind::kOrder, entry.algorithm, entry.root, entry.staged_bytes, pieces, ids);
}

// -- Records --------------------------------------------------------------------------------------------------------

void Link::handle(int host, RecordKind kind, RecordReader& record) {
  switch (kind) {
    case RecordKind::kReady: {
      std::string name;
      HostAnnouncement ready;
      record.get(name, ready.announcement, ready.weights, ready.is_inline, ready.by_rank, ready.sum, ready.last);
      check_ready(host, name, ready);
      const TensorId id = id_of(name);
      return add(id, tensor(id, name, Clock::now()), host, std::move(ready));
    }
    case RecordKind::kOrder:
      return on_order(host, record);
    case RecordKind::kBeat:
      return on_beat(host, record);
  }
  throw ForeignRecord();
}

void Link::check_ready(int host, std::string_view name, const HostAnnouncement& ready) {
  const std::vector<int>& ranks = ranks_[host];
  const auto check_one = [this](const Announcement& one) {
    const Signature& signature = one.signature;
    expect(static_cast<int>(signature.collective) < kCollectives && static_cast<int>(signature.op) < kReduceOps);
    expect(static_cast<int>(signature.dtype) < kDTypes && signature.root >= 0 && signature.root < world_.size);
    expect(signature.failed <= 1 && signature.as_half <= 1 && signature.on_device <= 1 && one.of_parameter <= 1);
    expect(signature.count <= kMostBytes / size_of(signature.dtype));
    expect(std::memchr(one.note, '\0', sizeof(one.note)) != nullptr);
  };
  const Signature& signature = ready.announcement.signature;
  expect(name.size() <= kMaxName);
  expect(std::count(ranks.begin(), ranks.end(), ready.last) == 1);
  check_one(ready.announcement);
  expect(ready.weights.sum >= 0.0 && ready.weights.present <= ranks.size());
  expect(ready.weights.absent <= ranks.size() - ready.weights.present);
  expect(ready.by_rank.empty() || ready.by_rank.size() == ranks.size());
  for (const AnnouncedBy& one : ready.by_rank) {
    expect(std::any_of(ranks.begin(), ranks.end(), [&](int r) { return world_.member(r).rank_of_all == one.rank; }));
    check_one(one.announcement);
  }
  const bool can_be_inline =
      ready.by_rank.empty() && signature.collective == Collective::kAllreduce && signature.on_device == 0;
  expect(can_be_inline || !ready.is_inline);
  expect(ready.sum.size() == (ready.is_inline ? bytes_of(signature) : 0));
}

void Link::on_order(int host, RecordReader& record) {
  Order order{};
  std::vector<Piece> pieces;
  record.get(order.entry.algorithm, order.entry.root, order.entry.staged_bytes, pieces, order.ids);
  expect(host == kConductor && !pieces.empty() && pieces.size() <= kPieces && pieces.size() == order.ids.size());
  order.entry.n_pieces = static_cast<std::uint32_t>(pieces.size());
  std::copy(pieces.begin(), pieces.end(), order.entry.pieces);
  for (const TensorId& id : order.ids) {
    const auto found = tensors_.find(id);
    expect(found != tensors_.end() && !found->second.by_host[host].empty());  // it was announced there first
  }
  orders_.push_back(std::move(order));
}

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
    for (const int r : table_.late(one.slot)) late.push_back({id_of(one.name), world_.rank(r).rank_of_world});
  }
  const Observed observed = world_.host < kObservers ? observed_[world_.host] : Observed();
  send_all(RecordKind::kBeat, has_failed ? world_.failure.code() : ErrorCode::kOk,
           has_failed ? world_.failure.fact() : std::string(), chunks_.arrived(), n_ready_, left, late, behind(late),
           figures(), observed.compared, observed.by_rank);
  sent_left_ = static_cast<std::uint32_t>(left.size());
  has_sent_end_ = has_failed || left.size() == ranks_[world_.host].size();
}

std::vector<Link::Behind> Link::behind(const std::vector<LateRank>& late) {
  std::vector<Behind> all;
  for (int r = 0; r < world_.ranks; ++r) {
    const int rank = world_.rank(r).rank_of_world;
    const Doing& doing = world_.member(rank).doing;
    Behind one{rank, doing.waits.load(std::memory_order_relaxed), {}};  // Relaxed: sent again
    const auto is_it = [&one](const LateRank& each) { return each.rank == one.rank; };
    const bool is_late = std::any_of(late.begin(), late.end(), is_it);
    if (!is_late && one.waits == 0) continue;
    if (is_late && Liveness::is_stopped(world_, r)) one.waits = kStopped;
    const std::string text = doing.text.read();
    text.copy(one.text.data(), one.text.size());
    all.push_back(one);
  }
  return all;
}

std::vector<Link::Figures> Link::figures() {
  std::vector<Figures> all;
  for (const int rank : ranks_[world_.host]) {
    const Counts& of = world_.member(rank).counts;
    // Relaxed, all: sent again.
    all.push_back({of.operations.load(std::memory_order_relaxed), of.bytes.load(std::memory_order_relaxed),
                   static_cast<std::uint64_t>(of.waited.load(std::memory_order_relaxed))});
  }
  return all;
}

void Link::note_figures(int host, const std::vector<Figures>& figures) {
  for (std::size_t i = 0; i < figures.size(); ++i) {
    Counts& of = world_.member(ranks_[host][i]).counts;
    of.operations.store(figures[i][0], std::memory_order_relaxed);
    of.bytes.store(figures[i][1], std::memory_order_relaxed);
    of.waited.store(static_cast<std::int64_t>(figures[i][2]), std::memory_order_relaxed);
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

void Link::note_behind(int host, const std::vector<Behind>& behind) {
  // Relaxed, all: for messages and deadlines, which are looked at again and again.
  for (const int rank : ranks_[host]) {
    const auto is_it = [rank](const Behind& one) { return one.rank == rank; };
    const auto told = std::find_if(behind.begin(), behind.end(), is_it);
    Doing& doing = world_.member(rank).doing;
    doing.waits.store(told == behind.end() ? 0 : told->waits, std::memory_order_relaxed);
    if (told != behind.end()) doing.text.write({told->text.data(), strnlen(told->text.data(), told->text.size())});
  }
}

void Link::on_beat(int host, RecordReader& record) {
  Peer& peer = peers_.at(host);
  Abort told{ErrorCode::kOk, {}, 0, {}, Patience(kAbort)};
  std::vector<int> left;
  std::vector<LateRank> late;
  std::vector<Behind> behind;
  std::vector<Figures> figures;
  Observed observed;
  record.get(told.error, told.text, told.arrived, told.n_ready, left, late, behind, figures, observed.compared,
             observed.by_rank);
  const auto is_there = [&](int rank) { return rank >= 0 && rank < world_.size && world_.member(rank).host == host; };
  expect(static_cast<int>(told.error) < kErrorCodes && told.n_ready.size() == n_ready_.size());
  expect(told.error == ErrorCode::kOk || Status(told.error, "").latches());
  expect(std::all_of(left.begin(), left.end(), is_there));
  expect(std::all_of(late.begin(), late.end(), [&](const LateRank& one) { return is_there(one.rank); }));
  expect(std::all_of(behind.begin(), behind.end(), [&](const Behind& one) {
    return is_there(one.rank) && (one.waits <= kMostWaits || one.waits == kStopped);
  }));
  expect(figures.size() == ranks_[host].size());
  expect(observed.by_rank.size() == (host < kObservers ? static_cast<std::size_t>(world_.size) : 0));
  note_behind(host, behind);
  note_figures(host, figures);
  if (host < kObservers) observed_[host] = std::move(observed);
  note_observed();
  peer.left = std::move(left);
  peer.late = std::move(late);
  peer.has_left = peer.left.size() == ranks_[host].size();
  if (told.error == ErrorCode::kOk || peer.has_failed) return;
  peer.has_failed = true;
  if (!abort_) abort_ = std::move(told);
}

// As soon as everything that is complete on the host that failed is complete here.
void Link::raise_abort() {
  if (world_.failure.is_set()) return;
  bool is_late = chunks_.arrived() < abort_->arrived;
  for (int host = 0; host < world_.hosts; ++host) is_late = is_late || n_ready_[host] < abort_->n_ready[host];
  if (!is_late || abort_->patience.is_over()) alarm_.raise(abort_->error, abort_->text);
}

// -- Watching the other hosts ---------------------------------------------------------------------------------------

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
      if (is_old) mark_late(id, tensor);
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
void Link::mark_late(const TensorId& id, const Tensor& tensor) {
  std::atomic<std::uint64_t>* const bits = world_.late(tensor.slot);
  // Relaxed, all: for messages; written by the link only.
  for (std::uint64_t i = 0; i < world_.layout.late_words; ++i) bits[i].store(0, std::memory_order_relaxed);
  for (const auto& [host, peer] : peers_) {
    if (!tensor.by_host[host].empty()) continue;
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

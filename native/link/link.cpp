#include "link/link.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace kvstore_hvd {
namespace {

// Bytes ordered and not yet arrived everywhere: what a tensor of higher priority may have to wait for. With less the
// network would wait for the next order.
constexpr std::uint64_t kWindow = std::uint64_t{4} << 20;
constexpr int kConductor = 0;
constexpr std::uint64_t kAlong = std::uint64_t{64} << 10;  // see rides_along()

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
    if (is_patient(name)) ++patient_;
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

// Counts who came last. A host that comes late itself may have read the others' announcements late. A rank without
// input left is late in all that follows.
void Link::observe(const Tensor& tensor) {
  if (patient_ > 0) return;
  std::vector<std::pair<Clock::time_point, std::int32_t>> arrivals;
  for (const auto& one : tensor.by_host) arrivals.emplace_back(one.front().at, one.front().last);
  std::sort(arrivals.begin(), arrivals.end());
  const auto [at, rank] = arrivals.back();
  Observed& own = observed_[world_.host];
  if (world_.host == kConductor) ++own.compared;
  if (world_.host != (world_.member(rank).host == kConductor ? 1 : kConductor)) return;
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
  if (!is_idle) return;
  if (is_patient(tensor.name)) --patient_;
  tensors_.erase(found);
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

}  // namespace kvstore_hvd

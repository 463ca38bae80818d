#include "link/link.hpp"

#include <algorithm>
#include <string>
#include <thread>

#include "base/running_time.hpp"
#include "reduce/reduce.hpp"
#include "shm/describe.hpp"

namespace kvstore_hvd {
namespace {

using Clock = std::chrono::steady_clock;

// How long the link looks on after the last news, and then how often it looks while something is under way, and else.
constexpr std::chrono::microseconds kSpin{20}, kBusyLook{100};
constexpr std::chrono::milliseconds kIdleLook{1};
// For the others to hear that the world has failed.
constexpr std::chrono::seconds kAbort{1};

// What a host's ranks contribute, and then all hosts; as those of Request.
Reduction within_host(const Signature& agreed) {
  return {agreed.dtype, agreed.op, agreed.prescale, 1.0, agreed.as_half != 0};
}
Reduction over_hosts(const Signature& agreed, double weights) {
  const bool divides = agreed.op == ReduceOp::kAverage && weights != 0.0;
  return {agreed.dtype, agreed.op, 1.0, divides ? agreed.postscale / weights : agreed.postscale, agreed.as_half != 0};
}

std::size_t bytes_of(const Signature& signature) { return signature.count * size_of(signature.dtype); }

WeightSums weights_of(World& world, std::uint32_t slot) {
  WeightSums sums{};
  for (int r = 0; r < world.ranks; ++r) {
    const double weight = world.mark(slot, r).weight;
    if (weight < 0.0) {
      ++sums.absent;
    } else {
      sums.sum += weight;
      sums.present += weight > 0.0 ? 1 : 0;
    }
  }
  return sums;
}

// Where a rank's array lies: in its arena, or with its announcement.
char* array_of(World& world, std::uint32_t slot, int rank, std::size_t bytes) {
  const std::uint64_t place = world.mark(slot, rank).place;
  return place == kNoPlace ? world.payload(slot, rank, bytes) : world.arena(rank) + place;
}

}  // namespace

Link::Link(std::shared_ptr<Segment> segment, Transport& transport, std::chrono::nanoseconds timeout)
    : segment_(std::move(segment)),
      world_(segment_->world()),
      hosts_(world_, transport, timeout),
      conductor_(hosts_),
      stragglers_(hosts_),
      chunks_(world_, transport),
      inlined_(world_.hosts),
      knows_(world_.hosts),
      known_(kSlots) {}

void Link::run() {
  Flag& bell = world_.link().bell;
  try {
    auto last_news = Clock::now();
    for (;;) {
      const std::uint32_t seen = bell.value();
      const bool moved = step();
      if (world_.failure.is_set()) return abort();
      if (std::all_of(hosts_.has_left.begin(), hosts_.has_left.end(), [](bool left) { return left; }) &&
          std::all_of(hosts_.mails.begin(), hosts_.mails.end(), [](const auto& m) { return !m || m->is_sent(); })) {
        return;
      }
      const auto now = Clock::now();
      if (moved) last_news = now;
      if (now - last_news < kSpin) continue;
      const bool busy = !chunks_.is_empty() || !hosts_.tensors.empty();
      bell.wait_change(seen, WaitPolicy{}, busy ? kBusyLook : std::chrono::nanoseconds(kIdleLook), world_.failure);
    }
  } catch (const TransportError& error) {
    hosts_.alarm.raise(ErrorCode::kTransport, std::string("a message between hosts failed: ") + error.what());
  } catch (const WorldLost&) {
    abort();
  }
}

bool Link::step() {
  bool moved = false;
  for (int host = 0; host < world_.hosts; ++host) {
    if (hosts_.mails[host] == nullptr) continue;
    if (hosts_.mails[host]->progress([&](const char* record) { handle(host, record); })) moved = true;
  }
  while (const auto slot = world_.link().inbox.get(taken_)) {
    ++taken_;
    stragglers_.introduce();  // first: whose operation is complete here has been introduced
    announced_here(*slot);
    moved = true;
  }
  while (chunks_.has_room()) {
    std::optional<Entry> entry;
    if (hosts_.is_conductor()) {
      entry = conductor_.next(chunks_.bytes_under_way());
    } else if (!orders_.empty()) {
      entry = orders_.front();
      orders_.pop_front();
    }
    if (!entry) break;
    chunks_.publish(*entry);
    moved = true;
  }
  if (chunks_.progress()) moved = true;
  stragglers_.progress();
  if (abort_) raise_abort();
  say_goodbye();
  return moved;
}

const TensorId& Link::id_of_slot(std::uint32_t slot) {
  Known& known = known_[slot];
  // Relaxed: all ranks have announced, so the slot does not change hands.
  const auto version = static_cast<std::uint32_t>(world_.slots[slot].state.load(std::memory_order_relaxed) >> 32);
  if (!known.is_known || known.version != version) known = {version, true, id_of(name_on(world_, slot))};
  return known.id;
}

void Link::announced_here(std::uint32_t slot) {
  const TensorId& id = id_of_slot(slot);
  HostAnnouncements& tensor = hosts_.tensor(id);
  tensor.slot = slot;
  tensor.since = Clock::now();
  tensor.is_waiting = false;
  const Signature& signature = world_.announcement(slot, 0).signature;
  HostAnnouncement own;
  own.disagrees = !hosts_.table.all_announced_the_same(slot);
  own.digest = world_.mark(slot, 0).digest;
  own.weights = weights_of(world_, slot);
  own.priority = world_.slots[slot].priority;
  const std::size_t bytes = bytes_of(signature);
  own.is_inline = !own.disagrees && signature.collective == Collective::kAllreduce && signature.on_device == 0 &&
                  bytes <= world_.thresholds.inlined;
  if (own.is_inline && bytes > 0) {
    own.sum.resize(bytes);
    std::vector<const void*> inputs;
    for (int r = 0; r < world_.ranks; ++r) inputs.push_back(array_of(world_, slot, r, bytes));
    void* sum = own.sum.data();
    reduce(within_host(signature), inputs.data(), world_.ranks, &sum, 1, signature.count);
  }
  const auto write = [&](std::vector<char>& outgoing) {
    RecordWriter writer(outgoing);
    writer.put(ReadyRecord{{own.is_inline ? RecordKind::kInline : RecordKind::kReady, 0},
                           id,
                           own.digest,
                           own.weights,
                           own.priority,
                           own.disagrees ? 1U : 0U});
    if (own.is_inline) {
      const std::uint64_t length = own.sum.size();
      writer.put(length);
      writer.put(own.sum.data(), own.sum.size());
    }
    writer.end();
  };
  if (own.is_inline) {
    ++inlined_[world_.host];
    hosts_.to_all(write);
  } else if (!hosts_.is_conductor()) {
    write(hosts_.mails[kConductor]->outgoing());
    return;  // who else has announced is the conductor's
  }
  announced(id, world_.host, std::move(own));
}

void Link::announced(const TensorId& id, int host, HostAnnouncement one) {
  HostAnnouncements& tensor = hosts_.tensor(id);
  tensor.add(host, std::move(one));
  if (!tensor.all_are_here()) {
    if (hosts_.is_conductor()) conductor_.check_left();
    return;
  }
  if (tensor.is_inline() && tensor.is_the_same()) {
    carry_out(id);
  } else if (hosts_.is_conductor()) {
    conductor_.all_announced(id);
  }
}

void Link::carry_out(const TensorId& id) {
  HostAnnouncements& tensor = hosts_.tensor(id);
  const std::uint32_t slot = tensor.slot;
  const Signature& agreed = world_.announcement(slot, 0).signature;
  const std::size_t bytes = bytes_of(agreed);
  if (bytes > 0) {
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (const auto& one : tensor.by_host) inputs.push_back(one.front().sum.data());
    for (int r = 0; r < world_.ranks; ++r) outputs.push_back(array_of(world_, slot, r, bytes));
    reduce(over_hosts(agreed, tensor.weights()), inputs.data(), world_.hosts, outputs.data(), world_.ranks,
           agreed.count);
  }
  world_.slots[slot].error = 0;
  for (int host = 0; host < world_.hosts; ++host) tensor.drop(host);
  tensor.slot = kNoSlot;
  hosts_.forget_if_idle(id);
  hosts_.table.announce_for_others(slot);
  InlineReduction::tell(world_, slot, world_.ranks);
}

void Link::handle(int host, const char* record) {
  RecordReader reader(record);
  RecordHeader header;
  std::memcpy(&header, record, sizeof(header));
  switch (header.kind) {
    case RecordKind::kReady:
    case RecordKind::kInline: {
      const auto ready = reader.get<ReadyRecord>();
      HostAnnouncement one;
      one.digest = ready.digest;
      one.weights = ready.weights;
      one.priority = ready.priority;
      one.disagrees = ready.disagrees != 0;
      one.is_inline = header.kind == RecordKind::kInline;
      if (one.is_inline) {
        ++inlined_[host];
        const auto length = reader.get<std::uint64_t>();
        const char* const sum = reader.get(length);
        one.sum.assign(sum, sum + length);
      }
      return announced(ready.id, host, std::move(one));
    }
    case RecordKind::kOrder: {
      const auto order = reader.get<OrderRecord>();
      return ordered(reader, order);
    }
    case RecordKind::kAsk: {
      const auto ask = reader.get<AskRecord>();
      const auto all = kvstore_hvd::announced_here(world_, hosts_.tensor(ask.id).slot);
      RecordWriter writer(hosts_.mails[host]->outgoing());
      writer.put(TellRecord{{RecordKind::kTell, 0}, ask.id, all.size()});
      for (const AnnouncedBy& one : all) writer.put(one);
      return writer.end();
    }
    case RecordKind::kTell: {
      const auto tell = reader.get<TellRecord>();
      std::vector<AnnouncedBy> all;
      for (std::uint64_t i = 0; i < tell.n; ++i) all.push_back(reader.get<AnnouncedBy>());
      return conductor_.told(tell.id, host, std::move(all));
    }
    case RecordKind::kLeft: {
      const auto left = reader.get<LeftRecord>();
      const std::uint32_t slot = hosts_.tensor(left.id).slot;
      if (slot != kNoSlot) raise_left(hosts_, slot, static_cast<int>(left.host));
      return;
    }
    case RecordKind::kHello:
      return stragglers_.introduced(reader);
    case RecordKind::kEager:
      return stragglers_.has_asked();
    case RecordKind::kWaiting:
      return stragglers_.waited_for(reader);
    case RecordKind::kWanted:
      return stragglers_.wanted(reader);
    case RecordKind::kLate:
      return stragglers_.late(host, reader);
    case RecordKind::kAbort: {
      knows_[host] = true;
      const auto abort = reader.get<AbortRecord>();
      if (abort_) return;
      abort_.emplace(Abort{abort.error, reader.text(abort.text_bytes), abort.arrived, {}, Patience(kAbort)});
      const std::size_t bytes = inlined_.size() * sizeof(std::uint64_t);
      abort_->inlined.resize(inlined_.size());
      std::memcpy(abort_->inlined.data(), reader.get(bytes), bytes);
      return;
    }
    case RecordKind::kBye:
      return has_left(host);
  }
}

void Link::ordered(RecordReader reader, const OrderRecord& order) {
  const bool is_failed = order.algorithm == Algorithm::kFail;
  Entry entry{};
  entry.algorithm = order.algorithm;
  entry.root = order.root;
  entry.n_pieces = order.n_pieces;
  entry.staged_bytes = order.staged_bytes;
  TensorId id{};
  for (std::uint32_t i = 0; i < order.n_pieces; ++i) {
    const auto piece = reader.get<OrderedPiece>();
    id = piece.id;
    HostAnnouncements& tensor = hosts_.tensor(id);
    const std::uint32_t slot = tensor.slot;
    entry.pieces[i] = Piece{slot, static_cast<std::uint32_t>(piece.staged), piece.offset, piece.bytes};
    if (piece.offset == 0) hosts_.table.agree_over_hosts(slot, piece.weights);
    if (is_failed) continue;
    const bool is_last = piece.offset + piece.bytes == world_.slots[slot].bytes;
    if (is_last) tensor.slot = kNoSlot;
    if (piece.offset == 0) hosts_.table.announce_for_others(slot);
    if (is_last) hosts_.forget_if_idle(id);
  }
  if (is_failed) {
    HostAnnouncements& tensor = hosts_.tensor(id);
    const std::uint32_t slot = tensor.slot;
    hosts_.table.disagree(slot, order.error, reader.text(order.text_bytes));
    const char* const is_inline = reader.get(static_cast<std::size_t>(world_.hosts));
    for (int host = 0; host < world_.hosts; ++host) {
      if (is_inline[host] != 0) tensor.drop(host);
    }
    tensor.slot = kNoSlot;
    hosts_.forget_if_idle(id);
    hosts_.table.announce_for_others(slot);
  }
  orders_.push_back(entry);
}

void Link::say_goodbye() {
  if (hosts_.has_left[world_.host] || !chunks_.is_empty() || world_.failure.is_set()) return;
  // Acquire: what the ranks did before they left.
  if (world_.left.load(std::memory_order_acquire) != static_cast<std::uint32_t>(world_.ranks)) return;
  hosts_.to_all([](std::vector<char>& outgoing) {
    RecordWriter writer(outgoing);
    writer.put(RecordHeader{RecordKind::kBye, 0});
    writer.end();
  });
  has_left(world_.host);
}

void Link::has_left(int host) {
  hosts_.has_left[host] = true;
  if (hosts_.is_conductor()) conductor_.check_left();
}

// As soon as all is complete here that is where the world failed.
void Link::raise_abort() {
  const auto is_behind = [this](std::size_t host) { return inlined_[host] < abort_->inlined[host]; };
  bool is_late = chunks_.arrived() < abort_->arrived;
  for (std::size_t host = 0; host < inlined_.size(); ++host) is_late = is_late || is_behind(host);
  if (!is_late || abort_->patience.is_over()) hosts_.alarm.raise(abort_->error, abort_->text);
}

void Link::abort() {
  const std::string fact = world_.failure.fact();
  hosts_.to_all([&](std::vector<char>& outgoing) {
    RecordWriter writer(outgoing);
    writer.put(AbortRecord{
        {RecordKind::kAbort, 0}, world_.failure.code(), static_cast<std::uint32_t>(fact.size()), chunks_.arrived()});
    writer.put(fact.data(), fact.size());
    writer.put(inlined_.data(), inlined_.size() * sizeof(std::uint64_t));
    writer.end();
  });
  Patience patience(kAbort);
  for (;;) {
    bool is_told = true;
    for (int host = 0; host < world_.hosts; ++host) {
      Mail* const mail = hosts_.mails[host].get();
      if (mail == nullptr) continue;
      // Whoever tells us of a failure knows of one.
      mail->progress([&](const char* record) {
        RecordHeader header;
        std::memcpy(&header, record, sizeof(header));
        if (header.kind == RecordKind::kAbort) knows_[host] = true;
      });
      is_told = is_told && (knows_[host] || mail->is_sent());
    }
    if (is_told || patience.is_over()) return;
    std::this_thread::sleep_for(kBusyLook);
  }
}

}  // namespace kvstore_hvd

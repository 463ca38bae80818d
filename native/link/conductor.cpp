#include "link/conductor.hpp"

#include <algorithm>
#include <string>

#include "shm/describe.hpp"

namespace kvstore_hvd {
namespace {

// How much is ordered and not yet everywhere: what a tensor of higher priority may have to wait for. Less, and the
// network would wait for the next order.
constexpr std::uint64_t kWindow = std::uint64_t{4} << 20;

}  // namespace

void Conductor::all_announced(const TensorId& id) {
  HostAnnouncements& tensor = hosts_.tensor(id);
  if (tensor.is_asked) return;
  if (!tensor.is_inline() && tensor.is_the_same()) {
    hosts_.table.agree_over_hosts(tensor.slot, tensor.weights());
    agenda_.add(tensor.slot, hosts_.world.slots[tensor.slot].priority);
    ids_[tensor.slot] = id;
    for (int host = 0; host < hosts_.world.hosts; ++host) tensor.drop(host);
    return;
  }
  tensor.is_asked = true;
  tensor.told.assign(hosts_.world.hosts, {});
  tensor.n_told = 0;
  hosts_.to_all([&](std::vector<char>& outgoing) {
    RecordWriter writer(outgoing);
    writer.put(AskRecord{{RecordKind::kAsk, 0}, id});
    writer.end();
  });
  told(id, hosts_.world.host, announced_here(hosts_.world, tensor.slot));
}

void Conductor::told(const TensorId& id, int host, std::vector<AnnouncedBy> announced) {
  HostAnnouncements& tensor = hosts_.tensor(id);
  tensor.told[host] = std::move(announced);
  if (++tensor.n_told < tensor.told.size()) return;
  std::vector<AnnouncedBy> all;
  for (const auto& one : tensor.told) all.insert(all.end(), one.begin(), one.end());
  std::sort(all.begin(), all.end(), [](const AnnouncedBy& a, const AnnouncedBy& b) { return a.rank < b.rank; });
  const Disagreement why = describe_disagreement(hosts_.world, all);
  hosts_.table.agree_over_hosts(tensor.slot, 0.0);
  hosts_.table.disagree(tensor.slot, why.code, why.text);
  failed_.push_back({id, tensor.slot});
}

std::optional<Entry> Conductor::next(std::uint64_t bytes_under_way) {
  Entry entry{};
  if (!failed_.empty()) {
    const Failed failed = failed_.front();
    failed_.pop_front();
    entry.algorithm = Algorithm::kFail;
    entry.n_pieces = 1;
    entry.pieces[0].slot = failed.slot;
    ids_[failed.slot] = failed.id;
  } else {
    if (bytes_under_way >= kWindow) return std::nullopt;
    const auto decision = agenda_.decide(entry, false);
    if (!decision) return std::nullopt;
    Agenda::remove(*decision);
  }
  tell_order(entry);
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    const Slot& slot = hosts_.world.slots[piece.slot];
    const bool is_first = piece.offset == 0, is_last = piece.offset + piece.bytes == slot.bytes;
    const bool is_failed = entry.algorithm == Algorithm::kFail;
    const TensorId id = ids_.at(piece.slot);
    if (is_failed || is_last) {
      ids_.erase(piece.slot);
      HostAnnouncements& tensor = hosts_.tensor(id);
      if (is_failed) {
        for (int host = 0; host < hosts_.world.hosts; ++host) tensor.drop(host);
        tensor.is_asked = false;
      }
      tensor.slot = kNoSlot;
      hosts_.forget_if_idle(id);
    }
    // Ranks may announce the next operation as soon as they see this.
    if (is_failed || is_first) hosts_.table.announce_for_others(piece.slot);
  }
  return entry;
}

void Conductor::tell_order(const Entry& entry) {
  World& world = hosts_.world;
  const bool is_failed = entry.algorithm == Algorithm::kFail;
  const Slot& first = world.slots[entry.pieces[0].slot];
  const std::uint32_t text_bytes = is_failed ? first.error_length : 0;
  hosts_.to_all([&](std::vector<char>& outgoing) {
    RecordWriter writer(outgoing);
    writer.put(OrderRecord{{RecordKind::kOrder, 0},
                           entry.algorithm,
                           entry.root,
                           entry.n_pieces,
                           entry.staged_bytes,
                           static_cast<ErrorCode>(is_failed ? first.error : 0),
                           text_bytes});
    for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
      const Piece& piece = entry.pieces[i];
      writer.put(
          OrderedPiece{ids_.at(piece.slot), piece.offset, piece.bytes, world.slots[piece.slot].weights, piece.staged});
    }
    if (!is_failed) return writer.end();
    writer.put(first.error_text, text_bytes);
    std::vector<char> is_inline;
    for (const auto& one : hosts_.tensor(ids_.at(entry.pieces[0].slot)).by_host) {
      is_inline.push_back(one.front().is_inline ? 1 : 0);
    }
    writer.put(is_inline.data(), is_inline.size());
    writer.end();
  });
}

void Conductor::check_left() {
  for (const auto& [id, tensor] : hosts_.tensors) {
    const auto has_announced = [](const auto& of_host) { return !of_host.empty(); };
    const auto waits = std::find_if(tensor.by_host.begin(), tensor.by_host.end(), has_announced);
    if (waits == tensor.by_host.end()) continue;
    for (int host = 0; host < hosts_.world.hosts; ++host) {
      if (!hosts_.has_left[host] || has_announced(tensor.by_host[host])) continue;
      // Whoever waits knows what for.
      if (tensor.slot != kNoSlot) return raise_left(hosts_, tensor.slot, host);
      RecordWriter writer(hosts_.mails[waits - tensor.by_host.begin()]->outgoing());
      writer.put(LeftRecord{{RecordKind::kLeft, 0}, id, host});
      return writer.end();
    }
  }
}

void raise_left(HostTable& hosts, std::uint32_t slot, int host) {
  const std::string who = describe_host(hosts.world, host);
  const std::string it = who.rfind("ranks ", 0) == 0 ? "they" : "it";
  hosts.alarm.raise(ErrorCode::kPeerLost, who + " left before " + it + " submitted " + operation_on(hosts.world, slot));
}

}  // namespace kvstore_hvd

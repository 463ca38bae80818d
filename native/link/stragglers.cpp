#include "link/stragglers.hpp"

#include <cstring>
#include <vector>

#include "request/request.hpp"

namespace kvstore_hvd {
namespace {

using Clock = std::chrono::steady_clock;

// How long an operation waits before anybody asks who is late, and how often that is asked again.
constexpr std::chrono::milliseconds kPatience{500}, kAgain{1000}, kLook{100};

void put_wanted(std::vector<char>& outgoing, RecordKind kind, WantedRecord record, const std::string& name) {
  record.header = {kind, 0};
  RecordWriter writer(outgoing);
  writer.put(record);
  writer.put(name.data(), name.size());
  writer.end();
}

}  // namespace

void Stragglers::progress() {
  introduce();
  World& world = hosts_.world;
  if (!has_told_ && world.asks_what_it_missed.load(std::memory_order_relaxed) != 0) {  // a hint
    has_told_ = is_eager_ = true;
    hosts_.to_all([](std::vector<char>& outgoing) {
      RecordWriter writer(outgoing);
      writer.put(RecordHeader{RecordKind::kEager, 0});
      writer.end();
    });
  }
  if (hosts_.tensors.empty()) return;
  const auto now = Clock::now();
  if (!is_eager_ && now - looked_ < kLook) return;
  looked_ = now;
  for (auto& [id, tensor] : hosts_.tensors) {
    if (tensor.slot == kNoSlot) continue;
    const auto due = tensor.is_waiting ? kAgain : is_eager_ ? std::chrono::milliseconds(0) : kPatience;
    if (now - tensor.since < due) continue;
    tensor.since = now;
    tensor.is_waiting = true;
    const auto& own = tensor.by_host[world.host];
    const bool is_inline = !own.empty() && own.front().is_inline;
    const WantedRecord record{{},         id,        world.announcement(tensor.slot, 0),
                              world.host, is_inline, world.slots[tensor.slot].name_length};
    const std::string name = name_on(world, tensor.slot);
    if (is_patient(name) && !is_eager_) continue;
    if (hosts_.is_conductor()) {
      want(record, name);
    } else {
      put_wanted(hosts_.mails[kConductor]->outgoing(), RecordKind::kWaiting, record, name);
    }
  }
}

void Stragglers::introduce() {
  if (is_introduced_) return;
  World& world = hosts_.world;
  for (int r = 0; r < world.ranks; ++r) {
    // Acquire: process and host are complete.
    if (world.rank(r).presence.load(std::memory_order_acquire) == Presence::kAbsent) return;
  }
  is_introduced_ = true;
  hosts_.to_all([&](std::vector<char>& outgoing) {
    RecordWriter writer(outgoing);
    writer.put(HelloRecord{{RecordKind::kHello, 0}, static_cast<std::uint64_t>(world.ranks)});
    for (int r = 0; r < world.ranks; ++r) {
      const RankState& state = world.rank(r);
      Introduction one{state.rank_of_world, state.pid, {}};
      std::memcpy(one.host, state.host, sizeof(one.host));
      writer.put(one);
    }
    writer.end();
  });
}

void Stragglers::introduced(RecordReader reader) {
  const auto hello = reader.get<HelloRecord>();
  for (std::uint64_t i = 0; i < hello.n; ++i) {
    const auto one = reader.get<Introduction>();
    RemoteRank& remote = hosts_.world.remote(one.rank_of_world);
    remote.pid = one.pid;
    std::memcpy(remote.host, one.host, sizeof(one.host));
    remote.is_known.store(1, std::memory_order_release);  // Release: publishes them.
  }
}

void Stragglers::waited_for(RecordReader reader) {
  const auto record = reader.get<WantedRecord>();
  want(record, reader.text(record.name_bytes));
}

// As the conductor, who knows which hosts have not announced it.
void Stragglers::want(const WantedRecord& record, const std::string& name) {
  const auto found = hosts_.tensors.find(record.id);
  // All hosts may have announced it meanwhile.
  if (found == hosts_.tensors.end() || found->second.by_host[record.host].empty()) return;
  for (int host = 0; host < hosts_.world.hosts; ++host) {
    if (!found->second.by_host[host].empty()) continue;
    if (host == hosts_.world.host) {
      want_here(record, name);
    } else {
      put_wanted(hosts_.mails[host]->outgoing(), RecordKind::kWanted, record, name);
    }
  }
}

void Stragglers::wanted(RecordReader reader) {
  const auto record = reader.get<WantedRecord>();
  want_here(record, reader.text(record.name_bytes));
}

void Stragglers::want_here(const WantedRecord& record, const std::string& name) {
  World& world = hosts_.world;
  // The conductor says this before it orders the operation; what is not ordered is complete when all have told of it.
  if (record.is_inline != 0) {
    const auto found = hosts_.tensors.find(record.id);
    if (found == hosts_.tensors.end() || found->second.by_host[record.host].empty()) return;
  }
  const auto slot = hosts_.table.announce_early(name, record.announcement);
  if (!slot) return;
  const std::vector<int> late = hosts_.table.late_here(*slot);
  hosts_.to_all([&](std::vector<char>& outgoing) {
    RecordWriter writer(outgoing);
    writer.put(LateRecord{{RecordKind::kLate, 0}, record.id, late.size()});
    for (const int r : late) writer.put(static_cast<std::uint64_t>(world.rank(r).rank_of_world));
    writer.end();
  });
}

void Stragglers::late(int host, RecordReader reader) {
  World& world = hosts_.world;
  const auto record = reader.get<LateRecord>();
  const auto found = hosts_.tensors.find(record.id);
  if (found == hosts_.tensors.end() || found->second.slot == kNoSlot) return;
  std::atomic<std::uint64_t>* const bits = world.late(found->second.slot);
  // Relaxed, all: for messages; written by the link only.
  for (int rank = 0; rank < world.size; ++rank) {
    if (world.home(rank).host == host)
      bits[rank / 64].fetch_and(~(std::uint64_t{1} << (rank % 64)), std::memory_order_relaxed);
  }
  for (std::uint64_t i = 0; i < record.n; ++i) {
    const auto rank = reader.get<std::uint64_t>();
    bits[rank / 64].fetch_or(std::uint64_t{1} << (rank % 64), std::memory_order_relaxed);
  }
}

}  // namespace kvstore_hvd

#include "link/chunks.hpp"

#include <algorithm>
#include <cstring>

namespace kvstore_hvd {
namespace {

// Tags of chunks follow those of records. MPI promises 32767 of them.
constexpr int kFirstTag = 16;
constexpr std::uint64_t kTags = 16384;

}  // namespace

LinkChunks::LinkChunks(World& world, Transport& transport)
    : world_(world), transport_(transport), log_(world), places_(world.hosts) {
  for (int r = 0; r < world.size; ++r) ++places_[world.home(r).host].count;
  for (int host = 1; host < world.hosts; ++host) {
    places_[host].first = places_[host - 1].first + places_[host - 1].count;
  }
}

void LinkChunks::publish(const Entry& entry) {
  Chunk chunk;
  chunk.index = published_++;
  chunk.algorithm = entry.algorithm;
  chunk.root_host = world_.home(entry.root).host;
  chunk.bytes = entry.staged_bytes;
  // The others cannot send before their ranks have reduced; a message that comes first would be copied.
  receive(chunk);
  chunks_.push_back(std::move(chunk));
  bytes_under_way_ += entry.staged_bytes;
  Entry& shared = log_.next_entry();
  std::memcpy(&shared, &entry, offsetof(Entry, pieces));
  std::copy_n(entry.pieces, entry.n_pieces, shared.pieces);
  log_.publish();
  for (int r = 0; r < world_.ranks; ++r) world_.rank(r).bell.ring();
}

bool LinkChunks::all_ranks(Flag RankState::* flag, std::uint64_t index) {
  for (int r = 0; r < world_.ranks; ++r) {
    if (!(world_.rank(r).*flag).reached(static_cast<std::uint32_t>(index + 1))) return false;
  }
  return true;
}

bool LinkChunks::moves(const Chunk& chunk, int host) const {
  if (chunk.bytes == 0 || chunk.algorithm == Algorithm::kFail) return false;
  return chunk.algorithm != Algorithm::kLinkBroadcast || host == chunk.root_host;
}

LinkChunks::Part LinkChunks::part_of(const Chunk& chunk, int host) {
  if (chunk.algorithm == Algorithm::kLinkBroadcast) return {0, chunk.bytes};
  if (chunk.algorithm == Algorithm::kLinkSum) return {host * chunk.bytes, chunk.bytes};
  return {places_[host].first * chunk.bytes, places_[host].count * chunk.bytes};
}

void LinkChunks::receive(Chunk& chunk) {
  const int tag = kFirstTag + static_cast<int>(chunk.index % kTags);
  for (int i = 1; i < world_.hosts; ++i) {
    const int host = (world_.host + world_.hosts - i) % world_.hosts;
    if (!moves(chunk, host)) continue;
    const Part part = part_of(chunk, host);
    chunk.receives.push_back(transport_.receive(host, tag, world_.link_memory(chunk.index) + part.offset, part.bytes));
  }
}

void LinkChunks::send(Chunk& chunk) {
  chunk.is_sent = true;
  if (!moves(chunk, world_.host)) return;
  const int tag = kFirstTag + static_cast<int>(chunk.index % kTags);
  const Part part = part_of(chunk, world_.host);
  // In rotation, so that not all hosts send to the same one first.
  for (int i = 1; i < world_.hosts; ++i) {
    const int host = (world_.host + i) % world_.hosts;
    chunk.sends.push_back(transport_.send(host, tag, world_.link_memory(chunk.index) + part.offset, part.bytes));
  }
}

bool LinkChunks::test(std::vector<Transport::Transfer>& transfers) {
  const auto is_over = [this](Transport::Transfer& one) { return transport_.test(one); };
  transfers.erase(std::remove_if(transfers.begin(), transfers.end(), is_over), transfers.end());
  return transfers.empty();
}

bool LinkChunks::progress() {
  bool moved = false;
  for (Chunk& chunk : chunks_) {
    if (!chunk.is_sent && all_ranks(&RankState::reduced, chunk.index)) {
      // After the look above: a rank that has read arrays of a world that had failed by then has reduced nothing.
      if (world_.failure.is_set()) return moved;
      send(chunk);
      moved = true;
    }
    if (!chunk.receives.empty() && test(chunk.receives)) moved = true;
    if (!chunk.sends.empty() && test(chunk.sends)) moved = true;
    if (!chunk.has_arrived && chunk.is_sent && chunk.receives.empty() && arrived_ == chunk.index) {
      chunk.has_arrived = true;
      ++arrived_;
      bytes_under_way_ -= chunk.bytes;
      world_.link().filled.post(static_cast<std::uint32_t>(arrived_));
      for (int r = 0; r < world_.ranks; ++r) world_.rank(r).bell.ring();
      moved = true;
    }
  }
  while (!chunks_.empty()) {
    const Chunk& first = chunks_.front();
    if (!first.has_arrived || !first.sends.empty() || !all_ranks(&RankState::collected, first.index)) break;
    chunks_.pop_front();
    moved = true;
  }
  return moved;
}

void LinkChunks::cancel() {
  for (Chunk& chunk : chunks_) {
    for (Transport::Transfer& one : chunk.receives) transport_.cancel(one);
  }
}

}  // namespace kvstore_hvd

#include "link/chunks.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/running_time.hpp"
#include "request/request.hpp"

namespace kvstore_hvd {
namespace {

// Up to here, times the other hosts, a hop less is worth more than the bytes.
constexpr std::uint64_t kWhole = std::uint64_t{128} << 10;
constexpr std::uint64_t kLine = 64;  // slices are whole lines, as pieces begin at one, so that no element is cut

}  // namespace

LinkChunks::LinkChunks(World& world, Transport& transport)
    : world_(world), transport_(transport), places_(world.hosts + 1) {
  for (int r = 0; r < world.size; ++r) ++places_[world.home(r).host + 1];
  std::partial_sum(places_.begin(), places_.end(), places_.begin());
}

void LinkChunks::publish(const Entry& entry) {
  Chunk chunk{};
  chunk.index = published_++;
  std::memcpy(&chunk.entry, &entry, sizeof(entry));
  // As all pieces of an entry.
  chunk.is_narrow = is_sum(chunk) && world_.is_narrow_on_link(world_.slots[entry.pieces[0].slot].agreed);
  chunk.is_whole = entry.staged_bytes * static_cast<std::uint64_t>(world_.hosts - 1) <= kWhole;
  // The others cannot send before their ranks have reduced; a message that comes first would be copied.
  receive(chunk);
  chunks_.push_back(std::move(chunk));
  bytes_under_way_ += entry.staged_bytes;
  Entry& shared = next_entry(world_);
  std::memcpy(&shared, &entry, offsetof(Entry, pieces));
  std::copy_n(entry.pieces, entry.n_pieces, shared.pieces);
  publish_entry(world_);
  for (int r = 0; r < world_.ranks; ++r) world_.rank(r).bell.ring();
}

bool LinkChunks::all_ranks(Flag RankState::* flag, std::uint64_t index) {
  for (int r = 0; r < world_.ranks; ++r) {
    if (!(world_.rank(r).*flag).reached(static_cast<std::uint32_t>(index + 1))) return false;
  }
  return true;
}

bool LinkChunks::moves(const Chunk& chunk, int host) const {
  if (chunk.entry.staged_bytes == 0 || chunk.entry.algorithm == Algorithm::kFail) return false;
  return chunk.entry.algorithm != Algorithm::kLinkBroadcast || host == world_.home(chunk.entry.root).host;
}

char* LinkChunks::sum_of(const Chunk& chunk) {
  return memory(chunk) + (chunk.is_narrow ? std::uint64_t{chunk.entry.staged_bytes} / 2 * 3 : 0);
}

LinkChunks::Bytes LinkChunks::slice_of(const Chunk& chunk, int host) const {
  const std::uint64_t bytes = chunk.entry.staged_bytes / (chunk.is_narrow ? 2 : 1);
  if (chunk.is_whole) return {0, bytes};
  const std::uint64_t lines = (bytes + kLine - 1) / kLine, hosts = static_cast<std::uint64_t>(world_.hosts);
  const std::uint64_t h = static_cast<std::uint64_t>(host);
  const std::uint64_t begin = std::min(lines * h / hosts * kLine, bytes);
  return {begin, std::min(lines * (h + 1) / hosts * kLine, bytes) - begin};
}

LinkChunks::Bytes LinkChunks::place_of(const Chunk& chunk, int host) const {
  const std::uint64_t bytes = chunk.entry.staged_bytes;
  if (chunk.entry.algorithm == Algorithm::kLinkBroadcast) return {0, bytes};
  return {places_[host] * bytes, (places_[host + 1] - places_[host]) * bytes};
}

// Behind the sum of this host's ranks, and the result; see link_sum.cpp.
char* LinkChunks::partial_of(const Chunk& chunk, int host) {
  const Bytes own = slice_of(chunk, world_.host);
  if (host == world_.host) return sum_of(chunk) + own.begin;
  const int place = host < world_.host ? host : host - 1;
  return memory(chunk) + 2 * std::uint64_t{chunk.entry.staged_bytes} + static_cast<std::uint64_t>(place) * own.count;
}

void LinkChunks::receive(Chunk& chunk) {
  const Bytes own = slice_of(chunk, world_.host);
  to_others([&](int host) {
    if (!moves(chunk, host)) return;
    const std::uint64_t count = is_sum(chunk) ? own.count : place_of(chunk, host).count;
    char* const to = is_sum(chunk) ? partial_of(chunk, host) : memory(chunk) + place_of(chunk, host).begin;
    if (count > 0) chunk.partials.push_back(transport_.receive(host, kPartials, to, count));
    const Bytes theirs = slice_of(chunk, host);
    if (is_sum(chunk) && !chunk.is_whole && theirs.count > 0) {
      chunk.results.push_back(transport_.receive(host, kResults, result_of(chunk) + theirs.begin, theirs.count));
    }
  });
}

void LinkChunks::send(Chunk& chunk) {
  world_.on_link[chunk.index % kLinkSlots].sent = monotonic_ns();
  if (!moves(chunk, world_.host)) return;
  to_others([&](int host) {
    const Bytes what = is_sum(chunk) ? slice_of(chunk, host) : place_of(chunk, world_.host);
    char* const begin = is_sum(chunk) ? sum_of(chunk) : memory(chunk);
    if (what.count > 0) chunk.sends.push_back(transport_.send(host, kPartials, begin + what.begin, what.count));
  });
}

void LinkChunks::sum(Chunk& chunk) {
  const Bytes own = slice_of(chunk, world_.host);
  const Entry& entry = chunk.entry;
  char* const result = result_of(chunk);
  const std::uint64_t parts = chunk.is_narrow ? 2 : 1;
  std::vector<const void*> inputs(world_.hosts);
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    const Piece& piece = entry.pieces[i];
    const std::uint64_t first = piece.staged / parts;
    const std::uint64_t begin = std::max<std::uint64_t>(first, own.begin);
    const std::uint64_t end = std::min<std::uint64_t>(first + piece.bytes / parts, own.begin + own.count);
    if (begin >= end) continue;
    const Slot& slot = world_.slots[piece.slot];
    Reduction reduction = reduction_over_hosts(slot.agreed, slot.weights);
    if (chunk.is_narrow) reduction = {world_.dtype_on_link(slot.agreed), reduction.op, 1.0, reduction.postscale, false};
    for (int host = 0; host < world_.hosts; ++host) inputs[host] = partial_of(chunk, host) + (begin - own.begin);
    void* output = result + begin;
    reduce(reduction, inputs.data(), world_.hosts, &output, 1, (end - begin) / size_of(reduction.dtype));
  }
  if (chunk.is_whole || own.count == 0) return;
  to_others([&](int host) { chunk.sends.push_back(transport_.send(host, kResults, result + own.begin, own.count)); });
}

bool LinkChunks::test(std::vector<Transport::Transfer>& transfers) {
  const auto is_over = [this](Transport::Transfer& one) { return transport_.test(one); };
  transfers.erase(std::remove_if(transfers.begin(), transfers.end(), is_over), transfers.end());
  return transfers.empty();
}

bool LinkChunks::progress(bool tells) {
  bool moved = false;
  for (Chunk& chunk : chunks_) {
    if (sent_ == chunk.index && all_ranks(&RankState::reduced, chunk.index)) {
      // After the look above: a rank that has read arrays of a world that had failed by then has reduced nothing.
      if (!world_.failure.is_set()) {
        send(chunk);
        ++sent_;
        moved = true;
      }
    }
    for (auto* transfers : {&chunk.sends, &chunk.partials, &chunk.results}) {
      if (!transfers->empty() && test(*transfers)) moved = true;
    }
    if (summed_ == chunk.index && sent_ > chunk.index && chunk.partials.empty()) {
      if (is_sum(chunk)) sum(chunk);
      ++summed_;
      moved = true;
    }
    if (tells && told_ == chunk.index && summed_ > chunk.index && chunk.results.empty()) {
      ++told_;
      moved = true;
      if (chunk.entry.algorithm != Algorithm::kFail) ++arrived_;
      bytes_under_way_ -= chunk.entry.staged_bytes;
      world_.on_link[chunk.index % kLinkSlots].arrived = monotonic_ns();
      world_.link().filled.post(static_cast<std::uint32_t>(told_));
      for (int r = 0; r < world_.ranks; ++r) world_.rank(r).bell.ring();
    }
  }
  while (!chunks_.empty()) {
    const Chunk& first = chunks_.front();
    if (told_ <= first.index || !first.sends.empty() || !all_ranks(&RankState::collected, first.index)) break;
    chunks_.pop_front();
    moved = true;
  }
  return moved;
}

bool LinkChunks::close() {
  bool is_idle = true;
  for (Chunk& chunk : chunks_) {
    for (auto* transfers : {&chunk.partials, &chunk.results}) {
      if (!is_closed_) {
        for (const Transport::Transfer one : *transfers) transport_.cancel(one);
      }
      is_idle = test(*transfers) && is_idle;
    }
    is_idle = test(chunk.sends) && is_idle;
  }
  is_closed_ = true;
  return is_idle;
}

}  // namespace kvstore_hvd

#include "link/chunks.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <system_error>

#include "request/request.hpp"

namespace kvstore_hvd {
namespace {

// Up to here, times the other hosts, a hop less is worth more than the bytes.
constexpr std::uint64_t kWhole = std::uint64_t{128} << 10;
constexpr char kReceipt = 0;
constexpr std::uint64_t kLine = 64;  // slices are whole lines, as pieces begin at one, so that no element is cut

}  // namespace

LinkChunks::LinkChunks(Segment& segment, Transport& transport)
    : world_(segment.world()), transport_(transport), places_(world_.hosts + 1), received_(world_.hosts) {
  for (int r = 0; r < world_.size; ++r) ++places_[world_.member(r).host + 1];
  std::partial_sum(places_.begin(), places_.end(), places_.begin());
  const Layout& layout = world_.layout;
  if (world_.ranks > 1 || layout.arena_bytes == 0 || !transport.copies()) return;
  void* const mapped = mmap(nullptr, layout.arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                            segment.fd(), static_cast<off_t>(layout.arenas));
  if (mapped == MAP_FAILED || madvise(mapped, layout.arena_bytes, MADV_DONTFORK) != 0) {
    throw std::system_error(errno, std::generic_category(), "mapping the arena again (KVHVD_ARENA_MIB limits it)");
  }
  arena_ = static_cast<char*>(mapped);
}

LinkChunks::~LinkChunks() {
  if (arena_ != nullptr) munmap(arena_, world_.layout.arena_bytes);
}

void LinkChunks::publish(const Entry& entry) {
  Chunk chunk{};
  chunk.index = published_++;
  std::memcpy(&chunk.entry, &entry, sizeof(entry));
  // As all pieces of an entry.
  chunk.is_narrow = is_sum(chunk) && world_.is_narrow_on_link(world_.slots[entry.pieces[0].slot].agreed);
  chunk.is_whole = entry.staged_bytes * static_cast<std::uint64_t>(world_.hosts - 1) <= kWhole;
  chunk.array = array_of(chunk);
  world_.on_link[chunk.index % kLinkSlots].in_array = chunk.array != nullptr;
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
  return chunk.entry.algorithm != Algorithm::kLinkBroadcast || host == world_.member(chunk.entry.root).host;
}

// Where the bytes of an entry lie in the array of the only rank, if they are summed there.
char* LinkChunks::array_of(const Chunk& chunk) {
  const Entry& entry = chunk.entry;
  if (arena_ == nullptr || !is_sum(chunk) || chunk.is_whole || chunk.is_narrow || entry.n_pieces != 1) return nullptr;
  const Piece& piece = entry.pieces[0];
  const Slot& slot = world_.slots[piece.slot];
  if (slot.direct == 0 || slot.agreed.prescale != 1.0 || slot.agreed.as_half != 0) return nullptr;
  return arena_ + world_.mark(piece.slot, 0).place + piece.offset - piece.staged;
}

char* LinkChunks::sum_of(const Chunk& chunk) {
  if (chunk.array != nullptr) return chunk.array;
  return memory(chunk) + (chunk.is_narrow ? std::uint64_t{chunk.entry.staged_bytes} / 2 * 3 : 0);
}

LinkChunks::Bytes LinkChunks::slice_of(const Chunk& chunk, int host) const {
  // Not the rest of the last line: an array may go on there.
  const Piece& last = chunk.entry.pieces[chunk.entry.n_pieces - 1];
  const std::uint64_t bytes = (last.staged + last.bytes) / (chunk.is_narrow ? 2 : 1);
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
    if (is_broadcast(chunk) && moves(chunk, world_.host)) receive_from(host, kResults, &receipt_, 1, chunk.results);
    if (!moves(chunk, host)) return;
    const std::uint64_t count = is_sum(chunk) ? own.count : place_of(chunk, host).count;
    char* const to = is_sum(chunk) ? partial_of(chunk, host) : memory(chunk) + place_of(chunk, host).begin;
    receive_from(host, kPartials, to, count, chunk.partials);
    const Bytes theirs = slice_of(chunk, host);
    if (is_sum(chunk) && !chunk.is_whole) {
      receive_from(host, kResults, result_of(chunk) + theirs.begin, theirs.count, chunk.results);
    }
  });
}

void LinkChunks::receive_from(int host, int tag, char* to, std::uint64_t bytes, std::vector<Message>& messages) {
  if (bytes > 0) messages.push_back({transport_.receive(host, tag, to, bytes), host, bytes});
}

void LinkChunks::send_to(int host, int tag, const char* data, std::uint64_t bytes, Chunk& chunk) {
  if (bytes > 0) chunk.sends.push_back({transport_.send(host, tag, data, bytes), host, bytes});
}

void LinkChunks::send(Chunk& chunk) {
  world_.on_link[chunk.index % kLinkSlots].sent = monotonic_ns();
  if (!moves(chunk, world_.host)) return;
  to_others([&](int host) {
    const Bytes what = is_sum(chunk) ? slice_of(chunk, host) : place_of(chunk, world_.host);
    char* const begin = is_sum(chunk) ? sum_of(chunk) : memory(chunk);
    send_to(host, kPartials, begin + what.begin, what.count, chunk);
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
  if (chunk.is_whole) return;
  to_others([&](int host) { send_to(host, kResults, result + own.begin, own.count, chunk); });
}

void LinkChunks::acknowledge(Chunk& chunk) {
  const int root = world_.member(chunk.entry.root).host;
  if (root != world_.host && moves(chunk, root)) send_to(root, kResults, &kReceipt, 1, chunk);
}

bool LinkChunks::test_sends(Chunk& chunk) {
  const auto is_over = [this](Message& one) { return transport_.test(one.transfer); };
  chunk.sends.erase(std::remove_if(chunk.sends.begin(), chunk.sends.end(), is_over), chunk.sends.end());
  return chunk.sends.empty();
}

bool LinkChunks::test_receives(std::vector<Message>& messages) {
  for (std::size_t i = 0; i < messages.size();) {
    Message& one = messages[i];
    std::size_t received = 0;
    const bool was_over = one.transfer == 0;  // with another size: what it was to bring never comes
    if (was_over ? !is_closed_ : !transport_.test(one.transfer, &received)) {
      ++i;
      continue;
    }
    received_[one.host] = 1;
    if (received != one.bytes && !is_closed_) {
      throw TransportError(
          "a message of " + std::to_string(received) + " bytes instead of " + std::to_string(one.bytes), one.host,
          TransportError::Kind::kForeign);
    }
    messages.erase(messages.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return messages.empty();
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
    if (!chunk.sends.empty() && test_sends(chunk)) moved = true;
    for (auto* messages : {&chunk.partials, &chunk.results}) {
      if (!messages->empty() && test_receives(*messages)) moved = true;
    }
    if (summed_ == chunk.index && sent_ > chunk.index && chunk.partials.empty()) {
      if (is_sum(chunk)) sum(chunk);
      if (is_broadcast(chunk)) acknowledge(chunk);
      ++summed_;
      moved = true;
    }
    // An array is its rank's again once that is told.
    const bool is_sent = chunk.array == nullptr || chunk.sends.empty();
    const bool has_results = chunk.results.empty() || is_broadcast(chunk);
    if (tells && told_ == chunk.index && summed_ > chunk.index && has_results && is_sent) {
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
    if (told_ <= first.index || !first.sends.empty() || !first.results.empty()) break;
    if (!all_ranks(&RankState::collected, first.index)) break;
    chunks_.pop_front();
    moved = true;
  }
  return moved;
}

bool LinkChunks::close() {
  const bool is_first = !std::exchange(is_closed_, true);
  bool is_idle = true;
  for (Chunk& chunk : chunks_) {
    for (auto* messages : {&chunk.partials, &chunk.results}) {
      if (is_first) {
        for (const Message& one : *messages) {
          if (one.transfer != 0) transport_.cancel(one.transfer);
        }
      }
      is_idle = test_receives(*messages) && is_idle;
    }
    is_idle = test_sends(chunk) && is_idle;
  }
  return is_idle;
}

}  // namespace kvstore_hvd

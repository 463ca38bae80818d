// Over hosts: the ranks of a host reduce one slice each of all their arrays into the link's memory; the links sum those
// of all hosts (see LinkChunks); every rank copies the result.
//
// The link's memory of an entry begins with the sum of this host's ranks, then the result. What travels in 16 bits, see
// World::dtype_on_link(), has both in the memory of the result: first that, then the sum, and half as far in as it is
// in the entry.
#include <cstring>

#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

char* sum_of(const Chunk& chunk) { return chunk.world().link_memory(chunk.index()); }

bool is_direct(const Chunk& chunk, const Piece& piece) { return chunk.world().slots[piece.slot].direct != 0; }

// The link needs nothing of this host's only rank, see LinkChunks.
bool lies_in_array(const Chunk& chunk) { return chunk.world().on_link[chunk.index() % kLinkSlots].in_array != 0; }

// Arrays in arenas and this rank's own slice are read where they lie. Which pieces are in arenas may differ from host
// to host; the conductor, which puts them together, knows it of its own.
void fill(Chunk& chunk) {
  const auto stage = [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    if (is_direct(chunk, piece)) return;
    std::memcpy(chunk.staging(chunk.rank()) + piece.staged + offset, chunk.source(piece) + offset, bytes);
  };
  const Range own = chunk.own_slice();
  chunk.for_each_in(Range{0, own.begin}, stage);
  chunk.for_each_in(Range{own.end, chunk.entry().staged_bytes}, stage);
}

bool reduce_slice(Chunk& chunk) {
  if (!chunk.all_filled()) return false;
  World& world = chunk.world();
  if (lies_in_array(chunk)) return true;
  char* const sum = sum_of(chunk);
  chunk.for_each_in(chunk.own_slice(), [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const bool direct = is_direct(chunk, piece);
    const auto input = [&](int r) -> const char* {
      if (r == chunk.rank()) return chunk.source(piece) + offset;
      if (direct) return world.arena(r) + world.mark(piece.slot, r).place + piece.offset + offset;
      return chunk.staging(r) + piece.staged + offset;
    };
    char* const output = sum + piece.staged + offset;
    chunk.reduce(reduction_within_host(chunk.request(piece)), input, [&](int) { return output; }, 1, bytes);
    const Signature& agreed = world.slots[piece.slot].agreed;
    if (!world.is_narrow_on_link(agreed)) return;
    char* const there = sum + chunk.entry().staged_bytes / 2 * 3 + (piece.staged + offset) / 2;
    narrow(world.dtype_on_link(agreed), output, there, bytes / sizeof(float));
  });
  return true;
}

// What this rank takes of a piece: all of it, or the part of the result that a reduce-scatter gives it.
Chunk::Overlap taken_of(const Chunk& chunk, const Piece& piece) {
  const Request& request = chunk.request(piece);
  if (request.collective == Collective::kReduceScatter) return chunk.overlap(piece, request.parts[0]);
  return {0, piece.bytes, chunk.result(piece)};
}

bool collect(Chunk& chunk) {
  if (!chunk.has_arrived()) return false;
  if (lies_in_array(chunk)) return true;
  const char* const result = sum_of(chunk) + chunk.entry().staged_bytes;
  for (std::uint32_t i = 0; i < chunk.entry().n_pieces; ++i) {
    const Piece& piece = chunk.entry().pieces[i];
    const Chunk::Overlap taken = taken_of(chunk, piece);
    if (taken.bytes == 0) continue;
    World& world = chunk.world();
    const Signature& agreed = world.slots[piece.slot].agreed;
    const std::uint64_t begin = piece.staged + taken.offset;
    if (world.is_narrow_on_link(agreed)) {
      widen(world.dtype_on_link(agreed), result + begin / 2, taken.output, taken.bytes / sizeof(float));
    } else {
      std::memcpy(taken.output, result + begin, taken.bytes);
    }
  }
  return true;
}

}  // namespace

const Steps kLinkSum{Steps::Memory::kLink, fill, reduce_slice, collect};

}  // namespace kvstore_hvd

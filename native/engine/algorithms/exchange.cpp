// Every rank stages its input, and takes what it wants of all ranks': copies it (exchange), or reduces it
// (reduce-scatter).
//
// Over hosts every rank lays its input into the link's memory, which has a place for each rank of the world, in the
// order of the hosts; the link sends those of its host to the others. (A reduce-scatter over hosts: link_sum.cpp.)
#include <algorithm>
#include <cstring>

#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

// Ranks may contribute different numbers of elements; a piece has room for the largest.
void stage_contributed(Chunk& chunk, char* memory) {
  for (std::uint32_t i = 0; i < chunk.entry().n_pieces; ++i) {
    const Piece& piece = chunk.entry().pieces[i];
    const Request& request = chunk.request(piece);
    const std::uint64_t own = request.contributed * size_of(request.dtype);
    if (own <= piece.offset) continue;
    chunk.stage_to(memory, Range{piece.staged, piece.staged + std::min(piece.bytes, own - piece.offset)});
  }
}

void fill_contributed(Chunk& chunk) { stage_contributed(chunk, chunk.staging(chunk.rank())); }

void fill_all(Chunk& chunk) { chunk.stage(chunk.all()); }

char* link_memory_of(const Chunk& chunk, int rank_of_world) {
  World& world = chunk.world();
  return world.link_memory(chunk.index()) +
         static_cast<std::size_t>(world.home(rank_of_world).place) * chunk.entry().staged_bytes;
}

void fill_link_memory(Chunk& chunk) {
  stage_contributed(chunk, link_memory_of(chunk, chunk.world().rank(chunk.rank()).rank_of_world));
}

// Calls `take(piece, part, overlap)` for what this rank takes of the entry.
template <class Take>
void for_each_part(Chunk& chunk, const Take& take) {
  for (std::uint32_t i = 0; i < chunk.entry().n_pieces; ++i) {
    const Piece& piece = chunk.entry().pieces[i];
    for (const Part& part : chunk.request(piece).parts) {
      const Chunk::Overlap overlap = chunk.overlap(piece, part);
      if (overlap.bytes > 0) take(piece, part, overlap);
    }
  }
}

const char* input_of(const Chunk& chunk, const Piece& piece, int rank) {
  return rank == chunk.rank() ? chunk.source(piece) : chunk.staging(rank) + piece.staged;
}

bool copy_parts(Chunk& chunk) {
  if (!chunk.all_filled()) return false;
  for_each_part(chunk, [&](const Piece& piece, const Part& part, const Chunk::Overlap& overlap) {
    std::memcpy(overlap.output, input_of(chunk, piece, part.rank) + overlap.offset, overlap.bytes);
  });
  return true;
}

bool copy_parts_from_link(Chunk& chunk) {
  if (!chunk.has_arrived()) return false;
  for_each_part(chunk, [&](const Piece& piece, const Part& part, const Chunk::Overlap& overlap) {
    std::memcpy(overlap.output, link_memory_of(chunk, part.rank) + piece.staged + overlap.offset, overlap.bytes);
  });
  return true;
}

bool reduce_parts(Chunk& chunk) {
  if (!chunk.all_filled()) return false;
  for_each_part(chunk, [&](const Piece& piece, const Part&, const Chunk::Overlap& overlap) {
    const auto input = [&](int r) { return input_of(chunk, piece, r) + overlap.offset; };
    chunk.reduce_to_own(piece, input, overlap.output, overlap.bytes);
  });
  return true;
}

}  // namespace

const Steps kExchange{Steps::Memory::kStaging, fill_contributed, copy_parts, nullptr};
const Steps kReduceScatter{Steps::Memory::kStaging, fill_all, reduce_parts, nullptr};
const Steps kLinkExchange{Steps::Memory::kLink, fill_link_memory, nullptr, copy_parts_from_link};

}  // namespace kvstore_hvd

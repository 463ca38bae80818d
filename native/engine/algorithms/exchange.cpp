// Broadcast: the root stages its array, and all copy it. Over hosts it lays it into the link's memory, and the link
// sends it to the other hosts.
//
// Exchange and reduce-scatter: every rank stages its input, and takes parts of all ranks': copies them, or reduces
// them. Over hosts every rank lays its input into the link's memory, which has a place for each rank of the world, in
// the order of the hosts; the link sends those of its host to the others. (A reduce-scatter over hosts: link_sum.cpp.)
#include <cstring>

#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

void copy_from(const Chunk& chunk, const char* staged, bool is_root) {
  chunk.for_each_in(chunk.all(), [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const Request& request = chunk.request(piece);
    if (is_root && request.inputs[0] == request.outputs[0]) return;
    std::memcpy(chunk.result(piece) + offset, staged + piece.staged + offset, bytes);
  });
}

void fill_root(Chunk& chunk) {
  if (chunk.entry().root == chunk.rank()) chunk.stage(chunk.all());
}

bool copy(Chunk& chunk) {
  const int root = chunk.entry().root;
  if (root != chunk.rank() && !chunk.has_filled(root)) return false;
  copy_from(chunk, chunk.staging(root), root == chunk.rank());
  return true;
}

bool is_root_of_all(const Chunk& chunk) { return chunk.world().rank(chunk.rank()).rank_of_world == chunk.entry().root; }

void fill_link_root(Chunk& chunk) {
  if (is_root_of_all(chunk)) chunk.stage_to(chunk.world().link_memory(chunk.index()), chunk.all());
}

bool copy_from_link(Chunk& chunk) {
  if (!chunk.has_arrived()) return false;
  copy_from(chunk, chunk.world().link_memory(chunk.index()), is_root_of_all(chunk));
  return true;
}

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
         static_cast<std::size_t>(world.member(rank_of_world).position) * chunk.entry().staged_bytes;
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
    chunk.reduce(chunk.reduction(piece), input, [&](int) { return overlap.output; }, 1, overlap.bytes);
  });
  return true;
}

}  // namespace

const Steps kBroadcast{Steps::Memory::kStaging, fill_root, copy, nullptr};
const Steps kLinkBroadcast{Steps::Memory::kLink, fill_link_root, nullptr, copy_from_link};

const Steps kExchange{Steps::Memory::kStaging, fill_contributed, copy_parts, nullptr};
const Steps kReduceScatter{Steps::Memory::kStaging, fill_all, reduce_parts, nullptr};
const Steps kLinkExchange{Steps::Memory::kLink, fill_link_memory, nullptr, copy_parts_from_link};

}  // namespace kvstore_hvd

// Every rank stages its input, and takes what it wants of all ranks': copies it (exchange), or reduces it
// (reduce-scatter).
#include <algorithm>
#include <cstring>

#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

// Ranks may contribute different numbers of elements; a piece has room for the largest.
void fill_contributed(Chunk& chunk) {
  for (std::uint32_t i = 0; i < chunk.entry().n_pieces; ++i) {
    const Piece& piece = chunk.entry().pieces[i];
    const Request& request = chunk.request(piece);
    const std::uint64_t own = request.contributed * size_of(request.dtype);
    if (own > piece.offset) chunk.stage(Range{piece.staged, piece.staged + std::min(piece.bytes, own - piece.offset)});
  }
}

void fill_all(Chunk& chunk) { chunk.stage(chunk.all()); }

// Calls `take(piece, part, input, output, bytes)` for what this rank takes of the entry; `input(rank)` is where the
// bytes of that rank lie.
template <class Take>
bool for_each_part(Chunk& chunk, const Take& take) {
  if (!chunk.all_filled()) return false;
  for (std::uint32_t i = 0; i < chunk.entry().n_pieces; ++i) {
    const Piece& piece = chunk.entry().pieces[i];
    const Request& request = chunk.request(piece);
    for (const Part& part : request.parts) {
      const std::uint64_t begin = std::max<std::uint64_t>(part.from, piece.offset);
      const std::uint64_t end = std::min<std::uint64_t>(part.from + part.bytes, piece.offset + piece.bytes);
      if (begin >= end) continue;
      const std::uint64_t inside = begin - piece.offset;
      const auto input = [&](int r) -> const char* {
        return (r == chunk.rank() ? chunk.source(piece) : chunk.staging(r) + piece.staged) + inside;
      };
      take(piece, part, input, static_cast<char*>(request.outputs[0]) + part.to + (begin - part.from), end - begin);
    }
  }
  return true;
}

bool copy_parts(Chunk& chunk) {
  return for_each_part(chunk, [](const Piece&, const Part& part, const auto& input, char* output, std::uint64_t bytes) {
    std::memcpy(output, input(part.rank), bytes);
  });
}

bool reduce_parts(Chunk& chunk) {
  return for_each_part(chunk, [&](const Piece& piece, const Part&, const auto& input, char* output,
                                  std::uint64_t bytes) { chunk.reduce_to_own(piece, input, output, bytes); });
}

}  // namespace

const Steps kExchange{Steps::Memory::kStaging, fill_contributed, copy_parts, nullptr};
const Steps kReduceScatter{Steps::Memory::kStaging, fill_all, reduce_parts, nullptr};

}  // namespace kvstore_hvd

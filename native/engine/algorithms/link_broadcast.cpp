// Over hosts: the root lays its array into the link's memory, the link sends it to the other hosts, and all copy it.
#include <cstring>

#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {
namespace {

bool is_root(const Chunk& chunk) { return chunk.world().rank(chunk.rank()).rank_of_world == chunk.entry().root; }

void fill(Chunk& chunk) {
  if (!is_root(chunk)) return;
  chunk.stage_to(chunk.world().link_memory(chunk.index()), chunk.all());
}

bool collect(Chunk& chunk) {
  if (!chunk.has_arrived()) return false;
  const char* const staged = chunk.world().link_memory(chunk.index());
  chunk.for_each_in(chunk.all(), [&](const Piece& piece, std::uint64_t offset, std::uint64_t bytes) {
    const Request& request = chunk.request(piece);
    if (is_root(chunk) && request.inputs[0] == request.outputs[0]) return;
    std::memcpy(chunk.result(piece) + offset, staged + piece.staged + offset, bytes);
  });
  return true;
}

}  // namespace

const Steps kLinkBroadcast{Steps::Memory::kLink, fill, nullptr, collect};

}  // namespace kvstore_hvd

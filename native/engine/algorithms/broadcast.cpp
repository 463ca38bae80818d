// The root stages its array, and all copy it. Over hosts it lays it into the link's memory, and the link sends it to
// the other hosts.
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

void fill(Chunk& chunk) {
  if (chunk.entry().root == chunk.rank()) chunk.stage(chunk.all());
}

bool copy(Chunk& chunk) {
  const int root = chunk.entry().root;
  if (root != chunk.rank() && !chunk.has_filled(root)) return false;
  copy_from(chunk, chunk.staging(root), root == chunk.rank());
  return true;
}

bool is_root_of_all(const Chunk& chunk) { return chunk.world().rank(chunk.rank()).rank_of_world == chunk.entry().root; }

void fill_link_memory(Chunk& chunk) {
  if (is_root_of_all(chunk)) chunk.stage_to(chunk.world().link_memory(chunk.index()), chunk.all());
}

bool copy_from_link(Chunk& chunk) {
  if (!chunk.has_arrived()) return false;
  copy_from(chunk, chunk.world().link_memory(chunk.index()), is_root_of_all(chunk));
  return true;
}

}  // namespace

const Steps kBroadcast{Steps::Memory::kStaging, fill, copy, nullptr};
const Steps kLinkBroadcast{Steps::Memory::kLink, fill_link_memory, nullptr, copy_from_link};

}  // namespace kvstore_hvd

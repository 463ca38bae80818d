#include "shm/describe.hpp"

#include <algorithm>

namespace kvstore_hvd {

std::string_view utf8_prefix(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  const auto continues = [&](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80; };
  while (bytes > 0 && continues(bytes)) --bytes;
  return text.substr(0, bytes);
}

std::string describe_shape(const Signature& signature) {
  std::string text = "(";
  const int shown = std::min<int>(signature.dims, kMaxDims);
  for (int i = 0; i < shown; ++i) text += (i > 0 ? ", " : "") + std::to_string(signature.shape[i]);
  if (signature.dims > shown) {
    text += ", ... " + std::to_string(signature.dims) + " dimensions, hash " + std::to_string(signature.more_dims);
  }
  if (signature.dims == 1) text += ",";
  return text + ")";
}

std::string rank_name(World& world, int rank) { return "rank " + std::to_string(world.rank(rank).rank_of_all); }

std::string describe_ranks(World& world, const std::vector<int>& ranks) {
  const auto shown = [&](std::size_t i) { return world.rank(ranks[i]).rank_of_all; };
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i;
    while (end + 1 < ranks.size() && shown(end + 1) == shown(end) + 1) ++end;
    if (i > 0) text += ", ";
    text += std::to_string(shown(i));
    if (end > i) text += "-" + std::to_string(shown(end));
    i = end + 1;
  }
  return text;
}

std::string describe_rank(World& world, int rank) {
  const RankState& state = world.rank(rank);
  std::string text = rank_name(world, rank);
  // Acquire: the fields that are read next were written before.
  if (state.presence.load(std::memory_order_acquire) == Presence::kAbsent) return text + " (never joined)";
  text += " (";
  if (state.host[0] != '\0') text += std::string(state.host) + ", ";
  return text + "pid " + std::to_string(state.pid) + ")";
}

std::string describe_each(World& world, const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 8;
  const std::size_t shown = std::min(ranks.size(), kMost);
  std::string text;
  for (std::size_t i = 0; i < shown; ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += describe_rank(world, ranks[i]);
  }
  if (shown == ranks.size()) return text;
  return text + " and " + describe_ranks(world, {ranks.begin() + kMost, ranks.end()});
}

std::string describe_speaker(World& world, int rank) {
  std::string text = "[" + rank_name(world, rank) + "/" + std::to_string(world.size_of_all);
  if (world.set_number != 0) {
    text += ", ";
    if (world.rank(rank).rank_of_all != rank) {
      text += "rank " + std::to_string(rank) + "/" + std::to_string(world.ranks) + " in ";
    }
    text += "process set " + std::to_string(world.set_number);
  }
  return text + "] ";
}

}  // namespace kvstore_hvd

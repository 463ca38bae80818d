#include "shm/world.hpp"

#include <algorithm>
#include <cstring>

namespace kvstore_hvd {
namespace {

std::string describe_process(std::string rank, const char* host, int pid) {
  rank += " (";
  if (host[0] != '\0') rank += std::string(host) + ", ";
  return rank + "pid " + std::to_string(pid) + ")";
}

}  // namespace

std::string_view utf8_prefix(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  const auto continues = [&](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80; };
  while (bytes > 0 && continues(bytes)) --bytes;
  return text.substr(0, bytes);
}

template <std::size_t kWords>
void TextOf<kWords>::write(std::string_view text) {
  char bytes[kBytes]{};
  const std::string_view shown = utf8_prefix(text, sizeof(bytes));
  std::memcpy(bytes, shown.data(), shown.size());
  const std::uint32_t version = version_.load(std::memory_order_relaxed);
  // A reader that sees one of the new words sees the odd version in its second look.
  version_.store(version + 1, std::memory_order_relaxed);
  for (std::size_t i = 0; i < kWords; ++i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i * sizeof(word), sizeof(word));
    words_[i].store(word, std::memory_order_release);
  }
  version_.store(version + 2, std::memory_order_release);  // publishes the words
}

template <std::size_t kWords>
std::string TextOf<kWords>::read() const {
  char bytes[kBytes];
  const std::uint32_t version = version_.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < kWords; ++i) {
    const std::uint64_t word = words_[i].load(std::memory_order_acquire);
    std::memcpy(bytes + i * sizeof(word), &word, sizeof(word));
  }
  if (version % 2 != 0 || version_.load(std::memory_order_relaxed) != version) return "";
  return std::string(bytes, strnlen(bytes, sizeof(bytes)));
}

template class TextOf<30>;

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

std::string rank_name(World& world, int rank) {
  if (rank == world.ranks) return "the other hosts";  // the link
  return "rank " + std::to_string(world.rank(rank).rank_of_all);
}

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i;
    while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) ++end;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (end > i) text += "-" + std::to_string(ranks[end]);
    i = end + 1;
  }
  return text;
}

std::string describe_host(World& world, int host) {
  std::vector<int> there;
  std::string name = std::to_string(host);
  for (int rank = 0; rank < world.size; ++rank) {
    const Member& member = world.member(rank);
    if (member.host != host) continue;
    if (there.empty() && member.host_name[0] != '\0') name = member.host_name;
    there.push_back(member.rank_of_all);
  }
  return "host " + name + " (" + describe_ranks(there) + ")";
}

std::string describe_rank(World& world, int rank) {
  const RankState& state = world.rank(rank);
  const std::string text = rank_name(world, rank);
  if (rank == world.ranks) return text;
  // Acquire: the fields that are read next were written before.
  if (state.presence.load(std::memory_order_acquire) == Presence::kAbsent) return text + " (never joined)";
  return describe_process(text, state.host, state.pid);
}

std::string describe_member(World& world, int rank_of_world) {
  const Member& member = world.member(rank_of_world);
  if (member.host == world.host) return describe_rank(world, member.local_rank);
  return describe_process("rank " + std::to_string(member.rank_of_all), member.host_name, member.pid);
}

std::string describe_members(World& world, const std::vector<int>& ranks_of_world) {
  constexpr std::size_t kNamed = 8;
  const std::size_t shown = std::min(ranks_of_world.size(), kNamed);
  std::string text;
  for (std::size_t i = 0; i < shown; ++i) {
    if (i > 0) text += i + 1 == ranks_of_world.size() ? " and " : ", ";
    text += describe_member(world, ranks_of_world[i]);
  }
  if (shown == ranks_of_world.size()) return text;
  std::vector<int> rest;
  for (std::size_t i = kNamed; i < ranks_of_world.size(); ++i)
    rest.push_back(world.member(ranks_of_world[i]).rank_of_all);
  return text + " and " + describe_ranks(rest);
}

std::string error_prefix(World& world, int rank) {
  std::string text = "[" + rank_name(world, rank) + "/" + std::to_string(world.size_of_all);
  if (world.set_number != 0) {
    text += ", ";
    const RankState& self = world.rank(rank);
    if (self.rank_of_all != self.rank_of_world) {
      text += "rank " + std::to_string(self.rank_of_world) + "/" + std::to_string(world.size) + " in ";
    }
    text += "process set " + std::to_string(world.set_number);
  }
  return text + "] ";
}

void ring_all(World& world) {
  for (int r = 0; r < world.ranks; ++r) world.rank(r).bell.ring();
  if (world.has_link()) ring_link(world);
}

void wake_all(World& world) {
  world.table_lock.wake();
  world.schedule_lock.wake();
  for (int r = 0; r < world.parties; ++r) {
    RankState& rank = world.rank(r);
    rank.filled.wake();
    rank.reduced.wake();
    rank.collected.wake();
    rank.bell.wake();
  }
  for (Claims& claims : world.claims) claims.finished.wake();
  if (world.has_link()) ring_link(world);
}

}  // namespace kvstore_hvd

#include "shm/segment.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

namespace kvstore_hvd {
namespace {

constexpr std::uint64_t kMagic = 0x6b76687664303134;  // changes with any change of world.hpp
constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Slices of up to 128 KiB for each rank, but no more than 1 MiB of staging for a chunk: larger gains nothing, and costs
// latency to a tensor of higher priority.
constexpr std::size_t kMaxSlice = std::size_t{128} << 10;
constexpr std::size_t kMaxStage = std::size_t{1} << 20;
// Of all ranks' payloads of one slot: address space, and what one rank may have to reduce while the others wait.
constexpr std::size_t kMaxPayloads = std::size_t{64} << 10;

// Cores that the calling thread may run on; kMaxRanks where the system does not say.
int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : kMaxRanks;
}

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// What an announcement can carry in a world of `size` ranks.
std::size_t inline_bytes(std::size_t size) { return std::min<std::size_t>(kMaxInline, kMaxPayloads / size / 64 * 64); }

// Of all hosts' sums of a chunk, or of all ranks' inputs.
constexpr std::size_t kMaxLinkMemory = std::size_t{4} << 20;

// `size`: of ranks here, of `all`, on that many hosts.
Layout layout_of(std::size_t size, std::size_t all, std::size_t hosts, std::size_t arena_bytes) {
  const bool has_link = hosts > 1;
  const std::size_t parties = has_link ? size + 1 : size;
  Layout at{};
  at.ranks = round_up(sizeof(World), kPage);
  at.announcements = round_up(at.ranks + parties * sizeof(RankState), kPage);
  at.marks = round_up(at.announcements + parties * kSlots * sizeof(Announcement), kPage);
  at.payloads = round_up(at.marks + parties * kSlots * sizeof(Mark), kPage);
  at.payload_stride = inline_bytes(size) + 64;  // not a power of two, as below
  at.members = round_up(at.payloads + size * kSlots * at.payload_stride, kPage);
  at.late = at.members + all * sizeof(Member);
  at.late_words = has_link ? (all + 63) / 64 : 0;
  at.records = round_up(at.late + at.late_words * sizeof(std::uint64_t) * kSlots, kPage);
  at.staging = round_up(at.records + size * kFlightRecords * sizeof(FlightRecord), kHugePage);
  // Between hosts a chunk costs messages: fewer, larger ones.
  at.stage_bytes = has_link ? kMaxStage : round_up(std::min(size * kMaxSlice, kMaxStage), kPage);
  // Ranks' staging memories start on different 2 MiB pages, never a power of two apart: accesses to equal offsets of
  // memories exactly 2^k apart evict one another from the cache.
  at.staging_stride = round_up(at.stage_bytes * kStages, kHugePage) + kPage;
  at.arenas = round_up(at.staging + size * at.staging_stride, kHugePage);
  // The same for arenas, whose sizes are often powers of two.
  at.arena_bytes = arena_bytes;
  at.arena_stride = arena_bytes == 0 ? 0 : round_up(arena_bytes, kHugePage) + kHugePage + page_size();
  at.link = round_up(at.arenas + size * at.arena_stride, kHugePage);
  at.link_bytes = has_link ? kMaxLinkMemory : 0;
  at.total = round_up(at.link + at.link_bytes * kLinkSlots, kHugePage);
  return at;
}

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Returns the number of ranks in the world. Throws std::invalid_argument.
std::size_t check_hosts(const Hosts& hosts, int size) {
  if (!hosts.are_several()) return static_cast<std::size_t>(size);
  const auto n_hosts = static_cast<int>(hosts.ranks.size());
  if (hosts.host < 0 || hosts.host >= n_hosts || hosts.ranks[hosts.host].size() != static_cast<std::size_t>(size)) {
    throw std::invalid_argument("this host has not as many ranks as the table of hosts says");
  }
  std::vector<int> all;
  for (const auto& ranks : hosts.ranks) {
    if (ranks.empty()) throw std::invalid_argument("a host has no ranks");
    all.insert(all.end(), ranks.begin(), ranks.end());
  }
  std::sort(all.begin(), all.end());
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] != static_cast<int>(r)) throw std::invalid_argument("not every rank is on one host");
  }
  if (!hosts.processes.empty() && hosts.processes.size() != all.size()) {
    throw std::invalid_argument("there is not one process for each rank");
  }
  return all.size();
}

// Of slices and chunks: pages, so that no element and no cache line is cut.
constexpr std::uint32_t kUnit = 4096;
// No more is staged for a chunk than fits into the staging memory of a world of one rank.
constexpr std::uint32_t kMostStaged = 128 << 10;
constexpr std::uint32_t kMost = 1 << 30;

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

[[noreturn]] void refuse(const std::string& fact) { throw std::invalid_argument(fact); }

void set(Thresholds& thresholds, std::string_view setting) {
  const auto equals = setting.find('=');
  if (equals == std::string_view::npos) refuse("'" + std::string(setting) + "' is not NAME=BYTES.");
  const std::string name(trimmed(setting.substr(0, equals)));
  const std::string_view text = trimmed(setting.substr(equals + 1));
  for (const ThresholdInfo& info : threshold_infos()) {
    if (info.name != name) continue;
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < info.least || value > info.most ||
        value % info.unit != 0) {
      refuse(name + ": '" + std::string(text) + "' is not a multiple of " + std::to_string(info.unit) + " from " +
             std::to_string(info.least) + " to " + std::to_string(info.most) + ".");
    }
    thresholds.*info.field = value;
    return;
  }
  std::string names;
  for (const ThresholdInfo& info : threshold_infos()) names += std::string(names.empty() ? "" : ", ") + info.name;
  refuse("'" + name + "' does not exist; there are " + names + ".");
}

}  // namespace

void Segment::map(std::size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (memory == MAP_FAILED) fail("mapping the shared segment");
  world_ = static_cast<World*>(memory);
  bytes_ = bytes;
  // A forked child (a DataLoader's worker) must not be able to write into the world of its parent.
  if (madvise(memory, bytes, MADV_DONTFORK) != 0) fail("keeping the shared segment from forked children");
}

std::shared_ptr<Segment> Segment::create(int size, std::size_t arena_bytes, const Thresholds& thresholds,
                                         const Inside& inside, std::optional<bool> has_core_for_each,
                                         const Hosts& hosts) {
  if (size < 1 || size > kMaxRanks) {
    throw std::invalid_argument("a world has 1 to " + std::to_string(kMaxRanks) + " ranks on a host, not " +
                                std::to_string(size));
  }
  const std::size_t all = check_hosts(hosts, size);
  if (inside.number != 0 && inside.ranks.size() != all) {
    throw std::invalid_argument("there is not one rank of the world of all for each rank");
  }
  const std::size_t n_hosts = hosts.are_several() ? hosts.ranks.size() : 1;
  const Layout layout = layout_of(static_cast<std::size_t>(size), all, n_hosts, round_up(arena_bytes, page_size()));
  const std::shared_ptr<Segment> segment(new Segment(memfd_create("kvstore_hvd", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  const int fd = segment->fd();
  if (fd < 0) fail("creating the shared segment");
  if (ftruncate(fd, static_cast<off_t>(layout.total)) != 0) fail("sizing the shared segment");
  // No process can take memory away under a rank that uses it.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) fail("sealing the shared segment");
  segment->map(layout.total);
  World& world = segment->world();
  world.layout = layout;
  world.ranks = size;
  world.parties = hosts.are_several() ? size + 1 : size;
  world.size = static_cast<std::int32_t>(all);
  world.hosts = static_cast<std::int32_t>(n_hosts);
  world.host = hosts.host;
  world.created = monotonic_ns();
  world.thresholds = thresholds;
  // The same on all hosts.
  std::size_t most = static_cast<std::size_t>(size);
  for (const auto& ranks : hosts.ranks) most = std::max(most, ranks.size());
  world.thresholds.inlined = std::min(thresholds.inlined, static_cast<std::uint32_t>(inline_bytes(most)));
  world.set_number = inside.number;
  world.size_of_all = inside.number == 0 ? static_cast<int>(all) : inside.size;
  world.has_core_for_each = has_core_for_each.value_or(size <= usable_cores()) ? 1 : 0;
  std::int32_t position = 0;
  for (int host = 0; host < world.hosts; ++host) {
    const int ranks_there = hosts.are_several() ? static_cast<int>(hosts.ranks[host].size()) : size;
    for (std::int32_t r = 0; r < ranks_there; ++r, ++position) {
      const int rank = hosts.are_several() ? hosts.ranks[host][r] : r;
      Member& member = world.member(rank);
      member.host = host;
      member.local_rank = r;
      member.position = position;
      member.rank_of_all = inside.number == 0 ? rank : inside.ranks[rank];
      if (!hosts.processes.empty()) {
        member.pid = hosts.processes[rank].second;
        std::strncpy(member.host_name, hosts.processes[rank].first.c_str(), sizeof(member.host_name) - 1);
      }
      if (host != world.host) continue;
      world.rank(r).rank_of_world = rank;
      world.rank(r).rank_of_all = member.rank_of_all;
    }
  }
  world.magic = kMagic;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(int fd) {
  const std::shared_ptr<Segment> segment(new Segment(fcntl(fd, F_DUPFD_CLOEXEC, 0)));
  if (segment->fd() < 0) fail("duplicating the descriptor of the shared segment");
  struct stat status{};
  if (fstat(segment->fd(), &status) != 0) fail("examining the shared segment");
  const auto bytes = static_cast<std::size_t>(status.st_size);
  if (bytes < sizeof(World)) throw std::invalid_argument("not a segment of this build of kvstore_hvd: too small");
  segment->map(bytes);
  const World& world = segment->world();
  if (world.magic != kMagic || world.ranks < 1 || world.ranks > kMaxRanks || world.layout.total != bytes ||
      layout_of(static_cast<std::size_t>(world.ranks), static_cast<std::size_t>(world.size),
                static_cast<std::size_t>(world.hosts), world.layout.arena_bytes)
              .total != bytes) {
    throw std::invalid_argument("not a segment of this build of kvstore_hvd (" + abi() + ")");
  }
  return segment;
}

Segment::Segment(int fd) : fd_(fd), owner_(process_id()) {}

Segment::~Segment() {
  if (world_ != nullptr && process_id() == owner_) munmap(world_, bytes_);
  if (fd_ >= 0) close(fd_);
}

std::string Segment::abi() {
  return "segment " + std::to_string(kMagic & 0xffffff) + "/" + std::to_string(sizeof(World)) + "/" +
         std::to_string(sizeof(RankState)) + "/" + std::to_string(sizeof(Announcement));
}

const std::vector<ThresholdInfo>& threshold_infos() {
  static const std::vector<ThresholdInfo> infos = {
      {"inlined", &Thresholds::inlined, 64, 0, kMaxInline},
      {"inlined_direct", &Thresholds::inlined_direct, 64, 0, kMost},
      {"one_shot", &Thresholds::one_shot, 64, 0, kMostStaged},
      {"large", &Thresholds::large, kUnit, 0, kMost},
      {"min_chunk", &Thresholds::min_chunk, kUnit, kUnit, kMost},
      {"max_slice", &Thresholds::max_slice, kUnit, kUnit, kMostStaged},
      {"max_slice_large", &Thresholds::max_slice_large, kUnit, kUnit, kMostStaged},
      {"broadcast_chunk", &Thresholds::broadcast_chunk, kUnit, kUnit, kMost},
      {"direct_chunk", &Thresholds::direct_chunk, kUnit, kUnit, kMost},
      {"min_part", &Thresholds::min_part, kUnit, kUnit, kMost},
      {"max_part", &Thresholds::max_part, kUnit, kUnit, kMost},
      {"submitter", &Thresholds::submitter, 64, 0, kMost},
      {"device_fusion", &Thresholds::device_fusion, 64, 0, kMost},
      {"linger", &Thresholds::linger, 64, 0, kMost},
  };
  return infos;
}

Thresholds parse_thresholds(std::string_view text) {
  Thresholds thresholds;
  while (!trimmed(text).empty()) {
    const auto comma = text.find(',');
    const std::string_view setting = trimmed(text.substr(0, comma));
    text = comma == std::string_view::npos ? "" : text.substr(comma + 1);
    set(thresholds, setting);
  }
  if (thresholds.min_part > thresholds.max_part) refuse("min_part is above max_part.");
  return thresholds;
}

}  // namespace kvstore_hvd

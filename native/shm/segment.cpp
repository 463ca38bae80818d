#include "shm/segment.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/process.hpp"
#include "shm/doorbell.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

constexpr std::uint64_t kMagic = 0x6b76687664303131;  // changes with any change of world.hpp
constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Slices of up to 128 KiB for each rank, but no more than 1 MiB of staging for a chunk: larger gains nothing, and costs
// latency to a tensor of higher priority.
constexpr std::size_t kMaxSlice = std::size_t{128} << 10;
constexpr std::size_t kMaxStage = std::size_t{1} << 20;
// Of all ranks' payloads of one slot: address space, and what one rank may have to reduce while the others wait.
constexpr std::size_t kMaxPayloads = std::size_t{64} << 10;

// That the calling thread may run on; as many as it likes where nobody can tell.
int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : kMaxRanks;
}

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// What an announcement can carry in a world of `size` ranks.
std::size_t inline_bytes(std::size_t size) { return std::min<std::size_t>(kMaxInline, kMaxPayloads / size / 64 * 64); }

// Of all hosts' sums of a chunk, or of all ranks' inputs.
constexpr std::size_t kMaxLinkMemory = std::size_t{4} << 20;

struct Layout {
  std::size_t ranks, announcements, marks, payloads, payload_stride, homes, remotes, late, late_words, staging, stride,
      stage, arenas, arena_stride, link, link_bytes, total;

  // `size`: of ranks here, of `all`, on that many hosts.
  Layout(std::size_t size, std::size_t all, std::size_t hosts, std::size_t arena_bytes) {
    const bool has_link = hosts > 1;
    const std::size_t parties = has_link ? size + 1 : size;
    ranks = round_up(sizeof(World), kPage);
    announcements = round_up(ranks + parties * sizeof(RankState), kPage);
    marks = round_up(announcements + parties * kSlots * sizeof(Announcement), kPage);
    payloads = round_up(marks + parties * kSlots * sizeof(Mark), kPage);
    // Not a power of two, as below.
    payload_stride = inline_bytes(size) + 64;
    homes = payloads + size * kSlots * payload_stride;
    remotes = round_up(homes + (has_link ? all * sizeof(World::Home) : 0), kPage);
    late = remotes + (has_link ? all * sizeof(RemoteRank) : 0);
    late_words = has_link ? (all + 63) / 64 : 0;
    staging = round_up(late + late_words * sizeof(std::uint64_t) * kSlots, kHugePage);
    // Between hosts a chunk costs messages: fewer, larger ones.
    stage = has_link ? kMaxStage : round_up(std::min(size * kMaxSlice, kMaxStage), kPage);
    // Ranks' staging memories start on different 2 MiB pages, never a power of two apart: accesses to equal offsets of
    // memories exactly 2^k apart evict one another from the cache.
    stride = round_up(stage * kStages, kHugePage) + kPage;
    arenas = round_up(staging + size * stride, kHugePage);
    // The same for arenas, whose sizes are often powers of two.
    arena_stride = arena_bytes == 0 ? 0 : round_up(arena_bytes, kHugePage) + kHugePage + page_size();
    link = round_up(arenas + size * arena_stride, kHugePage);
    link_bytes = has_link ? kMaxLinkMemory : 0;
    total = round_up(link + link_bytes * kLinkSlots, kHugePage);
  }
};

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
  return all.size();
}

// Closes the descriptor unless it was handed on.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace

std::shared_ptr<Segment> Segment::map(int fd, std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (memory == MAP_FAILED) fail("mapping the shared segment");
  // A forked child (a DataLoader's worker) must not be able to write into the world of its parent.
  if (madvise(memory, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(memory, bytes);
    errno = error;
    fail("keeping the shared segment from forked children");
  }
  return std::shared_ptr<Segment>(new Segment(fd, static_cast<World*>(memory), bytes));
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
  arena_bytes = round_up(arena_bytes, page_size());
  const std::size_t n_hosts = hosts.are_several() ? hosts.ranks.size() : 1;
  const Layout layout(static_cast<std::size_t>(size), all, n_hosts, arena_bytes);
  Descriptor fd(memfd_create("kvstore_hvd", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) fail("creating the shared segment");
  if (ftruncate(fd.get(), static_cast<off_t>(layout.total)) != 0) fail("sizing the shared segment");
  // Nobody can take memory away under a rank that uses it.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) fail("sealing the shared segment");

  auto segment = map(fd.get(), layout.total);
  fd.release();
  World& world = segment->world();
  world.ranks = size;
  world.parties = hosts.are_several() ? size + 1 : size;
  world.size = static_cast<std::int32_t>(all);
  world.hosts = static_cast<std::int32_t>(n_hosts);
  world.host = hosts.host;
  world.stage_bytes = static_cast<std::uint32_t>(layout.stage);
  world.total_bytes = layout.total;
  world.ranks_offset = layout.ranks;
  world.announcements_offset = layout.announcements;
  world.marks_offset = layout.marks;
  world.payloads_offset = layout.payloads;
  world.staging_offset = layout.staging;
  world.staging_stride = layout.stride;
  world.arena_bytes = arena_bytes;
  world.arenas_offset = layout.arenas;
  world.arena_stride = layout.arena_stride;
  world.payload_stride = layout.payload_stride;
  world.homes_offset = layout.homes;
  world.remotes_offset = layout.remotes;
  world.late_offset = layout.late;
  world.late_words = layout.late_words;
  world.link_offset = layout.link;
  world.link_bytes = static_cast<std::uint32_t>(layout.link_bytes);
  world.thresholds = thresholds;
  // The same on all hosts.
  std::size_t most = static_cast<std::size_t>(size);
  for (const auto& ranks : hosts.ranks) most = std::max(most, ranks.size());
  world.thresholds.inlined = std::min(thresholds.inlined, static_cast<std::uint32_t>(inline_bytes(most)));
  world.set_number = inside.number;
  world.size_of_all = inside.number == 0 ? static_cast<int>(all) : inside.size;
  world.has_core_for_each = has_core_for_each.value_or(size <= usable_cores()) ? 1 : 0;
  for (int r = 0; r < size; ++r) {
    const int rank = hosts.are_several() ? hosts.ranks[hosts.host][r] : r;
    world.rank(r).rank_of_world = rank;
    world.rank(r).rank_of_all = inside.number == 0 ? rank : inside.ranks[rank];
  }
  auto* const homes = reinterpret_cast<World::Home*>(world.base() + world.homes_offset);
  std::int32_t place = 0;
  for (int host = 0; hosts.are_several() && host < world.hosts; ++host) {
    std::int32_t r = 0;
    for (const int rank : hosts.ranks[host])
      homes[rank] = {host, r++, place++, inside.number == 0 ? rank : inside.ranks[rank]};
  }
  world.magic = kMagic;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(int fd) {
  Descriptor own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (own.get() < 0) fail("duplicating the descriptor of the shared segment");
  struct stat status{};
  if (fstat(own.get(), &status) != 0) fail("examining the shared segment");
  const auto bytes = static_cast<std::size_t>(status.st_size);
  if (bytes < sizeof(World)) throw std::invalid_argument("not a segment of this build of kvstore_hvd: too small");

  auto segment = map(own.get(), bytes);
  own.release();
  const World& world = segment->world();
  if (world.magic != kMagic || world.ranks < 1 || world.ranks > kMaxRanks || world.total_bytes != bytes ||
      Layout(static_cast<std::size_t>(world.ranks), static_cast<std::size_t>(world.size),
             static_cast<std::size_t>(world.hosts), world.arena_bytes)
              .total != bytes) {
    throw std::invalid_argument("not a segment of this build of kvstore_hvd (" + abi() + ")");
  }
  return segment;
}

Segment::Segment(int fd, World* world, std::size_t bytes)
    : fd_(fd), owner_(process_id()), world_(world), bytes_(bytes) {}

Segment::~Segment() {
  if (process_id() == owner_) munmap(world_, bytes_);
  close(fd_);
}

void Segment::introduce(int rank, int pid, const std::string& host) {
  if (rank < 0 || rank >= world_->size) throw std::invalid_argument("no rank " + std::to_string(rank));
  if (world_->home(rank).host == world_->host) return;
  RemoteRank& remote = world_->remote(rank);
  remote.pid = pid;
  std::strncpy(remote.host, host.c_str(), sizeof(remote.host) - 1);
  remote.is_known.store(1, std::memory_order_release);  // Release: publishes both.
}

int Segment::size() const { return world_->ranks; }

std::string Segment::abi() {
  return "segment " + std::to_string(kMagic & 0xffffff) + "/" + std::to_string(sizeof(World)) + "/" +
         std::to_string(sizeof(RankState)) + "/" + std::to_string(sizeof(Announcement));
}

void ring_link(World& world) {
  if (world.link_number == 0) {
    world.link().bell.ring();
  } else if (world.link().bell.ring_and_is_asleep()) {
    Doorbell::ring(world.link_number);
  }
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
  for (const Claims& claims : world.claims) claims.finished.wake();
  if (world.has_link()) ring_link(world);
}

}  // namespace kvstore_hvd

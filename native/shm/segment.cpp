#include "shm/segment.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/process.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

constexpr std::uint64_t kMagic = 0x6b76687664303130;  // changes with any change of world.hpp
constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Slices of up to 128 KiB for each rank, but no more than 1 MiB of staging for a chunk: larger gains nothing, and costs
// latency to a tensor of higher priority.
constexpr std::size_t kMaxSlice = std::size_t{128} << 10;
constexpr std::size_t kMaxStage = std::size_t{1} << 20;
// Of all ranks' payloads of one slot: address space, and what one rank may have to reduce while the others wait.
constexpr std::size_t kMaxPayloads = std::size_t{64} << 10;

// Of this machine, which ranks that share memory have in common.
std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// That the calling thread may run on; as many as it likes where nobody can tell.
int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : kMaxRanks;
}

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// What an announcement can carry in a world of `size` ranks.
std::size_t inline_bytes(std::size_t size) { return std::min<std::size_t>(kMaxInline, kMaxPayloads / size / 64 * 64); }

struct Layout {
  std::size_t ranks, announcements, marks, payloads, payload_stride, staging, stride, stage, arenas, arena_stride,
      total;

  Layout(std::size_t size, std::size_t arena_bytes) {
    ranks = round_up(sizeof(World), kPage);
    announcements = round_up(ranks + size * sizeof(RankState), kPage);
    marks = round_up(announcements + size * kSlots * sizeof(Announcement), kPage);
    payloads = round_up(marks + size * kSlots * sizeof(Mark), kPage);
    // Not a power of two, as below.
    payload_stride = inline_bytes(size) + 64;
    staging = round_up(payloads + size * kSlots * payload_stride, kHugePage);
    stage = round_up(std::min(size * kMaxSlice, kMaxStage), kPage);
    // Ranks' staging memories start on different 2 MiB pages, never a power of two apart: accesses to equal offsets of
    // memories exactly 2^k apart evict one another from the cache.
    stride = round_up(stage * kStages, kHugePage) + kPage;
    arenas = round_up(staging + size * stride, kHugePage);
    // The same for arenas, whose sizes are often powers of two.
    arena_stride = arena_bytes == 0 ? 0 : round_up(arena_bytes, kHugePage) + kHugePage + page_size();
    total = round_up(arenas + size * arena_stride, kHugePage);
  }
};

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

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
                                         const Inside& inside, std::optional<bool> has_core_for_each) {
  if (size < 1 || size > kMaxRanks) {
    throw std::invalid_argument("a world has 1 to " + std::to_string(kMaxRanks) + " ranks on a host, not " +
                                std::to_string(size));
  }
  if (inside.number != 0 && inside.ranks.size() != static_cast<std::size_t>(size)) {
    throw std::invalid_argument("there is not one rank of the world of all for each rank");
  }
  arena_bytes = round_up(arena_bytes, page_size());
  const Layout layout(static_cast<std::size_t>(size), arena_bytes);
  Descriptor fd(memfd_create("kvstore_hvd", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) fail("creating the shared segment");
  if (ftruncate(fd.get(), static_cast<off_t>(layout.total)) != 0) fail("sizing the shared segment");
  // Nobody can take memory away under a rank that uses it.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) fail("sealing the shared segment");

  auto segment = map(fd.get(), layout.total);
  fd.release();
  World& world = segment->world();
  world.ranks = world.parties = size;
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
  world.thresholds = thresholds;
  world.thresholds.inlined =
      std::min(thresholds.inlined, static_cast<std::uint32_t>(inline_bytes(static_cast<std::size_t>(size))));
  world.set_number = inside.number;
  world.size_of_all = inside.number == 0 ? size : inside.size;
  world.has_core_for_each = has_core_for_each.value_or(size <= usable_cores()) ? 1 : 0;
  for (int r = 0; r < size; ++r) world.rank(r).rank_of_all = inside.number == 0 ? r : inside.ranks[r];
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
      Layout(static_cast<std::size_t>(world.ranks), world.arena_bytes).total != bytes) {
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

int Segment::size() const { return world_->ranks; }

std::string Segment::abi() {
  return "segment " + std::to_string(kMagic & 0xffffff) + "/" + std::to_string(sizeof(World)) + "/" +
         std::to_string(sizeof(RankState)) + "/" + std::to_string(sizeof(Announcement));
}

void ring_all(World& world) {
  for (int r = 0; r < world.ranks; ++r) world.rank(r).bell.ring();
}

void wake_all(World& world) {
  world.table_lock.wake();
  world.schedule_lock.wake();
  for (int r = 0; r < world.ranks; ++r) {
    RankState& rank = world.rank(r);
    rank.filled.wake();
    rank.reduced.wake();
    rank.bell.wake();
  }
  for (const Claims& claims : world.claims) claims.finished.wake();
}

}  // namespace kvstore_hvd

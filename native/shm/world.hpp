// What lies in a segment: plain structures at fixed offsets, the same for every rank. Zero-filled memory is a valid
// initial state of all of them, except for the few fields that Segment::create fills in.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/types.hpp"
#include "shm/failure.hpp"
#include "shm/inbox.hpp"
#include "shm/thresholds.hpp"
#include "shm/wait.hpp"

namespace kvstore_hvd {

inline constexpr int kSlots = 8192;   // tensors known at a time (names, not requests)
inline constexpr int kEntries = 64;   // scheduled chunks that some rank has not yet taken note of
inline constexpr int kPieces = 64;    // tensors fused into one chunk
inline constexpr int kStages = 3;     // chunks in the pipeline: being filled, reduced, collected
inline constexpr int kLinkSlots = 8;  // chunks on their way between hosts
inline constexpr int kMaxName = 240;  // bytes of a request's name
inline constexpr int kMaxDims = 12;   // dimensions that are compared and printed one by one
inline constexpr std::uint32_t kNoSlot = 0xffffffff;

enum class Presence : std::uint32_t { kAbsent = 0, kJoined = 1, kLeft = 2 };

// A short text that one thread writes and any thread of any rank reads.
class SharedText {
 public:
  static constexpr std::size_t kWords = 30;
  static constexpr std::size_t kBytes = kWords * sizeof(std::uint64_t);

  void write(std::string_view text);
  // Empty while it is being written.
  std::string read() const;

 private:
  std::atomic<std::uint32_t> version_;  // odd while it is being written
  std::atomic<std::uint64_t> words_[kWords];
};

// What a rank is doing, as its watcher or its host's link tells.
struct Doing {
  // Ranks in the longest chain that begins with this one, each of which has waited for the next past its deadline; 0:
  // this rank has not waited for so long.
  std::atomic<std::uint32_t> waits;
  SharedText text;  // the operation in which it has, and the line of its program
};
// In a chain of so many ranks, or of all, some rank waits for one before it.
inline constexpr std::uint32_t kMostWaits = 64;
inline constexpr std::uint32_t kStopped = 1 << 30;  // instead, of a process that is stopped

// One rank, or the link, as the others see it. Each flag is written by its rank (the bell by anyone); those of the link
// are `filled` (entries for which all has come that the ranks read) and the bell, and its inbox has the slots that all
// ranks of this host have announced.
struct RankState {
  Flag filled;          // entries whose contribution lies in the rank's staging memory
  Flag reduced;         // entries that the rank has reduced, and whose foreign staging memory it no longer reads
  Flag collected;       // entries whose link memory it no longer reads; over hosts only
  Flag bell;            // rung when there may be something to do for the rank
  Inbox<kSlots> inbox;  // slots whose operation another rank has carried out; one operation is under way on each
  // Batches that the rank's device thread has begun, and that its device is through with; see DeviceQueue.
  std::atomic<std::uint32_t> batches_begun;
  std::atomic<std::uint32_t> batches_ended;
  std::atomic<Presence> presence;  // Release: publishes the fields below; the others read them after an acquire.
  std::int32_t pid;
  std::uint64_t start_time;  // of the process, in clock ticks since boot: tells a recycled pid
  // See Inside and Hosts; written by Segment::create.
  std::int32_t rank_of_all, rank_of_world;
  char host[64];
  Doing doing;
};

// A rank of another host, as the link knows it.
struct RemoteRank {
  std::atomic<std::uint32_t> is_known;  // Release: publishes pid and host.
  std::int32_t pid;
  char host[64];
  Doing doing;
};

// What one rank wants to do with a tensor; compared byte by byte across ranks, so padding is spelled out and zero.
struct Signature {
  Collective collective;
  DType dtype;
  ReduceOp op;
  std::uint8_t failed;  // this rank's input failed; `Announcement::note` says why
  std::int32_t root;
  double prescale;
  double postscale;
  std::uint64_t group;  // see Request
  std::uint64_t count;
  std::uint16_t dims;
  std::uint8_t as_half;
  std::uint8_t on_device;
  std::uint32_t more_dims;  // a hash of the dimensions beyond kMaxDims
  std::int64_t shape[kMaxDims];
};
static_assert(sizeof(Signature) == 144 && alignof(Signature) == 8);
// Entries are also counted in 32 bits (flags, the head of the schedule), where the count may wrap.
static_assert((kEntries & (kEntries - 1)) == 0);

inline constexpr std::uint64_t kNoPlace = ~std::uint64_t{0};

// What one rank wants to do with a tensor, in full; the others look at it only when they disagree.
struct Announcement {
  Signature signature;
  char note[223];             // why the input failed, or the request's label
  std::uint8_t of_parameter;  // the tensor is a parameter of a network, or its gradient
};

// The same, with the rank's number in the world of all.
struct AnnouncedBy {
  std::int64_t rank;
  Announcement announcement;
};

// What the last rank to announce needs to know of each of the others, in one cache line.
struct alignas(64) Mark {
  std::uint64_t digest;  // of the signature announced last
  // Where the rank's array lies: bytes from the start of its arena, or kNoPlace when it is elsewhere.
  std::uint64_t place;
  double weight;  // see Request
  // How many operations the rank has announced and how many of them it has completed; see TensorTable::take_slot().
  std::atomic<std::uint32_t> announced, completed;
  // How the rank learns that another one has carried out its operation, see InlineReduction.
  enum Watch : std::uint32_t { kInbox, kWatched, kDone };
  std::atomic<std::uint32_t> watch;
  char payload[28];  // see World::payload()
};
static_assert(sizeof(Mark) == 64);

// One tensor. A rank's n-th request under a name is matched with the n-th of all others.
struct Slot {
  // From the highest bits down: 32 bits of version, raised when the slot is given to another name; 16 bits that count
  // operations; 1 bit that says whether the link knows of the one under way from another host; 15 bits that say how
  // many ranks have announced it. The last two are back to 0 when the last one, which is the link if there is one,
  // does.
  std::atomic<std::uint64_t> state;
  std::uint32_t next_in_bucket;  // under table_lock
  std::uint64_t hash;            // under table_lock
  std::uint32_t name_length;     // under table_lock
  char name[kMaxName];           // under table_lock

  // What is to be done, written by the last rank to announce before it makes the slot ready, read by whoever schedules
  // and executes it. Stable until every rank has completed it.
  Signature agreed;
  std::uint64_t bytes;
  std::uint64_t scheduled;  // bytes, under schedule_lock
  double weights;           // see World::weights()
  std::uint32_t direct;     // whether every rank's array lies in its arena
  std::int32_t priority;    // over hosts; that of the last rank of this host
  std::uint32_t error;      // ErrorCode, kOk (0) when agreed
  std::uint32_t error_length;
  char error_text[1024];
};

// A tensor that every rank has announced, waiting to be scheduled.
struct Ready {
  std::int32_t priority;
  std::uint32_t order;  // first come, first served among equals
  std::uint32_t slot;
};

// A binary heap of them, highest priority first.
struct ReadyHeap {
  alignas(128) std::atomic<std::uint32_t> count;
  Ready tensors[kSlots];
};

enum class Algorithm : std::uint32_t {
  kFail,           // nothing moves: the ranks disagree, the slot says about what
  kOneShot,        // every rank stages everything and reduces everything: one synchronisation
  kTwoShot,        // every rank reduces one slice for all: two synchronisations, each byte moves twice
  kBroadcast,      // the root stages, the others copy
  kDirect,         // arrays in arenas: whoever claims a part reduces it, from all arrays into all arrays
  kInline,         // never scheduled: the last rank to announce reduces what the announcements carry
  kExchange,       // every rank stages its input and takes what it wants of the others'
  kReduceScatter,  // every rank stages everything and reduces what it receives
  kDevice,         // nothing moves here: the ranks' device threads carry out all pieces together
  // Over hosts, where the link moves bytes between the hosts' link memories; see algorithms/.
  kLinkSum,        // every host reduces its ranks' arrays, and the hosts' sums meet on all hosts
  kLinkBroadcast,  // the root's host sends its array to the others
  kLinkExchange,   // every host sends its ranks' inputs to the others
};

// Part of a tensor inside a chunk.
struct Piece {
  std::uint32_t slot;
  std::uint32_t staged;  // byte offset in the staging memory of the chunk, a multiple of 64
  std::uint64_t offset;  // byte offset in the tensor
  std::uint64_t bytes;
};

// One step of the agreed schedule: what every rank does next.
struct Entry {
  Algorithm algorithm;
  std::int32_t root;
  std::uint32_t n_pieces;
  std::uint32_t staged_bytes;  // of all pieces, laid out one after another
  std::uint32_t part_bytes;    // kDirect: what is claimed at a time
  Piece pieces[kPieces];
};

// Who does what of a kDirect entry.
struct Claims {
  alignas(128) std::atomic<std::uint32_t> next;  // parts claimed so far, or more
  alignas(128) std::atomic<std::uint32_t> done;  // parts reduced
  Flag finished;                                 // at the number of the entry plus one, once all parts are
};

// The weights of ranks, see Request: negative for one that has joined, which counts as much as the others do on
// average.
struct WeightSums {
  double sum;
  std::uint32_t present, absent;

  void add(double weight) {
    if (weight < 0.0) {
      ++absent;
    } else {
      sum += weight;
      present += weight > 0.0 ? 1 : 0;
    }
  }
  void add(const WeightSums& others) {
    sum += others.sum;
    present += others.present;
    absent += others.absent;
  }
  double total() const {
    return absent == 0 || present == 0 ? sum : sum * (static_cast<double>(present) + absent) / present;
  }
};

struct World {
  std::uint64_t magic;
  // Who stages and reduces: the ranks on this host. Who announces: they, and if there are several hosts the link, last,
  // for the ranks of all others. Who exists in this world, on all hosts. (And in the world of all, of which this may be
  // a part: see Inside.)
  std::int32_t ranks, parties, size;
  std::int32_t hosts, host;   // how many, and which one this is
  std::uint32_t stage_bytes;  // of one rank's staging memory for one chunk
  std::uint64_t total_bytes;
  std::uint64_t ranks_offset, announcements_offset, marks_offset, payloads_offset, staging_offset, staging_stride;
  std::uint64_t arena_bytes, arenas_offset, arena_stride;  // of each rank
  std::uint64_t payload_stride;
  std::uint64_t homes_offset, remotes_offset, late_offset, late_words, link_offset;
  std::uint32_t link_bytes;  // of the link's memory for one chunk
  std::uint32_t set_number;  // see Inside
  std::int32_t size_of_all;
  std::uint32_t has_core_for_each;  // whether the ranks may use as many cores as there are ranks
  Thresholds thresholds;

  Failure failure;
  std::atomic<std::uint32_t> left;  // ranks that left in good order
  // The link's steps, modulo 2^32, and how long it may stand still in between; 0: there is none yet.
  std::atomic<std::uint32_t> link_steps;
  std::atomic<std::int64_t> link_silence_ns;
  // When a rank here has asked for what others have announced, nanoseconds of the monotonic clock: for some time the
  // link then tells of what other hosts have announced at once.
  std::atomic<std::int64_t> asked_at;
  // Set before other ranks have the segment.
  DType link_dtype;           // see dtype_on_link()
  std::uint64_t link_number;  // of its thread's Doorbell; 0: the thread sleeps at the link's bell
  // By entry modulo kLinkSlots: when the link has sent what its ranks have reduced, and when all of the result was
  // here; nanoseconds of the monotonic clock. Published with the link's `filled`.
  struct OnLink {
    std::int64_t sent, arrived;
  };
  OnLink on_link[kLinkSlots];

  // The table of tensors, see tensor_table.hpp.
  SharedLock table_lock;
  // Slots handed out so far (each may have been handed on since); written under the lock.
  std::atomic<std::uint32_t> slots_used;
  std::uint32_t clock_hand;       // where the search for an idle slot goes on
  std::uint32_t buckets[kSlots];  // 1 + slot, 0 when empty
  Slot slots[kSlots];

  // The schedule, see schedule.hpp.
  SharedLock schedule_lock;
  alignas(128) std::atomic<std::uint32_t> head;  // entries published so far
  std::atomic<std::uint32_t> device_entries;     // those of them that are batches for devices; written under the lock
  std::uint32_t next_order;
  ReadyHeap ready, ready_on_device;
  Entry entries[kEntries];
  Claims claims[kEntries];

  // The sum of the ranks' weights, in rank order, see Request. For the rank that was last to announce.
  double weights(std::uint32_t slot) {
    WeightSums sums{};
    for (int r = 0; r < parties; ++r) sums.add(mark(slot, r).weight);
    return sums.total();
  }
  // The type in which a result travels between hosts: that of the arrays, or half of float32. Its sum is rounded to it
  // on each host, and again when it is complete.
  DType dtype_on_link(const Signature& agreed) const {
    if (!has_link() || agreed.dtype != DType::kFloat32 || !can_be_half(agreed.dtype, agreed.op)) return agreed.dtype;
    return agreed.as_half != 0 ? DType::kFloat16 : link_dtype;
  }
  bool is_narrow_on_link(const Signature& agreed) const { return dtype_on_link(agreed) != agreed.dtype; }
  char* base() { return reinterpret_cast<char*>(this); }
  // Whether the world has ranks on other hosts, with whom the link exchanges what this host's have reduced.
  bool has_link() const { return parties != ranks; }
  RankState& link() { return rank(ranks); }
  RankState& rank(int r) { return reinterpret_cast<RankState*>(base() + ranks_offset)[r]; }
  Announcement& announcement(std::uint32_t slot, int r) {
    return reinterpret_cast<Announcement*>(base() + announcements_offset)[static_cast<std::size_t>(slot) * parties + r];
  }
  Mark& mark(std::uint32_t slot, int r) {
    return reinterpret_cast<Mark*>(base() + marks_offset)[static_cast<std::size_t>(slot) * parties + r];
  }
  // The `bytes` that a rank's announcement carries; a few lie in the line that the others read anyway.
  char* payload(std::uint32_t slot, int r, std::size_t bytes) {
    if (bytes <= sizeof(Mark::payload)) return mark(slot, r).payload;
    return base() + payloads_offset + payload_stride * (static_cast<std::size_t>(slot) * ranks + r);
  }
  // Entries count from 0 and never wrap: 64 bits.
  char* staging(int r, std::uint64_t entry) {
    return base() + staging_offset + staging_stride * r + static_cast<std::size_t>(stage_bytes) * (entry % kStages);
  }
  // Where a rank of the world is: its host and its number there; its number if those of each host followed one another,
  // and in the world of all.
  struct Home {
    std::int32_t host, rank, place, of_all;
  };
  Home home(int rank_of_world) {
    if (!has_link()) return {0, rank_of_world, rank_of_world, rank(rank_of_world).rank_of_all};
    return reinterpret_cast<Home*>(base() + homes_offset)[rank_of_world];
  }
  // Ranks of other hosts by their numbers in the world: who they are, and which of them are late in a slot's operation,
  // as far as the link knows; a bit for each.
  RemoteRank& remote(int rank_of_world) {
    return reinterpret_cast<RemoteRank*>(base() + remotes_offset)[rank_of_world];
  }
  std::atomic<std::uint64_t>* late(std::uint32_t slot) {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(base() + late_offset) + slot * late_words;
  }
  Doing& doing(int rank_of_world) {
    const Home at = home(rank_of_world);
    return at.host == host ? rank(at.rank).doing : remote(rank_of_world).doing;
  }
  // The number of a rank of the world in the world of all.
  int rank_of_all(int rank_of_world) { return home(rank_of_world).of_all; }
  // Memory of an entry that ranks and link share. See algorithms/ for what lies in it.
  char* link_memory(std::uint64_t entry) {
    return base() + link_offset + static_cast<std::size_t>(link_bytes) * (entry % kLinkSlots);
  }
  char* arena(int r) { return base() + arenas_offset + arena_stride * r; }
};

// Wakes every sleeper of the world, so that all notice a failure at once.
void wake_all(World& world);

// Rings the link's bell.
void ring_link(World& world);

// Rings every rank's bell, and the link's.
void ring_all(World& world);

}  // namespace kvstore_hvd

// What lies in a segment: plain structures at fixed offsets, the same for every rank. Zero-filled memory is their valid
// initial state, except for the fields that Segment::create fills in.
#pragma once

#include <vector>

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

inline constexpr std::uint64_t kFlightRecords = 1024;  // operations of each rank that its flight recorder keeps

inline constexpr std::uint32_t kMaxInline = 4096;  // what an announcement can carry in a world of up to 16 ranks

// Algorithm selection thresholds, in bytes: measured, and overridable without a rebuild. The ranks of a world decide
// alike, by those of the rank that created the segment.
struct Thresholds {
  std::uint32_t inlined = 4096;               // up to here the last rank reduces at once, without a schedule
  std::uint32_t inlined_direct = 128 << 10;   // the same, of arrays in arenas, all ranks' together
  std::uint32_t one_shot = 2048;              // up to here one synchronisation costs less than halving the bytes
  std::uint32_t large = 16 << 20;             // from here on the memory, not the latency, is the limit
  std::uint32_t min_chunk = 64 << 10;         // two-shot: of all ranks together; less is not worth its synchronisations
  std::uint32_t max_slice = 64 << 10;         // two-shot: of one rank
  std::uint32_t max_slice_large = 128 << 10;  // the same, of large tensors
  std::uint32_t broadcast_chunk = 256 << 10;
  std::uint32_t direct_chunk = 1 << 20;  // what a tensor of higher priority may have to wait for
  std::uint32_t min_part = 8 << 10;      // direct, what is claimed at a time: less is done sooner than divided
  std::uint32_t max_part = 256 << 10;
  std::uint32_t submitter = 4 << 20;       // direct: up to here the last rank begins on the thread that submits
  std::uint32_t device_fusion = 64 << 20;  // arrays of devices that are carried out together
  std::uint32_t linger = 1 << 20;          // up to here a submitting thread may stay until the others have come
};

enum class Presence : std::uint32_t { kAbsent = 0, kJoined = 1, kLeft = 2 };

// A short text: one thread writes, any thread of any rank reads.
template <std::size_t kWords>
class TextOf {
 public:
  static constexpr std::size_t kBytes = kWords * sizeof(std::uint64_t);

  void write(std::string_view text);
  // Empty while it is being written.
  std::string read() const;

 private:
  std::atomic<std::uint32_t> version_;  // odd while it is being written
  std::atomic<std::uint64_t> words_[kWords];
};
using SharedText = TextOf<30>;

// What a rank is doing: written by its watcher, of ranks on other hosts by the link.
struct Doing {
  // Ranks in the longest chain that begins with this one, each of which has waited for the next past its deadline; 0:
  // this rank has not waited for so long.
  std::atomic<std::uint32_t> waits;
  SharedText text;  // the operation in which it waits, and the line of its program
};
// A chain of so many ranks, or of all, is a circle.
inline constexpr std::uint32_t kMostWaits = 64;
inline constexpr std::uint32_t kStopped = 1 << 30;  // instead, of a process that is stopped

// What a rank has done, for reports of all ranks. Relaxed, all: figures. Operations, bytes and waiting time are written
// by the rank's own engine, the others by local rank 0's watcher; over hosts by the link, as is all of other hosts'
// ranks.
struct Counts {
  std::atomic<std::uint64_t> operations, bytes;  // that are over; bytes of its arrays
  std::atomic<std::int64_t> waited;              // nanoseconds in which it only waited for others, see Rounds
  std::atomic<std::uint64_t> compared, last;     // operations whose arrivals were compared; those it came last in
  std::atomic<std::int64_t> behind;              // in these: nanoseconds behind the median rank, all together
};

// One operation in a rank's flight recorder: written by the rank, read by any process, also after the rank's death.
struct alignas(64) FlightRecord {
  std::atomic<std::uint64_t> number;     // among the rank's operations, from 1; 0 while the other fields are written
  std::atomic<std::uint64_t> slot;       // the version above the number of the slot, 32 bits each
  std::atomic<std::uint64_t> operation;  // its number under its name, and what it is; see report/flight.cpp
  std::atomic<std::uint64_t> bytes;
  std::atomic<std::int64_t> announced, scheduled, completed;  // nanoseconds of the monotonic clock; 0: not yet
};
static_assert(sizeof(FlightRecord) == 64);

// One rank, or the link, as the others see it. Each flag is written by its owner, the bell by all.
struct RankState {
  Flag filled;     // rank: entries whose contribution lies in its staging memory; link: entries that have arrived here
  Flag reduced;    // entries that the rank has reduced, and whose foreign staging memory it no longer reads
  Flag collected;  // entries whose link memory it no longer reads; over hosts only
  Flag bell;       // rung when there may be something to do for the owner
  // Rank: slots whose operation another rank has carried out, at most one operation on each. Link: slots that all ranks
  // of this host have announced.
  Inbox<kSlots> inbox;
  // Batches that the rank's device thread has begun, and that its device is through with; see DeviceQueue.
  std::atomic<std::uint32_t> batches_begun;
  std::atomic<std::uint32_t> batches_ended;
  std::atomic<Presence> presence;  // Release: publishes the fields below; the others read them after an acquire.
  std::int32_t pid;
  std::uint64_t start_time;  // of the process, in clock ticks since boot: tells a recycled pid
  char host[64];
  // Its number in this world and in the world of all, see Inside and Hosts; written by Segment::create.
  std::int32_t rank_of_world, rank_of_all;
};

// One rank of the world, on whichever host; written by Segment::create.
struct Member {
  std::int32_t host, local_rank;
  std::int32_t position;     // its number if those of each host followed one another
  std::int32_t rank_of_all;  // in the world of all
  std::int32_t pid;          // over hosts only, as is the name
  char host_name[64];
  Doing doing;
  Counts counts;
};

// One rank's operation on a tensor; compared byte by byte across ranks, so padding is spelled out and zero.
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

// One rank's operation on a tensor, in full; the others read it only when they disagree.
struct Announcement {
  Signature signature;
  char note[223];             // why the input failed, or the request's label
  std::uint8_t of_parameter;  // the tensor is a parameter of a network, or its gradient
};

struct AnnouncedBy {
  std::int64_t rank;  // in the world of all
  Announcement announcement;
};

// What the last rank to announce reads of each of the others, in one cache line.
struct alignas(64) Mark {
  std::uint64_t digest;  // of the signature announced last
  std::uint64_t place;   // of the rank's array: bytes from the start of its arena; kNoPlace: elsewhere
  double weight;         // see Request
  std::atomic<std::uint32_t> announced, completed;  // operations; see TensorTable::take_slot()
  // How the rank learns that another one has reduced its operation inline, see TensorTable.
  enum Watch : std::uint32_t { kInbox, kWatched, kDone };
  std::atomic<std::uint32_t> watch;
  char payload[28];  // see World::payload()
};
static_assert(sizeof(Mark) == 64);

// One tensor. A rank's n-th request under a name is matched with the n-th of all others.
struct Slot {
  // From the highest bits down: 32 bits of version, raised when the slot is given to another name; 16 bits that count
  // operations; 1 bit: the link has announced the one under way on behalf of other hosts; 15 bits that count the ranks
  // that have announced it. The last two are 0 again once the last party has announced it.
  std::atomic<std::uint64_t> state;
  std::uint32_t next_in_bucket;  // under table_lock
  std::uint64_t hash;            // under table_lock
  std::uint32_t name_length;     // under table_lock
  char name[kMaxName];           // under table_lock

  // The agreed operation: written by the last party to announce; stable until every rank has completed it.
  Signature agreed;
  std::uint64_t bytes;
  std::uint64_t scheduled;  // bytes, under schedule_lock
  double weights;           // see World::weights()
  std::uint32_t direct;     // whether every rank's array lies in its arena
  std::int32_t priority;    // over hosts; that of the last rank of this host
  std::int32_t last;        // over hosts: that rank
  std::uint32_t error;      // ErrorCode, kOk (0) when agreed
  std::uint32_t error_length;
  char error_text[1024];
};

// A tensor that every party has announced, waiting to be scheduled.
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
  kDirect,         // arrays in arenas: a rank that claims a part reduces it, from all arrays into all arrays
  kInline,         // never scheduled: the last rank to announce reduces what the announcements carry
  kExchange,       // every rank stages its input and takes what it wants of the others'
  kReduceScatter,  // every rank stages everything and reduces what it receives
  kDevice,         // nothing moves here: the ranks' device threads carry out all pieces together
  // Over hosts, where the link moves bytes between the hosts' link memories; see algorithms/.
  kLinkSum,        // every host reduces its ranks' arrays, and the hosts' sums meet on all hosts
  kLinkBroadcast,  // the root's host sends its array to the others
  kLinkExchange,   // every host sends its ranks' inputs to the others
};

constexpr const char* name_of(Algorithm algorithm) {
  constexpr const char* kNames[] = {"failed", "one-shot", "two-shot",       "broadcast",
                                    "direct", "inline",   "exchange",       "reducescatter",
                                    "device", "link-sum", "link-broadcast", "link-exchange"};
  return kNames[static_cast<int>(algorithm)];
}

// Part of a tensor inside a chunk.
struct Piece {
  std::uint32_t slot;
  std::uint32_t staged;  // byte offset in the staging memory of the chunk, a multiple of 64
  std::uint64_t offset;  // byte offset in the tensor
  std::uint64_t bytes;
};

// One step of the schedule, the same on every rank.
struct Entry {
  Algorithm algorithm;
  std::int32_t root;
  std::uint32_t n_pieces;
  std::uint32_t staged_bytes;  // of all pieces, laid out one after another
  std::uint32_t part_bytes;    // kDirect: what is claimed at a time
  Piece pieces[kPieces];
};

// The parts of a kDirect entry.
struct Claims {
  alignas(128) std::atomic<std::uint32_t> next;  // parts claimed so far, or more
  alignas(128) std::atomic<std::uint32_t> done;  // parts reduced
  Flag finished;                                 // at the number of the entry plus one, once all parts are
};

// The weights of ranks, see Request; negative: absent, counts as an average one of the others.
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

// Where the parts of a segment lie: offsets and sizes in bytes.
struct Layout {
  std::uint64_t ranks, announcements, marks, payloads, members, late, records, staging, arenas, link, total;
  std::uint64_t payload_stride, late_words, staging_stride, arena_stride;
  std::uint64_t arena_bytes;  // of one rank
  std::uint64_t stage_bytes;  // of one rank's staging memory for one chunk
  std::uint64_t link_bytes;   // of the link's memory for one chunk
};

struct World {
  std::uint64_t magic;
  Layout layout;
  std::int32_t ranks;    // on this host: those that stage and reduce
  std::int32_t parties;  // those that announce: the ranks here, and over hosts the link, last, for the ranks elsewhere
  std::int32_t size;     // ranks on all hosts
  std::int32_t hosts, host;  // how many, and which one this is
  std::uint32_t set_number;  // see Inside
  std::int32_t size_of_all;  // ranks in the world of all
  std::int64_t created;      // nanoseconds of the monotonic clock
  std::int32_t generation;
  char job[64];                     // its name
  std::uint32_t has_core_for_each;  // whether the ranks may use as many cores as there are ranks
  Thresholds thresholds;

  Failure failure;
  std::atomic<std::uint32_t>
      is_told;                      // whether a process of this host has taken it upon itself to write the failure down
  std::atomic<std::uint32_t> left;  // ranks that left in good order
  // The link's steps, modulo 2^32, and how long it may stand still in between; 0: there is none yet.
  std::atomic<std::uint32_t> link_steps;
  std::atomic<std::int64_t> link_silence_ns;
  // When a rank here last called Engine::missed(), nanoseconds of the monotonic clock: for some time afterwards the
  // link announces at once what other hosts have announced.
  std::atomic<std::int64_t> asked_at;
  // Set before other ranks have the segment.
  DType link_dtype;           // see dtype_on_link()
  std::uint64_t link_number;  // of its thread's Doorbell; 0: the thread sleeps at the link's bell
  // By entry modulo kLinkSlots: when the link had sent its ranks' sum, and when all of the result had arrived;
  // nanoseconds of the monotonic clock. Published with the link's `filled`.
  struct OnLink {
    std::int64_t sent, arrived;
    std::uint32_t in_array;  // whether sum and result lie in the array of the only rank; published with the entry
  };
  OnLink on_link[kLinkSlots];

  // The table of tensors, see tensor_table.hpp.
  SharedLock table_lock;
  std::atomic<std::uint32_t> slots_used;  // slots that have had a name; written under the lock
  std::uint32_t clock_hand;               // where the next search for an idle slot begins
  std::uint32_t buckets[kSlots];          // 1 + slot, 0 when empty
  Slot slots[kSlots];

  // The schedule, see schedule.hpp.
  SharedLock schedule_lock;
  alignas(128) std::atomic<std::uint32_t> head;  // entries published so far
  std::atomic<std::uint32_t> device_entries;     // of those, batches for devices; written under the lock
  std::uint32_t next_order;
  ReadyHeap ready, ready_on_device;
  Entry entries[kEntries];
  Claims claims[kEntries];

  // The sum of the ranks' weights, in rank order. For the last rank to announce.
  double weights(std::uint32_t slot) {
    WeightSums sums{};
    for (int r = 0; r < parties; ++r) sums.add(mark(slot, r).weight);
    return sums.total();
  }
  // The type in which a result travels between hosts: that of the arrays, or 16 bits for float32. Each host's sum is
  // rounded to it, and the complete one again.
  DType dtype_on_link(const Signature& agreed) const {
    if (!has_link() || agreed.dtype != DType::kFloat32 || !can_be_half(agreed.dtype, agreed.op)) return agreed.dtype;
    return agreed.as_half != 0 ? DType::kFloat16 : link_dtype;
  }
  bool is_narrow_on_link(const Signature& agreed) const { return dtype_on_link(agreed) != agreed.dtype; }
  char* base() { return reinterpret_cast<char*>(this); }
  template <class T>
  T* at(std::uint64_t offset) {
    return reinterpret_cast<T*>(base() + offset);
  }
  bool has_link() const { return parties != ranks; }
  RankState& link() { return rank(ranks); }
  RankState& rank(int r) { return at<RankState>(layout.ranks)[r]; }
  Announcement& announcement(std::uint32_t slot, int r) {
    return at<Announcement>(layout.announcements)[static_cast<std::size_t>(slot) * parties + r];
  }
  Mark& mark(std::uint32_t slot, int r) { return at<Mark>(layout.marks)[static_cast<std::size_t>(slot) * parties + r]; }
  // The `bytes` that a rank's announcement carries; a few lie in the line that the others read anyway.
  char* payload(std::uint32_t slot, int r, std::size_t bytes) {
    if (bytes <= sizeof(Mark::payload)) return mark(slot, r).payload;
    return base() + layout.payloads + layout.payload_stride * (static_cast<std::size_t>(slot) * ranks + r);
  }
  // Entries count from 0 and never wrap: 64 bits.
  char* staging(int r, std::uint64_t entry) {
    return base() + layout.staging + layout.staging_stride * r + layout.stage_bytes * (entry % kStages);
  }
  Member& member(int rank_of_world) { return at<Member>(layout.members)[rank_of_world]; }
  FlightRecord* records(int r) {
    return at<FlightRecord>(layout.records) + kFlightRecords * static_cast<std::uint64_t>(r);
  }
  // A bit for each rank of the world: those of other hosts that are late in a slot's operation, as the link knows.
  std::atomic<std::uint64_t>* late(std::uint32_t slot) {
    return at<std::atomic<std::uint64_t>>(layout.late) + slot * layout.late_words;
  }
  // Memory of an entry that ranks and link share. See algorithms/ for what lies in it.
  char* link_memory(std::uint64_t entry) { return base() + layout.link + layout.link_bytes * (entry % kLinkSlots); }
  char* arena(int r) { return base() + layout.arenas + layout.arena_stride * r; }
};

// Wakes every sleeper of the world, so that all notice a failure at once.
void wake_all(World& world);

// Rings the link's bell; see link/loop.cpp.
void ring_link(World& world);

// Rings every rank's bell, and the link's.
void ring_all(World& world);

// ---- Pieces of text that errors and reports share ----

// The longest beginning of `text` of at most `bytes` bytes that does not end inside a character.
std::string_view utf8_prefix(std::string_view text, std::size_t bytes);
// "(256, 784)", "(3,)", "()".
std::string describe_shape(const Signature& signature);

// Texts have ranks by their numbers in the world of all; `rank` is a local rank.
// "rank 3".
std::string rank_name(World& world, int rank);
// "rank 3", "ranks 0-2, 5"; `ranks` ascending, not empty, numbers in the world of all.
std::string describe_ranks(const std::vector<int>& ranks);
// "rank 2 (node1, pid 8123)".
std::string describe_rank(World& world, int rank);
// The same of a rank on any host.
std::string describe_member(World& world, int rank_of_world);
// "rank 2 (node1, pid 8123) and rank 5 (node1, pid 8126)"; after the first eight "and ranks 9-12".
std::string describe_members(World& world, const std::vector<int>& ranks_of_world);
// "host node1 (ranks 4-7)"; its number where its name is not known.
std::string describe_host(World& world, int host);
// How errors begin: "[rank 2/8] ", "[rank 5/8, rank 1/2 in process set 3] ".
std::string error_prefix(World& world, int rank);

}  // namespace kvstore_hvd

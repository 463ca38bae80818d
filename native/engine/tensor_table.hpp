// The table of tensors: finds the slot of a name, counts announcements of ranks, and carries out small allreduces.
//
// Announcing is lock-free (one compare-and-swap); only the first use of a name takes the table's lock. When all slots
// are taken, one whose operations are all complete is given to the new name, with a new version.
//
// Inline reduction: every announcement carries its rank's contribution, so the last rank to announce has all of them.
// It reduces them, leaves the result where each contribution was, and tells the others: no schedule, and one wait. A
// rank whose caller waits watches its own mark, where flag and result are one cache line; others find the slot in their
// inbox, and their bell is rung. Arrays in arenas are reduced where they lie, so larger ones can go this way.
#pragma once

#include "report/report.hpp"

namespace kvstore_hvd {

// A slot as one rank remembers it.
struct SlotHandle {
  std::uint32_t slot = kNoSlot;
  std::uint32_t version = 0;
};

class TensorTable {
 public:
  TensorTable(World& world, Alarm& alarm)
      : world_(world), alarm_(alarm), rank_(alarm.rank()), inputs_(world.ranks), outputs_(world.ranks) {}

  // The slot of `name`, made if there is none; nothing when every slot is busy (try again after a completion), or
  // unless it `waits` while another rank has the table's lock. Throws WorldLost.
  std::optional<SlotHandle> find(std::string_view name, bool waits = true);

  // Whether the handle is still that of its name.
  bool is_current(const SlotHandle& handle) const;

  enum class Outcome { kStale, kWaiting, kHere, kLast, kDone };

  // Announces this rank's next operation on the slot. kStale: the slot has changed hands, find() it again. kWaiting:
  // for other ranks. kHere: every rank of this host has announced; the link is next. kLast: every rank has
  // announced; the slot now has what was agreed, or the disagreement, and the caller makes it ready. kDone: the same,
  // and it was reduced inline. `watched`: a thread will watch this rank's mark.
  Outcome announce(const SlotHandle& handle, const Request& request, bool watched = false);

  // For the link, once all ranks of this host have announced: whether they have announced the same; to set what all
  // hosts agree on (`weights`: of all ranks), or their disagreement; and to close the operation as the last party: from
  // then on, and not before, ranks may announce the next one.
  bool all_announced_the_same(std::uint32_t slot) const;
  void agree_over_hosts(std::uint32_t slot, double weights);
  void disagree(std::uint32_t slot, ErrorCode code, std::string_view text);
  void close_operation(std::uint32_t slot);
  // For the link: ranks of another host have announced an operation (`announcement`) that not all of this host have, so
  // that missed() shows it. Returns the slot, unless there is none or all here have announced.
  std::optional<std::uint32_t> announce_early(std::string_view name, const Announcement& announcement);

  // This rank has completed the operation it announced last.
  void complete(std::uint32_t slot);

  // Whether `other` has announced the operation that this rank announced last.
  bool announced_by(std::uint32_t slot, int other);

  // Up to `most` operations that other ranks have announced and this rank has not, but for patient ones; nothing when
  // another rank has the table's lock. Never waits. One that this rank announces meanwhile may be among them; so with
  // `described` only the thread that submits everything may call it.
  std::optional<std::vector<Missed>> missed(std::size_t most, bool described) const;
  // For the link: the ranks of this host that have not announced an operation which not all of them have.
  std::vector<int> late(std::uint32_t slot) const;

 private:
  std::optional<std::uint32_t> take_slot();
  bool is_busy(std::uint32_t slot) const;
  // A rank that has announced an operation on the slot that this rank has not, or -1.
  int rank_ahead(std::uint32_t slot) const;
  std::optional<Announced> announced(std::uint32_t slot, int rank) const;
  void unlink(std::uint32_t slot);
  Outcome decide(std::uint32_t slot, const Request& request);
  // Puts what is reduced inline beside the announcement that follows. The slot's payloads stay until this rank has
  // called take_inline(), except that the last rank writes the result: it announces the next operation only after that.
  void stage_inline(std::uint32_t slot, const Request& request, bool watched);
  // As the last rank, when all have announced the same. False: the operation must be scheduled.
  bool reduce_inline(std::uint32_t slot, const Request& request);
  void agree(std::uint32_t slot);
  // See Mark::place.
  std::uint64_t place_of(const Request& request) const;

  World& world_;
  Alarm& alarm_;
  int rank_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

// ---- What happens to an operation that is reduced inline; all from any thread ----

// Whether it may be, as far as a rank's own request tells.
bool may_reduce_inline(World& world, const Request& request);
// It has been: tells the ranks of this host, but for `rank`.
void tell_inline(World& world, std::uint32_t slot, int rank);
// Whether it has been, for a rank that watches its mark. Acquire: the result is there.
inline bool is_done_inline(World& world, int rank, std::uint32_t slot) {
  return world.mark(slot, rank).watch.load(std::memory_order_acquire) == Mark::kDone;
}
// The rank's mark is watched no more; false when the operation has been reduced meanwhile.
bool stop_watching(World& world, int rank, std::uint32_t slot);
// Copies the result into this rank's arrays. Returns whether it was there already, the array being in an arena.
bool take_inline(World& world, int rank, std::uint32_t slot, const Request& request);

// The signature that `request` announces.
Signature signature_of(const Request& request);

// What the ranks of this host have announced on the slot.
std::vector<AnnouncedBy> announced_here(World& world, std::uint32_t slot);

// Why ranks that have not announced the same fail: an error of docs/errors.md without its prefix.
struct Disagreement {
  ErrorCode code;
  std::string text;
};
Disagreement describe_disagreement(World& world, const std::vector<AnnouncedBy>& announced);

}  // namespace kvstore_hvd

// The table of tensors: finds the slot of a name, and counts which ranks have announced an operation on it.
//
// Announcing is lock-free (one compare-and-swap); only the first use of a name takes the table's lock. When all slots
// are taken, one whose operations are all complete is given to the new name; its version then tells those who remember
// the old one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "engine/inline_reduction.hpp"
#include "report/stall.hpp"
#include "request/request.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// A slot as one rank remembers it.
struct SlotHandle {
  std::uint32_t slot = kNoSlot;
  std::uint32_t version = 0;
};

class TensorTable {
 public:
  TensorTable(World& world, Alarm& alarm)
      : world_(world), alarm_(alarm), rank_(alarm.rank()), inline_(world, alarm.rank()) {}

  // The slot of `name`, made if there is none; nothing when every slot is busy (try again after a completion), or
  // unless it `waits` while another rank has the table's lock. Throws WorldLost.
  std::optional<SlotHandle> find(std::string_view name, bool waits = true);

  // Whether the handle is still that of its name.
  bool is_current(const SlotHandle& handle) const;

  enum class Outcome { kStale, kWaiting, kHere, kLast, kDone };

  // Announces this rank's next operation on the slot. kStale: the slot has changed hands, find() it again. kLast: every
  // other rank has announced as well; the slot now says what was agreed, or about what the ranks disagree, and the
  // caller is the one to make it ready. kDone: so has every other rank, and the operation was carried out. kHere: every
  // other rank of this host has announced; what comes next is the link's. `watched`: see InlineReduction.
  Outcome announce(const SlotHandle& handle, const Request& request, bool watched = false);

  // For the link, once all ranks of this host have announced: whether they have announced the same; what they have
  // agreed on with the ranks of the other hosts (`weights` are those of all ranks), or that they have not; and that it
  // takes note of it as the last party: ranks may announce the next operation. Between the last two nothing may be
  // announced.
  bool all_announced_the_same(std::uint32_t slot) const;
  void agree_over_hosts(std::uint32_t slot, double weights);
  void disagree(std::uint32_t slot, ErrorCode code, std::string_view text);
  void announce_for_others(std::uint32_t slot);
  // Ranks of another host have announced an operation under this name, and not all of this host have: so that missed()
  // tells those. `announcement` is one of theirs. Returns the slot, unless there is none or all here have announced.
  std::optional<std::uint32_t> announce_early(std::string_view name, const Announcement& announcement);

  // This rank has completed the operation it announced last.
  void complete(std::uint32_t slot);

  // Whether `other` has announced the operation that this rank announced last.
  bool announced_by(std::uint32_t slot, int other);

  // Operations that other ranks have announced and this rank has not, up to `most` of them; nothing when another rank
  // has the table's lock. Never waits. One that this rank announces at this moment may be among them; that must not be
  // when they are to be `described`: then only the thread may call it that submits everything. Without patient ones.
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
  void agree(std::uint32_t slot);
  // See Mark::place.
  std::uint64_t place_of(const Request& request) const;

  World& world_;
  Alarm& alarm_;
  int rank_;
  InlineReduction inline_;
};

// The signature that `request` announces.
Signature signature_of(const Request& request);

// What the ranks of this host have announced on the slot.
std::vector<AnnouncedBy> announced_here(World& world, std::uint32_t slot);

// Why ranks that have not announced the same fail, in the form of docs/errors.md, without the prefix that names the
// reading rank.
struct Disagreement {
  ErrorCode code;
  std::string text;
};
Disagreement describe_disagreement(World& world, const std::vector<AnnouncedBy>& announced);

}  // namespace kvstore_hvd

// The table of tensors: announcing operations, reducing them inline, and giving a slot to another name.
#include "worlds.hpp"

using namespace proof;

namespace {

// The slot of "a", made before the threads begin.
SlotHandle make_slot(World& world, const char* name = "a") { return *Rank(world, 0).table.find(name); }

// As a caller that watches its mark, or one that sleeps at its bell until its inbox has the slot.
void await_inline(Rank& self, std::uint32_t slot, std::uint32_t& taken, bool watches) {
  if (watches && (is_done_inline(self.world, self.rank, slot) || !stop_watching(self.world, self.rank, slot))) return;
  for (RankState& own = self.world.rank(self.rank);;) {
    const std::uint32_t seen = own.bell.value();
    if (const auto found = own.inbox.get(taken)) {
      ++taken;
      return require(*found == slot, "another slot");
    }
    self.world.failure.check();
    own.bell.wait_change(seen, kSleeps, kMaxSleep, self.world.failure);
  }
}

// Announces a sum of 1 by every rank, and checks it.
void sum_inline(Rank& self, const SlotHandle& handle, std::uint32_t& taken, bool watches) {
  std::int32_t value = 1;
  const Request request = self.sum_of(value);
  switch (self.table.announce(handle, request, watches)) {
    case TensorTable::Outcome::kDone:
      break;
    case TensorTable::Outcome::kWaiting:
      await_inline(self, handle.slot, taken, watches);
      break;
    default:
      require(false, "another outcome");
  }
  take_inline(self.world, self.rank, handle.slot, request);
  require(value == self.world.ranks, "another sum");
  self.table.complete(handle.slot);
}

void define_inline(Program& program, int ranks, int operations, bool watches) {
  World& world = make_world(program, ranks);
  const SlotHandle handle = make_slot(world);
  for (int rank = 0; rank < ranks; ++rank) {
    program.thread([&world, handle, rank, operations, watches] {
      Rank self(world, rank);
      std::uint32_t taken = 0;
      for (int i = 0; i < operations; ++i) sum_inline(self, handle, taken, watches);
    });
  }
}

const Litmus inline_once("two ranks, inline", [](Program& program) { define_inline(program, 2, 1, false); });
const Litmus watched_once("two ranks, inline, watched", [](Program& program) { define_inline(program, 2, 1, true); });
const Litmus inline_twice("two ranks, inline, twice", [](Program& program) { define_inline(program, 2, 2, false); });
const Litmus watched_twice("two ranks, inline, watched, twice",
                           [](Program& program) { define_inline(program, 2, 2, true); });
const Litmus inline_of_three("three ranks, inline", [](Program& program) { define_inline(program, 3, 1, false); });
const Litmus watched_of_three("three ranks, inline, watched",
                              [](Program& program) { define_inline(program, 3, 1, true); });

// Rank 1 gets the sum, or learns that rank 0 is gone.
void define_death(Program& program, bool watches) {
  World& world = make_world(program, 2);
  const SlotHandle handle = make_slot(world);
  const auto sum = [&world, handle, watches](int rank) {
    Rank self(world, rank);
    std::uint32_t taken = 0;
    try {
      sum_inline(self, handle, taken, watches);
    } catch (const WorldLost&) {
      require(world.failure.fact() == "died", "another fact");
    }
  };
  program.mortal_thread([sum] { sum(0); });
  program.thread([sum] { sum(1); });
  program.thread([&world] {
    if (died(0)) Alarm(world, 1, std::chrono::hours(1)).raise(ErrorCode::kPeerLost, "died");
  });
}

const Litmus dies("a rank dies, inline", [](Program& program) { define_death(program, false); });
const Litmus dies_watched("a rank dies, inline, watched", [](Program& program) { define_death(program, true); });

// Two ranks announce, and another one looks at what it has missed as soon as it sees one of them.
const Litmus missed("a rank looks at what it has missed", [](Program& program) {
  World& world = make_world(program, 3);
  const SlotHandle handle = make_slot(world);
  for (int rank : {0, 1}) {
    program.thread([&world, handle, rank] {
      Rank self(world, rank);
      std::int32_t value = 1;
      self.table.announce(handle, self.sum_of(value));
    });
  }
  program.thread([&world, handle] {
    until([&] { return world.slots[handle.slot].state.load(std::memory_order_relaxed) % 0x10000 != 0; });
    const auto found = Rank(world, 2).table.missed(4, true);
    require(found && found->size() == 1, "nothing is missed");
    require(found->front().name == "a" && found->front().announced->count == 1, "another operation");
  });
});

// All slots are taken. Rank 0 goes on with "a", whose slot rank 1 may give to "b" at any time.
const Litmus reuse("a slot given to another name", [](Program& program) {
  World& world = make_world(program, 2);
  const SlotHandle a = make_slot(world), other = make_slot(world, "c");
  world.slots_used = kSlots;
  for (int i = 0; i < 2; ++i) {  // an operation is over
    Rank self(world, i);
    std::int32_t value = 1;
    self.table.announce(a, self.sum_of(value));
    self.table.complete(a.slot);
  }
  for (int rank : {0, 1}) {
    program.thread([&world, a, other, rank] {
      Rank self(world, rank);
      std::int32_t value = 1;
      const char* const name = rank == 0 ? "a" : "b";
      const Request request = self.sum_of(value, name);
      std::optional<SlotHandle> handle = a;
      if (rank == 1) handle = self.table.find("b");
      for (;; handle = self.table.find(name)) {
        require(handle.has_value(), "no slot is free");
        require(handle->slot == a.slot || handle->slot == other.slot, "another slot");
        if (self.table.announce(*handle, request) == TensorTable::Outcome::kWaiting) break;
      }
      require(world.slots[handle->slot].name[0] == name[0], "a slot of another name");
    });
  }
});

}  // namespace

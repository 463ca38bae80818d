// Announcing operations: the last rank reduces inline, and tells the others.
#include "worlds.hpp"

namespace proof::table {

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

}  // namespace proof::table

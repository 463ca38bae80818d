// Slots of the table: what others have announced there, and another name.
#include "worlds.hpp"

namespace proof::slots {

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

}  // namespace proof::slots

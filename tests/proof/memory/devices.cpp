// The schedule's heaps and bells: whoever could make the next entry learns of it; batches of devices, which need room.
#include "engine/device_queue.hpp"
#include "worlds.hpp"

namespace proof::devices {

// Until entry `index` is there, as Progress.
void await_entry(Rank& self, std::uint32_t index, Entry& entry) {
  for (Flag& bell = self.world.rank(self.rank).bell;;) {
    const std::uint32_t seen = bell.value();
    if (self.schedule.fetch(index, entry)) return;
    bell.wait_change(seen, kSleeps, kMaxSleep, self.world.failure);
  }
}

// A slot that all have announced.
void agree(World& world, std::uint32_t slot, bool on_device) {
  world.slots[slot].agreed.on_device = on_device;
  world.slots[slot].agreed.count = world.slots[slot].bytes = 1;
}

// As Pending::announce().
void make_ready(Rank& self, std::uint32_t slot) {
  self.schedule.make_ready(slot, 0);
  for (int r = 0; r < self.world.ranks; ++r) {
    if (r != self.rank) self.world.rank(r).bell.ring();
  }
}

void define_ready(Program& program, int ranks) {
  World& world = make_world(program, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    program.thread([&world, rank] {
      Rank self(world, rank);
      Entry entry;
      if (rank == 0) {
        agree(world, 1, false);
        make_ready(self, 1);
      }
      await_entry(self, 0, entry);
      require(entry.n_pieces == 1 && entry.pieces[0].slot == 1 && world.slots[1].bytes == 1, "another entry");
    });
  }
}

const Litmus two("a tensor is ready, two ranks", [](Program& program) { define_ready(program, 2); });
// All but the device of `late` have begun the batch before. When it begins it, there is room for the next.
void define_room(Program& program, int late) {
  World& world = make_world(program, 2);
  const int other = 1 - late;
  Entry entry;
  agree(world, 0, true);
  Rank(world, other).schedule.make_ready(0, 0);
  Rank(world, other).schedule.fetch(0, entry);
  world.rank(other).batches_begun = 1;
  program.thread([&world, late] {
    DeviceQueue devices(world, late);
    devices.put(DeviceBatch{});
    require(devices.take(std::chrono::seconds(1)).has_value(), "no batch");
  });
  program.thread([&world, other] {
    Rank self(world, other);
    agree(world, 1, true);
    make_ready(self, 1);
    Entry next;
    await_entry(self, 1, next);
  });
}

const Litmus first_is_late("room for a batch, rank 0 is late", [](Program& program) { define_room(program, 0); });
const Litmus last_is_late("room for a batch, rank 1 is late", [](Program& program) { define_room(program, 1); });

// Rank 1 leaves a lost world, and releases memory that the device of rank 0 reads, if it is at work.
const Litmus leaves("a rank leaves a lost world, with a device at work", [](Program& program) {
  World& world = make_world(program, 2);
  world.rank(0).batches_ended = world.rank(0).batches_begun = 1;
  world.rank(1).batches_ended = world.rank(1).batches_begun = 1;
  std::uint64_t& memory = program.shared<std::uint64_t>();
  program.thread([&world, &memory] {
    DeviceQueue devices(world, 0);
    devices.put(DeviceBatch{});
    if (!devices.take(std::chrono::seconds(1))) return;
    require(memory == 0, "released memory");
    devices.done(0);
  });
  program.thread([&world, &memory] {
    if (!world.failure.set(1, ErrorCode::kPeerLost, "lost")) return;
    DeviceQueue devices(world, 1);
    if (devices.others_are_through([](int) { return false; })) memory = 1;
  });
});

}  // namespace proof::devices

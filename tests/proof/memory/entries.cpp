// The schedule and what carries it out: one rank decides an entry, all fill, reduce and collect it, or claim its parts.
#include "engine/pipeline.hpp"
#include "worlds.hpp"

namespace proof::entries {

// A rank's requests, announced before the threads begin.
struct Requests {
  Requests(World& world, int rank)
      : alarm(world, rank, std::chrono::hours(1)),
        messages(world, rank),
        pending(world, alarm, messages, standstills) {}

  // A sum of integers, in place.
  void add(const char* name, std::int32_t* values, std::size_t count) {
    Request request;
    request.name = name;
    request.dtype = DType::kInt32;
    request.inputs = {values};
    request.outputs = {values};
    request.count = count;
    request.shape = {static_cast<std::int64_t>(count)};
    pending.add(std::make_shared<Work>(std::make_shared<Request>(std::move(request))), false);
  }

  Alarm alarm;
  Messages messages;
  Standstills standstills;
  Pending pending;
  std::vector<std::int32_t> values;
};

enum class Begin { kAnnounced, kPublished };

// Every rank sums `entries` arrays of `count` integers, each an entry; they lie in its arena if `direct`.
// The threads begin once `before` entries are done.
// `dies`: rank 0 may, and rank 1 learns of it.
void define(Program& program, int ranks, int entries, std::size_t count, bool direct, Begin begin,
            void (*choose)(Thresholds&), int before = 0, bool dies = false) {
  program.begins = true;
  World& world = make_world(program, ranks, 256);
  world.thresholds.inlined = world.thresholds.inlined_direct = 0;
  choose(world.thresholds);
  std::vector<std::shared_ptr<Requests>> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(std::make_shared<Requests>(world, rank));
  for (int i = 0; i < entries; ++i) {
    for (int rank = 0; rank < ranks; ++rank) {
      Requests& requests = *all[rank];
      requests.values.resize(count * entries);
      auto* const values = direct ? reinterpret_cast<std::int32_t*>(world.arena(rank)) : requests.values.data();
      for (std::size_t k = 0; k < count; ++k) values[i * count + k] = rank + 1;
      requests.add(std::to_string(i).c_str(), values + i * count, count);
    }
    Entry entry;
    if (begin == Begin::kPublished) Rank(world, 0).schedule.fetch(static_cast<std::uint32_t>(i), entry);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == 0 && dies) program.mortal = 1;
    program.thread([&world, its = all[rank], rank, entries, count, direct, before] {
      auto* const values = direct ? reinterpret_cast<std::int32_t*>(world.arena(rank)) : its->values.data();
      if (!direct) std::fill(its->values.begin(), its->values.end(), rank + 1);
      int done = 0;
      DeviceQueue devices(world, rank);
      Pipeline pipeline(world, its->alarm, its->pending, devices, [&](std::uint32_t) { ++done; });
      const auto advance_to = [&](int target) {
        while (done < target && !world.failure.is_set()) require(pipeline.advance(kSleeps), "nothing to do");
      };
      advance_to(before);
      proof::begin();
      try {
        advance_to(entries);
      } catch (const WorldLost&) {
      }
      if (done < entries) return;  // the world is lost
      for (std::size_t k = 0; k < count * entries; ++k) {
        require(values[k] == world.ranks * (world.ranks + 1) / 2, "another sum");
      }
    });
  }
  if (!dies) return;
  program.thread([&world] {
    proof::begin();
    if (died(0)) Alarm(world, 1, std::chrono::hours(1)).raise(ErrorCode::kPeerLost, "died");
  });
}

void all_one_shot(Thresholds& chosen) { chosen.one_shot = 1 << 20; }
void all_two_shot(Thresholds& chosen) { chosen.one_shot = 0; }
void two_parts(Thresholds& chosen) { chosen.min_part = chosen.max_part = 32; }

const Litmus decide("two ranks decide an entry",
                    [](Program& program) { define(program, 2, 1, 1, false, Begin::kAnnounced, all_one_shot); });
const Litmus one_shot("one-shot",
                      [](Program& program) { define(program, 2, 1, 1, false, Begin::kPublished, all_one_shot); });
const Litmus two_shot("two-shot",
                      [](Program& program) { define(program, 2, 1, 32, false, Begin::kPublished, all_two_shot); });
const Litmus direct("direct: parts that ranks claim",
                    [](Program& program) { define(program, 2, 1, 16, true, Begin::kPublished, two_parts); });
const Litmus one_shot_of_three("one-shot, three ranks", [](Program& program) {
  define(program, 3, 1, 1, false, Begin::kPublished, all_one_shot);
});
const Litmus direct_of_three("direct, three ranks",
                             [](Program& program) { define(program, 3, 1, 16, true, Begin::kPublished, two_parts); });
const Litmus stages("one-shot, staging memory used anew",
                    [](Program& program) { define(program, 2, 7, 1, false, Begin::kPublished, all_one_shot, 3); });

const Litmus dies("one-shot, a rank dies", [](Program& program) {
  define(program, 2, 1, 1, false, Begin::kPublished, all_one_shot, 0, true);
  program.sleeps_end = true;  // see failing.cpp
});

}  // namespace proof::entries

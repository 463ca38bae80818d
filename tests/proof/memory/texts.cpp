// Texts, records and processes that one rank describes and others read; a gate that closes behind the threads inside.
#include "shm/liveness.hpp"
#include "worlds.hpp"

namespace proof::texts {

using Short = TextOf<2>;

const Litmus text("a text, written twice", [](Program& program) {
  Short& shared = program.shared_zeros<Short>();
  program.thread([&] {
    shared.write("aaaaaaaaaaaaaaaa");
    shared.write("bbbbbbbbbbbbbbbb");
  });
  for (int reader = 0; reader < 2; ++reader) {
    program.thread([&] {
      const std::string read = shared.read();
      require(read.empty() || read == std::string(16, read[0]), "two texts in one");
    });
  }
});

const Litmus text_dies("a rank dies while it writes a text", [](Program& program) {
  Short& shared = program.shared_zeros<Short>();
  shared.write("aaaaaaaaaaaaaaaa");
  program.mortal_thread([&] { shared.write("bbbbbbbbbbbbbbbb"); });
  program.thread([&] {
    const std::string read = shared.read();
    require(read.empty() || read == std::string(16, read[0]), "two texts in one");
  });
});

const Litmus presence("a rank joins, others describe its process", [](Program& program) {
  World& world = make_world(program, 2);
  program.thread([&] { Liveness(world, 0, "here", false); });
  program.thread([&] {
    const std::string read = describe_rank(world, 0);
    const std::string joined = "rank 0 (here, pid " + std::to_string(process_id()) + ")";
    require(read == "rank 0 (never joined)" || read == joined, "half of a description");
    require(!Liveness::is_stopped(world, 0), "not stopped");
  });
  program.thread([&] {
    until([&] { return world.rank(0).presence.load(std::memory_order_relaxed) == Presence::kJoined; });
    Liveness liveness(world, 1, "here", true);
    require(!liveness.poll(std::chrono::milliseconds(0)), "nobody has died");
  });
});

std::unique_ptr<Work> work_of(std::size_t count) {
  Request request;
  request.count = count;
  auto work = std::make_unique<Work>(std::make_shared<Request>(request));
  work->since = Clock::time_point(std::chrono::nanoseconds(10 * count));
  work->scheduled = Clock::time_point(std::chrono::nanoseconds(10 * count + 1));
  return work;
}

// The recorder's next record takes the place of its first one.
const Litmus record("a record of an operation takes the place of another one", [](Program& program) {
  World& world = make_world(program, 1);
  FlightRecorder recorder(world, 0);
  for (std::uint64_t n = 0; n < kFlightRecords; ++n) {
    const auto work = work_of(1);
    recorder.begin(*work, 1, 1, 1);
    recorder.end(*work, Clock::time_point(std::chrono::nanoseconds(12)));
  }
  const FlightRecord& first = world.records(0)[1];
  program.thread([recorder] {
    FlightRecorder own = recorder;
    const auto next = work_of(2);
    own.begin(*next, 2, 2, 2);
    own.end(*next, Clock::time_point(std::chrono::nanoseconds(22)));
  });
  program.thread([&first] {
    const auto seen = read(first);
    if (!seen) return;
    const std::int64_t n = seen->number == 1 ? 1 : 2;
    const auto is_or_comes = [&](std::int64_t time, std::int64_t expected) {
      return time == expected || (n == 2 && time == 0);
    };
    require(seen->slot == n && seen->version == n && seen->operation == static_cast<std::uint64_t>(n), "two records");
    require(seen->bytes == static_cast<std::uint64_t>(4 * n) && seen->announced == 10 * n, "two records in one");
    require(is_or_comes(seen->scheduled, 10 * n + 1) && is_or_comes(seen->completed, 10 * n + 2),
            "times of another one");
    require(seen->completed == 0 || (seen->scheduled != 0 && seen->algorithm), "an end without what belongs to it");
  });
});

// Two threads inside, one of which closes the gate; the last one out cleans up.
const Litmus gate("a gate", [](Program& program) {
  struct Shared {
    Gate gate;
    std::uint64_t used[2], cleaned;
  };
  Shared& shared = program.shared<Shared>();
  for (const int number : {0, 1}) {
    program.thread([&shared, number] {
      if (!shared.gate.enter()) return require(shared.used[1] == 1, "what was written before it closed");
      shared.used[number] = 1;
      if (number == 1) shared.gate.close();
      if (shared.gate.leave()) shared.cleaned = 1 + shared.used[0] + shared.used[1];
    });
  }
  program.end = [&shared] { require(shared.cleaned > 1, "not cleaned up"); };
});

}  // namespace proof::texts

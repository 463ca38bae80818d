// Texts and processes that one rank describes and others read; a gate that closes behind the threads inside.
#include "shm/liveness.hpp"
#include "shm/world.cpp"  // a shorter text than its own
#include "worlds.hpp"

using namespace proof;

namespace {

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

}  // namespace

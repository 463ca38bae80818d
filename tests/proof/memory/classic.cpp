// The checker's self-test: which outcomes of classic litmus programs it finds, and which not. The reduced search finds
// the same as one over all orders of steps.
#include <atomic>
#include <cstdio>
#include <random>

#include "checker.hpp"

namespace proof::classic {

constexpr auto rlx = std::memory_order_relaxed, acq = std::memory_order_acquire, rel = std::memory_order_release,
               acq_rel = std::memory_order_acq_rel, sc = std::memory_order_seq_cst;
using Atomic = std::atomic<int>;

struct Memory {
  Atomic x, y, z, flag;
  int data;
  int read[6];  // what the threads have read
};

// `outcomes`: all that are allowed, one character for each of read[].
void test(const char* name, int reads, const std::string& outcomes, std::vector<void (*)(Memory&)> threads) {
  Program program;
  Memory& memory = program.shared_zeros<Memory>();
  for (auto body : threads) program.thread([&memory, body] { body(memory); });
  program.end = [&memory, reads] {
    std::string text;
    if (reads == 0) text = std::to_string(memory.x.load()) + std::to_string(memory.y.load());
    for (int i = 0; i < reads; ++i) text += static_cast<char>('0' + memory.read[i]);
    outcome(text);
  };
  std::string found[2];
  long executions[2];
  for (const bool reduces : {false, true}) {
    const Explored explored = explore(program, reduces);
    executions[reduces] = explored.executions;
    for (const std::string& text : explored.outcomes) found[reduces] += (found[reduces].empty() ? "" : " ") + text;
  }
  std::printf("  %-28s %6ld executions, %8ld without reduction: %s\n", name, executions[1], executions[0],
              found[1].c_str());
  if (found[0] != outcomes || found[1] != outcomes)
    throw name + (": " + found[0]) + " and " + found[1] + ", expected " + outcomes;
}

void run(Program&) {
  test("store buffering", 2, "00 01 10 11",
       {[](Memory& m) { m.x.store(1, rel), m.read[0] = m.y.load(acq); },
        [](Memory& m) { m.y.store(1, rel), m.read[1] = m.x.load(acq); }});
  test("store buffering, sc", 2, "01 10 11",
       {[](Memory& m) { m.x.store(1, sc), m.read[0] = m.y.load(sc); },
        [](Memory& m) { m.y.store(1, sc), m.read[1] = m.x.load(sc); }});
  test("store buffering, half sc", 2, "00 01 10 11",
       {[](Memory& m) { m.x.store(1, sc), m.read[0] = m.y.load(sc); },
        [](Memory& m) { m.y.store(1, sc), m.read[1] = m.x.load(acq); }});
  test("store buffering, fences", 2, "01 10 11",
       {[](Memory& m) { m.x.store(1, rlx), std::atomic_thread_fence(sc), m.read[0] = m.y.load(rlx); },
        [](Memory& m) { m.y.store(1, rlx), std::atomic_thread_fence(sc), m.read[1] = m.x.load(rlx); }});
  test("message passing", 2, "00 01 11",
       {[](Memory& m) { m.x.store(1, rlx), m.y.store(1, rel); },
        [](Memory& m) { m.read[0] = m.y.load(acq), m.read[1] = m.x.load(rlx); }});
  test("message passing, relaxed", 2, "00 01 10 11",
       {[](Memory& m) { m.x.store(1, rlx), m.y.store(1, rlx); },
        [](Memory& m) { m.read[0] = m.y.load(acq), m.read[1] = m.x.load(rlx); }});
  test("message passing, fences", 2, "00 01 11",
       {[](Memory& m) { m.x.store(1, rlx), std::atomic_thread_fence(rel), m.y.store(1, rlx); },
        [](Memory& m) { m.read[0] = m.y.load(rlx), std::atomic_thread_fence(acq), m.read[1] = m.x.load(rlx); }});
  // C11 allows 11 too: this semantics has no load buffering.
  test("load buffering", 2, "00 01 10",
       {[](Memory& m) { m.read[0] = m.x.load(rlx), m.y.store(1, rlx); },
        [](Memory& m) { m.read[1] = m.y.load(rlx), m.x.store(1, rlx); }});
  test("coherence of reads", 2, "00 01 11",
       {[](Memory& m) { m.x.store(1, rlx); }, [](Memory& m) { m.read[0] = m.x.load(rlx), m.read[1] = m.x.load(rlx); }});
  // Of the last values.
  test("two stores each", 0, "11 12 21 22",
       {[](Memory& m) { m.x.store(1, rlx), m.y.store(2, rlx); },
        [](Memory& m) { m.y.store(1, rlx), m.x.store(2, rlx); }});
  test("two stores each, sc", 0, "12 21 22",
       {[](Memory& m) { m.x.store(1, sc), m.y.store(2, sc); }, [](Memory& m) { m.y.store(1, sc), m.x.store(2, sc); }});
  const auto writes_x = [](Memory& m) { m.x.store(1, rel); };
  const auto writes_y = [](Memory& m) { m.y.store(1, rel); };
  test("independent reads", 4, "0000 0001 0010 0011 0100 0101 0110 0111 1000 1001 1010 1011 1100 1101 1110 1111",
       {writes_x, writes_y, [](Memory& m) { m.read[0] = m.x.load(acq), m.read[1] = m.y.load(acq); },
        [](Memory& m) { m.read[2] = m.y.load(acq), m.read[3] = m.x.load(acq); }});
  test("independent reads, sc", 4, "0000 0001 0010 0011 0100 0101 0110 0111 1000 1001 1011 1100 1101 1110 1111",
       {[](Memory& m) { m.x.store(1, sc); }, [](Memory& m) { m.y.store(1, sc); },
        [](Memory& m) { m.read[0] = m.x.load(sc), m.read[1] = m.y.load(sc); },
        [](Memory& m) { m.read[2] = m.y.load(sc), m.read[3] = m.x.load(sc); }});
  test("write, read, causality", 3, "000 001 100 101 111",
       {writes_x, [](Memory& m) { m.read[0] = m.x.load(acq), m.y.store(m.read[0], rel); },
        [](Memory& m) { m.read[1] = m.y.load(acq), m.read[2] = m.x.load(rlx); }});
  test("increments", 2, "01 10",
       {[](Memory& m) { m.read[0] = m.x.fetch_add(1, rlx); }, [](Memory& m) { m.read[1] = m.x.fetch_add(1, rlx); }});
  test("release sequence", 2, "00 01 11 21",
       {[](Memory& m) { m.x.store(1, rlx), m.y.store(1, rel); },
        [](Memory& m) {
          int one = 1;
          m.y.compare_exchange_strong(one, 2, rlx);
        },
        [](Memory& m) { m.read[0] = m.y.load(acq), m.read[1] = m.x.load(rlx); }});
}

// ---- Random programs ----

struct Step {
  int kind, location, value, order;
};

int take(const Step& step, Atomic& at) {
  constexpr std::memory_order kLoads[] = {rlx, acq, sc}, kStores[] = {rlx, rel, sc}, kBoth[] = {rlx, acq_rel, sc};
  int expected = step.value - 1;
  switch (step.kind) {
    case 0:
    case 1:
      return at.load(kLoads[step.order]);
    case 2:
      at.store(step.value, kStores[step.order]);
      return 0;
    case 3:
      return at.fetch_add(1, kBoth[step.order]);
    case 4:
      at.compare_exchange_strong(expected, step.value, kBoth[step.order], kLoads[step.order]);
      return expected;
    default:
      std::atomic_thread_fence(kBoth[step.order]);
      return 0;
  }
}

// The reduced search finds the outcomes of the full one.
void run_random(Program&) {
  std::mt19937 random(1);
  const auto draw = [&random](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  constexpr int kPrograms = 1000, kSteps = 3;
  long executions[2] = {};
  for (int number = 0; number < kPrograms; ++number) {
    Program program;
    Memory& memory = program.shared_zeros<Memory>();
    program.spins = false;
    const int threads = 2 + draw(2);
    for (int t = 0; t < threads; ++t) {
      std::vector<Step> steps;
      for (int i = 0; i < kSteps - (threads == 3 ? 1 : 0); ++i) {
        steps.push_back({draw(6) < 5 ? draw(5) : 5, draw(2), 1 + draw(2), draw(3)});
      }
      program.thread([&memory, steps, t] {
        for (const Step& step : steps) {
          memory.read[t] = memory.read[t] * 5 + take(step, step.location == 0 ? memory.x : memory.y);
        }
      });
    }
    program.end = [&memory, threads] {
      std::string text = std::to_string(memory.x.load()) + " " + std::to_string(memory.y.load());
      for (int t = 0; t < threads; ++t) text += " " + std::to_string(memory.read[t]);
      outcome(text);
    };
    std::vector<std::string> found[2];
    for (const bool reduces : {false, true}) {
      Explored explored = explore(program, reduces);
      executions[reduces] += explored.executions;
      found[reduces] = std::move(explored.outcomes);
    }
    if (found[0] != found[1]) throw "the reduced search misses an outcome of program " + std::to_string(number);
  }
  std::printf("  %d random programs: %ld executions, %ld without reduction\n", kPrograms, executions[1], executions[0]);
}

const Litmus random_programs("random programs", run_random);
const Litmus all("classic litmus programs", run);

}  // namespace proof::classic

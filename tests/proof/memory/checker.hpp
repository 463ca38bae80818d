// A stateless model checker of the C11 memory model, for the engine's own objects: its sources are compiled with
// -fsanitize=thread, and runtime.cpp takes the place of ThreadSanitizer's runtime. It so sees every atomic access, with
// its order and its line, and every plain access, and decides what each load reads.
//
// Semantics: messages, timestamps and views, as in the promising semantics without promises (Kang, Hur, Lahav,
// Vafeiadis and Dreyer, POPL 2017), with sequentially consistent accesses as in RC11 (Lahav, Vafeiadis, Kang, Hur and
// Dreyer, PLDI 2017) but for their total order, which agrees with happens-before as in C11. Release sequences are those
// of C++20. A load never reads from a store that comes later in program order and depends on nothing (no load
// buffering). A compare-exchange does not fail spuriously. A data race of plain accesses is an error, so their values
// need no model.
//
// Search: depth first over threads and over what each access reads, each execution from the start, on fibers. Partial
// orders are reduced by dynamic partial-order reduction (Flanagan and Godefroid, POPL 2005) and sleep sets.
#pragma once

#include <cstddef>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace proof {

inline constexpr int kMaxThreads = 6;
inline constexpr std::size_t kMemory = std::size_t{64} << 20;  // bytes

// The threads of one litmus program. Each stands for a thread of a process of its own.
class Program {
 public:
  // An object in shared memory: zeros, then constructed. Its content at the start of every execution is that which it
  // has at the end of the litmus function.
  template <class T>
  T& shared() {
    return *new (allocate(sizeof(T), alignof(T))) T();
  }
  template <class T>
  T& shared_zeros(std::size_t bytes = sizeof(T)) {
    return *static_cast<T*>(allocate(bytes, alignof(T)));
  }
  void thread(std::function<void()> body) { threads.push_back(std::move(body)); }
  // The same; its process may die before any of its accesses to shared memory. One process dies in an execution.
  void mortal_thread(std::function<void()> body) {
    mortal |= 1U << threads.size();
    thread(std::move(body));
  }

  std::vector<std::function<void()>> threads;
  std::function<void()> end;  // after all threads: with the last value of each location
  unsigned mortal = 0;
  // By their limit, once nothing else happens; from then on not every order is tried. Otherwise a sleep without end is
  // an error.
  bool sleeps_end = false;
  bool spins = true;       // what reads the same three times in a row is a loop that goes on reading it
  bool begins = false;     // all threads call begin()
  bool is_large = false;   // takes more than seconds: only with --full
  int spurious_wakes = 0;  // so many sleeps of an execution may end early

 private:
  static void* allocate(std::size_t bytes, std::size_t alignment);
};

// A litmus program, named "file: name". The function is called once; the threads run in every execution.
struct Litmus {
  Litmus(const char* name, void (*define)(Program&), const char* file = __builtin_FILE());
};

// ---- For threads ----

// An execution in which `holds` is false is an error.
void require(bool holds, const char* what);
// Waits until `holds()`, a look at shared memory that changes nothing.
void until(const std::function<bool()>& holds);
// Until all threads have come here, they take their steps in one order, which leaves the memory as it is at some
// moment.
void begin();
// Waits until thread `number` has died or has ended, as a pidfd tells; returns whether it died.
bool died(int number);

// Tells the self-test which outcome an execution had.
void outcome(const std::string& text);
// The number of executions, and the outcomes, of one program; throws std::string where there is an error.
struct Explored {
  long executions = 0, pruned = 0;
  int steps = 0;  // of the longest
  std::vector<std::string> outcomes;
};
Explored explore(Program& program, bool reduces = true);

}  // namespace proof

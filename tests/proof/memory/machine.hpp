// The checker's machine: what it keeps of threads, memory and the execution under way. See checker.hpp.
#pragma once

#include <cxxabi.h>
#include <setjmp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

#include "checker.hpp"

namespace proof::machine {

using Word = std::uint64_t;

inline constexpr int kMaxLocations = 192;
inline constexpr int kMaxSteps = 4000;  // of an execution
inline constexpr std::size_t kStack = std::size_t{256} << 10;
inline constexpr std::size_t kHeap = std::size_t{16} << 20;  // of all threads, in one execution
// A load that reads the same again and again is not looked at any more: the spinning in front of a sleep.
inline constexpr int kRepeats = 2;

inline bool acquires(int order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }
inline bool releases(int order) { return order == __ATOMIC_RELEASE || order >= __ATOMIC_ACQ_REL; }
inline bool is_sc(int order) { return order == __ATOMIC_SEQ_CST; }
inline constexpr const char* kOrders[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};

// Of a thread or a message: the message known of each location, by its number, and of each thread how far its plain
// accesses happen before.
struct View {
  std::uint16_t at[kMaxLocations];
  std::uint16_t clock[kMaxThreads];
};

struct Message {
  Word value;
  int place;         // in modification order
  bool is_replaced;  // by a read-modify-write, which follows at once
  int step;
  View view;  // what an acquire learns
};

struct Location {
  Word address;
  int bytes;
  std::vector<Message> messages;  // in the order of execution; the first is the content at the start
  std::vector<int> order;         // numbers of messages, in modification order
};

enum class Kind { kLoad, kStore, kRmw, kCas, kFence, kWait, kWake, kWoken, kBlocked, kDeath, kBegin, kPlain };
inline constexpr const char* kKinds[] = {"load", "store", "rmw",     "cas",   "fence", "futex_wait",
                                         "wake", "woken", "blocked", "death", "begin", "plain access"};

struct Op {
  Kind kind = Kind::kPlain;
  Word address = 0;
  int bytes = 0, order = 0, fail_order = 0;
  Word operand = 0, expected = 0;
  Word (*apply)(Word, Word) = nullptr;
  const void* site = nullptr;
  Word result = 0;
  bool ok = false;
  int location = -1;

  bool is_futex() const { return kind == Kind::kWait || kind == Kind::kWake; }
  bool reads() const { return kind == Kind::kLoad || kind == Kind::kWait || (kind == Kind::kCas && !ok); }
  bool writes() const { return kind == Kind::kStore || kind == Kind::kRmw || (kind == Kind::kCas && ok); }
};

using Steps = std::array<std::uint16_t, kMaxThreads>;  // 1 + the last step of each thread

struct Thread {
  jmp_buf base, here;
  bool is_begun = false, is_finished = false, is_dead = false, is_asleep = false;
  std::vector<char> stack;
  std::function<void()> body;
  abi::__cxa_eh_globals* eh = nullptr;
  Word exceptions[2];
  Op pending;
  View now, acquired, released;
  Steps steps;
  int after = -1;  // the step that made the pending one possible
  bool looks = false;
  std::vector<std::pair<int, int>> seen;  // location and message, while it looks
  const void* last_site;
  int last_location, last_message, repeats;
  int timeouts;
};

// The threads that need not run: what begins with their next step has been explored. Of a load, what reads a message
// below `covered`.
struct Sleep {
  unsigned threads = 0;
  std::array<std::uint16_t, kMaxThreads> covered{};
};

struct Node {
  int thread, choice, choices;
  bool is_quiet;  // before all threads have begun
  unsigned enabled, backtrack, done, asleep;
  Sleep sleep;
  std::array<std::uint16_t, kMaxThreads> messages;  // of the location that each thread would read
  Op op;
  Steps steps;
};

struct Cell {  // eight bytes of shared memory
  std::uint32_t run;
  std::uint16_t write_clock, read_clock[kMaxThreads];
  std::uint8_t writer, write_mask, read_mask[kMaxThreads];
};

struct Bucket {
  View view{};
  std::vector<int> sleepers;
};

struct Weaker {
  int order = -1, fail_order = -1;
};

inline char* memory = nullptr;
inline Cell* cells = nullptr;
inline std::size_t used = 0;
inline char *heap = nullptr, *heap_end = nullptr;
inline bool on_heap = false;  // whether a thread of the program allocates

inline Program* program = nullptr;
inline std::vector<Thread> threads;
inline std::vector<Location> locations;
inline std::map<Word, int> location_at;
inline std::map<Word, Bucket> buckets;
inline View sc;
inline std::vector<Node> path;
inline std::size_t depth = 0;
inline int running = -1, crashed = -1, spurious = 0;
// What every thread knows after Kind::kBegin.
struct Begun {
  View view;
  Steps steps;
};
inline Begun begun;
inline bool reduces = true, is_pruned = false, is_quiet = false;
inline std::uint32_t run = 0;
inline std::vector<std::pair<Word*, Word>> undo;
inline std::string error, outcome_text;
inline jmp_buf scheduler;

inline bool is_full = false;
inline std::map<const void*, Weaker> weakened;
inline std::map<const void*, Op> sites;

inline std::vector<std::pair<std::string, void (*)(Program&)>>& litmuses() {
  static std::vector<std::pair<std::string, void (*)(Program&)>> all;
  return all;
}

inline bool is_shared(const volatile void* address) {
  const auto* at = static_cast<const volatile char*>(address);
  return at >= memory && at < memory + used;
}

inline void fail(const std::string& what) {
  if (error.empty()) error = what;
}

// ---- model.cpp: what a step does ----

constexpr int kCrash = -1, kSpurious = -2;

void join(View& view, const View& other, bool with_clock = true);
void join(Steps& steps, const Steps& other);
int find_location(Word address, int bytes);
void check_race(const char* address, std::size_t bytes, bool writes);
// What the step may do: messages to read or, of a store, to write behind; sleepers to wake.
void find_choices(const Thread& thread, const Op& op, std::vector<int>& choices);
void do_step(int number, Op& op, int choice);

// ---- search.cpp: which executions there are ----

// Takes a step of the running thread; the outcome is in its `pending`. To be called with on_heap set.
void step(const Op& op);
// Leaves the running thread for good.
void leave();

}  // namespace proof::machine

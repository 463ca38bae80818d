#include "checker.hpp"

#include <cxxabi.h>
#include <linux/futex.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>

namespace proof {
namespace {

using Word = std::uint64_t;

constexpr int kMaxLocations = 192;
constexpr int kMaxSteps = 4000;  // of an execution
constexpr std::size_t kStack = std::size_t{256} << 10;
constexpr std::size_t kHeap = std::size_t{16} << 20;  // of all threads, in one execution
// A load that reads the same again and again is not looked at any more: the spinning in front of a sleep.
constexpr int kRepeats = 2;

bool acquires(int order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }
bool releases(int order) { return order == __ATOMIC_RELEASE || order >= __ATOMIC_ACQ_REL; }
bool is_sc(int order) { return order == __ATOMIC_SEQ_CST; }
const char* const kOrders[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};

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
const char* const kKinds[] = {"load", "store", "rmw",     "cas",   "fence", "futex_wait",
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

char* memory = nullptr;
Cell* cells = nullptr;
std::size_t used = 0;
char *heap = nullptr, *heap_end = nullptr;
bool on_heap = false;  // whether a thread of the program allocates

Program* program = nullptr;
std::vector<Thread> threads;
std::vector<Location> locations;
std::map<Word, int> location_at;
std::map<Word, Bucket> buckets;
View sc;
std::vector<Node> path;
std::size_t depth = 0;
int running = -1, crashed = -1, spurious = 0;
// What every thread knows after Kind::kBegin.
struct {
  View view;
  Steps steps;
} begun;
bool reduces = true, is_pruned = false, is_quiet = false;
std::uint32_t run = 0;
std::vector<std::pair<Word*, Word>> undo;
std::string error, outcome_text;
jmp_buf scheduler;

bool is_full = false;
std::map<const void*, Weaker> weakened;
std::map<const void*, Op> sites;

std::vector<std::pair<std::string, void (*)(Program&)>>& litmuses() {
  static std::vector<std::pair<std::string, void (*)(Program&)>> all;
  return all;
}

bool is_shared(const volatile void* address) {
  const auto* at = static_cast<const volatile char*>(address);
  return at >= memory && at < memory + used;
}

void fail(const std::string& what) {
  if (error.empty()) error = what;
}

// ---- Views ----

int place(int location, int message) { return locations[location].messages[message].place; }

void raise(View& view, int location, int message) {
  std::uint16_t& at = view.at[location];
  if (place(location, message) > place(location, at)) at = static_cast<std::uint16_t>(message);
}

void join(View& view, const View& other, bool with_clock = true) {
  for (std::size_t i = 0; i < locations.size(); ++i) {
    if (view.at[i] != other.at[i]) raise(view, static_cast<int>(i), other.at[i]);
  }
  for (int t = 0; with_clock && t < kMaxThreads; ++t) view.clock[t] = std::max(view.clock[t], other.clock[t]);
}

void join(Steps& steps, const Steps& other) {
  for (int t = 0; t < kMaxThreads; ++t) steps[t] = std::max(steps[t], other[t]);
}

// ---- Fibers ----

void swap_exceptions(Thread& thread) {
  auto* const global = reinterpret_cast<Word*>(abi::__cxa_get_globals());
  std::swap(global[0], thread.exceptions[0]);
  std::swap(global[1], thread.exceptions[1]);
}

void leave() {
  Thread& thread = threads[running];
  on_heap = false;
  if (_setjmp(thread.here) == 0) _longjmp(scheduler, 1);
  on_heap = true;
}

[[gnu::noinline]] void run_body(Thread& thread) {
  on_heap = true;
  try {
    thread.body();
  } catch (const std::exception& thrown) {
    on_heap = false;
    fail(std::string("an exception leaves a thread: ") + thrown.what());
  }
  on_heap = false;
  thread.is_finished = true;
}

void fiber() {
  Thread& thread = threads[running];
  if (_setjmp(thread.base) == 0) _longjmp(scheduler, 1);
  for (;;) {
    run_body(threads[running]);
    leave();
  }
}

void enter(int number, bool begins) {
  Thread& thread = threads[number];
  running = number;
  swap_exceptions(thread);
  if (_setjmp(scheduler) == 0) {
    if (!thread.is_begun) {
      thread.is_begun = true;
      static ucontext_t context;
      getcontext(&context);
      context.uc_stack.ss_sp = thread.stack.data();
      context.uc_stack.ss_size = thread.stack.size();
      makecontext(&context, fiber, 0);
      setcontext(&context);
    }
    _longjmp(begins ? thread.base : thread.here, 1);
  }
  swap_exceptions(thread);
  running = -1;
}

// ---- Memory ----

Word content(Word address, int bytes) {
  Word value = 0;
  std::memcpy(&value, reinterpret_cast<const void*>(address), static_cast<std::size_t>(bytes));
  return value;
}

Cell& cell_of(Word address, bool writes) {
  const std::size_t index = (address - reinterpret_cast<Word>(memory)) / 8;
  Cell& cell = cells[index];
  if (cell.run != run * 2 && cell.run != run * 2 + 1) {
    std::memset(&cell, 0, sizeof(cell));
    cell.run = run * 2;
  }
  if (writes && cell.run == run * 2) {
    cell.run = run * 2 + 1;
    auto* const word = reinterpret_cast<Word*>(memory) + index;
    undo.emplace_back(word, *word);
  }
  return cell;
}

int find_location(Word address, int bytes) {
  const auto [found, is_new] = location_at.emplace(address, static_cast<int>(locations.size()));
  if (is_new) {
    if (locations.size() == kMaxLocations) fail("too many locations"), std::exit(2);
    Location location{address, bytes, {}, {0}};
    location.messages.push_back(Message{content(address, bytes), 0, false, -1, View{}});
    locations.push_back(std::move(location));
  }
  return found->second;
}

void check_race(const char* address, std::size_t bytes, bool writes) {
  const View& now = threads[running].now;
  while (bytes > 0) {
    const Word at = reinterpret_cast<Word>(address);
    const std::size_t here = std::min<std::size_t>(bytes, 8 - at % 8);
    const auto mask = static_cast<std::uint8_t>(((1U << here) - 1) << (at % 8));
    Cell& cell = cell_of(at, writes);
    const auto is_before = [&](int t, std::uint16_t clock) { return t == running || now.clock[t] >= clock; };
    bool races = (cell.write_mask & mask) != 0 && !is_before(cell.writer, cell.write_clock);
    for (int t = 0; writes && t < kMaxThreads; ++t) {
      races = races || ((cell.read_mask[t] & mask) != 0 && !is_before(t, cell.read_clock[t]));
    }
    if (races) return fail("a data race at byte " + std::to_string(address - memory));
    if (writes) {
      cell.write_mask = static_cast<std::uint8_t>(cell.writer == running ? cell.write_mask | mask : mask);
      cell.writer = static_cast<std::uint8_t>(running);
      cell.write_clock = now.clock[running];
    } else {
      cell.read_mask[running] = static_cast<std::uint8_t>(cell.read_mask[running] | mask);
      cell.read_clock[running] = now.clock[running];
    }
    address += here;
    bytes -= here;
  }
}

// ---- Steps ----

// Whether what begins with `first`, `second` leaves out an execution that begins with `second`, `first`. A load that
// comes second may still read what was there before, unless both are sequentially consistent.
bool excludes_reverse(const Op& first, const Op& second) {
  if (first.kind == Kind::kFence || second.kind == Kind::kFence) return is_sc(first.order) && is_sc(second.order);
  if (first.address != second.address) return false;
  if (first.is_futex() && second.is_futex()) return true;
  if (first.reads()) return second.writes();
  if (!first.writes()) return false;
  if (second.kind == Kind::kCas) return true;  // also one that fails: it may succeed if it comes first
  const bool are_sc = is_sc(first.order) && is_sc(second.order);
  if (second.reads()) return are_sc;
  return second.writes() && (are_sc || first.kind != Kind::kStore || second.kind != Kind::kStore);
}

bool can_run(int number) {
  const Thread& thread = threads[number];
  if (thread.is_finished || thread.is_dead) return false;
  if (thread.pending.kind == Kind::kWoken) return !thread.is_asleep;
  if (thread.pending.kind == Kind::kDeath) {
    const Thread& other = threads[thread.pending.operand];
    return other.is_finished || other.is_dead;
  }
  if (thread.pending.kind == Kind::kBegin) {
    const auto begins = [](const Thread& one) { return one.pending.kind == Kind::kBegin || !is_quiet; };
    return std::all_of(threads.begin(), threads.end(), begins);
  }
  if (thread.pending.kind != Kind::kBlocked) return true;
  return std::any_of(thread.seen.begin(), thread.seen.end(),
                     [](const auto& seen) { return locations[seen.first].order.back() != seen.second; });
}

std::uint16_t messages_for(const Op& op) {
  return op.kind == Kind::kLoad ? static_cast<std::uint16_t>(locations[op.location].messages.size()) : 0;
}

// The lowest place in modification order that an access of this order may read, or write behind.
int lowest(const Thread& thread, const Op& op, int order) {
  int least = place(op.location, thread.now.at[op.location]);
  if (is_sc(order)) least = std::max(least, place(op.location, sc.at[op.location]));
  return least;
}

constexpr int kCrash = -1, kSpurious = -2;

// What the step may do: messages to read or, of a store, to write behind; sleepers to wake.
void find_choices(const Thread& thread, const Op& op, std::vector<int>& choices) {
  choices.clear();
  if (op.location >= 0 && op.kind != Kind::kWake) {
    const Location& location = locations[op.location];
    const int least = lowest(thread, op, op.order);
    const int least_failing = op.kind == Kind::kCas ? lowest(thread, op, op.fail_order) : least;
    for (int at = static_cast<int>(location.order.size()) - 1; at >= std::min(least, least_failing); --at) {
      const int number = location.order[at];
      const Message& message = location.messages[number];
      const bool writes = op.kind == Kind::kCas ? message.value == op.expected : op.kind != Kind::kLoad;
      if (writes && message.is_replaced && op.kind != Kind::kWait) continue;
      if (at >= (writes ? least : least_failing)) choices.push_back(number);
    }
  } else if (op.kind == Kind::kWake && op.operand == 1) {
    const auto& sleepers = buckets[op.address].sleepers;
    choices.assign(sleepers.begin(), sleepers.end());
  }
  if (choices.empty()) choices.push_back(0);
}

// Whether all that the thread may do next has been explored.
bool is_covered(const Sleep& sleep, int number) {
  const Op& op = threads[number].pending;
  if ((sleep.threads >> number & 1) == 0) return false;
  if (op.kind != Kind::kLoad) return true;
  static std::vector<int> choices;
  find_choices(threads[number], op, choices);
  return std::all_of(choices.begin(), choices.end(), [&](int message) { return message < sleep.covered[number]; });
}

void learn(Thread& thread, int location, int number, int order) {
  const Message& message = locations[location].messages[number];
  raise(thread.now, location, number);
  join(acquires(order) ? thread.now : thread.acquired, message.view);
  if (message.step >= 0) join(thread.steps, path[message.step].steps);
  if (thread.looks) thread.seen.emplace_back(location, number);
}

void put(int number, Op& op, Word value, int behind, bool replaces) {
  Thread& thread = threads[number];
  Location& location = locations[op.location];
  if (op.bytes < 8) value &= (Word{1} << (op.bytes * 8)) - 1;
  const int id = static_cast<int>(location.messages.size());
  const int where = location.messages[behind].place + 1;
  if (replaces) location.messages[behind].is_replaced = true;
  location.order.insert(location.order.begin() + where, id);
  location.messages.push_back(Message{value, where, false, static_cast<int>(depth), View{}});
  for (std::size_t i = where; i < location.order.size(); ++i)
    location.messages[location.order[i]].place = static_cast<int>(i);
  raise(thread.now, op.location, id);
  View view = releases(op.order) ? thread.now : thread.released;
  raise(view, op.location, id);
  if (replaces) join(view, location.messages[behind].view);
  location.messages[id].view = view;
  if (is_sc(op.order)) raise(sc, op.location, id);
  cell_of(op.address, true);
  std::memcpy(reinterpret_cast<void*>(op.address), &location.messages[location.order.back()].value,
              static_cast<std::size_t>(op.bytes));
}

void put_to_sleep(int number, Op& op, int choice) {
  Thread& thread = threads[number];
  Bucket& bucket = buckets[op.address];
  op.result = 0;
  if (choice == kSpurious) {
    ++spurious;
    return;
  }
  learn(thread, op.location, choice, __ATOMIC_RELAXED);
  op.result = locations[op.location].messages[choice].value;
  op.ok = op.result == op.expected;  // sleeps
  join(bucket.view, thread.now);
  if (!op.ok) return;
  bucket.sleepers.push_back(number);
  thread.is_asleep = true;
}

void wake(Thread& thread, Op& op, int choice) {
  Bucket& bucket = buckets[op.address];
  join(thread.now, bucket.view);
  join(bucket.view, thread.now);
  const auto wakes = [&](int sleeper) {
    if (op.operand == 1 && sleeper != choice) return false;
    threads[sleeper].is_asleep = false;
    threads[sleeper].after = static_cast<int>(depth);
    join(threads[sleeper].now, thread.now, false);  // the system's barriers; for races only the program's own count
    return true;
  };
  auto& all = bucket.sleepers;
  all.erase(std::remove_if(all.begin(), all.end(), wakes), all.end());
}

void do_step(int number, Op& op, int choice) {
  Thread& thread = threads[number];
  switch (op.kind) {
    case Kind::kLoad:
      learn(thread, op.location, choice, op.order);
      op.result = locations[op.location].messages[choice].value;
      break;
    case Kind::kStore:
      put(number, op, op.operand, choice, false);
      break;
    case Kind::kRmw:
    case Kind::kCas: {
      op.result = locations[op.location].messages[choice].value;
      op.ok = op.kind == Kind::kRmw || op.result == op.expected;
      learn(thread, op.location, choice, op.ok ? op.order : op.fail_order);
      if (op.ok) put(number, op, op.apply(op.result, op.operand), choice, true);
      if (!op.ok) op.order = op.fail_order;
      break;
    }
    case Kind::kFence:
      if (acquires(op.order)) join(thread.now, thread.acquired);
      if (is_sc(op.order)) {
        join(thread.now, sc, false);
        join(sc, thread.now, false);
      }
      if (releases(op.order)) thread.released = thread.now;
      break;
    case Kind::kWait:
      put_to_sleep(number, op, choice);
      break;
    case Kind::kWake:
      wake(thread, op, choice);
      break;
    case Kind::kDeath:
      join(thread.now, threads[op.operand].now);
      join(thread.steps, threads[op.operand].steps);
      op.ok = threads[op.operand].is_dead;
      break;
    case Kind::kBlocked:
      for (const auto& [location, message] : thread.seen) {
        const int step = locations[location].messages[locations[location].order.back()].step;
        if (step >= 0) join(thread.steps, path[step].steps);
      }
      break;
    case Kind::kBegin:
      for (const Thread& other : threads) {
        if (!is_quiet) break;
        join(sc, other.now, false);
        join(begun.view, other.now);
        join(begun.steps, other.steps);
      }
      is_quiet = false;
      join(thread.now, begun.view);
      join(thread.steps, begun.steps);
      break;
    case Kind::kWoken:
    case Kind::kPlain:
      break;
  }
  ++thread.now.clock[number];
}

bool is_before(std::size_t step, const Steps& steps) { return steps[path[step].thread] > step; }

// The steps that come after `i` but need not, and then `op`, a step of thread `number`: the threads that could take the
// first one (source sets: Abdulla, Aronis, Jonsson and Sagonas, POPL 2014).
unsigned initials(std::size_t i, std::size_t at, int number, const Steps& needed) {
  unsigned found = 0, seen = 0;
  std::vector<std::size_t> these;
  for (std::size_t k = i + 1; k <= at; ++k) {
    const int thread = k < at ? path[k].thread : number;
    const Steps& steps = k < at ? path[k].steps : needed;
    if (k < at && is_before(i, steps)) continue;
    const auto comes_first = [&](std::size_t earlier) { return is_before(earlier, steps); };
    if ((seen >> thread & 1) == 0 && std::none_of(these.begin(), these.end(), comes_first)) found |= 1U << thread;
    seen |= 1U << thread;
    these.push_back(k);
  }
  return found;
}

// Has the search try `op`, at `at`, by `number`, before each earlier step that keeps something from it. `steps` are
// those that come before it otherwise, `read` those before what it reads.
void find_races(int number, const Op& op, std::size_t at, Steps& steps, const Steps& read) {
  for (std::size_t i = at; i-- > 0;) {
    Node& node = path[i];
    if (node.is_quiet || node.thread == number || is_before(i, steps) || !excludes_reverse(node.op, op)) continue;
    Steps needed = steps;
    join(needed, read);
    const unsigned first = initials(i, at, number, needed);
    if ((first & node.backtrack) == 0) {
      const unsigned chosen = (first >> number & 1) != 0 ? 1U << number : first & -first;
      node.backtrack |= (chosen & node.enabled) != 0 ? chosen : node.enabled;
    }
    join(steps, node.steps);
  }
}

// ---- Executions ----

void begin_execution() {
  for (const auto& [word, value] : undo) *word = value;
  undo.clear();
  ++run;
  heap_end = heap;
  locations.clear();
  location_at.clear();
  buckets.clear();
  std::memset(&sc, 0, sizeof(sc));
  depth = 0;
  crashed = -1;
  spurious = 0;
  is_pruned = false;
  is_quiet = program->begins;
  std::memset(&begun, 0, sizeof(begun));
  outcome_text.clear();
  for (std::size_t t = 0; t < threads.size(); ++t) {
    Thread& thread = threads[t];
    thread.is_finished = thread.is_dead = thread.is_asleep = thread.looks = false;
    thread.exceptions[0] = thread.exceptions[1] = 0;
    thread.pending = Op{};
    for (View* view : {&thread.now, &thread.acquired, &thread.released}) std::memset(view, 0, sizeof(*view));
    thread.now.clock[t] = 1;
    thread.steps = Steps{};
    thread.after = -1;
    thread.last_site = nullptr;
    thread.repeats = thread.timeouts = 0;
  }
  for (std::size_t t = 0; t < threads.size(); ++t) {
    if (!threads[t].is_begun) enter(static_cast<int>(t), true);
    enter(static_cast<int>(t), true);
  }
}

// The step of the thread's that is pending. Returns whether the execution goes on.
void take_step(Node& node, Sleep& sleep) {
  const int number = node.thread;
  Thread& thread = threads[number];
  Op op = thread.pending;
  if (depth + 1 < path.size() && (node.op.site != op.site || node.op.address != op.address)) {
    return fail("an execution went another way than before");
  }
  if (op.kind == Kind::kWait) join(thread.now, buckets[op.address].view);
  static std::vector<int> choices;
  find_choices(thread, op, choices);
  // A load that spins.
  const bool spins = program->spins && thread.last_site == op.site && thread.last_location == op.location &&
                     thread.repeats >= kRepeats && (op.kind == Kind::kLoad || op.kind == Kind::kCas) &&
                     std::find(choices.begin(), choices.end(), thread.last_message) != choices.end();
  if (spins) choices.assign(1, thread.last_message);
  const bool is_partly_covered = (sleep.threads >> number & 1) != 0 && op.kind == Kind::kLoad;
  if (is_partly_covered) {
    const auto is_old = [&](int message) { return message < sleep.covered[number]; };
    choices.erase(std::remove_if(choices.begin(), choices.end(), is_old), choices.end());
  }
  if (op.kind == Kind::kWait && spurious < program->spurious_wakes) choices.push_back(kSpurious);
  const bool may_die = (program->mortal >> number & 1) != 0 && crashed < 0 && op.kind != Kind::kWoken;
  if (may_die && !is_partly_covered && !spins) choices.push_back(kCrash);
  if (node.is_quiet) choices.resize(1);
  node.choices = static_cast<int>(choices.size());
  const int choice = choices[node.choice];

  if (thread.after >= 0) join(thread.steps, path[thread.after].steps);
  thread.after = -1;
  node.op = op;
  if (choice == kCrash) {
    crashed = number;
    thread.is_dead = true;
    node.op.kind = Kind::kPlain;
    for (auto& bucket : buckets) {
      auto& all = bucket.second.sleepers;
      all.erase(std::remove(all.begin(), all.end(), number), all.end());
    }
    thread.steps[number] = static_cast<std::uint16_t>(depth + 1);
    node.steps = thread.steps;
    return;
  }
  Steps steps = thread.steps;  // without what is read: a store may have to come after a load that reads it now
  do_step(number, op, choice);
  node.op = op;
  if (spins) node.op.kind = Kind::kPlain;
  const bool repeats = op.reads() && op.kind != Kind::kWait && thread.last_site == op.site &&
                       thread.last_location == op.location && thread.last_message == choice;
  thread.repeats = repeats ? thread.repeats + 1 : 0;
  thread.last_site = op.reads() ? op.site : nullptr;
  thread.last_location = op.location;
  thread.last_message = choice;
  if (reduces) find_races(number, node.op, depth, steps, thread.steps);
  join(thread.steps, steps);
  thread.steps[number] = static_cast<std::uint16_t>(depth + 1);
  node.steps = thread.steps;
  // What sleeps and does not commute wakes up.
  const unsigned before = sleep.threads;
  for (int t = 0; t < static_cast<int>(threads.size()); ++t) {
    const Op& next = threads[t].pending;
    const bool is_load = next.kind == Kind::kLoad;  // has new choices only, see is_covered()
    if (t == number || (!is_load && (before >> t & 1) != 0)) {
      Op tried = next;
      if (tried.kind == Kind::kCas) tried.ok = true;
      Op failed = next;
      if (t == number || excludes_reverse(tried, node.op) ||
          (next.kind == Kind::kCas && excludes_reverse(failed, node.op)) || next.kind == Kind::kDeath ||
          next.kind == Kind::kBlocked) {
        sleep.threads &= ~(1U << t);
      }
    }
  }
  thread.pending.result = op.result;
  thread.pending.ok = op.ok;
  ++depth;
  if (op.kind == Kind::kWait && op.ok) {
    thread.pending.kind = Kind::kWoken;
  } else {
    enter(number, false);
  }
  --depth;
  if (!thread.is_finished && thread.pending.kind == Kind::kBlocked && can_run(number)) is_pruned = true;
}

// The sleeps of all threads end by their limit, if that may be. By then each sees everything.
bool time_passes() {
  constexpr int kMost = 3;
  bool goes_on = false;
  for (Thread& thread : threads) {
    if (!program->sleeps_end || !thread.is_asleep || thread.is_dead || ++thread.timeouts > kMost) continue;
    thread.is_asleep = false;
    for (std::size_t i = 0; i < locations.size(); ++i) {
      thread.now.at[i] = static_cast<std::uint16_t>(locations[i].order.back());
    }
    goes_on = true;
  }
  for (auto& bucket : buckets) {
    auto& all = bucket.second.sleepers;
    all.erase(std::remove_if(all.begin(), all.end(), [](int t) { return !threads[t].is_asleep; }), all.end());
  }
  return goes_on;
}

void run_execution() {
  begin_execution();
  Sleep sleep;
  for (;; ++depth) {
    unsigned enabled = 0;
    for (int t = 0; t < static_cast<int>(threads.size()); ++t) enabled |= can_run(t) ? 1U << t : 0;
    if (!error.empty() || is_pruned) break;
    if (enabled == 0 && time_passes()) {
      --depth;
      continue;
    }
    if (enabled == 0) {
      for (int t = 0; t < static_cast<int>(threads.size()); ++t) {
        if (!threads[t].is_finished && !threads[t].is_dead) fail("thread " + std::to_string(t) + " waits for ever");
      }
      break;
    }
    if (depth >= kMaxSteps) return fail("an execution of too many steps");
    if (depth == path.size()) {
      Node node{};
      node.enabled = enabled;
      node.sleep = sleep;
      for (int t = 0; t < static_cast<int>(threads.size()); ++t) {
        node.messages[t] = messages_for(threads[t].pending);
        if (is_covered(sleep, t)) node.asleep |= 1U << t;
      }
      const unsigned awake = enabled & ~node.asleep;
      if (awake == 0) {
        is_pruned = true;
        break;
      }
      const int last = depth > 0 ? path[depth - 1].thread : 0;
      node.thread = (awake >> last & 1) != 0 ? last : __builtin_ctz(awake);
      node.is_quiet = is_quiet;
      node.backtrack = reduces || is_quiet ? 1U << node.thread : enabled;
      path.push_back(node);
    }
    Node& node = path[depth];
    sleep = node.sleep;
    for (int t = 0; reduces && t < static_cast<int>(threads.size()); ++t) {
      if ((node.done >> t & 1) == 0) continue;
      sleep.threads |= 1U << t;
      sleep.covered[t] = node.messages[t];
    }
    take_step(node, sleep);
    if (is_pruned) {
      ++depth;
      break;
    }
  }
  // What those that did not get on would have done next.
  for (int t = 0; reduces && t < static_cast<int>(threads.size()); ++t) {
    const Thread& thread = threads[t];
    if (thread.is_finished || thread.is_dead) continue;
    Op op = thread.pending;
    if (op.kind == Kind::kCas) op.ok = true;
    Steps steps = thread.steps;
    find_races(t, op, std::min(depth, path.size()), steps, steps);
  }
}

bool find_next() {
  while (!path.empty()) {
    Node& node = path.back();
    if (++node.choice < node.choices) return true;
    node.done |= 1U << node.thread;
    const unsigned left = node.backtrack & ~node.done & ~node.asleep;
    if (left != 0) {
      node.thread = __builtin_ctz(left);
      node.choice = node.choices = 0;
      return true;
    }
    path.pop_back();
  }
  return false;
}

void step(const Op& op) {
  Thread& thread = threads[running];
  on_heap = false;
  thread.pending = op;
  if (op.address != 0 && op.kind != Kind::kWake && op.kind != Kind::kPlain) {
    thread.pending.location = find_location(op.address, op.bytes);
  }
  leave();
}

// ---- The runtime that instrumented code calls ----

Op make(Kind kind, const volatile void* address, int bytes, int order, const void* site) {
  Op op;
  op.kind = kind;
  op.address = reinterpret_cast<Word>(address);
  op.bytes = bytes;
  op.order = order;
  op.site = site;
  return op;
}

// As the command line says.
void weaken(Op& op) {
  on_heap = false;
  sites.emplace(op.site, op);
  if (!weakened.empty()) {
    const auto found = weakened.find(op.site);
    if (found != weakened.end() && found->second.order >= 0) op.order = found->second.order;
    if (found != weakened.end() && found->second.fail_order >= 0) op.fail_order = found->second.fail_order;
  }
  on_heap = true;
}

bool is_watched(const volatile void* address) { return running >= 0 && on_heap && is_shared(address); }

template <class T>
T load(const volatile T* address, int order, const void* site) {
  if (!is_watched(address)) return __atomic_load_n(address, __ATOMIC_SEQ_CST);
  Op op = make(Kind::kLoad, address, sizeof(T), order, site);
  weaken(op);
  step(op);
  return static_cast<T>(threads[running].pending.result);
}

template <class T>
void store(volatile T* address, T value, int order, const void* site) {
  if (!is_watched(address)) return __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
  Op op = make(Kind::kStore, address, sizeof(T), order, site);
  op.operand = value;
  weaken(op);
  step(op);
}

template <class T>
T modify(volatile T* address, T operand, int order, const void* site, Word (*apply)(Word, Word)) {
  if (!is_watched(address)) {
    const T old = *address;
    *address = static_cast<T>(apply(old, operand));
    return old;
  }
  Op op = make(Kind::kRmw, address, sizeof(T), order, site);
  op.operand = operand;
  op.apply = apply;
  weaken(op);
  step(op);
  return static_cast<T>(threads[running].pending.result);
}

template <class T>
int compare_exchange(volatile T* address, T* expected, T value, int order, int fail_order, const void* site) {
  if (!is_watched(address)) {
    const bool is_same = *address == *expected;
    if (is_same) *address = value;
    if (!is_same) *expected = *address;
    return is_same;
  }
  Op op = make(Kind::kCas, address, sizeof(T), order, site);
  op.fail_order = fail_order;
  op.expected = *expected;
  op.operand = value;
  op.apply = [](Word, Word b) { return b; };
  weaken(op);
  step(op);
  const Op& done = threads[running].pending;
  if (!done.ok) *expected = static_cast<T>(done.result);
  return done.ok;
}

void access(const volatile void* address, std::size_t bytes, bool writes) {
  if (bytes == 0 || !is_watched(address)) return;
  if (writes && crashed < 0 && (program->mortal >> running & 1) != 0) step(Op{});  // it may die before
  on_heap = false;
  check_race(const_cast<const char*>(static_cast<const volatile char*>(address)), bytes, writes);
  on_heap = true;
  if (!error.empty()) leave();
}

}  // namespace

void* Program::allocate(std::size_t bytes, std::size_t alignment) {
  used = (used + alignment - 1) / alignment * alignment;
  void* const place = memory + used;
  used += (bytes + 7) / 8 * 8;
  if (used > kMemory) throw std::string("too little memory");
  return place;
}

Litmus::Litmus(const char* name, void (*define)(Program&)) { litmuses().emplace_back(name, define); }

void require(bool holds, const char* what) {
  if (holds) return;
  on_heap = false;
  fail(what);
  if (running >= 0) leave();
}

void until(const std::function<bool()>& holds) {
  for (;;) {
    Thread& thread = threads[running];
    thread.seen.clear();
    thread.looks = true;
    const bool is_over = holds();
    thread.looks = false;
    if (is_over) return;
    Op op;
    op.kind = Kind::kBlocked;
    step(op);
  }
}

void begin() {
  Op op;
  op.kind = Kind::kBegin;
  step(op);
}

bool died(int number) {
  Op op;
  op.kind = Kind::kDeath;
  op.operand = static_cast<Word>(number);
  step(op);
  return threads[running].pending.ok;
}

void outcome(const std::string& text) {
  const bool was = std::exchange(on_heap, false);
  outcome_text = text;
  on_heap = was;
}

Explored explore(Program& its_program, bool its_reduces) {
  program = &its_program;
  reduces = its_reduces;
  threads = std::vector<Thread>(program->threads.size());
  for (std::size_t t = 0; t < threads.size(); ++t) {
    threads[t].body = program->threads[t];
    threads[t].stack.resize(kStack);
  }
  path.clear();
  error.clear();
  Explored found;
  std::set<std::string> outcomes;
  do {
    run_execution();
    if (error.empty() && !is_pruned && program->end) program->end();
    (is_pruned ? found.pruned : found.executions)++;
    found.steps = std::max(found.steps, static_cast<int>(depth));
    if (!error.empty()) throw error;
    if (!is_pruned) outcomes.insert(outcome_text);
  } while (find_next());
  found.outcomes.assign(outcomes.begin(), outcomes.end());
  return found;
}

}  // namespace proof

using namespace proof;

// NOLINTBEGIN: the names are the compiler's.
#define SITE __builtin_return_address(0)
#define MODIFY(bits, name, expression)                                                                     \
  std::uint##bits##_t __tsan_atomic##bits##_##name(volatile std::uint##bits##_t* a, std::uint##bits##_t v, \
                                                   int order) {                                            \
    return modify(a, v, order, SITE, [](Word x, Word y) -> Word { return expression; });                   \
  }
#define ATOMICS(bits)                                                                                        \
  std::uint##bits##_t __tsan_atomic##bits##_load(const volatile std::uint##bits##_t* a, int order) {         \
    return load(a, order, SITE);                                                                             \
  }                                                                                                          \
  void __tsan_atomic##bits##_store(volatile std::uint##bits##_t* a, std::uint##bits##_t v, int order) {      \
    store(a, v, order, SITE);                                                                                \
  }                                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile std::uint##bits##_t* a, std::uint##bits##_t* c, \
                                                    std::uint##bits##_t v, int order, int fail_order) {      \
    return compare_exchange(a, c, v, order, fail_order, SITE);                                               \
  }                                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile std::uint##bits##_t* a, std::uint##bits##_t* c,   \
                                                  std::uint##bits##_t v, int order, int fail_order) {        \
    return compare_exchange(a, c, v, order, fail_order, SITE);                                               \
  }                                                                                                          \
  MODIFY(bits, exchange, (void(x), y))                                                                       \
  MODIFY(bits, fetch_add, x + y)                                                                             \
  MODIFY(bits, fetch_sub, x - y)                                                                             \
  MODIFY(bits, fetch_or, x | y)                                                                              \
  MODIFY(bits, fetch_and, x& y)
#define PLAIN(bytes)                                                      \
  void __tsan_read##bytes(void* a) { access(a, bytes, false); }           \
  void __tsan_write##bytes(void* a) { access(a, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* a) { access(a, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* a) { access(a, bytes, true); }

extern "C" {
ATOMICS(8)
ATOMICS(16)
ATOMICS(32)
ATOMICS(64)
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
void __tsan_read_range(void* a, std::size_t bytes) { access(a, bytes, false); }
void __tsan_write_range(void* a, std::size_t bytes) { access(a, bytes, true); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_atomic_signal_fence(int) {}
void __tsan_atomic_thread_fence(int order) {
  if (running < 0 || !on_heap) return;
  Op op = make(Kind::kFence, nullptr, 0, order, SITE);
  weaken(op);
  step(op);
}

// Linked in place of the C library's.
void* __real_memcpy(void*, const void*, std::size_t);
void* __real_memmove(void*, const void*, std::size_t);
void* __real_memset(void*, int, std::size_t);
int __real_memcmp(const void*, const void*, std::size_t);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  access(from, bytes, false);
  access(to, bytes, true);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, std::size_t bytes) {
  access(from, bytes, false);
  access(to, bytes, true);
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, std::size_t bytes) {
  access(to, bytes, true);
  return __real_memset(to, value, bytes);
}
int __wrap_memcmp(const void* a, const void* b, std::size_t bytes) {
  access(a, bytes, false);
  access(b, bytes, false);
  return __real_memcmp(a, b, bytes);
}

long __real_syscall(long, ...);
long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  auto* const word = va_arg(list, std::uint32_t*);
  const int operation = va_arg(list, int);
  const auto value = va_arg(list, std::uint32_t);
  va_end(list);
  if (number != SYS_futex) return errno = ENOSYS, -1;
  if (!is_watched(word)) return 0;
  Op op = make(operation == FUTEX_WAIT ? Kind::kWait : Kind::kWake, word, 4, __ATOMIC_RELAXED, SITE);
  op.operand = op.expected = value;
  step(op);
  errno = EAGAIN;
  return operation == FUTEX_WAIT && threads[running].pending.kind == Kind::kWait ? -1 : 0;
}
}
// NOLINTEND

// Time stands still: no wait ends by its limit.
std::chrono::steady_clock::time_point now_of_wrap() __asm__("__wrap__ZNSt6chrono3_V212steady_clock3nowEv");
std::chrono::steady_clock::time_point now_of_wrap() {
  return std::chrono::steady_clock::time_point(std::chrono::hours(1));
}

// What the threads allocate is gone with their execution, wherever they stopped.
void* operator new(std::size_t bytes) {
  if (!on_heap) {
    if (void* const place = std::malloc(bytes)) return place;
    throw std::bad_alloc();
  }
  char* const place = heap_end;
  heap_end += (bytes + 15) / 16 * 16;
  if (heap_end > heap + kHeap) std::abort();
  return place;
}
void operator delete(void* place) noexcept {
  const auto* const at = static_cast<const char*>(place);
  if (at < heap || at >= heap + kHeap) std::free(place);
}
void operator delete(void* place, std::size_t) noexcept { operator delete(place); }

namespace {

void print_path() {
  for (std::size_t i = 0; i < std::min(depth + 1, path.size()); ++i) {
    const Op& op = path[i].op;
    if (op.kind == Kind::kPlain && op.site == nullptr) continue;
    std::printf("  thread %d: %-12s %-8s byte %-8ld value %-6llx of %llx  @%p\n", path[i].thread,
                kKinds[static_cast<int>(op.kind)], kOrders[op.order],
                op.address == 0 ? 0L : static_cast<long>(op.address - reinterpret_cast<Word>(memory)),
                static_cast<unsigned long long>(op.writes() && op.kind == Kind::kStore ? op.operand : op.result),
                static_cast<unsigned long long>(op.operand), op.site);
  }
}

int order_named(const std::string& name) {
  for (int order = 0; order < 6; ++order) {
    if (name == kOrders[order]) return order;
  }
  std::exit(2);
}

}  // namespace

// [--sites] [--weaken ADDRESS=ORDER]... [--weaken-failure ADDRESS=ORDER]... [NAME]...
int main(int count, char** arguments) {
  memory = static_cast<char*>(mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  cells = static_cast<Cell*>(mmap(nullptr, kMemory / 8 * sizeof(Cell), PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  heap = static_cast<char*>(std::malloc(kHeap));
  bool lists_sites = false;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> names;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    if (word == "--full") {
      is_full = true;
    } else if (word == "--sites") {
      lists_sites = true;
    } else if (word == "--weaken" || word == "--weaken-failure") {
      const std::string what = arguments[++i];
      const auto equals = what.find('=');
      Weaker& weaker = weakened[reinterpret_cast<const void*>(std::stoul(what.substr(0, equals), nullptr, 16))];
      (word == "--weaken" ? weaker.order : weaker.fail_order) = order_named(what.substr(equals + 1));
    } else {
      names.push_back(word);
    }
  }
  for (const auto& [name, define] : litmuses()) {
    const auto is_part = [&text = name](const std::string& part) { return text.find(part) != std::string::npos; };
    if (!names.empty() && std::none_of(names.begin(), names.end(), is_part)) continue;
    const auto start = std::chrono::system_clock::now();
    std::memset(memory, 0, used);
    used = 64;
    undo.clear();
    Program defined;
    try {
      define(defined);
      if (defined.is_large && !is_full) continue;
      if (defined.threads.empty()) continue;  // it has explored what it wants
      const Explored found = explore(defined);
      const std::chrono::duration<double> seconds = std::chrono::system_clock::now() - start;
      std::printf("%s: %ld executions, %ld pruned, up to %d steps, %.2f s\n", name.c_str(), found.executions,
                  found.pruned, found.steps, seconds.count());
    } catch (const std::string& what) {
      std::printf("%s: FAILED: %s\n", name.c_str(), what.c_str());
      print_path();
      return 1;
    }
  }
  for (const auto& [site, op] : sites) {
    if (!lists_sites) break;
    std::printf("site %p %s %s %s\n", site, kKinds[static_cast<int>(op.kind)], kOrders[op.order],
                kOrders[op.fail_order]);
  }
  return 0;
}

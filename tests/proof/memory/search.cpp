// The search: fibers, the order of their steps, and what need not be tried.
#include <ucontext.h>

#include <set>

#include "machine.hpp"

namespace proof {
namespace machine {
namespace {

// ---- Fibers ----

void swap_exceptions(Thread& thread) {
  auto* const global = reinterpret_cast<Word*>(abi::__cxa_get_globals());
  std::swap(global[0], thread.exceptions[0]);
  std::swap(global[1], thread.exceptions[1]);
}

}  // namespace

void leave() {
  Thread& thread = threads[running];
  on_heap = false;
  if (_setjmp(thread.here) == 0) _longjmp(scheduler, 1);
  on_heap = true;
}

namespace {

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
// ---- Partial orders ----

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

// Whether all that the thread may do next has been explored.
bool is_covered(const Sleep& sleep, int number) {
  const Op& op = threads[number].pending;
  if ((sleep.threads >> number & 1) == 0) return false;
  if (op.kind != Kind::kLoad) return true;
  static std::vector<int> choices;
  find_choices(threads[number], op, choices);
  return std::all_of(choices.begin(), choices.end(), [&](int message) { return message < sleep.covered[number]; });
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

}  // namespace

void step(const Op& op) {
  Thread& thread = threads[running];
  on_heap = false;
  thread.pending = op;
  if (op.address != 0 && op.kind != Kind::kWake && op.kind != Kind::kPlain) {
    thread.pending.location = find_location(op.address, op.bytes);
  }
  leave();
}

}  // namespace machine

using namespace machine;

void* Program::allocate(std::size_t bytes, std::size_t alignment) {
  used = (used + alignment - 1) / alignment * alignment;
  void* const place = memory + used;
  used += (bytes + 7) / 8 * 8;
  if (used > kMemory) throw std::string("too little memory");
  return place;
}

Litmus::Litmus(const char* name, void (*define)(Program&), const char* file) {
  const std::string path = file;
  const std::size_t start = path.rfind('/') + 1;
  litmuses().emplace_back(path.substr(start, path.rfind('.') - start) + ": " + name, define);
}

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

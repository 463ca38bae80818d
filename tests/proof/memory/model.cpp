// What a step of a thread may do, and does: the memory model.
#include "machine.hpp"

namespace proof::machine {
namespace {

// ---- Views ----

int place(int location, int message) { return locations[location].messages[message].place; }

void raise(View& view, int location, int message) {
  std::uint16_t& at = view.at[location];
  if (place(location, message) > place(location, at)) at = static_cast<std::uint16_t>(message);
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

}  // namespace

void join(View& view, const View& other, bool with_clock) {
  for (std::size_t i = 0; i < locations.size(); ++i) {
    if (view.at[i] != other.at[i]) raise(view, static_cast<int>(i), other.at[i]);
  }
  for (int t = 0; with_clock && t < kMaxThreads; ++t) view.clock[t] = std::max(view.clock[t], other.clock[t]);
}

void join(Steps& steps, const Steps& other) {
  for (int t = 0; t < kMaxThreads; ++t) steps[t] = std::max(steps[t], other[t]);
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

namespace {

// The lowest place in modification order that an access of this order may read, or write behind.
int lowest(const Thread& thread, const Op& op, int order) {
  int least = place(op.location, thread.now.at[op.location]);
  if (is_sc(order)) least = std::max(least, place(op.location, sc.at[op.location]));
  return least;
}

}  // namespace

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

namespace {

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

}  // namespace

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

}  // namespace proof::machine

#include "engine/pending.hpp"

#include <cstdio>

#include "engine/schedule.hpp"
#include "shm/liveness.hpp"

namespace kvstore_hvd {
namespace {

// Limit on waiting for the names of late ranks on other hosts.
constexpr std::chrono::seconds kUntilTold{10};
constexpr int kLooks = 8;  // operations are examined from this part of the timeout on

std::string seconds(std::chrono::nanoseconds duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace

Pending::Added Pending::add(std::shared_ptr<Work> work, bool watched) {
  const auto [found, is_new] = names_.try_emplace(work->request().name);
  Name& name = found->second;
  Work& added = *work;
  name.is_used = !is_new;
  if (is_new) known_.push_back(found->first);
  name.queue.push_back(std::move(work));
  count_.fetch_add(1, std::memory_order_relaxed);  // Relaxed: publishes nothing.
  const bool first = name.queue.size() == 1;
  const Ready ready = first ? start(name, watched) : Ready::kNot;
  // Only now: the other ranks need not wait for a look at the clock.
  added.submitted = added.since = Clock::now();
  rounds_.submitted(name.statistics, added);
  if (first) record(name);
  if (names_.size() > kSlots) forget_names();
  return Added{ready, first && is_announced(name) ? name.slot.slot : kNoSlot};
}

Pending::Ready Pending::start(Name& name, bool watched) {
  if (world_.failure.is_set()) return Ready::kNot;
  if (const auto ready = announce(name, watched)) return *ready;
  waiting_for_slot_.push_back(name.queue.front()->request().name);
  return Ready::kNot;
}

// Bounds the memory of programs that use ever new names: of those that are over, one that has not been used for long
// (second chance). Right after a submission: what rounds_ knows by pointers is under way.
void Pending::forget_names() {
  for (int look = 0; look < 2; ++look) {
    const auto oldest = names_.find(known_.front());
    known_.pop_front();
    Name& name = oldest->second;
    if (name.queue.empty() && !std::exchange(name.is_used, false)) {
      forgotten_.add(name.statistics);
      names_.erase(oldest);
    } else {
      known_.push_back(oldest->first);
    }
  }
}

// After its announcement: the other ranks need not wait for that.
void Pending::record(const Name& name) {
  if (is_announced(name))
    flight_.begin(*name.queue.front(), name.slot.slot, name.slot.version, name.statistics.operations);
}

// Returns nothing, and has no effect, when the table has no free slot.
std::optional<Pending::Ready> Pending::announce(Name& name, bool watched) try {
  Work& work = *name.queue.front();
  for (;;) {
    if (name.slot.slot == kNoSlot) {
      const auto found = table_.find(work.request().name);
      if (!found) return std::nullopt;
      name.slot = *found;
    }
    // A slot with an operation of this rank does not change hands: the write below replaces none.
    if (!table_.is_current(name.slot)) {
      name.slot = SlotHandle{};
      continue;
    }
    in_flight_[name.slot.slot] = InFlight{&work, &name};
    switch (table_.announce(name.slot, work.request(), watched)) {
      case TensorTable::Outcome::kStale:
        in_flight_[name.slot.slot] = InFlight{};
        name.slot = SlotHandle{};
        continue;
      case TensorTable::Outcome::kWaiting:
      case TensorTable::Outcome::kHere:
        check_left(name.slot.slot, work.request());
        return Ready::kNot;
      case TensorTable::Outcome::kLast:
        Schedule(world_, alarm_).make_ready(name.slot.slot, work.request().priority);
        for (int r = 0; r < parties_; ++r) {
          if (r != rank_) world_.rank(r).bell.ring();
        }
        return world_.slots[name.slot.slot].direct ? Ready::kAlone : Ready::kTogether;
      case TensorTable::Outcome::kDone:
        return Ready::kDone;
    }
  }
} catch (const WorldLost&) {
  return Ready::kNot;
}

bool Pending::is_announced(const Name& name) const {
  return !name.queue.empty() && name.slot.slot != kNoSlot &&
         in_flight_[name.slot.slot].work == name.queue.front().get();
}

bool Pending::is_met(const Work& work) {
  if (work.done()) return true;
  const auto found = names_.find(work.request().name);
  const auto is_it = [&work](const std::shared_ptr<Work>& one) { return one.get() == &work; };
  // A completed work leaves its queue a moment before it is done.
  if (found == names_.end() || std::none_of(found->second.queue.begin(), found->second.queue.end(), is_it)) return true;
  if (!is_announced(found->second) || !is_it(found->second.queue.front())) return false;
  const std::uint32_t slot = found->second.slot.slot;
  for (int r = 0; r < parties_; ++r) {
    if (!table_.announced_by(slot, r)) return false;
  }
  return true;
}

void Pending::scheduled(const Entry& entry) const {
  Clock::time_point now;
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    if (entry.pieces[i].offset != 0) continue;  // not the first chunk
    if (now == Clock::time_point()) now = Clock::now();
    Work& work = *in_flight_[entry.pieces[i].slot].work;
    work.scheduled = now;
    work.algorithm = entry.algorithm;
  }
}

void Pending::arrived(const Entry& entry, const World::OnLink& times) const {
  for (std::uint32_t i = 0; i < entry.n_pieces; ++i) {
    World::OnLink& on_link = in_flight_[entry.pieces[i].slot].work->on_link;
    if (on_link.sent == 0) on_link.sent = times.sent;
    on_link.arrived = times.arrived;
  }
}

Pending::Completed Pending::complete(std::uint32_t slot, Clock::time_point now) {
  Name& name = *in_flight_[slot].name;
  in_flight_[slot] = InFlight{};
  std::shared_ptr<Work> work = std::move(name.queue.front());
  name.queue.pop_front();
  Status status = messages_.disagreement(work->request(), world_.slots[slot]);
  if (work->algorithm == Algorithm::kInline) {                          // never scheduled
    if (work->scheduled == Clock::time_point()) work->scheduled = now;  // another rank has carried it out
    if (world_.mark(slot, rank_).place != kNoPlace) work->algorithm = Algorithm::kDirect;
  }
  flight_.end(*work, now);
  table_.complete(slot);
  name.statistics.add(*work, now);
  timeline_.record(*work, now, !status.ok());
  rounds_.completed(name.statistics, *work, now);
  if (!name.queue.empty()) {
    name.queue.front()->since = now;
    const Ready ready = start(name);
    record(name);
    tell_progress(name, ready);
  }
  retry_slots();
  return {std::move(work), std::move(status)};
}

void Pending::tell_progress(const Name& name, Ready ready) {
  if (ready == Ready::kDone) world_.rank(rank_).inbox.put(name.slot.slot);
  if (ready != Ready::kNot) world_.rank(rank_).bell.ring();
}

Pending::CarriedOut Pending::carried_out() {
  CarriedOut found;
  for (const auto& [text, name] : names_) {
    if (!is_announced(name)) continue;
    const Work& work = *name.queue.front();
    if (is_done_inline(world_, rank_, name.slot.slot)) {
      found.slots.push_back(name.slot.slot);
    } else if (work.scheduled == Clock::time_point() && may_reduce_inline(world_, work.request())) {
      int missing = 0;
      for (int r = 0; r < parties_; ++r) missing += !table_.announced_by(name.slot.slot, r);
      if (missing == 0) found.may_come = true;
    }
  }
  return found;
}

std::deque<std::shared_ptr<Work>> Pending::take_all(const std::function<bool(std::uint32_t)>& held) {
  std::deque<std::shared_ptr<Work>> all;
  const auto now = Clock::now();
  for (auto& [text, name] : names_) {
    const std::size_t kept = is_announced(name) && held(name.slot.slot) ? 1 : 0;
    for (std::size_t i = kept; i < name.queue.size(); ++i) {
      std::shared_ptr<Work>& work = name.queue[i];
      if (i > 0) work->since = now;  // it waited for those before it
      timeline_.record(*work, now, true);
      all.push_back(std::move(work));
    }
    name.queue.resize(kept);
  }
  rounds_.forget();
  waiting_for_slot_.clear();
  return all;
}

void Pending::retry_slots() {
  while (!waiting_for_slot_.empty() && !world_.failure.is_set()) {
    const auto found = names_.find(waiting_for_slot_.front());
    const auto ready = announce(found->second);
    if (!ready) return;
    record(found->second);
    tell_progress(found->second, *ready);
    waiting_for_slot_.pop_front();
  }
}

void Pending::check_left() {
  if (world_.left.load(std::memory_order_acquire) == 0) return;  // as below
  for (auto& [text, name] : names_) {
    if (is_announced(name)) check_left(name.slot.slot, name.queue.front()->request());
  }
}

void Pending::check_left(std::uint32_t slot, const Request& request) {
  // Acquire: pairs with the release of Engine::shutdown().
  if (world_.left.load(std::memory_order_acquire) == 0) return;
  for (int r = 0; r < parties_; ++r) {
    const bool gone = world_.rank(r).presence.load(std::memory_order_acquire) == Presence::kLeft;
    if (!gone || r == rank_ || table_.announced_by(slot, r)) continue;
    return alarm_.raise(ErrorCode::kPeerLost, Messages::left_early(describe_rank(world_, r), rank_name(world_, rank_),
                                                                   describe_operation(request)));
  }
}

std::chrono::nanoseconds Pending::waited(Clock::time_point since, Clock::time_point now) const {
  return now - since - standstills_.between(since, now);
}

void Pending::wait_for_all() {
  for (const auto& [text, name] : names_) {
    for (const auto& work : name.queue) work->is_waited_for.store(true, std::memory_order_relaxed);
  }
}

Pending::Overdue Pending::overdue(const EngineOptions& options, const std::function<bool(std::uint32_t)>& held) {
  const auto now = Clock::now();
  const auto most = std::min(static_cast<std::uint32_t>(world_.size_of_all), kMostWaits);
  const auto in_mxnet_since = options.activity->in_mxnet_since(now);
  const bool stays_in_mxnet = in_mxnet_since && waited(*in_mxnet_since, now) >= options.timeout;
  const auto is_waited_for = [](const auto& work) { return work->is_waited_for.load(std::memory_order_relaxed); };
  const auto stopped_before = std::exchange(stopped_since_, {});
  Overdue found;
  const Name* without_slot = nullptr;
  bool has_slots = false;
  for (auto& [text, name] : names_) {
    if (name.queue.empty()) continue;
    Work& work = *name.queue.front();
    auto waited_for = waited(work.since, now);
    if (waited_for < options.timeout / kLooks) continue;
    if (!is_announced(name)) {
      if (waited_for >= options.timeout) without_slot = &name;
      continue;
    }
    const Blamed blamed = blamed_for(name.slot.slot);
    for (const int rank : blamed.ranks) look_whether_stopped(rank, stopped_before, now);
    // The last rank may have announced it long after the others.
    if (options.waits_for_busy && blamed.announced_by_all) {
      if (work.met == Clock::time_point()) work.met = now;
      waited_for = waited(work.met, now);
    }
    // A device has the same time again, and then says whose device it waits for.
    const auto limit = held(name.slot.slot) ? 2 * options.timeout : options.timeout;
    if (waited_for < limit) continue;
    has_slots = true;
    // A program may compute between submitting an operation and waiting for it.
    const bool waits =
        stays_in_mxnet || is_patient(text) || std::any_of(name.queue.begin(), name.queue.end(), is_waited_for);
    const std::uint32_t chain = chain_of(blamed.ranks, now, options.timeout) + (waits ? 1 : 0);
    if (waits && chain > found.wait.ranks) found.wait = {std::min(chain, most), describe_operation(work.request())};
    if (is_patient(text)) continue;
    // A rank inside a collective computes nothing of the program.
    const bool may_compute = chain < most && !blamed.announced_by_all;
    const bool may_be_told = !blamed.ranks.empty() || waited_for < limit + kUntilTold;
    if (options.waits_for_busy && may_compute && may_be_told) continue;
    found.fact = describe_timeout(name, limit, blamed, waits, options.activity->line());
    return found;
  }
  // Slots come free when the operations of this rank end that have one.
  if (without_slot != nullptr && !has_slots) {
    found.fact = describe_timeout(*without_slot, options.timeout, {}, true, {});
  }
  return found;
}

// Once for each rank in each call of overdue().
void Pending::look_whether_stopped(int rank, const StoppedSince& before, Clock::time_point now) {
  const auto [at, is_new] = stopped_since_.try_emplace(rank);
  if (!is_new || !is_stopped(rank)) return;
  const auto earlier = before.find(rank);
  at->second = earlier != before.end() && earlier->second ? earlier->second : now;
}

bool Pending::is_stopped(int rank) const {
  const Member& member = world_.member(rank);
  if (member.host == world_.host) return Liveness::is_stopped(world_, member.local_rank);
  return member.doing.waits.load(std::memory_order_relaxed) == kStopped;  // Relaxed: looked at again and again
}

// The longest chain that begins with one of the ranks. A stop counts once seen for the examined part of the timeout.
std::uint32_t Pending::chain_of(const std::vector<int>& ranks, Clock::time_point now,
                                std::chrono::nanoseconds timeout) const {
  std::uint32_t longest = 0;
  for (const int rank : ranks) {
    const auto stopped = stopped_since_.find(rank);
    const bool is_seen = stopped != stopped_since_.end() && stopped->second;
    if (is_seen && waited(*stopped->second, now) >= timeout - timeout / kLooks) return kStopped;
    const std::uint32_t waits = world_.member(rank).doing.waits.load(std::memory_order_relaxed);  // Relaxed: as above
    if (waits != kStopped) longest = std::max(longest, waits);
  }
  return longest;
}

EngineStatistics Pending::report() {
  rounds_.end(Clock::now());
  EngineStatistics all{{}, rounds_.statistics()};
  for (const auto& [text, name] : names_) {
    if (name.statistics.operations > 0) all.names.emplace_back(text, name.statistics);
  }
  if (forgotten_.operations > 0) all.names.emplace_back("", forgotten_);
  return all;
}

void Pending::start_timeline(std::size_t capacity) {
  rounds_.end(Clock::now());
  timeline_.start(capacity);
}

std::string Pending::describe_timeout(const Name& name, std::chrono::nanoseconds timeout, const Blamed& blamed,
                                      bool is_waited_for, const std::string& line) {
  const std::string operation = describe_operation(name.queue.front()->request());
  std::string text = rank_name(world_, rank_) + " waited " + seconds(timeout) + " in " + operation + " for ";
  if (!is_announced(name)) return text + "one of " + std::to_string(kSlots) + " tensors in flight to complete";
  if (blamed.ranks.empty()) {
    return text + (blamed.announced_by_all ? "the other ranks, none of which makes progress" : "ranks of other hosts");
  }
  text += describe_members(world_, blamed.ranks) + ", which ";
  if (blamed.announced_by_all) return text + "stopped inside the collective";
  text += "did not submit it";
  std::string fix;
  const auto tell = [this, &text](int rank, const std::string& what) {
    text += ".\n  rank " + std::to_string(world_.member(rank).rank_of_all) + " " + what;
  };
  const std::string at = line.empty() ? "" : "at " + line;
  if (is_waited_for) {
    tell(world_.rank(rank_).rank_of_world, "waits in " + operation + (at.empty() ? "" : ", " + at));
  } else if (!at.empty()) {
    tell(world_.rank(rank_).rank_of_world, "is " + at);
  }
  constexpr std::size_t kShown = 3;
  for (std::size_t i = 0; i < std::min(blamed.ranks.size(), kShown); ++i) {
    const int rank = blamed.ranks[i];
    const Doing& doing = world_.member(rank).doing;
    const std::string what = doing.text.read(), where = what.empty() ? "" : ", " + what;
    if (is_stopped(rank)) {
      tell(rank, "is stopped" + where);
    } else if (doing.waits.load(std::memory_order_relaxed) > 0) {  // Relaxed: as above
      tell(rank, "waits for others itself" + where);
      fix = "\n  Fix: have all ranks submit the same operations, and those that they wait for in the same order";
    } else if (!what.empty()) {
      tell(rank, "is " + what);
    }
  }
  return text + fix;
}

Blamed Pending::blamed_for(std::uint32_t slot) {
  std::vector<int> late, slow;
  const RankState& own = world_.rank(rank_);
  const std::uint32_t filled = own.filled.value(), reduced = own.reduced.value();
  for (int r = 0; r < parties_; ++r) {
    const bool is_late = !table_.announced_by(slot, r);
    if (r == world_.ranks) {
      if (is_late) add_late_elsewhere(slot, late);
      continue;
    }
    const RankState& other = world_.rank(r);
    if (is_late) late.push_back(other.rank_of_world);
    if (!other.filled.reached(filled) || !other.reduced.reached(reduced)) slow.push_back(other.rank_of_world);
  }
  std::sort(late.begin(), late.end());
  const bool by_all = late.empty() && (!world_.has_link() || table_.announced_by(slot, world_.ranks));
  return Blamed{std::move(by_all ? slow : late), by_all};
}

void Pending::add_late_elsewhere(std::uint32_t slot, std::vector<int>& late) const {
  const std::atomic<std::uint64_t>* const bits = world_.late(slot);
  for (int rank = 0; rank < world_.size; ++rank) {
    // Relaxed: for messages.
    if ((bits[rank / 64].load(std::memory_order_relaxed) >> (rank % 64) & 1) != 0) late.push_back(rank);
  }
}

std::vector<Waiting> Pending::waiting(std::chrono::nanoseconds age) {
  const auto now = Clock::now();
  std::vector<Waiting> all;
  for (const auto& [text, name] : names_) {
    if (!is_announced(name)) continue;
    const Work& work = *name.queue.front();
    const auto waited_for = waited(work.since, now);
    if (waited_for < age) continue;
    all.push_back(
        Waiting{text, describe_operation(work.request()), work.since, waited_for, blamed_for(name.slot.slot)});
  }
  return all;
}

}  // namespace kvstore_hvd

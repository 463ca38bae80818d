#include "report/report.hpp"

#include <algorithm>

namespace kvstore_hvd {
namespace {

constexpr std::size_t kMostLooks = 20;  // see Rounds

void expose(Statistics& statistics, Clock::time_point from, Clock::time_point until) {
  statistics.last.exposed = std::max(until - from, Clock::duration::zero());
  statistics.total.exposed += statistics.last.exposed;
}

}  // namespace

void Statistics::add(const Work& work, Clock::time_point completed) {
  ++operations;
  const bool failed = work.algorithm == Algorithm::kFail;
  if (!failed) bytes += work.request().count * size_of(work.request().dtype);
  algorithm = work.algorithm;
  submitted = work.submitted;
  // Its first chunk may be scheduled before the rank that announces it has looked at the clock.
  const auto queued = std::max(work.scheduled - work.submitted, Clock::duration::zero());
  last = Times{queued, completed - work.scheduled, {}};
  total.queued += last.queued;
  total.reducing += last.reducing;
}

void Statistics::add(const Statistics& other) {
  operations += other.operations;
  bytes += other.bytes;
  algorithm = other.algorithm;
  submitted = other.submitted;
  last = other.last;
  total.queued += other.total.queued;
  total.reducing += other.total.reducing;
  total.exposed += other.total.exposed;
}

void Rounds::submitted(Statistics& statistics, Work& work) {
  if (statistics.round == round_) {
    end(work.submitted);
  } else {
    look_for_wait(work.submitted);
    completed_.clear();
    looks_ = blocked_ = 0;
  }
  statistics.round = work.round = round_;
  last_submission_ = work.submitted;
  work.begins_round = !std::exchange(begun_, true);
  ++under_way_;
}

void Rounds::completed(Statistics& statistics, const Work& work, Clock::time_point when) {
  if (work.round == round_) {
    completed_.push_back(Completed{&statistics, work.submitted, work.scheduled, when});
    --under_way_;
  } else if (work.round + 1 == round_) {
    expose(statistics, std::max(work.submitted, before_), std::min(when, ended_));
  }
}

void Rounds::end(Clock::time_point when) {
  if (!begun_) return;
  Clock::time_point last = under_way_ > 0 ? when : last_submission_;
  for (const Completed& one : completed_) {
    expose(*one.statistics, std::max(one.submitted, last_submission_), one.completed);
    last = std::max(last, one.completed);
  }
  ++statistics_.count;
  const auto exposed = last - last_submission_, reduced = reducing();
  statistics_.exposed += exposed;
  statistics_.reducing += reduced;
  add_wait(exposed - reduced);
  forget();
  before_ = last_submission_;
  ended_ = when;
  ++round_;
}

Clock::duration Rounds::reducing() const {
  Clock::duration all{0};
  // From the end, what is not covered yet.
  Clock::time_point covered = Clock::time_point::max();
  for (auto one = completed_.rbegin(); one != completed_.rend(); ++one) {
    const auto begin = std::max(one->scheduled, last_submission_);
    const auto end = std::min(one->completed, covered);
    if (begin < end) all += end - begin;
    covered = std::min(covered, begin);
  }
  return all;
}

void Rounds::look_for_wait(Clock::time_point next) {
  if (under_way_ > 0 || completed_.empty()) return;
  const auto until = completed_.back().completed;
  const auto waited = until - last_submission_ - reducing();
  if (next - until < waited / 4) add_wait(waited);
}

void Rounds::look(bool is_blocked) {
  if (under_way_ == 0) return;
  ++looks_;
  if (is_blocked) ++blocked_;
}

void Rounds::add_wait(std::chrono::nanoseconds time) {
  if (looks_ > 0) {
    counted_ = std::max(std::min(counted_ + looks_, kMostLooks), looks_);
    const auto looks = static_cast<double>(looks_);
    blocked_part_ += (static_cast<double>(blocked_) - blocked_part_ * looks) / static_cast<double>(counted_);
  }
  unjudged_ += time;
  if (counted_ == 0) return;
  const auto all = std::exchange(unjudged_, std::chrono::nanoseconds(0));
  const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(all * blocked_part_).count();
  waited_.store(waited_.load(std::memory_order_relaxed) + waited, std::memory_order_relaxed);  // a figure
}

void Rounds::forget() {
  completed_.clear();
  looks_ = blocked_ = 0;
  under_way_ = 0;
  begun_ = false;
}

void Timeline::start(std::size_t capacity) {
  kept_ = TimelineEvents{};
  kept_.events.reserve(capacity);
  capacity_ = capacity;
}

TimelineEvents Timeline::take() {
  TimelineEvents taken = std::exchange(kept_, TimelineEvents{});
  kept_.events.reserve(capacity_);  // address space: memory is taken as events come
  return taken;
}

void Timeline::add(const Work& work, Clock::time_point completed, bool failed) {
  // The newest are lost, so that what is kept has no gaps.
  if (kept_.events.size() >= capacity_) {
    ++kept_.lost;
    return;
  }
  const Request& request = work.request();
  // Its first chunk may be scheduled before the rank that announces it has looked at the clock.
  Clock::time_point scheduled = std::max(work.scheduled, work.since);
  if (work.scheduled == Clock::time_point()) scheduled = completed;
  kept_.events.push_back(TimelineEvent{request.name, request.label, request.collective, work.algorithm, request.dtype,
                                       request.op, failed, work.begins_round, bytes_of(request), work.submitted,
                                       work.since, scheduled, std::max(completed, scheduled), work.on_link});
}

}  // namespace kvstore_hvd

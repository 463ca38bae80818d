#include "report/timeline.hpp"

#include <algorithm>
#include <utility>

namespace kvstore_hvd {

using Clock = std::chrono::steady_clock;

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
                                       request.op, failed, work.round, bytes_of(request), work.submitted, work.since,
                                       scheduled, std::max(completed, scheduled), work.on_link});
}

}  // namespace kvstore_hvd

#include "engine/engine.hpp"

#include <utility>

#include "base/process.hpp"
#include "engine/active_engine.hpp"
#include "request/messages.hpp"
#include "shm/describe.hpp"

namespace kvstore_hvd {

// A call into the world. The last one out of a world that was left gives back what it held: memory, descriptors, and
// the threads' stacks, however long the Engine itself is kept.
class Engine::Visit {
 public:
  explicit Visit(const Engine& engine) : engine_(engine), inside_(engine.gate_.enter()) {}
  ~Visit() {
    if (!inside_ || !engine_.gate_.leave()) return;
    // In a forked child there is nothing to give back, as in ~Engine.
    if (engine_.forked()) return;
    engine_.active_.reset();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  explicit operator bool() const { return inside_; }
  ActiveEngine* operator->() const { return engine_.active_.get(); }

 private:
  const Engine& engine_;
  const bool inside_;
};

Engine::Engine(std::shared_ptr<Segment> segment, int rank, EngineOptions options)
    : rank_(segment->world().rank(rank).rank_of_world),
      size_(segment->world().size),
      local_rank_(rank),
      owner_(process_id()),
      speaker_(describe_speaker(segment->world(), rank)),
      active_(std::make_unique<ActiveEngine>(std::move(segment), rank, std::move(options))) {}

Engine::~Engine() {
  // The threads and the memory of the parent do not exist in a forked child: there is nothing to release.
  if (forked()) {
    static_cast<void>(active_.release());
  } else {
    shutdown("");
  }
}

bool Engine::forked() const { return process_id() != owner_; }

Status Engine::why_outside(const Request& request) const {
  return forked() ? Messages::forked() : Messages::left(speaker_ + describe_operation(request) + ": ");
}

std::shared_ptr<Segment> Engine::segment() const {
  const Visit visit(*this);
  return visit ? visit->segment() : nullptr;
}

void Engine::protect(std::shared_ptr<Arena> arena) {
  if (const Visit visit(*this); visit) visit->protect(std::move(arena));
}

std::shared_ptr<Work> Engine::submit(std::shared_ptr<const Request> request) {
  if (const Visit visit(*this); visit) return visit->submit(std::move(request), false);
  return refuse(std::move(request));
}

std::shared_ptr<Work> Engine::submit_and_linger(std::shared_ptr<const Request> request) {
  if (const Visit visit(*this); visit) return visit->submit_and_linger(std::move(request));
  return refuse(std::move(request));
}

std::shared_ptr<Work> Engine::submit_to_wait(std::shared_ptr<const Request> request) {
  if (const Visit visit(*this); visit) return visit->submit(std::move(request), true);
  return refuse(std::move(request));
}

void Engine::submit_to_wait(const std::shared_ptr<Work>& work) {
  work->renew();
  if (const Visit visit(*this); visit) return visit->submit(work, true);
  work->finish(why_outside(work->request()));
}

std::shared_ptr<Work> Engine::refuse(std::shared_ptr<const Request> request) const {
  auto work = std::make_shared<Work>(std::move(request));
  work->finish(why_outside(work->request()));
  return work;
}

// Whoever leaves completes all works first, so outside there is nothing to wait for.
bool Engine::wait(Work& work, std::chrono::nanoseconds limit) {
  if (work.done()) return true;
  const Visit visit(*this);
  return !visit || visit->wait(work, limit);
}

bool Engine::wait_briefly(Work& work) {
  if (work.done()) return true;
  const Visit visit(*this);
  return !visit || visit->wait_briefly(work);
}

bool Engine::is_met(const Work& work) const {
  const Visit visit(*this);
  return !visit || visit->is_met(work);
}

const Status& Engine::wait(Work& work) {
  while (!wait(work, std::chrono::seconds(1))) {
  }
  return work.status();
}

bool Engine::wait_for_all(std::chrono::nanoseconds limit) {
  const Visit visit(*this);
  return !visit || visit->wait_for_all(limit);
}

void Engine::abort(const std::string& text) {
  if (const Visit visit(*this); visit) visit->abort(text);
}

EngineStatistics Engine::report() const {
  const Visit visit(*this);
  return visit ? visit->report() : EngineStatistics();
}

void Engine::start_timeline(std::size_t capacity) {
  if (const Visit visit(*this); visit) visit->start_timeline(capacity);
}

void Engine::stop_timeline() {
  if (const Visit visit(*this); visit) visit->stop_timeline();
}

TimelineEvents Engine::take_timeline() {
  if (const Visit visit(*this); visit) return visit->take_timeline();
  if (forked()) return {};
  const std::lock_guard<std::mutex> lock(remains_mutex_);
  return std::exchange(remains_.timeline, {});
}

std::optional<std::vector<Waiting>> Engine::waiting(std::chrono::nanoseconds age) const {
  const Visit visit(*this);
  return visit ? visit->waiting(age) : std::vector<Waiting>{};
}

std::optional<std::vector<Missed>> Engine::missed(std::size_t most, bool described) const {
  const Visit visit(*this);
  return visit ? visit->missed(most, described) : std::vector<Missed>{};
}

Engine::Process Engine::process(int rank) const {
  const Visit visit(*this);
  return visit ? visit->process(rank) : Process();
}

Status Engine::health() const {
  if (const Visit visit(*this); visit) return visit->health();
  if (forked()) return Messages::forked();
  return remains_.health;
}

std::optional<DeviceBatch> Engine::take_batch(std::chrono::nanoseconds limit) {
  const Visit visit(*this);
  return visit ? visit->take_batch(limit) : std::nullopt;
}

bool Engine::end_batch(std::uint64_t number, const Status& status) {
  const Visit visit(*this);
  return visit && visit->end_batch(number, status);
}

std::uint64_t Engine::bytes_in_place() const {
  const Visit visit(*this);
  return visit ? visit->bytes_in_place() : remains_.bytes_in_place;
}

bool Engine::shutdown(const std::string& reason) {
  const Visit visit(*this);
  if (forked()) return true;
  if (!visit) return remains_.are_devices_through;
  const bool are_through = visit->shutdown(reason);
  const std::lock_guard<std::mutex> lock(remains_mutex_);
  if (!is_left_) {
    remains_ = {visit->health(), visit->bytes_in_place(), are_through, visit->take_timeline()};
    is_left_ = true;
    gate_.close();
  }
  return are_through;
}

}  // namespace kvstore_hvd

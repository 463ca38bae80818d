#include "shm/arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>

namespace kvstore_hvd {
namespace {

void forbid(char* memory, std::size_t bytes) {
  if (bytes == 0) return;
  mmap(memory, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

// Writes what is there, as one atomic step: other threads of this process may write there at the same time.
void write_nothing_new(char* memory) {
  auto* const word = reinterpret_cast<volatile std::uint32_t*>(memory);
  std::uint32_t value = 0;
  while (!__atomic_compare_exchange_n(word, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace

Arena::Arena(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)),
      base_(segment_->world().arena(rank)),
      capacity_(segment_->world().layout.arena_bytes),
      place_in_segment_(base_ - segment_->world().base()),
      owner_(process_id()) {
  if (capacity_ == 0) return;
  free_.emplace(0, capacity_);
  // The rest of the segment does not exist in a forked child, but the child has MXNet's arrays that lie here.
  if (madvise(base_, capacity_, MADV_DOFORK) != 0) {
    throw std::system_error(errno, std::generic_category(), "keeping the arena for forked children");
  }
}

void* Arena::allocate(std::size_t bytes) {
  if (process_id() != owner_) return nullptr;
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_retired_ || is_isolated_.load(std::memory_order_relaxed)) return nullptr;
  // The lowest place that fits, so that the pages that were touched are used again.
  const auto found = std::find_if(free_.begin(), free_.end(), [size](const auto& hole) { return hole.second >= size; });
  if (found == free_.end()) return nullptr;
  const auto [offset, available] = *found;
  free_.erase(found);
  if (available > size) free_.emplace(offset + size, available - size);
  allocated_.emplace(offset, size);
  used_ += size;
  if (offset + size > extent_.load(std::memory_order_relaxed)) {
    extent_.store(offset + size, std::memory_order_relaxed);
  }
  return base_ + offset;
}

void Arena::free(void* memory) {
  // Another thread of the parent may have held the mutex; and what the child has is not used again.
  if (process_id() != owner_) return;
  std::shared_ptr<Segment> unused;  // outlives the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = allocated_.find(static_cast<std::size_t>(static_cast<char*>(memory) - base_));
  if (found == allocated_.end()) return;
  auto [offset, size] = *found;
  allocated_.erase(found);
  used_ -= size;
  unused = take_unused();
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

void Arena::retire() {
  if (process_id() != owner_) return;
  std::shared_ptr<Segment> unused;  // outlives the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  is_retired_ = true;
  unused = take_unused();
}

std::shared_ptr<Segment> Arena::take_unused() {
  if (!is_retired_ || !allocated_.empty()) return nullptr;
  is_gone_.store(true, std::memory_order_relaxed);
  return std::exchange(segment_, nullptr);
}

bool Arena::contains(const void* memory) const {
  if (is_gone_.load(std::memory_order_relaxed)) return false;  // another mapping may have taken the place
  const auto* address = static_cast<const char*>(memory);
  return address >= base_ && address < base_ + capacity_;
}

std::size_t Arena::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

// Maps a private copy of what was ever in use, in its place: where the system does not overcommit, all of an arena
// would be charged. Each page is copied at the first write to it. An access beyond faults. Returns errno, or 0.
int Arena::map_privately() {
  const std::size_t page = page_size();
  const std::size_t extent = (extent_.load(std::memory_order_relaxed) + page - 1) / page * page;
  if (extent > 0 && mmap(base_, extent, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, segment_->fd(),
                         place_in_segment_) == MAP_FAILED) {
    return errno;
  }
  forbid(base_ + extent, capacity_ - extent);
  return 0;
}

// No write of this process is lost, whichever thread makes it and when: one before the mmap() is in the pages of the
// segment, of which the copies are made; one after it goes to a copy. And once each page was written to, there is none
// left that others can change. Only pages of arrays matter.
bool Arena::isolate() {
  if (process_id() != owner_) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capacity_ == 0 || is_isolated_.load(std::memory_order_relaxed) || is_gone_.load(std::memory_order_relaxed))
    return true;
  if (map_privately() != 0) {
    // The system may have taken the old mapping away before it refused the new one.
    mmap(base_, capacity_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, segment_->fd(),
         place_in_segment_);
    return false;
  }
  is_isolated_.store(true, std::memory_order_relaxed);
  const std::size_t page = page_size();
  for (const auto& [offset, bytes] : allocated_) {
    for (std::size_t at = offset / page * page; at < offset + bytes; at += page) write_nothing_new(base_ + at);
  }
  return true;
}

void Arena::after_fork_in_child() {
  // What is gone may have become the place of another mapping; a copy the child has inherited.
  if (capacity_ == 0 || is_gone_.load(std::memory_order_relaxed) || is_isolated_.load(std::memory_order_relaxed))
    return;
  if (const int error = map_privately(); error != 0) {
    // An access that goes wrong ends the child; one to memory that is still shared would change the parent's arrays.
    forbid(base_, capacity_);
    throw std::system_error(error, std::generic_category(), "copying the arena for a forked child");
  }
}

}  // namespace kvstore_hvd

// All threads of a launch as fibers of one thread, in an order drawn from a seed: finds wrong results and deadlocks of
// rare orders, and repeats one exactly. It sees no weak memory: that is what threads.hpp under ThreadSanitizer is for.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "machine.hpp"

namespace kvstore_hvd::gpu::host {

class Fibers final : public Machine {
 public:
  // With `even` no rank is much slower than the others: the clock counts all waiting, so a time limit would name one.
  explicit Fibers(std::uint64_t seed, bool even = false) : random_(seed), even_(even) {}

  // Runs `kernel` as `players` ranks of blocks(player) blocks of `threads` threads.
  // Returns false when every thread waited without end.
  bool run(const std::function<std::uint32_t(std::uint32_t)>& blocks, std::uint32_t players, std::uint32_t threads,
           const std::function<void(std::uint32_t)>& kernel) {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<std::unique_ptr<SyncedBlock>> states;
    for (std::uint32_t player = 0; player < players; ++player) {
      for (std::uint32_t block = 0; block < blocks(player); ++block) {
        states.push_back(std::make_unique<SyncedBlock>());
        states.back()->threads = threads;
        for (std::uint32_t thread = 0; thread < threads; ++thread) {
          fibers.push_back(std::make_unique<Fiber>());
          fibers.back()->place = {this, states.back().get(), thread, block, blocks(player), player};
        }
      }
    }
    // Some ranks are slowed down: neighbours that are far apart are what flow control is for.
    std::vector<std::uint32_t> patience(players);
    for (std::uint32_t& of : patience) of = !even_ && draw(4) == 0 ? draw(64) : 0;
    std::vector<Fiber*> alive;
    for (const auto& fiber : fibers) alive.push_back(fiber.get());
    kernel_ = &kernel;
    idle_ = 0;
    while (!alive.empty()) {
      if (idle_ > 20000 * fibers.size()) return false;  // slow ranks run once in 64 times
      const std::size_t chosen = draw(static_cast<std::uint32_t>(alive.size()));
      Fiber& fiber = *alive[chosen];
      if (patience[fiber.place.player] != 0 && draw(patience[fiber.place.player]) != 0) continue;
      running_ = &fiber;
      current = &fiber.place;
      enter(fiber);
      current = nullptr;
      if (!fiber.done) continue;
      alive[chosen] = alive.back();
      alive.pop_back();
    }
    return true;
  }

  void sync(Place& place) override {
    auto& block = static_cast<SyncedBlock&>(*place.block_state);
    const std::uint64_t turn = block.turn;
    if (++block.arrived == block.threads) {
      block.arrived = 0;
      ++block.turn;
      idle_ = 0;
    }
    while (block.turn == turn) pause(place);
  }
  void pause(Place&) override {
    ++idle_;
    ++clock_ns_;
    leave();
  }
  void look(Place&) override {
    if (draw(8) == 0) leave();
  }
  void touch(Place&) override {
    idle_ = 0;
    if (draw(8) == 0) leave();
  }
  std::uint64_t now_ns(Place&) override { return ++clock_ns_; }

 private:
  struct SyncedBlock : Block {
    std::uint32_t arrived = 0;
    std::uint64_t turn = 0;
  };
  struct Fiber {
    Place place;
    ucontext_t first;
    jmp_buf here;
    bool begun = false;
    bool done = false;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
  };
  static constexpr std::size_t kStackBytes = 32 << 10;

  std::uint32_t draw(std::uint32_t below) { return static_cast<std::uint32_t>(random_() % below); }

  // The first time by ucontext, which makes a system call, then by a jump, which makes none.
  void enter(Fiber& fiber) {
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.begun) _longjmp(fiber.here, 1);
    fiber.begun = true;
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.first.uc_stack.ss_size = kStackBytes;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, reinterpret_cast<void (*)()>(&Fibers::begin), 0);
    setcontext(&fiber.first);
  }
  static void begin() {
    Fibers& machine = *static_cast<Fibers*>(current->machine);
    Fiber& fiber = *machine.running_;
    (*machine.kernel_)(fiber.place.player);
    fiber.done = true;
    machine.idle_ = 0;
    _longjmp(machine.scheduler_, 1);
  }
  void leave() {
    if (_setjmp(running_->here) == 0) _longjmp(scheduler_, 1);
  }

  std::mt19937_64 random_;
  const bool even_;
  jmp_buf scheduler_;
  const std::function<void(std::uint32_t)>* kernel_ = nullptr;
  Fiber* running_ = nullptr;
  std::uint64_t idle_ = 0;
  std::uint64_t clock_ns_ = 0;
};

}  // namespace kvstore_hvd::gpu::host

// All threads of a launch as threads of the operating system: under ThreadSanitizer it finds accesses that no flag
// orders.
#pragma once

#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "machine.hpp"

namespace kvstore_hvd::gpu::host {

class Threads final : public Machine {
 public:
  explicit Threads(std::uint64_t /*seed*/) {}

  // As Fibers::run; always returns true: who waits without end must do so against a time limit.
  bool run(const std::function<std::uint32_t(std::uint32_t)>& blocks, std::uint32_t players, std::uint32_t threads,
           const std::function<void(std::uint32_t)>& kernel) {
    std::vector<std::unique_ptr<SyncedBlock>> states;
    std::vector<std::thread> running;
    for (std::uint32_t player = 0; player < players; ++player) {
      for (std::uint32_t block = 0; block < blocks(player); ++block) {
        states.push_back(std::make_unique<SyncedBlock>(threads));
        for (std::uint32_t thread = 0; thread < threads; ++thread) {
          const Place place = {this, states.back().get(), thread, block, blocks(player), player};
          running.emplace_back([place, &kernel] {
            Place own = place;
            current = &own;
            kernel(own.player);
            current = nullptr;
          });
        }
      }
    }
    for (std::thread& thread : running) thread.join();
    return true;
  }

  void sync(Place& place) override { pthread_barrier_wait(&static_cast<SyncedBlock&>(*place.block_state).barrier); }
  void pause(Place&) override { std::this_thread::yield(); }
  void look(Place&) override {}
  void touch(Place&) override {}
  std::uint64_t now_ns(Place&) override {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }

 private:
  struct SyncedBlock : Block {
    explicit SyncedBlock(std::uint32_t n) {
      threads = n;
      pthread_barrier_init(&barrier, nullptr, n);
    }
    ~SyncedBlock() { pthread_barrier_destroy(&barrier); }
    SyncedBlock(const SyncedBlock&) = delete;
    SyncedBlock& operator=(const SyncedBlock&) = delete;
    pthread_barrier_t barrier;
  };
};

}  // namespace kvstore_hvd::gpu::host

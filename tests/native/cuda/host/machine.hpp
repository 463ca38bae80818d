// The machine that plays a GPU: where a CUDA thread stands, and what it asks for while it runs. Two kinds of machines
// exist: fibers.hpp and threads.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore_hvd::gpu::host {

struct Machine;

// Shared by the threads of a block.
struct Block {
  std::uint32_t threads = 0;
  alignas(64) unsigned char shared[256] = {};
};

// One CUDA thread.
struct Place {
  Machine* machine = nullptr;
  Block* block_state = nullptr;
  std::uint32_t thread = 0;
  std::uint32_t block = 0;
  std::uint32_t blocks = 0;
  std::uint32_t player = 0;
};

struct Machine {
  virtual ~Machine() = default;
  virtual void sync(Place& place) = 0;   // of the threads of a block
  virtual void pause(Place& place) = 0;  // it waits for another thread
  virtual void look(Place& place) = 0;   // it is about to read a flag
  virtual void touch(Place& place) = 0;  // it is about to write a flag or to access data
  virtual std::uint64_t now_ns(Place& place) = 0;
};

// Of the thread that runs; a machine sets it.
inline thread_local Place* current = nullptr;

}  // namespace kvstore_hvd::gpu::host

// The GPU kernels as a library of the host, for tests of the Python side: each CUDA thread is a thread.
#include <cstring>

#include "host/threads.hpp"
#include "kernel_table.hpp"

namespace {

constexpr unsigned kThreads = 2;  // of a block

}  // namespace

// Runs a kernel to its end; `argument` is a Copy or a Launch. Returns false when there is no such kernel.
extern "C" bool run_kernel(const char* name, unsigned blocks, unsigned players, const void* worlds,
                           const void* argument) {
  using namespace kvstore_hvd::gpu;
  host::Threads machine(0);
  const auto of_each = [blocks](unsigned) { return blocks; };
  const auto copy = tests::copy_kernels().find(name);
  if (copy != tests::copy_kernels().end()) {
    Copy what;
    std::memcpy(&what, argument, sizeof(what));
    return machine.run(of_each, players, kThreads, [&](unsigned) { copy->second(what); });
  }
  const auto meeting = tests::meeting_kernels().find(name);
  if (meeting == tests::meeting_kernels().end()) return false;
  Launch what;
  std::memcpy(&what, argument, sizeof(what));
  return machine.run(of_each, players, kThreads,
                     [&](unsigned) { meeting->second(static_cast<const World*>(worlds), what); });
}

extern "C" void constants(unsigned* tile_bytes, unsigned* tile_elements) {
  *tile_bytes = kvstore_hvd::gpu::kTileBytes;
  *tile_elements = kvstore_hvd::gpu::kTileElements;
}

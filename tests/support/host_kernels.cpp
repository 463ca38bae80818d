// The GPU kernels as a library of the host, for tests of the Python side: each CUDA thread is a thread.
#include "host/threads.hpp"
#include "kernel_table.hpp"

// Runs a kernel to its end; `argument` is a Launch where there are worlds, and else a Copy.
extern "C" void run_kernel(void* kernel, unsigned blocks, unsigned players, const void* worlds, const void* argument) {
  using namespace kvstore_hvd::gpu;
  host::Threads(0).run([blocks](unsigned) { return blocks; }, players, 2, [&](unsigned) {
    if (worlds == nullptr) return reinterpret_cast<tests::CopyKernel>(kernel)(*static_cast<const Copy*>(argument));
    reinterpret_cast<tests::MeetingKernel>(kernel)(static_cast<const World*>(worlds),
                                                   *static_cast<const Launch*>(argument));
  });
}

extern "C" void constants(unsigned* tile_bytes, unsigned* tile_elements) {
  *tile_bytes = kvstore_hvd::gpu::kTileBytes;
  *tile_elements = kvstore_hvd::gpu::kTileElements;
}

// MXNet as it is, but for pushes to its engine that are refused when a test says so. Linked against libmxnet.so: what
// is not here is found there.
#include <dlfcn.h>

#include <atomic>

namespace {

enum Refusal { kNone, kBeforeTaking, kAfterTaking };

thread_local bool refused_last = false;
std::atomic<int> pushes_before{-1};  // the refusal: -1 for none
std::atomic<int> kind{kNone};

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// Refuses one push, after `pushes` others: before it has taken the operation, or after (then the operation's deleter is
// called, as MXNet does when an exception leaves its engine).
void refuse(int pushes, int after_taking) {
  kind = after_taking ? kAfterTaking : kBeforeTaking;
  pushes_before = pushes;
}

// How many pushes will still come before the refusal: -1 when it has been.
int remaining() { return pushes_before; }

int MXEnginePushAsyncND(void* function, void* parameter, void (*deleter)(void*), const void* context, void** reads,
                        int n_reads, void** writes, int n_writes, const void* property, int priority, const char* name,
                        bool wait) {
  refused_last = pushes_before.load() >= 0 && pushes_before.fetch_sub(1) == 0;
  if (refused_last) {
    if (kind == kAfterTaking) deleter(parameter);
    return -1;
  }
  using Push = int (*)(void*, void*, void (*)(void*), const void*, void**, int, void**, int, const void*, int,
                       const char*, bool);
  static const Push push = next<Push>("MXEnginePushAsyncND");
  return push(function, parameter, deleter, context, reads, n_reads, writes, n_writes, property, priority, name, wait);
}

const char* MXGetLastError() {
  if (refused_last) return "the test refuses it\nStack trace:\n  ...";
  static const auto last_error = next<const char* (*)()>("MXGetLastError");
  return last_error();
}

}  // extern "C"

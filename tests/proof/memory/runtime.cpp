// The runtime that instrumented code calls, in place of ThreadSanitizer's, and parts of the C library.
#include <linux/futex.h>
#include <sys/syscall.h>

#include <cerrno>
#include <chrono>
#include <cstdarg>

#include "machine.hpp"

namespace proof::machine {
namespace {

Op make(Kind kind, const volatile void* address, int bytes, int order, const void* site) {
  Op op;
  op.kind = kind;
  op.address = reinterpret_cast<Word>(address);
  op.bytes = bytes;
  op.order = order;
  op.site = site;
  return op;
}

// As the command line says.
void weaken(Op& op) {
  on_heap = false;
  sites.emplace(op.site, op);
  if (!weakened.empty()) {
    const auto found = weakened.find(op.site);
    if (found != weakened.end() && found->second.order >= 0) op.order = found->second.order;
    if (found != weakened.end() && found->second.fail_order >= 0) op.fail_order = found->second.fail_order;
  }
  on_heap = true;
}

bool is_watched(const volatile void* address) { return running >= 0 && on_heap && is_shared(address); }

template <class T>
T load(const volatile T* address, int order, const void* site) {
  if (!is_watched(address)) return __atomic_load_n(address, __ATOMIC_SEQ_CST);
  Op op = make(Kind::kLoad, address, sizeof(T), order, site);
  weaken(op);
  step(op);
  return static_cast<T>(threads[running].pending.result);
}

template <class T>
void store(volatile T* address, T value, int order, const void* site) {
  if (!is_watched(address)) return __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
  Op op = make(Kind::kStore, address, sizeof(T), order, site);
  op.operand = value;
  weaken(op);
  step(op);
}

template <class T>
T modify(volatile T* address, T operand, int order, const void* site, Word (*apply)(Word, Word)) {
  if (!is_watched(address)) {
    const T old = *address;
    *address = static_cast<T>(apply(old, operand));
    return old;
  }
  Op op = make(Kind::kRmw, address, sizeof(T), order, site);
  op.operand = operand;
  op.apply = apply;
  weaken(op);
  step(op);
  return static_cast<T>(threads[running].pending.result);
}

template <class T>
int compare_exchange(volatile T* address, T* expected, T value, int order, int fail_order, const void* site) {
  if (!is_watched(address)) {
    const bool is_same = *address == *expected;
    if (is_same) *address = value;
    if (!is_same) *expected = *address;
    return is_same;
  }
  Op op = make(Kind::kCas, address, sizeof(T), order, site);
  op.fail_order = fail_order;
  op.expected = *expected;
  op.operand = value;
  op.apply = [](Word, Word b) { return b; };
  weaken(op);
  step(op);
  const Op& done = threads[running].pending;
  if (!done.ok) *expected = static_cast<T>(done.result);
  return done.ok;
}

void access(const volatile void* address, std::size_t bytes, bool writes) {
  if (bytes == 0 || !is_watched(address)) return;
  if (writes && crashed < 0 && (program->mortal >> running & 1) != 0) step(Op{});  // it may die before
  on_heap = false;
  check_race(const_cast<const char*>(static_cast<const volatile char*>(address)), bytes, writes);
  on_heap = true;
  if (!error.empty()) leave();
}

}  // namespace
}  // namespace proof::machine

using namespace proof::machine;

// NOLINTBEGIN: the names are the compiler's.
#define SITE __builtin_return_address(0)
#define MODIFY(bits, name, expression)                                                                     \
  std::uint##bits##_t __tsan_atomic##bits##_##name(volatile std::uint##bits##_t* a, std::uint##bits##_t v, \
                                                   int order) {                                            \
    return modify(a, v, order, SITE, [](Word x, Word y) -> Word { return expression; });                   \
  }
#define ATOMICS(bits)                                                                                        \
  std::uint##bits##_t __tsan_atomic##bits##_load(const volatile std::uint##bits##_t* a, int order) {         \
    return load(a, order, SITE);                                                                             \
  }                                                                                                          \
  void __tsan_atomic##bits##_store(volatile std::uint##bits##_t* a, std::uint##bits##_t v, int order) {      \
    store(a, v, order, SITE);                                                                                \
  }                                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile std::uint##bits##_t* a, std::uint##bits##_t* c, \
                                                    std::uint##bits##_t v, int order, int fail_order) {      \
    return compare_exchange(a, c, v, order, fail_order, SITE);                                               \
  }                                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile std::uint##bits##_t* a, std::uint##bits##_t* c,   \
                                                  std::uint##bits##_t v, int order, int fail_order) {        \
    return compare_exchange(a, c, v, order, fail_order, SITE);                                               \
  }                                                                                                          \
  MODIFY(bits, exchange, (void(x), y))                                                                       \
  MODIFY(bits, fetch_add, x + y)                                                                             \
  MODIFY(bits, fetch_sub, x - y)                                                                             \
  MODIFY(bits, fetch_or, x | y)                                                                              \
  MODIFY(bits, fetch_and, x& y)
#define PLAIN(bytes)                                                      \
  void __tsan_read##bytes(void* a) { access(a, bytes, false); }           \
  void __tsan_write##bytes(void* a) { access(a, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* a) { access(a, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* a) { access(a, bytes, true); }

extern "C" {
ATOMICS(8)
ATOMICS(16)
ATOMICS(32)
ATOMICS(64)
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
void __tsan_read_range(void* a, std::size_t bytes) { access(a, bytes, false); }
void __tsan_write_range(void* a, std::size_t bytes) { access(a, bytes, true); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_atomic_signal_fence(int) {}
void __tsan_atomic_thread_fence(int order) {
  if (running < 0 || !on_heap) return;
  Op op = make(Kind::kFence, nullptr, 0, order, SITE);
  weaken(op);
  step(op);
}

// Linked in place of the C library's.
void* __real_memcpy(void*, const void*, std::size_t);
void* __real_memmove(void*, const void*, std::size_t);
void* __real_memset(void*, int, std::size_t);
int __real_memcmp(const void*, const void*, std::size_t);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  access(from, bytes, false);
  access(to, bytes, true);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, std::size_t bytes) {
  access(from, bytes, false);
  access(to, bytes, true);
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, std::size_t bytes) {
  access(to, bytes, true);
  return __real_memset(to, value, bytes);
}
int __wrap_memcmp(const void* a, const void* b, std::size_t bytes) {
  access(a, bytes, false);
  access(b, bytes, false);
  return __real_memcmp(a, b, bytes);
}

long __real_syscall(long, ...);
long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  auto* const word = va_arg(list, std::uint32_t*);
  const int operation = va_arg(list, int);
  const auto value = va_arg(list, std::uint32_t);
  va_end(list);
  if (number != SYS_futex) return errno = ENOSYS, -1;
  if (!is_watched(word)) return 0;
  Op op = make(operation == FUTEX_WAIT ? Kind::kWait : Kind::kWake, word, 4, __ATOMIC_RELAXED, SITE);
  op.operand = op.expected = value;
  step(op);
  errno = EAGAIN;
  return operation == FUTEX_WAIT && threads[running].pending.kind == Kind::kWait ? -1 : 0;
}
}
// NOLINTEND

// Time stands still: no wait ends by its limit.
std::chrono::steady_clock::time_point now_of_wrap() __asm__("__wrap__ZNSt6chrono3_V212steady_clock3nowEv");
std::chrono::steady_clock::time_point now_of_wrap() {
  return std::chrono::steady_clock::time_point(std::chrono::hours(1));
}

// What the threads allocate is gone with their execution, wherever they stopped.
void* operator new(std::size_t bytes) {
  if (!on_heap) {
    if (void* const place = std::malloc(bytes)) return place;
    throw std::bad_alloc();
  }
  char* const place = heap_end;
  heap_end += (bytes + 15) / 16 * 16;
  if (heap_end > heap + kHeap) std::abort();
  return place;
}
void operator delete(void* place) noexcept {
  const auto* const at = static_cast<const char*>(place);
  if (at < heap || at >= heap + kHeap) std::free(place);
}
void operator delete(void* place, std::size_t) noexcept { operator delete(place); }

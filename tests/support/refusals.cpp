// Preloaded into a worker: calls of the system fail with the error number that REFUSE_<name> holds, where it is set.
#include <dlfcn.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>

namespace {

bool is_refused(const char* variable) {
  const char* number = std::getenv(variable);
  if (number == nullptr) return false;
  errno = std::atoi(number);
  return true;
}

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

constexpr int kDontFork = 10, kDoFork = 11;  // MADV_DONTFORK, MADV_DOFORK

}  // namespace

extern "C" {

int memfd_create(const char* name, unsigned flags) {
  if (is_refused("REFUSE_memfd_create")) return -1;
  return real<int (*)(const char*, unsigned)>("memfd_create")(name, flags);
}

int eventfd(unsigned count, int flags) {
  if (is_refused("REFUSE_eventfd")) return -1;
  return real<int (*)(unsigned, int)>("eventfd")(count, flags);
}

int madvise(void* memory, std::size_t bytes, int advice) noexcept {
  if (advice == kDontFork && is_refused("REFUSE_dontfork")) return -1;
  if (advice == kDoFork && is_refused("REFUSE_dofork")) return -1;
  return real<int (*)(void*, std::size_t, int)>("madvise")(memory, bytes, advice);
}

int getrlimit64(__rlimit_resource_t resource, struct rlimit64* limits) noexcept {
  if (is_refused("REFUSE_getrlimit")) return -1;
  return real<int (*)(__rlimit_resource_t, struct rlimit64*)>("getrlimit64")(resource, limits);
}

int getrlimit(__rlimit_resource_t resource, struct rlimit* limits) noexcept {
  if (is_refused("REFUSE_getrlimit")) return -1;
  return real<int (*)(__rlimit_resource_t, struct rlimit*)>("getrlimit")(resource, limits);
}
}

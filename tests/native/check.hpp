// A minimal test harness: register cases, check facts, run those whose name contains an argument of the command line.
//
//   const bool registered = testing::add("adds up", [] { testing::check(1 + 1 == 2, "one and one"); });
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace testing {

inline std::vector<std::pair<std::string, std::function<void()>>>& cases() {
  static std::vector<std::pair<std::string, std::function<void()>>> all;
  return all;
}

// Relaxed: only counted; the threads of a case are joined before the count is read.
inline std::atomic<int> failures{0};

inline bool add(std::string name, std::function<void()> body) {
  cases().emplace_back(std::move(name), std::move(body));
  return true;
}

// Records a failure and goes on; any thread may call it. Returns `fact`, so that the caller can stop early.
inline bool check(bool fact, const std::string& what, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  if (fact) return true;
  // A broken kernel fails thousands of checks: the first ones tell enough.
  if (failures.fetch_add(1, std::memory_order_relaxed) < 50) {
    std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what.c_str());
  }
  return false;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Runs `body(i)` in a thread for each i below n, and waits for all of them.
template <class Body>
void on_threads(int n, const Body& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back([&body, i] { body(i); });
  for (auto& thread : threads) thread.join();
}

template <typename A, typename B>
bool check_equal(const A& actual, const B& expected, const std::string& what, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
  if (actual == expected) return true;
  std::ostringstream text;
  text << what << ": got " << actual << ", expected " << expected;
  return check(false, text.str(), file, line);
}

// Returns the exit status: 0 when at least one case ran and every check held. With KVHVD_TEST_FIRST=60 the first case
// that fails is the last one, and SIGALRM ends one that takes more than 60 seconds.
inline int run(int argc, char** argv) {
  const char* const first = std::getenv("KVHVD_TEST_FIRST");
  int ran = 0;
  for (const auto& [name, body] : cases()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted = wanted || name.find(argv[i]) != std::string::npos;
    if (!wanted) continue;
    const int before = failures.load(std::memory_order_relaxed);
    if (first != nullptr) alarm(static_cast<unsigned>(std::atoi(first)));
    try {
      body();
    } catch (const std::exception& error) {
      check(false, name + " threw: " + error.what());
    }
    ++ran;
    const bool failed = failures.load(std::memory_order_relaxed) != before;
    std::printf("%s %s\n", failed ? "FAIL" : "ok  ", name.c_str());
    std::fflush(stdout);
    if (failed && first != nullptr) break;
  }
  std::printf("%d cases, %d failed checks\n", ran, failures.load(std::memory_order_relaxed));
  return ran > 0 && failures.load(std::memory_order_relaxed) == 0 ? 0 : 1;
}

}  // namespace testing

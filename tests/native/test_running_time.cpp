// Time in which this process did not run does not count.
#include <chrono>

#include "base/process.hpp"
#include "check.hpp"

namespace kvstore_hvd {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::check;

const bool patience = testing::add("a limit stands still while the process does", [] {
  Patience limit(seconds(2));
  auto now = Clock::now();
  check(!limit.is_over(now += milliseconds(900)), "0.9 s");
  check(!limit.is_over(now += seconds(100)), "a pause counts as a moment");
  check(!limit.is_over(now += milliseconds(900)), "1.9 s");
  check(limit.is_over(now += milliseconds(200)), "2.1 s");
});

const bool standstills = testing::add("what overlaps with times in which the process did not run is told", [] {
  const auto start = Clock::now();
  const auto at = [start](double s) { return start + milliseconds(static_cast<int>(s * 1000)); };
  Standstills pauses(start);
  for (const double s : {0.5, 1.0, 31.0, 31.5, 41.5})
    pauses.look(at(s));  // it stood still from 1 to 31 and 31.5 to 41.5
  check(pauses.between(at(0.2), at(41.5)) == milliseconds(29900 + 9900), "both");
  check(pauses.between(at(31.2), at(41.5)) == milliseconds(9900), "the second");
  check(pauses.between(at(11), at(31.5)) == milliseconds(19900), "a part of the first");
  check(pauses.between(at(41.5), at(42)) == milliseconds(0), "none");
  check(pauses.between(at(41.7), at(51.7)) == milliseconds(9900), "one that has just ended, before the next look");
  for (int i = 0; i < 1000; ++i) pauses.look(at(60 + 2 * i));
  check(pauses.between(at(0), at(2058)) < seconds(257 * 2), "no more of them are kept than matter");
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }

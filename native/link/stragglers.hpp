// Who has not submitted what others wait for, on whatever host: for messages, and for ranks that follow what others
// submit (see Join). Told only of operations that wait: the conductor asks the hosts that have not announced one, those
// tell everybody which of their ranks are late.
#pragma once

#include <chrono>
#include <string>

#include "link/host_table.hpp"

namespace kvstore_hvd {

class Stragglers {
 public:
  explicit Stragglers(HostTable& hosts) : hosts_(hosts) {}

  // Tells the other hosts what is due.
  void progress();
  // Tells the other hosts of the ranks of this one, once all of them are here.
  void introduce();

  // What other links tell.
  void introduced(RecordReader reader);
  void has_asked() { is_eager_ = true; }
  void waited_for(RecordReader reader);
  void wanted(RecordReader reader);
  void late(int host, RecordReader reader);

 private:
  void want(const WantedRecord& record, const std::string& name);
  void want_here(const WantedRecord& record, const std::string& name);

  HostTable& hosts_;
  bool is_introduced_ = false, is_eager_ = false, has_told_ = false;
  std::chrono::steady_clock::time_point looked_{};
};

}  // namespace kvstore_hvd

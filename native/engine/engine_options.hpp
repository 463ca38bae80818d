#pragma once

#include <chrono>
#include <string>

namespace kvstore_hvd {

struct EngineOptions {
  // How long a request may wait for the other ranks, and a rank for another inside a collective.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  // Watch the other ranks' processes; off when the ranks are threads of one process.
  bool watch_peers = true;
  // How messages name this machine.
  std::string host;
};

}  // namespace kvstore_hvd

// TCP between hosts: messages of any size arrive whole, in order and where they belong, whoever is early; and what
// ends.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <random>
#include <string>

#include "check.hpp"
#include "link/transport.hpp"
#include "ranks.hpp"

namespace kvstore_hvd {
namespace {

using testing::check;

std::vector<std::shared_ptr<Transport>> connected(std::size_t hosts) {
  std::vector<std::shared_ptr<Transport>> ends;
  for (const auto& sockets : tcp_connections(hosts)) ends.push_back(tcp_transport(sockets));
  return ends;
}

std::vector<char> message(std::uint32_t number, std::size_t bytes) {
  std::vector<char> content(bytes);
  for (std::size_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(number * 131 + i * 7 + i / 251);
  return content;
}

void run_program(std::uint32_t seed) {
  struct Message {
    Transport& end;  // that of who sends, or receives, it
    std::uint32_t number;
    std::vector<char> content;
    Transport::Transfer transfer;
  };
  constexpr int kHosts = 3;
  std::mt19937 random(seed);
  const auto ends = connected(kHosts);
  const std::size_t kinds[] = {0, 8, 100, 4070, 5000, 70000, 300000};
  std::deque<Message> sent;      // kept until all have arrived
  std::deque<Message> received;  // under way
  struct Stream {
    std::vector<std::size_t> bytes;
    std::size_t n_sent = 0, n_received = 0;
  };
  Stream streams[kHosts][kHosts][3];
  std::size_t open = 0;
  for (int pair = 0; pair < kHosts * kHosts; ++pair) {
    if (pair % kHosts == pair / kHosts) continue;
    for (Stream& stream : streams[pair / kHosts][pair % kHosts]) {
      stream.bytes.resize(random() % 12);
      for (auto& bytes : stream.bytes) bytes = kinds[random() % 7];
      open += 2 * stream.bytes.size();
    }
  }
  const std::uint32_t haste = random() % 3;  // of those who receive
  for (int idle = 0; open > 0 || !received.empty(); ++idle) {
    if (!check(idle < 2000000, "messages are missing")) return;
    const int from = static_cast<int>(random() % kHosts), to = static_cast<int>(random() % kHosts);
    if (from == to) continue;
    const int tag = static_cast<int>(random() % 3);
    Stream& stream = streams[from][to][tag];
    const auto number = [&](std::size_t n) {
      return static_cast<std::uint32_t>(1000 * n + 10U * seed + 3U * from + tag);
    };
    if (stream.n_sent < stream.bytes.size()) {
      const std::uint32_t n = number(stream.n_sent);
      sent.push_back({*ends[from], n, message(n, stream.bytes[stream.n_sent]), 0});
      const auto& content = sent.back().content;
      sent.back().transfer = ends[from]->send(to, tag, content.data(), content.size());
      ++stream.n_sent;
      --open;
    }
    if (stream.n_received < stream.bytes.size() && random() % 3 <= haste) {
      const std::size_t bytes = stream.bytes[stream.n_received];
      received.push_back({*ends[to], number(stream.n_received++), std::vector<char>(bytes), 0});
      auto& content = received.back().content;
      received.back().transfer = ends[to]->receive(from, tag, content.data(), bytes);
      --open;
    }
    for (Message& one : sent) {
      if (one.transfer != 0 && random() % 4 == 0) one.end.test(one.transfer);
    }
    for (const auto& end : ends) end->progress();
    for (Message& one : received) {
      if (one.transfer != 0 && one.end.test(one.transfer)) {
        check(one.content == message(one.number, one.content.size()), "other bytes");
      }
    }
    while (!received.empty() && received.front().transfer == 0) received.pop_front();
  }
  for (Message& one : sent)
    check(one.transfer == 0 || one.end.test(one.transfer), "a message that arrived is not sent");
}

const bool programs = testing::add("random messages between three hosts", [] {
  for (std::uint32_t seed = 0; seed < (thread_sanitizer() ? 20 : 200); ++seed) run_program(seed);
});

const bool ended = testing::add("the end of a connection is told once, after all that came before", [] {
  auto ends = connected(2);
  const auto content = message(1, 200000);
  std::vector<char> first(content.size()), second(content.size());
  auto sending = ends[0]->send(1, kRecords, content.data(), content.size());
  auto early = ends[0]->send(1, kRecords, content.data(), content.size());
  auto receiving = ends[1]->receive(0, kRecords, first.data(), first.size());
  while (!ends[0]->test(early)) ends[1]->progress();
  check(ends[0]->test(sending), "in order");
  ends[0].reset();
  while (!ends[1]->test(receiving)) {
  }
  check(first == content, "other bytes");
  receiving = ends[1]->receive(0, kRecords, second.data(), second.size());
  while (!ends[1]->test(receiving)) {
  }
  check(second == content, "other bytes");
  receiving = ends[1]->receive(0, kRecords, second.data(), second.size());
  int told = 0;
  for (int i = 0; i < 3; ++i) {
    try {
      check(!ends[1]->test(receiving), "nothing came");
    } catch (const TransportError& error) {
      check(error.kind == TransportError::Kind::kLost && error.host == 0, error.what());
      ++told;
    }
  }
  check(told == 1, "told " + std::to_string(told) + " times");
  auto lost = ends[1]->send(0, kPartials, content.data(), content.size());
  check(ends[1]->test(lost), "a message to a host that is gone is over");
  ends[1]->cancel(receiving);
  check(ends[1]->test(receiving), "cancelled");
});

const bool strangers = testing::add("bytes of another program end the connection", [] {
  const auto sockets = tcp_connections(2);
  const auto end = tcp_transport(sockets[0]);
  const std::string text = "GET / HTTP/1.1\r\nHost: example.org\r\n\r\n";
  check(write(sockets[1][0], text.data(), text.size()) == static_cast<ssize_t>(text.size()), "sent");
  char memory[64];
  auto receiving = end->receive(1, kRecords, memory, sizeof(memory));
  std::string fault;
  for (int i = 0; i < 1000000 && fault.empty(); ++i) {
    try {
      check(!end->test(receiving), "taken for a message");
    } catch (const TransportError& error) {
      fault = error.what();
    }
  }
  check(fault.find("none of our messages") != std::string::npos, fault);
  close(sockets[1][0]);
});

const bool floods = testing::add("messages that are too long, or that nobody can wait for, end the connection", [] {
  struct Header {
    std::uint64_t tag, bytes;
  };
  const std::vector<std::vector<Header>> all{
      {{kPartials, kLongest + 1}}, {{kResults + 1, 0}}, {{kRecords, 65}}, std::vector<Header>(100, {kPartials, 0})};
  for (const auto& headers : all) {
    const auto sockets = tcp_connections(2);
    const auto end = tcp_transport(sockets[0]);
    char memory[64];
    auto receiving = end->receive(1, kRecords, memory, sizeof(memory));
    const std::size_t bytes = headers.size() * sizeof(Header);
    check(write(sockets[1][0], headers.data(), bytes) == static_cast<ssize_t>(bytes), "sent");
    bool is_foreign = false;
    for (int i = 0; i < 1000000 && !is_foreign; ++i) {
      try {
        check(!end->test(receiving), "taken for a message");
      } catch (const TransportError& error) {
        is_foreign = error.kind == TransportError::Kind::kForeign && error.host == 1;
      }
    }
    check(is_foreign, "not refused");
    close(sockets[1][0]);
  }
});

const bool forked = testing::add("a forked child holds no connection, and its own files stay its own", [] {
  const auto sockets = tcp_connections(2);
  auto end = tcp_transport(sockets[0]);
  const bool is_closed = succeeds_in_child([&] {
    if (fcntl(sockets[0][1], F_GETFD) >= 0) return false;
    const int own = dup2(STDERR_FILENO, sockets[0][1]);
    const auto is_there = [own] { return fcntl(own, F_GETFD) >= 0; };
    const bool in_grandchild = succeeds_in_child(is_there);
    end.reset();
    return in_grandchild && is_there();
  });
  check(is_closed, "the child");
  check(fcntl(sockets[0][1], F_GETFD) >= 0, "the parent keeps it");
  close(sockets[1][0]);
});

}  // namespace
}  // namespace kvstore_hvd

int main(int argc, char** argv) { return testing::run(argc, argv); }

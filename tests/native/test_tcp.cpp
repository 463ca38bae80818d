// TCP between hosts: messages of any size arrive whole, in order and where they belong, whoever is early; what ends;
// and that a transport gives its memory back.
#include <fcntl.h>
#include <unistd.h>

#include <new>

#include "link/transport.hpp"
#include "ranks.hpp"

namespace {

std::atomic<std::ptrdiff_t> allocated{0};  // pieces, of all threads

}  // namespace

void* operator new(std::size_t bytes) {
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  ++allocated;
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) --allocated;
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

namespace kvstore_hvd {
namespace {

std::vector<char> message(std::uint32_t number, std::size_t bytes) {
  std::vector<char> content(bytes);
  for (std::size_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(number * 131 + i * 7 + i / 251);
  return content;
}

void wait_for(Transport& end, Transport::Transfer& transfer) {
  while (!end.test(transfer)) {
  }
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
  const auto ends = tcp_transports(kHosts, seed % 2 == 0 ? 1 << 16 : 0);
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
  auto ends = tcp_transports(2);
  const auto content = message(1, 200000);
  std::vector<char> first(content.size()), second(content.size());
  auto sending = ends[0]->send(1, kRecords, content.data(), content.size());
  auto early = ends[0]->send(1, kRecords, content.data(), content.size());
  auto receiving = ends[1]->receive(0, kRecords, first.data(), first.size());
  while (!ends[0]->test(early)) ends[1]->progress();
  check(ends[0]->test(sending), "in order");
  auto unread = ends[1]->send(0, kPartials, content.data(), 1000);
  check(ends[1]->test(unread), "the kernel has it");
  ends[0].reset();
  wait_for(*ends[1], receiving);
  check(first == content, "other bytes");
  receiving = ends[1]->receive(0, kRecords, second.data(), second.size());
  wait_for(*ends[1], receiving);
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

  ends = tcp_transports(2);  // sends that fail, before the other end's last message is read
  sending = ends[0]->send(1, kRecords, content.data(), 1000);
  check(ends[0]->test(sending), "the kernel has it");
  ends[0].reset();
  Transport::Transfer failing[3];
  for (auto& one : failing) one = ends[1]->send(0, kPartials, content.data(), 1000);
  std::vector<char> last(1000);
  receiving = ends[1]->receive(0, kRecords, last.data(), last.size());
  wait_for(*ends[1], receiving);
  check(std::equal(last.begin(), last.end(), content.begin()), "other bytes");
});

const bool foreign = testing::add("bytes that are no message, or that nobody can wait for, end the connection", [] {
  const auto headers = [](std::size_t n, std::uint64_t tag, std::uint64_t length) {
    std::string bytes(16 * n, '\0');
    for (std::size_t i = 0; i < n; ++i) {
      std::memcpy(&bytes[16 * i], &tag, 8);
      std::memcpy(&bytes[16 * i + 8], &length, 8);
    }
    return bytes;
  };
  const std::pair<std::string, const char*> all[] = {
      {"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", "none of our messages"},
      {headers(1, kPartials, kLongest + 1), "none of our messages"},
      {headers(1, kResults + 1, 0), "none of our messages"},
      {headers(1, kRecords, 65), "longer than"},
      {headers(100, kPartials, 0), "not ordered"}};
  for (int i = 0; i < 10; ++i) {
    const auto& [bytes, says] = all[i / 2];
    const auto sockets = tcp_connections(2);
    const auto end = tcp_transport(sockets[0]);
    char memory[64];
    Transport::Transfer receiving = 0;
    if (i % 2 == 0) receiving = end->receive(1, kRecords, memory, sizeof(memory));
    check(write(sockets[1][0], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "sent");
    while (i % 2 != 0 && !end->has_received(1)) end->progress();
    if (i % 2 != 0) receiving = end->receive(1, kRecords, memory, sizeof(memory));
    std::string fault;
    for (int looks = 0; looks < 1000000 && fault.empty(); ++looks) {
      try {
        check(!end->test(receiving), "taken for a message");
      } catch (const TransportError& error) {
        fault = error.what();
        check(error.kind == TransportError::Kind::kForeign && error.host == 1, fault);
      }
    }
    check(fault.find(says) != std::string::npos, says + (": " + fault));
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

const bool freed = testing::add("what was sent, has come, or is under way leaves nothing behind", [] {
  std::vector<char> content(1000), large(32 << 20);  // `large` does not go into the buffers of a socket
  for (const int messages : {1, 0, 50}) {
    const auto before = allocated.load();
    {
      const auto ends = tcp_transports(2);
      for (int i = 0; i < messages; ++i) {
        auto sending = ends[0]->send(1, kRecords, content.data(), content.size());
        auto receiving = ends[1]->receive(0, kRecords, content.data(), content.size());
        while (!ends[0]->test(sending) || !ends[1]->test(receiving)) ends[1]->progress();
      }
      if (messages > 0) {
        static_cast<void>(ends[0]->send(1, kPartials, large.data(), large.size()));
        static_cast<void>(ends[0]->receive(1, kPartials, content.data(), content.size()));
      }
    }
    const std::ptrdiff_t left = allocated.load() - before;
    if (messages == 1) continue;  // what the first transport and its messages make once stays
    check_equal(left, std::ptrdiff_t{0}, "what is left of " + std::to_string(messages) + " messages");
  }
});

}  // namespace
}  // namespace kvstore_hvd

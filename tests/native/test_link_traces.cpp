// Executions of the model of links (tests/proof/link.pml) on real links: messages come when the model says so, and
// operations end on each host as in the model. tests/proof/link.py makes the executions.
#include <deque>
#include <fstream>
#include <map>
#include <sstream>
#include <tuple>

#include "ranks.hpp"
#include "request/request.hpp"

namespace kvstore_hvd {
namespace {

using std::chrono::milliseconds;

constexpr int kHosts = 3, kOperations = 2;
constexpr std::size_t kWhole = 2048, kSliced = 40000;  // elements: more than announcements carry; sliced
constexpr std::size_t kHead = 32;                      // bytes of a message before its records
constexpr milliseconds kSettles{5000}, kLooks{101};    // see Link::look()

// Messages between hosts, which wait until the test delivers them. Those of one event of the model go together.
struct Wires {
  struct Message {
    std::vector<char> bytes;
    int event;
    bool is_beat;  // has no news
  };
  using Key = std::tuple<int, int, int>;  // from, to, tag
  std::map<Key, std::deque<Message>> sent, delivered;
  int event = 0;
  bool has_news[kHosts] = {};  // whether beats of the host tell of a failure, or of ranks that have left

  bool deliver(int from, int to, int tag) {
    auto& queue = sent[{from, to, tag}];
    const auto move = [&] {
      delivered[{from, to, tag}].push_back(std::move(queue.front()));
      queue.pop_front();
    };
    while (!queue.empty() && queue.front().is_beat) move();
    if (queue.empty()) return false;
    const int of = queue.front().event;
    move();
    while (tag == kRecords && !queue.empty() && (queue.front().event == of || queue.front().is_beat)) move();
    return true;
  }
};

class End final : public Transport {
 public:
  End(Wires& wires, int host) : wires_(wires), host_(host) {}
  Transfer send(int host, int tag, const void* data, std::size_t bytes) override {
    const auto* const begin = static_cast<const char*>(data);
    bool is_beat = tag == kRecords && !wires_.has_news[host_];
    for (std::size_t at = kHead; is_beat && at + sizeof(RecordHeader) <= bytes;) {
      RecordHeader header;
      std::memcpy(&header, begin + at, sizeof(header));
      is_beat = header.kind == RecordKind::kBeat;
      at += header.bytes;
    }
    wires_.sent[{host_, host, tag}].push_back({std::vector<char>(begin, begin + bytes), wires_.event, is_beat});
    return kSent;
  }
  Transfer receive(int host, int tag, void* data, std::size_t bytes) override {
    receives_[++count_] = Receive{host, tag, data, bytes};
    return count_;
  }
  bool test(Transfer& transfer, std::size_t* received) override {
    if (transfer != kSent) {
      const auto found = receives_.find(transfer);
      const Receive one = found->second;
      // Those of one sender and tag are over in their order.
      for (auto before = receives_.begin(); before != found; ++before) {
        if (before->second.host == one.host && before->second.tag == one.tag) return false;
      }
      auto& queue = wires_.delivered[{one.host, host_, one.tag}];
      if (queue.empty() && !one.is_cancelled) return false;
      if (!one.is_cancelled) {
        check(queue.front().bytes.size() <= one.bytes, "a message has room");
        std::memcpy(one.data, queue.front().bytes.data(), queue.front().bytes.size());
        if (received != nullptr) *received = queue.front().bytes.size();
        queue.pop_front();
      }
      receives_.erase(found);
    }
    transfer = 0;
    return true;
  }
  void cancel(const Transfer& transfer) override { receives_.at(transfer).is_cancelled = true; }
  void progress() override {}

 private:
  struct Receive {
    int host = 0, tag = 0;
    void* data = nullptr;
    std::size_t bytes = 0;
    bool is_cancelled = false;
  };
  static constexpr Transfer kSent = ~Transfer{0};

  Wires& wires_;
  const int host_;
  std::map<Transfer, Receive> receives_;
  Transfer count_ = 0;
};

struct Host {
  std::shared_ptr<Segment> segment;
  std::unique_ptr<Link> link;
  std::unique_ptr<Engine> engine;
  std::vector<float> arrays[kOperations];
  std::shared_ptr<Work> works[kOperations];
  bool is_silent = false;

  World& world() { return segment->world(); }
  bool has_failed() { return world().failure.is_set(); }
};

class Replay {
 public:
  explicit Replay(std::size_t elements) : elements_(elements), now_(Clock::now()) {
    const Placement placement{{0}, {1}, {2}};
    for (int h = 0; h < kHosts; ++h) {
      Host& host = hosts_[h];
      host.segment = Segment::create(1, 0, {}, {}, std::nullopt, Hosts{h, placement, test_processes(placement)});
      LinkOptions options;
      options.silence = std::chrono::hours(1);
      host.link = std::make_unique<Link>(host.segment, std::make_shared<End>(wires_, h), options);
    }
    for (int h = 0; h < kHosts; ++h)
      hosts_[h].engine = std::make_unique<Engine>(hosts_[h].segment, 0, thread_options());
    const auto are_met = [&] {
      return std::all_of(std::begin(hosts_), std::end(hosts_), [](Host& host) { return host.link->missing().empty(); });
    };
    for (int round = 0; round < 20; ++round) {
      for (Host& host : hosts_) host.link->step(now_);
      for (int from = 0; from < kHosts; ++from) {
        for (int to = 0; to < kHosts; ++to) wires_.deliver(from, to, kRecords);
      }
      if (are_met()) break;
    }
    check(are_met(), "the links meet");
    for (int h = 0; h < kHosts; ++h) settle(h);
  }

  ~Replay() {
    for (Host& host : hosts_) host.engine->abort("the execution is over");
    for (Host& host : hosts_) host.engine->shutdown("");
    for (Host& host : hosts_) {
      while (!host.link->close()) {
      }
    }
  }

  // Whether the execution is none of the links'.
  bool is_beyond() const { return is_beyond_; }

  // One event of the model. Returns what is wrong, or an empty text.
  std::string follow(const std::string& event) {
    std::istringstream words(event);
    std::string what;
    int a = 0, b = 0, c = 0;
    words >> what >> a >> b >> c;
    ++wires_.event;
    if (what == "announce") {
      Host& host = hosts_[a];
      host.arrays[b].assign(elements_, static_cast<float>(1 << a));
      host.works[b] = host.engine->submit(allreduce(std::string(1, static_cast<char>('a' + b)), host.arrays[b]));
      settle(a);
    } else if (what == "mail" || what == "partial" || what == "result") {
      const int tag = what == "mail" ? kRecords : what == "partial" ? kPartials : kResults;
      if (!wires_.deliver(a, b, tag)) {
        // In the model a rank reduces at once; here its world may fail before.
        is_beyond_ = tag != kRecords && std::any_of(hosts_, hosts_ + kHosts, [](Host& h) { return h.has_failed(); });
        return is_beyond_ ? "" : "there is no such message";
      }
      settle(b);
    } else if (what == "fail" || what == "notice") {
      if (what == "fail" || !hosts_[a].has_failed()) hosts_[a].engine->abort("a rank died");
      settle(a);
    } else if (what == "leave") {
      wires_.has_news[a] = true;
      hosts_[a].engine->shutdown("");
      settle(a);
    } else if (what == "silence") {
      hosts_[a].is_silent = true;
    } else if (what == "end") {
      return end(hosts_[a], b, c != 0);
    } else if (what != "over") {
      return "there is no such event";
    }
    return "";
  }

 private:
  bool step(int h) {
    wires_.has_news[h] = wires_.has_news[h] || hosts_[h].has_failed();
    return hosts_[h].link->step(now_);
  }

  // Until neither the link nor the rank of a host has anything to do.
  void settle(int h) {
    Host& host = hosts_[h];
    for (const auto end = Clock::now() + kSettles; Clock::now() < end;) {
      if (step(h)) continue;
      const std::uint32_t published = host.world().head.load();
      const RankState& rank = host.world().rank(0);
      const auto told = host.world().link().filled.value();
      const bool has_left = rank.presence.load() == Presence::kLeft;
      if (has_left || host.has_failed() || (rank.reduced.reached(published) && rank.collected.reached(told))) break;
      std::this_thread::yield();
    }
    for (int again = 0; again < 3; ++again) {  // a look at what the last message said, a record of it, a message
      now_ += kLooks;
      while (step(h)) {
      }
    }
  }

  std::string end(Host& host, int done, bool has_failed) {
    if (host.has_failed() != has_failed) return has_failed ? "the world has not failed" : host.world().failure.fact();
    for (int op = 0; op < kOperations; ++op) {
      if (host.works[op] == nullptr) continue;
      if (!host.engine->wait(*host.works[op], kSettles)) return "operation " + std::to_string(op) + " does not end";
      const bool is_done = host.works[op]->status().ok(), should_be = (done >> op & 1) != 0;
      if (is_done != should_be) return std::to_string(op) + (is_done ? " is done" : " has failed");
      const auto sum = [](std::size_t) { return 7.0F; };
      if (is_done && !same_bits(host.arrays[op], sum)) return "a sum is wrong";
    }
    return "";
  }

  const std::size_t elements_;
  bool is_beyond_ = false;
  Clock::time_point now_;
  Wires wires_;
  Host hosts_[kHosts];
};

const bool traces = testing::add("links follow the executions of their model", [] {
  const std::string path = __FILE__;
  std::ifstream file(path.substr(0, path.rfind('/')) + "/../proof/link_traces.txt");
  int count = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    const std::string name = line.substr(0, line.find(':'));
    Replay replay(name.find("sliced") == 0 ? kSliced : kWhole);
    std::istringstream events(line.substr(line.find(':') + 1));
    std::string before;
    for (std::string event; std::getline(events, event, ';'); before += event + ";") {
      const std::string wrong = replay.follow(event);
      check(wrong.empty(), name + ":" + event + ": " + wrong + " after" + before);
      if (!wrong.empty() || replay.is_beyond()) break;
    }
    ++count;
  }
  check(count >= 40, "there are executions in tests/proof/link_traces.txt");
});

}  // namespace
}  // namespace kvstore_hvd

// What other hosts send to a link: valid streams of records are followed, and others end in one failure that names the
// host, or are taken for what they may be; never in anything else. The link and two ranks of its host are real, each of
// the other hosts is a script.
//
// KVHVD_TEST_RECORDS_S: for how long random streams are tried, in place of a second. KVHVD_TEST_RECORDS_SEED: the
// first.
#include <array>

#include "link/link.hpp"
#include "link/mail.hpp"
#include "ranks.hpp"

namespace kvstore_hvd {
namespace {

constexpr int kHosts = 3, kSize = 4;
constexpr std::size_t kHead = 32;  // bytes of Mail::Head
constexpr std::chrono::milliseconds kStall{10};

// The ranks of the tested host are two; each other host has one.
Placement placement_around(int tested) {
  return tested == 0 ? Placement{{0, 1}, {2}, {3}} : Placement{{0}, {1, 2}, {3}};
}

// Plays all other hosts. Whatever moves in chunks is 1 on each rank, and so kSize in a sum's result.
class Script final : public Transport {
 public:
  struct Peer {
    std::vector<char> stream;          // of records
    std::uint64_t own = 0, other = 0;  // numbers of the ends, see Mail
    bool has_greeted = false;
    std::uint64_t build = 0;
    std::vector<char> earlier;                  // records for an earlier attempt of the tested host, before all others
    bool starts_over = false;                   // once both have met
    std::optional<TransportError::Kind> fault;  // of its connection, behind the stream
    char* memory = nullptr;                     // of the receive that waits
    std::size_t room = 0;
  };

  explicit Script(std::uint32_t seed) : random(seed) {
    for (std::size_t host = 0; host < kHosts; ++host) peers[host].own = 2 * host + 1;
  }

  Transfer send(int host, int tag, const void* data, std::size_t) override {
    // Its number follows the build.
    if (tag == kRecords) std::memcpy(&peers[host].other, static_cast<const char*>(data) + 8, 8);
    return kDone;
  }

  Transfer receive(int host, int tag, void* data, std::size_t bytes) override {
    if (tag == kRecords) {
      peers[host].memory = static_cast<char*>(data);
      peers[host].room = bytes;
      return static_cast<Transfer>(host) + 1;
    }
    const float value = tag == kResults ? kSize : 1.0F;
    for (std::size_t i = 0; i < bytes; i += sizeof(value)) std::memcpy(static_cast<char*>(data) + i, &value, 4);
    return kDone + bytes;
  }

  bool test(Transfer& transfer, std::size_t* received) override {
    std::size_t bytes = transfer - kDone;
    if (transfer <= kHosts) {
      bytes = deliver(peers[transfer - 1]);
      if (bytes == 0) return false;
    }
    if (received != nullptr) *received = bytes;
    transfer = 0;
    return true;
  }

  void cancel(const Transfer& transfer) override { is_cancelled[transfer] = true; }
  void progress() override {}

  bool is_through() const {
    return std::all_of(peers.begin(), peers.end(), [](const Peer& peer) { return peer.stream.empty(); });
  }

  std::mt19937 random;
  std::array<Peer, kHosts> peers;
  std::map<Transfer, bool> is_cancelled;
  bool in_one_message = false, in_single_bytes = false;
  std::int64_t too_many = 0;  // bytes that a head tells of and that do not come

 private:
  static constexpr Transfer kDone = 100;

  std::size_t deliver(Peer& peer) {
    const auto transfer = static_cast<Transfer>(&peer - peers.data()) + 1;
    if (is_cancelled[transfer]) return kHead;
    if (peer.other != 0 && peer.has_greeted && peer.stream.empty() && peer.fault) {
      throw TransportError("it ended", static_cast<int>(transfer) - 1, *std::exchange(peer.fault, std::nullopt));
    }
    if (peer.other == 0 || (peer.has_greeted && peer.stream.empty())) return 0;
    std::size_t bytes = 0;
    if (peer.earlier.empty() && std::exchange(peer.has_greeted, true)) {
      bytes = std::min(peer.stream.size(), peer.room - kHead);
      if (!in_one_message && bytes > 1 && random() % 2 == 0) bytes = 1 + random() % (random() % 2 == 0 ? 64 : bytes);
      if (in_single_bytes) bytes = 1;  // messages end where records do, too
      bytes = std::min(bytes, peer.stream.size());
    }
    std::vector<char>& stream = peer.earlier.empty() ? peer.stream : peer.earlier;
    if (&stream == &peer.earlier) bytes = stream.size();
    const std::uint64_t from = peer.own + (peer.starts_over && bytes > 0 ? 2 : 0);
    const std::uint64_t head[4] = {peer.build, from, &stream == &peer.earlier ? ~0ULL : peer.other,
                                   bytes + static_cast<std::uint64_t>(bytes > 0 ? too_many : 0)};
    std::memcpy(peer.memory, head, kHead);
    std::copy_n(stream.begin(), bytes, peer.memory + kHead);
    stream.erase(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(bytes));
    return kHead + bytes;
  }
};

struct Operation {
  std::string name;
  Collective collective;
  std::size_t count;
  int root;
  bool is_inline;  // on the other hosts; else the conductor orders it
  std::vector<float> input, output;

  Request request() {
    Request request = allreduce(name, output);
    request.collective = collective;
    request.inputs = {input.data()};
    request.count = request.contributed = count;
    request.shape = {static_cast<std::int64_t>(count)};
    if (collective == Collective::kBroadcast) request.root = root;
    for (int r = 0; collective == Collective::kExchange && r < kSize; ++r) {
      request.parts.push_back(Part{r, 0, bytes(), bytes() * static_cast<std::size_t>(r)});
    }
    return request;
  }
  std::size_t bytes() const { return count * sizeof(float); }
};

std::vector<Operation> program(std::mt19937& random) {
  std::vector<Operation> all(1 + random() % 6);
  for (std::size_t i = 0; i < all.size(); ++i) {
    constexpr Collective kKinds[]{Collective::kAllreduce, Collective::kAllreduce, Collective::kBroadcast,
                                  Collective::kExchange};
    constexpr std::size_t kCounts[]{0, 1, 100, 1024, 1025, 5000, 40000, 300000};
    Operation& one = all[i];
    one.name = "t" + std::to_string(i);
    one.collective = kKinds[random() % 4];
    one.count = kCounts[random() % 8];
    one.root = static_cast<int>(random() % kSize);
    one.is_inline = one.collective == Collective::kAllreduce && one.count <= 1024 && random() % 3 != 0;
  }
  return all;
}

void fill(Operation& one) {
  one.input.assign(one.count, 1.0F);
  one.output.assign(one.count * (one.collective == Collective::kExchange ? kSize : 1), 0.0F);
}

// What a host tells once its rank has announced the operation.
struct Ready {
  std::string name;
  Announcement announcement;
  WeightSums weights{1.0, 1, 0};
  bool is_inline;
  std::vector<AnnouncedBy> told;
  std::vector<char> sum;
  std::int32_t last = 0;

  // Of a host with this rank only.
  explicit Ready(Operation one, int rank = 0) : name(one.name), is_inline(one.is_inline), last(rank) {
    fill(one);
    std::memset(&announcement, 0, sizeof(announcement));
    announcement.signature = signature_of(one.request());
    std::memcpy(announcement.note, "'t'", 3);
    if (is_inline)
      sum.assign(reinterpret_cast<char*>(one.input.data()), reinterpret_cast<char*>(one.input.data() + one.count));
  }
  void append_to(std::vector<char>& stream) const {
    append_record(stream, RecordKind::kReady, name, announcement, weights, is_inline, told, sum, last);
  }
};

struct Order {
  Algorithm algorithm;
  std::int32_t root;
  std::uint32_t staged = 0;
  std::vector<Piece> pieces;
  std::vector<TensorId> ids;

  explicit Order(const Operation& one) : root(one.collective == Collective::kBroadcast ? one.root : 0) {
    algorithm = one.collective == Collective::kBroadcast  ? Algorithm::kLinkBroadcast
                : one.collective == Collective::kExchange ? Algorithm::kLinkExchange
                                                          : Algorithm::kLinkSum;
  }
  void add(const Operation& one, std::uint64_t offset, std::uint64_t bytes) {
    pieces.push_back(Piece{0, staged, offset, bytes});
    ids.push_back(id_of(one.name));
    staged += static_cast<std::uint32_t>((bytes + 63) / 64 * 64);
  }
  void append_to(std::vector<char>& stream) const {
    append_record(stream, RecordKind::kOrder, algorithm, root, staged, pieces, ids);
  }
};

struct Beat {
  ErrorCode error = ErrorCode::kOk;
  std::string text;
  std::uint64_t arrived = 0;
  std::vector<std::uint64_t> n_ready = std::vector<std::uint64_t>(kHosts);
  std::vector<int> left;
  struct Late {
    TensorId id;
    int rank;
  };
  std::vector<Late> late;
  struct Told {
    std::uint64_t waits, operations, bytes, waited;
    std::array<char, SharedText::kBytes> text;
  };
  std::vector<Told> told{1};
  std::uint64_t compared = 0;
  std::vector<std::array<std::uint64_t, 2>> observed;

  explicit Beat(int host = 0) : observed(host < 2 ? kSize : 0) {}

  void append_to(std::vector<char>& stream) const {
    append_record(stream, RecordKind::kBeat, error, text, arrived, n_ready, left, late, told, compared, observed);
  }
};

// The conductor cuts and joins tensors as it likes: what one entry may hold is a promise of memory only.
void append_orders(std::vector<char>& stream, const std::vector<Operation>& all, std::mt19937& random) {
  constexpr std::uint64_t kLargest = 256 << 10;
  std::vector<const Operation*> ordered;
  for (const Operation& one : all) {
    if (!one.is_inline) ordered.push_back(&one);
  }
  std::shuffle(ordered.begin(), ordered.end(), random);
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < ordered.size();) {
    Order order(*ordered[i]);
    while (i < ordered.size() && Order(*ordered[i]).algorithm == order.algorithm &&
           Order(*ordered[i]).root == order.root && order.staged < kLargest) {
      const Operation& one = *ordered[i];
      const std::uint64_t rest = one.bytes() - offset, most = 64 * (1 + random() % ((kLargest - order.staged) / 64));
      const std::uint64_t bytes = std::min(rest, random() % 4 == 0 ? most : kLargest - order.staged);
      order.add(one, offset, bytes);
      offset = bytes == rest ? 0 : offset + bytes;
      i += bytes == rest ? 1 : 0;
      if (offset != 0 || random() % 3 == 0) break;
    }
    order.append_to(stream);
  }
}

struct Outcome {
  std::vector<Status> statuses;
  bool are_right = true;  // the results of operations without error
  ErrorCode failure = ErrorCode::kOk;
  std::string text;

  bool is_refused() const { return text.find("sent what is no record of this version") != std::string::npos; }
};

// Runs the operations on the ranks of the tested host, each twice, with what the script sends. `ends`: it ends by
// itself.
Outcome run(const std::shared_ptr<Script>& script, int tested, const std::vector<Operation>& all, bool ends) {
  const Placement placement = placement_around(tested);
  const auto segment = Segment::create(2, 0, {}, {}, std::nullopt, Hosts{tested, placement, test_processes(placement)});
  Link link(segment, script, LinkOptions{});
  std::vector<std::unique_ptr<Engine>> engines;
  for (int local = 0; local < 2; ++local) engines.push_back(std::make_unique<Engine>(segment, local, thread_options()));
  std::atomic<int> at_work{2};
  Outcome outcomes[2];
  std::vector<std::thread> ranks;
  for (std::size_t local = 0; local < 2; ++local) {
    ranks.emplace_back([&, local] {
      Engine& engine = *engines[local];
      std::vector<Operation> own;
      for (int round = 0; round < 2; ++round) own.insert(own.end(), all.begin(), all.end());
      std::vector<std::shared_ptr<Work>> works;
      for (Operation& one : own) {
        fill(one);
        works.push_back(engine.submit(one.request()));
      }
      for (std::size_t i = 0; i < works.size(); ++i) {
        outcomes[local].statuses.push_back(engine.wait(*works[i]));
        if (!outcomes[local].statuses.back().ok()) continue;
        const float expected = own[i].collective == Collective::kAllreduce ? kSize : 1.0F;
        if (!same_bits(own[i].output, [&](std::size_t) { return expected; })) outcomes[local].are_right = false;
      }
      --at_work;
    });
  }
  auto moved = Clock::now();
  while (at_work > 0) {
    const auto now = Clock::now();
    if (link.step(now)) moved = now;
    if (!ends && script->is_through() && now - moved > kStall) engines[0]->abort("there is no more");
    std::this_thread::yield();
  }
  for (auto& rank : ranks) rank.join();
  Outcome& outcome = outcomes[0];
  outcome.are_right = outcome.are_right && outcomes[1].are_right;
  if (segment->world().failure.is_set()) {
    outcome.failure = segment->world().failure.code();
    outcome.text = segment->world().failure.fact();
  }
  outcome.statuses.insert(outcome.statuses.end(), outcomes[1].statuses.begin(), outcomes[1].statuses.end());
  engines.clear();
  while (!link.close()) {
  }
  return outcome;
}

// Streams of a program that runs twice.
void append_streams(Script& script, int tested, const std::vector<Operation>& all) {
  const Placement placement = placement_around(tested);
  for (int round = 0; round < 2; ++round) {
    for (int host = 0; host < kHosts; ++host) {
      if (host == tested) continue;
      std::vector<char>& stream = script.peers[host].stream;
      std::vector<Operation> own = all;
      std::shuffle(own.begin(), own.end(), script.random);
      for (const Operation& one : own) {
        Ready(one, placement[host][0]).append_to(stream);
        if (script.random() % 4 == 0) Beat(host).append_to(stream);
      }
      if (host == 0) append_orders(stream, all, script.random);
    }
  }
}

// One change of a stream, by chance in what is a length or a number.
void change(std::vector<char>& stream, std::mt19937& random) {
  if (stream.empty()) return;
  constexpr std::uint64_t kNumbers[]{
      0,        1,          2,          8,          63,         64,   65, 240, 241, 255, 4096, 1 << 20, (4 << 20) + 1,
      1U << 31, 0xffffffff, 1ULL << 32, 1ULL << 61, 1ULL << 63, ~0ULL};
  const std::size_t at = random() % stream.size(), aligned = at / 4 * 4;
  const auto where = stream.begin() + static_cast<std::ptrdiff_t>(at);
  const std::size_t some = std::min<std::size_t>(1 + random() % 100, stream.size() - at);
  switch (random() % 7) {
    case 0:
      stream[at] = static_cast<char>(stream[at] ^ (1 << random() % 8));
      break;
    case 1:
      stream[at] = static_cast<char>(random());
      break;
    case 2:
    case 3: {
      const std::uint64_t number = kNumbers[random() % (sizeof(kNumbers) / sizeof(*kNumbers))];
      std::memcpy(stream.data() + aligned, &number,
                  std::min<std::size_t>(random() % 2 == 0 ? 4 : 8, stream.size() - aligned));
      break;
    }
    case 4:
      stream.erase(where, where + static_cast<std::ptrdiff_t>(some));
      break;
    case 5: {
      const std::vector<char> copy(where, where + static_cast<std::ptrdiff_t>(some));
      stream.insert(where, copy.begin(), copy.end());
      break;
    }
    default:
      stream.resize(at);
  }
}

const bool valid = testing::add("valid streams are followed", [] {
  for (std::uint32_t seed = 0; seed < (thread_sanitizer() ? 10 : 60); ++seed) {
    const int tested = static_cast<int>(seed % 2);
    const auto script = std::make_shared<Script>(seed);
    script->in_single_bytes = seed % 5 == 0;
    const auto all = program(script->random);
    append_streams(*script, tested, all);
    const Outcome outcome = run(script, tested, all, true);
    for (const Status& status : outcome.statuses)
      check(status.ok(), "seed " + std::to_string(seed) + ": " + status.text());
    check(outcome.are_right, "seed " + std::to_string(seed) + ": wrong results");
  }
});

const bool changed = testing::add("changed streams are refused, or taken for what they may be", [] {
  const char *const limit = std::getenv("KVHVD_TEST_RECORDS_S"), *const first = std::getenv("KVHVD_TEST_RECORDS_SEED");
  const auto end = Clock::now() + std::chrono::seconds(limit == nullptr ? 1 : std::atoi(limit));
  int refused = 0, taken = 0;
  for (auto seed = static_cast<std::uint32_t>(first == nullptr ? 0 : std::atoi(first)); Clock::now() < end; ++seed) {
    const int tested = static_cast<int>(seed % 2);
    const auto script = std::make_shared<Script>(seed);
    const Placement placement = placement_around(tested);
    const auto all = program(script->random);
    append_streams(*script, tested, all);
    const int liar = (tested + 1 + static_cast<int>(script->random() % 2)) % kHosts;
    for (std::uint32_t n = 1 + script->random() % 3; n > 0; --n) change(script->peers[liar].stream, script->random);
    std::printf("seed %u\r", seed);
    std::fflush(stdout);
    const Outcome outcome = run(script, tested, all, false);
    check(outcome.statuses.size() == 4 * all.size(), "all operations end");
    (outcome.is_refused() ? refused : taken) += 1;
    if (!outcome.is_refused()) continue;
    // Orders of the first host may no longer fit what the liar has announced.
    const auto is_named = [&](int host) {
      return outcome.text.find("host testhost (rank " + std::to_string(placement[host][0]) + ") sent") == 0;
    };
    check(outcome.failure == ErrorCode::kTransport && (is_named(liar) || is_named(0)), outcome.text);
  }
  std::printf("%d refused, %d taken\n", refused, taken);
  check(refused > 0 && taken > 0, "both happen");
});

const bool refused = testing::add("each record that no host of this version sends is refused", [] {
  using Tell = std::function<void(Script&, std::vector<char>&)>;
  const Operation x{"x", Collective::kAllreduce, 100000, 0, false, {}, {}},
      small{"small", Collective::kAllreduce, 10, 0, true, {}, {}};
  Order first(x);
  first.add(x, 0, 64 << 10);
  const auto spoiled = [](auto record, const auto& spoil) -> Tell {
    spoil(record);
    return [record](Script&, std::vector<char>& stream) { record.append_to(stream); };
  };
  const auto ready = [&](const auto& spoil) { return spoiled(Ready(small), spoil); };
  const auto order = [&](const auto& spoil) { return spoiled(first, spoil); };
  const auto beat = [&](const auto& spoil) { return spoiled(Beat(), spoil); };
  const auto header = [&](std::uint32_t kind, std::uint32_t bytes) -> Tell {
    return
        [=](Script&, std::vector<char>& stream) { append(stream, RecordHeader{static_cast<RecordKind>(kind), bytes}); };
  };
  const auto signature = [&](const std::function<void(Signature&)>& spoil) {
    return ready([=](Ready& one) { spoil(one.announcement.signature); });
  };
  const std::vector<std::pair<const char*, Tell>> all{
      {"a record without a header", header(2, 0)},
      {"half a header", header(2, 4)},
      {"no kind", header(9, 8)},
      {"a record of more than 4 MiB", header(2, (4 << 20) + 1)},
      {"a head that tells of more than there is",
       [&](Script& script, std::vector<char>& stream) {
         Beat().append_to(stream);
         script.too_many = 8;
       }},
      {"bytes behind a record",
       [&](Script&, std::vector<char>& stream) {
         const std::size_t begin = stream.size();
         Beat().append_to(stream);
         stream.push_back(0);
         ++stream[begin + 4];
       }},
      {"a count of strings",
       [&](Script&, std::vector<char>& stream) { append_record(stream, RecordKind::kReady, std::uint64_t{1} << 61); }},
      {"a name of 241 bytes", ready([](Ready& one) { one.name.assign(241, 'x'); })},
      {"a note without an end", ready([](Ready& one) { std::memset(one.announcement.note, 'x', 223); })},
      {"a sum that is too short", ready([](Ready& one) { one.sum.resize(36); })},
      {"a sum of what is no sum", signature([](Signature& one) { one.collective = Collective::kExchange; })},
      {"another collective", signature([](Signature& one) { one.collective = static_cast<Collective>(4); })},
      {"another dtype", signature([](Signature& one) { one.dtype = static_cast<DType>(8); })},
      {"another op", signature([](Signature& one) { one.op = static_cast<ReduceOp>(5); })},
      {"a root that is no rank", signature([](Signature& one) { one.root = kSize; })},
      {"more bytes than there are", signature([](Signature& one) { one.count = std::uint64_t{1} << 62; })},
      {"more weights than ranks", ready([](Ready& one) { one.weights.absent = 1; })},
      {"announcements of another host's ranks", ready([](Ready& one) {
         one.told = {AnnouncedBy{1, one.announcement}};
         one.is_inline = false;
         one.sum.clear();
       })},
      {"65 pieces", order([&](Order& one) {
         while (one.pieces.size() < 65) one.add(x, 0, 0);
       })},
      {"no pieces", order([](Order& one) { one.pieces.clear(), one.ids.clear(); })},
      {"pieces without names", order([](Order& one) { one.ids.clear(); })},
      {"a piece of what was not announced", order([](Order& one) { one.ids[0].low ^= 1; })},
      {"a piece that is not next", order([](Order& one) { one.pieces[0].offset = 64; })},
      {"a piece beyond the array", order([](Order& one) { one.pieces[0].bytes = 500000; })},
      {"a piece that cuts elements", order([](Order& one) { one.pieces[0].bytes = 63; })},
      {"a piece without bytes", order([&](Order& one) { one.add(x, 64 << 10, 0); })},
      {"a piece at another place", order([](Order& one) { one.pieces[0].staged = 64; })},
      {"less memory than pieces", order([](Order& one) { one.staged = 64; })},
      {"another algorithm", order([](Order& one) { one.algorithm = Algorithm::kLinkExchange; })},
      {"an algorithm of one host", order([](Order& one) { one.algorithm = Algorithm::kDirect; })},
      {"no algorithm", order([](Order& one) { one.algorithm = static_cast<Algorithm>(99); })},
      {"another root", order([](Order& one) { one.root = 1; })},
      {"a rank of another host that has left", beat([](Beat& one) { one.left = {1}; })},
      {"a rank of no host that has left", beat([](Beat& one) { one.left = {-1}; })},
      {"a wait that is none", beat([](Beat& one) { one.told[0].waits = kMostWaits + 1; })},
      {"a rank of no host that is late", beat([](Beat& one) { one.late = {{id_of("x"), 1 << 30}}; })},
      {"figures of more ranks than it has", beat([](Beat& one) { one.told.resize(2); })},
      {"figures of no rank", beat([](Beat& one) { one.observed.clear(); })},
      {"a last rank of another host", ready([](Ready& one) { one.last = 1; })},
      {"counts of other hosts", beat([](Beat& one) { one.n_ready.resize(2); })},
      {"no error", beat([](Beat& one) { one.error = static_cast<ErrorCode>(77); })},
      {"an error that fails no world", beat([](Beat& one) { one.error = ErrorCode::kMismatch; })},
  };
  for (const auto& [name, tell] : all) {
    const auto script = std::make_shared<Script>(0);
    script->in_one_message = true;
    for (const int host : {0, 2}) Ready(x, host == 0 ? 0 : 3).append_to(script->peers[host].stream);
    tell(*script, script->peers[0].stream);
    const Outcome outcome = run(script, 1, {x}, true);
    check(outcome.is_refused() && outcome.text.find("host testhost (rank 0) sent") == 0,
          name + std::string(": ") + outcome.text);
    for (const Status& status : outcome.statuses) check(status.code() == ErrorCode::kTransport, name);
  }
  const auto script = std::make_shared<Script>(0);
  for (const int host : {0, 2}) Ready(x, host == 0 ? 0 : 3).append_to(script->peers[host].stream);
  first.append_to(script->peers[2].stream);
  const Outcome outcome = run(script, 1, {x}, true);
  check(outcome.text.find("host testhost (rank 3) sent what is no record") == 0,
        "an order of another host than the first");
});

const bool watched = testing::add("a host is lost that is silent, gone, of another build, or has started over", [] {
  using Peer = Script::Peer;
  const char* const silent = "host testhost (ranks 1-2) has not been heard of for 0 s";
  const auto left = [](Peer& peer, int host, std::vector<int> ranks) {
    Beat beat(host);
    if (host == 1) beat.told.resize(2);
    beat.left = std::move(ranks);
    beat.append_to(peer.stream);
  };
  const std::tuple<const char*, std::function<void(Peer&)>, std::string> all[] = {
      {"silent", [](Peer&) {}, silent},
      {"one of its ranks has left", [&](Peer& peer) { left(peer, 1, {1}); }, silent},
      {"mail of an earlier attempt",
       [](Peer& peer) {
         Beat beat;
         beat.error = ErrorCode::kPeerLost;
         beat.text = "the earlier world is lost";
         beat.append_to(peer.earlier);
       },
       silent},
      {"another build", [](Peer& peer) { peer.build = 1; }, "run different versions of kvstore_hvd"},
      {"a later attempt", [&](Peer& peer) { left(peer, 1, {}), peer.starts_over = true; },
       "host testhost (ranks 1-2) could not join, and started over"},
      {"its connection ends", [](Peer& peer) { peer.fault = TransportError::Kind::kLost; },
       "host testhost (ranks 1-2) is lost: the connection to it has ended (it ended)"},
      {"MPI fails", [](Peer& peer) { peer.fault = TransportError::Kind::kFailed; },
       "a message to or from host testhost (ranks 1-2) failed (it ended)"},
  };
  for (const auto& [name, change, expected] : all) {
    const auto script = std::make_shared<Script>(0);
    change(script->peers[1]);
    left(script->peers[2], 2, {3});  // all of its ranks: nobody waits for it, and its connection may end
    script->peers[2].fault = TransportError::Kind::kLost;
    const Placement placement{{0}, {1, 2}, {3}};
    const auto segment = Segment::create(1, 0, {}, {}, std::nullopt, Hosts{0, placement, test_processes(placement)});
    LinkOptions options;
    options.silence = std::chrono::milliseconds(300);
    Link link(segment, script, options);
    const Failure& failure = segment->world().failure;
    for (int i = 0; i < 5000 && !failure.is_set(); ++i) {
      link.step(Clock::now());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const std::string text = failure.is_set() ? failure.fact() : "not lost";
    check(text.find(expected) != std::string::npos, name + std::string(": ") + text);
    while (!link.close()) {
    }
  }
});

const bool first_failure = testing::add("who fails and leaves has failed, though more is complete there than here", [] {
  const Operation x{"x", Collective::kAllreduce, 1000, 0, true, {}, {}};
  for (const bool says_so : {true, false}) {  // or its connection ends
    const auto script = std::make_shared<Script>(0);
    Beat beat(2);
    beat.error = ErrorCode::kPeerLost;
    beat.text = "rank 3 gave up";
    beat.arrived = 1;
    if (says_so) beat.left = {3};
    if (!says_so) script->peers[2].fault = TransportError::Kind::kLost;
    beat.append_to(script->peers[2].stream);
    const Outcome outcome = run(script, 1, {x}, true);
    check(outcome.failure == ErrorCode::kPeerLost && outcome.text == beat.text, outcome.text);
  }
});

}  // namespace
}  // namespace kvstore_hvd

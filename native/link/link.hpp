// The link of one host of a world: one more party of the host's segment, for the ranks of all other hosts.
//
// When all ranks of its host have announced an operation, it sends the announcement to all other links (READY). So
// every link knows the announcements of all hosts, and finds out by itself whether they agree, which ranks are late,
// and the result of small sums, which travel with the announcement. Everything else is scheduled: the conductor, the
// link of rank 0's host, decides the order and sends each entry to the others (ORDER); LinkChunks moves the bytes.
// Twice a second each link sends which of its ranks have left or are late, and whether the world has failed (BEAT).
#pragma once

#include <array>
#include <deque>
#include <map>
#include <unordered_map>

#include "engine/tensor_table.hpp"
#include "link/chunks.hpp"
#include "link/mail.hpp"
#include "shm/segment.hpp"

namespace kvstore_hvd {

struct LinkOptions {
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);  // as EngineOptions::timeout
  // How long no byte of another host may come.
  std::chrono::nanoseconds silence = std::chrono::seconds(10);
  std::uint64_t build = 0;        // see Mail
  DType dtype = DType::kFloat32;  // World::link_dtype
};

// One thread.
class Link {
 public:
  Link(std::shared_ptr<Segment> segment, std::shared_ptr<Transport> transport, const LinkOptions& options);

  // Makes progress without waiting; returns whether anything has moved.
  bool step(Clock::time_point now);

  // The ranks of hosts whose links are not met. From any thread.
  std::vector<int> missing() const;
  // The ranks of all hosts have left, or the world has failed and the other hosts know, or it was given up.
  bool is_over() const { return is_over_; }
  // From any thread.
  void give_up() { is_over_ = true; }
  // To be called then until it returns true: no message is under way any more, and the link can be destroyed.
  bool close();
  // Whether something is under way that the next step may move.
  bool is_busy() const { return !chunks_.is_empty() || !tensors_.empty() || !missing().empty(); }
  bool has_chunks() const { return !chunks_.is_empty(); }
  // Whether bytes have come since the last call.
  bool has_received() { return std::exchange(has_received_, false); }
  Flag& bell() { return world_.link().bell; }
  // Before other ranks have the segment: its thread sleeps there.
  void sleeps_at(std::uint64_t doorbell) { world_.link_number = doorbell; }
  const Failure& failure() const { return world_.failure; }
  const std::shared_ptr<Transport>& transport() const { return transport_; }

 private:
  // One operation, as announced by all ranks of a host.
  struct HostAnnouncement {
    Announcement announcement;  // of local rank 0
    WeightSums weights;
    bool is_inline = false;
    std::vector<AnnouncedBy> by_rank;  // if they differ, or an input failed
    std::vector<char> sum;             // of the host, if it is inline
    std::uint64_t number = 0;          // counts the host's announcements
    std::int32_t last = 0;             // the rank that announced last
    Clock::time_point at{};            // when it came
  };
  // Announcements of hosts under a name that are not over: the n-th of one host matches the n-th of all others.
  struct Tensor {
    std::string name;
    std::uint32_t slot = kNoSlot;  // on this host, while all of its ranks have announced an operation
    std::vector<std::deque<HostAnnouncement>> by_host;
    bool is_agreed = false;  // waits for the conductor
    bool is_early = false;   // the link has announced it on behalf of other hosts
    Clock::time_point since;
  };
  // An entry of the schedule, from another host's conductor. Its pieces have no slots yet.
  struct Order {
    Entry entry;
    std::vector<TensorId> ids;  // of the pieces
  };
  // A rank that has not announced an operation which others of its host have.
  struct LateRank {
    TensorId id;
    int rank;
  };
  // What a rank does and has done, as its host tells the others, see Doing and Counts.
  struct Told {
    std::uint64_t waits, operations, bytes, waited;
    std::array<char, SharedText::kBytes> text;
  };
  // Of all ranks of the world, as a host has observed it: how often each came last, and the nanoseconds behind the
  // median host.
  struct Observed {
    std::uint64_t compared = 0;
    std::vector<std::array<std::uint64_t, 2>> by_rank;
  };
  // Another host.
  struct Peer {
    Peer(Transport& transport, int host, const LinkOptions& options)
        : mail(transport, host, options.build), silence(options.silence) {}
    Mail mail;
    Patience silence;  // since bytes of it have come
    bool has_left = false, has_failed = false;
    std::vector<int> left;       // ranks
    std::vector<LateRank> late;  // in its last BEAT
  };
  // A failure on another host. Operations that are complete there complete here before the failure is raised: those of
  // `arrived` entries, and of the `n_ready` READY records that it had from each host.
  struct Abort {
    ErrorCode error;
    std::string text;
    std::uint64_t arrived;
    std::vector<std::uint64_t> n_ready;
    Patience patience;
  };

  // A host that waits for another one sees when it comes: the conductor, or host 1 where the conductor is the last one.
  static constexpr int kObservers = 2;

  // These, and publish_next(), throw ForeignRecord.
  void handle(int host, RecordKind kind, RecordReader& record);
  void check_ready(int host, std::string_view name, const HostAnnouncement& ready);
  void on_order(int host, RecordReader& record);
  void lose(int host, const std::string& why);
  void distrust(int host, const char* what);
  void fail(const std::string& fact);
  void announced_here(std::uint32_t slot, Clock::time_point now);
  Tensor& tensor(const TensorId& id, std::string_view name, Clock::time_point now);
  void add(const TensorId& id, Tensor& tensor, int host, HostAnnouncement ready);
  void all_announced(const TensorId& id, Tensor& tensor);
  bool is_the_same(const Tensor& tensor) const;
  double weights(const Tensor& tensor) const;
  void observe(const Tensor& tensor);
  void carry_out(Tensor& tensor);
  void disagree(Tensor& tensor);
  void end(const TensorId& id);
  bool publish_next();
  void publish(const Entry& entry);
  void send_order(const Entry& entry);
  void hear();
  void look(Clock::time_point now);
  void check_peers();
  void check_left(const Tensor& tensor);
  // `tensor`: nullptr if no host has announced the operation.
  void mark_late(const TensorId& id, std::uint32_t slot, const Tensor* tensor);
  void announce_early(Tensor& tensor, const std::vector<std::uint64_t>& waits_since);
  void send_beat();
  std::vector<Told> told(const std::vector<LateRank>& late);
  void on_beat(int host, RecordReader& record);
  void note_told(int host, const std::vector<Told>& told);
  void note_observed();
  void raise_abort();
  bool may_end();
  template <class... T>
  void send_all(RecordKind kind, const T&... values) {
    if (has_sent_end_) return;  // the others may have closed their ends
    for (auto& [host, other] : peers_) append_record(other.mail.outgoing(), kind, values...);
  }

  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<Transport> transport_;
  const LinkOptions options_;
  World& world_ = segment_->world();
  Alarm alarm_{world_, world_.ranks, options_.timeout};
  TensorTable table_{world_, alarm_};
  Schedule schedule_{world_, alarm_};
  LinkChunks chunks_{*segment_, *transport_};
  std::vector<std::vector<int>> ranks_ = std::vector<std::vector<int>>(world_.hosts);  // by host
  std::map<int, Peer> peers_;                                                          // by host
  std::unordered_map<TensorId, Tensor, TensorIdHash> tensors_;
  std::vector<TensorId> ids_ = std::vector<TensorId>(kSlots);  // by slot, while it is in use
  std::deque<std::uint32_t> failing_;                          // slots on which hosts disagree, to be published
  std::deque<Order> orders_;
  std::vector<std::uint64_t> n_ready_ = std::vector<std::uint64_t>(world_.hosts);  // READY records received, by host
  std::uint32_t taken_ = 0;                                                        // from the inbox, modulo 2^32
  std::uint32_t sent_left_ = 0;                                                    // ranks
  bool has_received_ = false;
  bool has_sent_end_ = false;  // that all ranks here have left, or that the world has failed
  std::atomic<bool> is_over_{false};
  Clock::time_point looked_{}, beat_{};
  std::optional<Patience> after_failure_;
  std::optional<Abort> abort_;
  std::array<Observed, kObservers> observed_;  // by host
  std::size_t patient_ = 0;                    // of tensors_, see is_patient()
};

}  // namespace kvstore_hvd

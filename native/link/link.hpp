// The link of one host of a world: one more party of the host's segment, which tells all other links when all ranks of
// this one have announced an operation, and lays what the others contribute where these ranks find it.
//
// All links know what all hosts have announced. So each finds out by itself whether they agree, who is missing, and
// what small sums amount to; only the order of what is scheduled is the conductor's, the link of rank 0's host.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/running_time.hpp"
#include "engine/agenda.hpp"
#include "engine/tensor_table.hpp"
#include "link/chunks.hpp"
#include "link/mail.hpp"
#include "shm/alarm.hpp"
#include "shm/doorbell.hpp"
#include "shm/segment.hpp"

namespace kvstore_hvd {

struct LinkOptions {
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);  // as EngineOptions::timeout
  // How long another host may say nothing.
  std::chrono::nanoseconds silence = std::chrono::seconds(10);
  std::uint64_t build = 0;        // see Mail
  DType dtype = DType::kFloat32;  // World::link_dtype
};

// One thread.
class Link {
 public:
  using Clock = std::chrono::steady_clock;

  Link(std::shared_ptr<Segment> segment, std::shared_ptr<Transport> transport, const LinkOptions& options);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Does what can be done without waiting; returns whether anything has moved.
  bool step(Clock::time_point now);

  // The ranks of hosts whose links are not met. From any thread.
  std::vector<int> missing() const;
  // Whether the ranks of all hosts have left, or the world has failed and the other hosts know, or it was given up.
  bool is_over() const { return is_over_; }
  // From any thread.
  void give_up() { is_over_ = true; }
  // Then, until it returns true: nothing is under way any more, and this can be destroyed.
  bool close();
  // Whether something is under way that the next step may move.
  bool is_busy() const { return !chunks_.is_empty() || !tensors_.empty() || !missing().empty(); }
  bool has_chunks() const { return !chunks_.is_empty(); }
  // Whether bytes have come since the last call, though nothing may have moved for that.
  bool has_received() { return std::exchange(has_received_, false); }
  Flag& bell() { return world_.link().bell; }
  // Before other ranks have the segment: its thread sleeps there.
  void sleeps_at(const Doorbell& doorbell) { world_.link_number = doorbell.number(); }
  const Failure& failure() const { return world_.failure; }
  const std::shared_ptr<Transport>& transport() const { return transport_; }

 private:
  // One operation, as all ranks of a host have announced it.
  struct Ready {
    Announcement announcement;  // of local rank 0
    WeightSums weights;
    bool is_inline = false;
    std::vector<AnnouncedBy> told;  // by each rank, if not all announced the same, or not all can take part
    std::vector<char> sum;          // of the host, if it is inline
    std::uint64_t number = 0;       // among all that the host has announced
  };
  // What hosts have announced under a name and is not over: the n-th of one host is that of all others.
  struct Tensor {
    std::string name;
    std::uint32_t slot = kNoSlot;  // on this host, while all of its ranks have announced an operation
    std::vector<std::deque<Ready>> by_host;
    bool is_agreed = false;  // what comes next is the conductor's
    bool is_early = false;   // ranks here know that others have announced it
    Clock::time_point since;
  };
  // An entry of the schedule, from another host's conductor. Its pieces have no slots yet.
  struct Order {
    Entry entry;
    std::vector<TensorId> ids;  // of the pieces
  };
  // A rank that has not announced an operation which others of its host have.
  struct Late {
    TensorId id;
    int rank;
  };
  // A rank that is late or waits for others itself, see shm/world.hpp.
  struct Behind {
    int rank;
    std::uint32_t waits;
    std::array<char, SharedText::kBytes> text;
  };
  // What is known of another host.
  struct Other {
    Other(Transport& transport, int host, const LinkOptions& options)
        : mail(transport, host, options.build), silence(options.silence) {}
    Mail mail;
    Patience silence;  // since bytes of it have come
    bool has_left = false, has_failed = false;
    std::vector<int> left;   // ranks
    std::vector<Late> late;  // when it last told
  };
  // What another host has told of its failure. What is complete there will be everywhere, before anybody hears of it:
  // `arrived` entries, and what the READY records make up that had come from each host.
  struct Abort {
    ErrorCode error;
    std::string text;
    std::uint64_t arrived;
    std::vector<std::uint64_t> n_ready;
    Patience patience;
  };

  // These, and publish_next(), throw ForeignRecord.
  void handle(int host, RecordKind kind, RecordReader& record);
  void check_ready(int host, std::string_view name, const Ready& ready);
  void ordered(int host, RecordReader& record);
  void lose(int host, const std::string& why);
  void distrust(int host, const char* what);
  void fail(const std::string& fact);
  void announced_here(std::uint32_t slot, Clock::time_point now);
  Tensor& tensor(const TensorId& id, std::string_view name, Clock::time_point now);
  void add(const TensorId& id, Tensor& tensor, int host, Ready ready);
  void all_announced(const TensorId& id, Tensor& tensor);
  bool is_the_same(const Tensor& tensor) const;
  double weights(const Tensor& tensor) const;
  void carry_out(Tensor& tensor);
  void disagree(Tensor& tensor);
  void end(const TensorId& id);
  bool publish_next();
  void publish(const Entry& entry);
  void tell_order(const Entry& entry);
  void hear();
  void look(Clock::time_point now);
  void check_peers();
  void check_left(const Tensor& tensor);
  void mark_late(const TensorId& id, const Tensor& tensor);
  void tell_early(Tensor& tensor, const std::vector<std::uint64_t>& waits_since);
  void beat();
  std::vector<Behind> behind(const std::vector<Late>& late);
  void beaten(int host, RecordReader& record);
  void note_behind(int host, const std::vector<Behind>& behind);
  void raise_abort();
  bool may_end();
  template <class... T>
  void tell_all(RecordKind kind, const T&... values) {
    if (has_told_end_) return;  // the others may have closed their ends
    for (auto& [host, other] : others_) append_record(other.mail.outgoing(), kind, values...);
  }

  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<Transport> transport_;
  const LinkOptions options_;
  World& world_;
  Alarm alarm_;
  TensorTable table_;
  Agenda agenda_;
  LinkChunks chunks_;
  std::vector<std::vector<int>> ranks_;  // by host
  std::map<int, Other> others_;          // by host
  std::unordered_map<TensorId, Tensor, TensorIdHash> tensors_;
  std::vector<TensorId> ids_;          // by slot, while it is in use
  std::deque<std::uint32_t> failing_;  // slots about which hosts disagree, to be published
  std::deque<Order> orders_;
  std::vector<std::uint64_t> n_ready_;  // records that came, by host
  std::uint32_t taken_ = 0;             // from the inbox, modulo 2^32
  std::uint32_t told_left_ = 0;         // ranks
  bool has_received_ = false;
  bool has_told_end_ = false;  // that all ranks here have left, or that the world has failed
  std::atomic<bool> is_over_{false};
  Clock::time_point looked_{}, beat_{};
  std::optional<Patience> after_failure_;
  std::optional<Abort> abort_;
};

}  // namespace kvstore_hvd

// Decides in what order the hosts carry out what all of them have announced: one agenda for all hosts, on the link of
// one of them. The order goes to the other links as it is made; nobody asks for it, and there are no rounds.
#pragma once

#include <cstdint>
#include <deque>

#include "engine/agenda.hpp"
#include "link/host_table.hpp"

namespace kvstore_hvd {

class Conductor {
 public:
  explicit Conductor(HostTable& hosts) : hosts_(hosts), agenda_(hosts.world) {}

  // All hosts have announced an operation on a tensor that is not carried out inline.
  void all_announced(const TensorId& id);

  // What the ranks of a host have announced of a tensor about which the hosts disagree.
  void told(const TensorId& id, int host, std::vector<AnnouncedBy> announced);

  // The next entry, if there is one; it is told to the other links. `bytes_under_way`: of the entries so far.
  std::optional<Entry> next(std::uint64_t bytes_under_way);

  // A host has left: what lacks its announcement will never be carried out.
  void check_left();

 private:
  void tell_order(const Entry& entry);
  void fail(const TensorId& id);

  HostTable& hosts_;
  Agenda agenda_;
  std::unordered_map<std::uint32_t, TensorId> ids_;  // of what is on the agenda, by slot
  struct Failed {
    TensorId id;
    std::uint32_t slot;
  };
  std::deque<Failed> failed_;
};

// Fails the world: that host left without what all ranks of this one wait for.
void raise_left(HostTable& hosts, std::uint32_t slot, int host);

}  // namespace kvstore_hvd

// What the parts of one link share.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/tensor_table.hpp"
#include "link/announcements.hpp"
#include "link/mail.hpp"
#include "shm/alarm.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// The link of rank 0's host decides the order of everything.
inline constexpr int kConductor = 0;

// Of a slot that all ranks of this host have announced: its name, which stays until they have completed the operation,
// and how messages name the operation, as describe_operation().
inline std::string operation_on(World& world, std::uint32_t slot) {
  const Announcement& announcement = world.announcement(slot, 0);
  return std::string(name_of(announcement.signature.collective)) + " " + announcement.note;
}
inline std::string name_on(World& world, std::uint32_t slot) {
  return std::string(world.slots[slot].name, world.slots[slot].name_length);
}

struct HostTable {
  HostTable(World& its_world, Transport& transport, std::chrono::nanoseconds timeout)
      : world(its_world), alarm(world, world.ranks, timeout), table(world, alarm), has_left(world.hosts) {
    for (int host = 0; host < world.hosts; ++host) {
      mails.push_back(host == world.host ? nullptr : std::make_unique<Mail>(transport, host));
    }
  }

  bool is_conductor() const { return world.host == kConductor; }

  HostAnnouncements& tensor(const TensorId& id) { return tensors.try_emplace(id, world.hosts).first->second; }
  void forget_if_idle(const TensorId& id) {
    const auto found = tensors.find(id);
    if (found != tensors.end() && found->second.is_idle()) tensors.erase(found);
  }
  // Calls `write(outgoing)` for every other host.
  template <class Write>
  void to_all(const Write& write) {
    for (const auto& mail : mails) {
      if (mail != nullptr) write(mail->outgoing());
    }
  }

  World& world;
  Alarm alarm;
  TensorTable table;
  std::vector<std::unique_ptr<Mail>> mails;  // by host; none for this one
  std::unordered_map<TensorId, HostAnnouncements, TensorIdHash> tensors;
  std::vector<bool> has_left;  // by host: all of its ranks
};

}  // namespace kvstore_hvd

// MXNet's engine has one list of the errors of its operations, for the next waitall(). Every thread that ends a failed
// operation searches that list, and adds to it, without a lock: ThreadedEngine::OnComplete, in 1.9.1 and 2.0.0b1. A
// list that is moved to a larger place meanwhile, or that two threads extend at once, damages the heap.
//
// A world that is lost ends hundreds of operations within a millisecond, on several threads, while MXNet hands their
// errors on to what depends on them. So Completion::fail() is called one at a time, and the list has room before.
#pragma once

#include <cstddef>
#include <memory>

#include "mxnet/engine_abi.hpp"

namespace kvstore_hvd::mxnet {

// How many of our operations may fail between two waitall() until the list has to be moved, at the least.
constexpr std::size_t kRoomForErrors = 2047;

// Has MXNet's list grow, once in a process, before anything of ours can fail: errors are made, and read at once. The
// memory stays with the list. Not with NaiveEngine, which keeps no errors. Throws Error.
void make_room_for_errors(const std::shared_ptr<const Api>& api);

}  // namespace kvstore_hvd::mxnet

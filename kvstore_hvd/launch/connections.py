"""Waiting for descriptors: what a loop of the launcher or of a daemon is woken by."""

from __future__ import annotations

import select
from collections.abc import Callable

from kvstore_hvd.base.channel import Channel


class Poller:
    """Waits for descriptors, and calls what belongs to each. Channels are flushed when they can be written."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._known: dict[int, tuple[Callable[[], object], int]] = {}  # by descriptor: and for what we wait there
        self._channels: dict[int, Channel] = {}

    def watch(self, fd: int, call: Callable[[], object], events: int = select.EPOLLIN) -> None:
        """Call this when something of the kind is possible on the descriptor."""
        if fd not in self._known:
            self._epoll.register(fd, events)
        elif self._known[fd][1] != events:
            self._epoll.modify(fd, events)
        self._known[fd] = call, events

    def forget(self, fd: int) -> None:
        """Watch a descriptor no longer, if it was; to be called before it is closed."""
        if self._known.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def add(self, channel: Channel, call: Callable[[], object]) -> None:
        """Call this when the channel can be read, or has ended."""
        self._channels[channel.fileno()] = channel
        self.watch(channel.fileno(), call)

    def close_channel(self, channel: Channel) -> None:
        """Close a channel; without effect on one that is closed."""
        if self._channels.pop(channel.fileno(), None) is not None:
            self.forget(channel.fileno())
            self.forget(channel.write_fd)
        channel.close()

    def wait(self, seconds: float) -> None:
        for fd, channel in self._channels.items():
            if channel.write_fd == fd:
                self.watch(fd, self._known[fd][0], select.EPOLLIN | select.EPOLLOUT * channel.wants_to_write)
            elif channel.wants_to_write:
                self.watch(channel.write_fd, channel.flush, select.EPOLLOUT)
            else:
                self.forget(channel.write_fd)
        for fd, events in self._epoll.poll(max(0.0, seconds)):
            if fd in self._channels and events & select.EPOLLOUT:
                self._channels[fd].flush()
            is_due = events & ~select.EPOLLOUT or fd not in self._channels
            if is_due and fd in self._known:  # else an earlier call has closed it
                self._known[fd][0]()

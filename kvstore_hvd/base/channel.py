"""Messages over a stream socket or a pair of pipes, and the kinds of messages of launcher, daemons and workers.

A message is a JSON object whose ``"t"`` is its kind, after optional raw bytes. It ends with a newline, because srun
passes on whole lines only. The peer of a socket has been authenticated before its first message.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import struct
from collections.abc import Mapping
from typing import IO, Any, Callable

# Lengths of the object and of the raw bytes before it.
_LENGTHS = struct.Struct("!II")
_CHUNK = 1 << 18  # bytes of one read or write
_MOST_SKIPPED, _MOST_SHOWN = 1 << 16, 1 << 11  # bytes before the greeting: at most, and those that are kept
_MOST_QUOTED = 80  # bytes of a wrong message in an error
_MOST_DIGITS = 20  # of a number

_Take = Callable[[Any], Any]  # returns the value of a field; raises ValueError for a wrong one
Kinds = Mapping[str, Mapping[str, _Take]]

# Items of a list; Linux starts no command of so many words.
_MOST_ITEMS = 1 << 20
_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}:\d{1,5}", re.ASCII)


class ChannelError(Exception):
    """The peer is gone, or has sent no message; the text is a sentence."""


class Channel:
    """One end of a connection. It never waits: bytes that cannot be sent at once are kept for `flush`.

    `receive` refuses messages of more than `longest` bytes and of kinds that are not in `kinds` (None: any kind).
    `writer` is the file to write to, by default the `reader`. Bytes before the `greeting` are no messages; `skipped` is
    their end. One thread may receive while another sends or flushes; two threads that receive, or two that send, need a
    lock.
    """

    def __init__(
        self,
        reader: socket.socket | IO[bytes],
        kinds: Kinds | None = None,
        longest: int = 1 << 26,
        *,
        writer: IO[bytes] | None = None,
        greeting: bytes = b"",
    ) -> None:
        self._ends, self._kinds, self._longest = (reader, writer or reader), kinds, longest
        self._fd, self.write_fd = (end.fileno() for end in self._ends)
        for fd in (self._fd, self.write_fd):
            os.set_blocking(fd, False)
        self._received, self._unsent = bytearray(), bytearray()
        self._greeting, self.skipped = greeting, b""

    @property
    def wants_to_write(self) -> bool:
        """Whether `flush` is to be called when `write_fd` can be written."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """The descriptor to read from, for selectors; -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Close both descriptors and drop unsent bytes. May be called again."""
        self._fd = self.write_fd = -1
        for end in self._ends:
            end.close()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, with raw bytes under ``"raw"``. Raises ChannelError after the last one."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""  # the peer closed it with unread bytes
        except OSError as error:
            raise ChannelError(f"the connection broke: {error.strerror}.") from None
        if not data:
            is_cut = self._received and not self._greeting
            raise ChannelError(f"the other side closed the connection{' within a message' if is_cut else ''}.")
        self._received += data
        if self._greeting and not self._skip():
            return []
        messages, at = [], 0
        while len(self._received) - at >= _LENGTHS.size:
            length, more = _LENGTHS.unpack_from(self._received, at)
            if length + more > self._longest:
                fact = f"a message of {length + more} bytes was announced"
                raise ChannelError(f"{fact}; at most {self._longest} are allowed.")
            begin, end = at + _LENGTHS.size, at + _LENGTHS.size + more + length
            if len(self._received) < end:
                break
            messages.append(_message(bytes(self._received[begin + more : end]), self._kinds))
            if more:
                messages[-1]["raw"] = bytes(self._received[begin : begin + more])
            at = end
        del self._received[:at]
        return messages

    def _skip(self) -> bool:
        """Drop bytes before the greeting; returns whether the greeting has arrived."""
        before, found, behind = self._received.partition(self._greeting)
        self.skipped = bytes(before[-_MOST_SHOWN:])
        if found:
            self._received, self._greeting = behind, b""
        elif len(before) > _MOST_SKIPPED:
            raise ChannelError("the other side says something else than messages.")
        return bool(found)

    def send(self, message: dict[str, Any], raw: bytes = b"") -> None:
        """Send a message. `receive` reports the end of the connection, after the messages that had arrived."""
        body = json.dumps(message).encode("ascii") + b"\n"
        self._unsent += _LENGTHS.pack(len(body), len(raw)) + raw + body
        self.flush()

    def flush(self) -> None:
        """Write unsent bytes, as many as the connection takes now."""
        try:
            while self._unsent:
                # A copy: a view would forbid to shorten the buffer.
                del self._unsent[: os.write(self.write_fd, bytes(self._unsent[:_CHUNK]))]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()


def _message(body: bytes, kinds: Kinds | None) -> dict[str, Any]:
    message: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(body, parse_int=_number)
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise ChannelError(f"{body[:_MOST_QUOTED]!r} is no message.")
    try:
        return message if kinds is None else take(message, kinds)
    except ValueError as error:
        raise ChannelError(f"{body[:_MOST_QUOTED]!r} is no message: {error}.") from None


def _number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError  # the conversion of a million digits takes long
    return int(digits)


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the peer of a connected Unix socket, from the kernel."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Poller:
    """Waits for descriptors, and calls the function of each. Flushes channels that can be written."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._known: dict[int, tuple[Callable[[], object], int]] = {}  # by descriptor: function and events
        self._channels: dict[int, Channel] = {}

    def watch(self, fd: int, call: Callable[[], object], events: int = select.EPOLLIN) -> None:
        """Call a function whenever one of these events occurs."""
        if fd not in self._known:
            self._epoll.register(fd, events)
        elif self._known[fd][1] != events:
            self._epoll.modify(fd, events)
        self._known[fd] = call, events

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor; call it before closing one."""
        if self._known.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def add(self, channel: Channel, call: Callable[[], object]) -> None:
        """Call a function whenever the channel can be read or has ended."""
        self._channels[channel.fileno()] = channel
        self.watch(channel.fileno(), call)

    def close_channel(self, channel: Channel) -> None:
        """Close a channel; may be called again."""
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


# -- Kinds of messages, with a parser for each field -------------------------------------------------------------------


def take(message: Mapping[str, Any], kinds: Kinds) -> dict[str, Any]:
    """The fields of a message of one of these kinds. Raises ValueError for another kind or a wrong field."""
    kind = message.get("t")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError("'t'")
    taken = {"t": kind}
    for name, field in kinds[kind].items():
        if name not in message:
            raise ValueError(f"'{name}' is missing")
        try:
            taken[name] = field(message[name])
        except ValueError:
            raise ValueError(f"'{name}'") from None
    return taken


def _of(kind: type, is_allowed: Callable[[Any], object] = lambda value: True) -> _Take:
    def field(value: Any) -> Any:
        if type(value) is not kind or not is_allowed(value):  # isinstance would take True for a number
            raise ValueError
        return value

    return field


def _whole(least: int, most: int = (1 << 31) - 1) -> _Take:
    return _of(int, lambda value: least <= value <= most)


def _text(value: Any) -> str:
    """A text for people: lone surrogates, which no terminal can write, become escapes."""
    if type(value) is not str:
        raise ValueError
    return value.encode("utf-8", "backslashreplace").decode()


def _each(field: _Take) -> _Take:
    is_list = _of(list, lambda value: len(value) <= _MOST_ITEMS)
    return lambda value: [field(each) for each in is_list(value)]


def _within(kinds: Kinds) -> _Take:
    is_message = _of(dict)
    return lambda value: take(is_message(value), kinds)


_FLAG, _TEXTS, _NUMBERS = _of(bool), _each(_text), _each(_whole(0))
_GENERATION, _PID, _CODE, _ERRNO, _FD = _whole(-1), _whole(1), _whole(-64, 255), _whole(0), _whole(1, 2)
_WORKER = _whole(-(1 << 31))  # below 0: a task of the launcher
_IS_HOST = _of(list, lambda value: len(value) == 2)
_HOST: _Take = lambda value: _TEXTS(_IS_HOST(value))  # noqa: E731
_ADDRESSES = _each(_of(str, lambda text: _ADDRESS.fullmatch(text) and int(text.rpartition(":")[2]) < 1 << 16))
# Bytes of a process's words and variables that are no UTF-8 are surrogates.
_WORDS = _each(_of(str))
_VARIABLES = _of(dict, lambda value: all(type(each) is str for each in value.values()))
_RANKS = {
    "rank": _whole(0),
    "size": _whole(1),
    "hosts": _each(_HOST),
    "pids": _NUMBERS,
    "addresses": _each(_ADDRESSES),
    "local_ranks": _NUMBERS,
}

OF_WORKER: Kinds = {
    "enter": {"host": _HOST, "pid": _PID, "ranks": _NUMBERS, "addresses": _ADDRESSES},
    "ready": {"generation": _GENERATION, "cause": _text, "text": _text, "unreached": _NUMBERS},
    "joined": {"generation": _GENERATION},
    "synced": {"generation": _GENERATION},
    "finished": {},
    "failure": {"part": _text},
}
TO_WORKER: Kinds = {
    "refused": {"text": _text},
    "rank": _RANKS,
    "world": {"generation": _GENERATION, "job": _text, **_RANKS},
    "lost": {"generation": _GENERATION, "text": _text},
    "updated": {"number": _whole(0), "result": _whole(0, 3)},
    "leave": {},
    "fail": {"text": _text, "fix": _text},
}
OF_DAEMON: Kinds = {
    "up": {"pid": _PID, "version": _text},
    "beat": {},
    "say": {"text": _text},
    "ending": {"text": _text, "code": _whole(1, 255)},
    "started": {"worker": _WORKER, "pid": _PID},
    "not_started": {"worker": _WORKER, "text": _text, "errno": _ERRNO},
    "out": {"worker": _WORKER, "fd": _FD},
    "exited": {"worker": _WORKER, "code": _CODE},
    "from": {"worker": _WORKER, "message": _within(OF_WORKER)},
}
TO_DAEMON: Kinds = {
    "beat": {},
    "ack": {"bytes": _whole(0)},
    "start": {
        "worker": _WORKER,
        "command": _WORDS,
        "environment": _VARIABLES,
        "share": _NUMBERS,
        "control": _FLAG,
        "stdin": _FLAG,
        "capture": _FLAG,
    },
    "to": {"worker": _WORKER, "message": _within(TO_WORKER)},
    "signal": {"worker": lambda value: None if value is None else _WORKER(value), "signal": _whole(1, 64)},
    "end": {"text": _text},
}

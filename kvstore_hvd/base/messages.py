"""The messages of launcher, daemons and workers: each kind with its fields, and what each field may hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Callable

_Take = Callable[[Any], Any]  # returns the value of a field; raises ValueError if that cannot be
Kinds = Mapping[str, Mapping[str, _Take]]

_MOST_ITEMS = 1 << 20  # of a list; Linux starts no command of so many words
_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}:\d{1,5}", re.ASCII)


def take(message: Mapping[str, Any], kinds: Kinds) -> dict[str, Any]:
    """A message of one of these kinds, with the fields of that kind and no others. Raises ValueError for others."""
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
        if type(value) is not kind or not is_allowed(value):  # True is no number
            raise ValueError
        return value

    return field


def _whole(least: int, most: int = (1 << 31) - 1) -> _Take:
    return _of(int, lambda value: least <= value <= most)


def _text(value: Any) -> str:
    """A text for people: lone surrogates, which cannot be written, as escapes."""
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
_WORKER = _whole(-(1 << 31))  # below 0: a task of the launcher's own
_HOST = _of(list, lambda value: len(value) == 2 and all(type(each) is str for each in value))
_ADDRESSES = _each(_of(str, lambda text: _ADDRESS.fullmatch(text) and int(text.rpartition(":")[2]) < 1 << 16))
# Words and variables of a process hold bytes that are no UTF-8 as surrogates.
_WORDS = _each(_of(str))
_VARIABLES = _of(dict, lambda value: all(type(each) is str for each in value.values()))
_PLACE = {
    "rank": _whole(0),
    "size": _whole(1),
    "hosts": _each(lambda value: _TEXTS(_HOST(value))),
    "pids": _NUMBERS,
    "addresses": _each(_ADDRESSES),
    "places": _NUMBERS,
}

OF_WORKER: Kinds = {
    "enter": {
        "host": lambda value: _TEXTS(_HOST(value)),
        "pid": _PID,
        "ranks": _NUMBERS,
        "addresses": _ADDRESSES,
    },
    "ready": {"generation": _GENERATION, "cause": _text, "text": _text, "unreached": _NUMBERS},
    "joined": {"generation": _GENERATION},
    "synced": {"generation": _GENERATION},
    "finished": {},
}
TO_WORKER: Kinds = {
    "refused": {"text": _text},
    "place": _PLACE,
    "world": {"generation": _GENERATION, "job": _text, **_PLACE},
    "void": {"generation": _GENERATION, "text": _text},
    "updated": {"number": _whole(0), "result": _whole(0, 3)},
    "leave": {"text": _text},
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
        "line": _FLAG,
        "stdin": _FLAG,
        "capture": _FLAG,
    },
    "to": {"worker": _WORKER, "message": _within(TO_WORKER)},
    "signal": {
        "worker": lambda value: None if value is None else _WORKER(value),
        "signal": _whole(1, 64),
        "ended": _FLAG,
    },
    "end": {"text": _text},
}

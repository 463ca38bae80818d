"""The messages of an elastic job: what the launcher, the daemons and the workers say to each other.

A message is a JSON object whose ``"t"`` is its type; the tables below name every other field and what it may be. What
a process is allowed to say is the table with its name. `check` says whether a message is in a table; one that is not
ends the connection that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvstore_hvd.wire import WireError

__all__ = ["DAEMON", "IDENTITIES", "LAUNCHER_TO_DAEMON", "LAUNCHER_TO_WORKER", "WORKER", "check"]


def _whole(low: int, high: int = 2**53) -> Callable[[Any], bool]:
    # True and False are whole numbers for Python, not for JSON.
    return lambda value: type(value) is int and low <= value <= high


_ID = _whole(0)
_GENERATION = _whole(0)
_HOST = (str, str)  # name, identity

# A field may be of a type; equal to a text or a number; what a function accepts; one of a set of these; a list of one
# of these; an object with texts for names and one of these for values; or a list with exactly the members of a tuple.

#: daemon -> launcher
DAEMON: Mapping[str, Mapping[str, Any]] = {
    "started": {"worker": _ID, "pid": _whole(1)},
    "not_started": {"worker": _ID, "text": str},
    "exited": {"worker": _ID, "code": _whole(-255, 255), "lines": [str]},
    "from": {"worker": _ID, "message": dict},
    "beat": {},
}

#: launcher -> daemon
LAUNCHER_TO_DAEMON: Mapping[str, Mapping[str, Any]] = {
    "start": {"worker": _ID, "command": [str], "environment": {str: str}, "cores": [_ID]},
    "to": {"worker": _ID, "message": dict},
    "signal": {"worker": {None, _ID}, "signal": _whole(1, 64), "ended": bool},
    "end": {"text": str},
    "beat": {},
}

#: worker -> launcher, within a daemon's "from"
WORKER: Mapping[str, Mapping[str, Any]] = {
    "enter": {"host": _HOST},
    "ready": {
        "generation": _whole(-1),
        "cause": {"start", "lost", "timeout", "updated", "meeting", "reset"},
        "text": str,
    },
    "joined": {"generation": _GENERATION},
    "synced": {"generation": _GENERATION},
    "finished": {},
}

#: launcher -> worker, within a "to" to its daemon
LAUNCHER_TO_WORKER: Mapping[str, Mapping[str, Any]] = {
    "place": {"rank": _whole(0), "size": _whole(1), "hosts": [_HOST], "places": [_whole(0)]},
    "world": {
        "generation": _GENERATION,
        "rank": _whole(0),
        "size": _whole(1),
        "hosts": [_HOST],
        "places": [_whole(0)],  # local ranks
        "job": str,
    },
    "void": {"generation": _GENERATION, "text": str},
    "updated": {"number": _whole(1), "result": {1, 2, 3}},
    "leave": {"text": str},
    "fail": {"text": str},
    "refused": {"text": str},  # by the daemon itself, which ends the connection then
}


#: who a process says it is in the handshake of a connection; here ``"role"`` takes the place of ``"t"``
IDENTITIES: Mapping[str, Mapping[str, Any]] = {
    "launcher": {},
    "daemon": {"host": str, "pid": _whole(1)},
    "worker": {"worker": _ID, "pid": _whole(1)},
}


def check(message: dict[str, Any], table: Mapping[str, Mapping[str, Any]], type_field: str = "t") -> str:
    """The type of a message, if the table allows it."""
    kind = message.get(type_field)
    if not isinstance(kind, str) or kind not in table:
        raise WireError(f"a message has the unknown type {_shown(kind)}.")
    fields = table[kind]
    if message.keys() - {type_field} != fields.keys():
        raise WireError(f"a message '{kind}' has not the fields {', '.join(fields) or 'that it should: none'}.")
    for name, allowed in fields.items():
        if not _fits(message[name], allowed):
            raise WireError(f"a message '{kind}' has {name} {_shown(message[name])}.")
    return kind


def _fits(value: Any, allowed: Any) -> bool:
    if allowed is float:
        return type(value) in (int, float)
    if isinstance(allowed, type):
        return type(value) is allowed
    if isinstance(allowed, set):
        return any(_fits(value, one) for one in allowed)
    if isinstance(allowed, list):
        return type(value) is list and all(_fits(member, allowed[0]) for member in value)
    if isinstance(allowed, tuple):
        return type(value) is list and len(value) == len(allowed) and all(map(_fits, value, allowed))
    if isinstance(allowed, dict):
        return type(value) is dict and all(_fits(member, allowed[str]) for member in value.values())
    if callable(allowed):
        return bool(allowed(value))
    return type(value) is type(allowed) and value == allowed


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""Small operations that their caller may leave before they are over, with Ctrl-C or because of another error.

The engine writes to their memory until they are over: it is kept here, whatever becomes of the caller.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from kvstore_hvd import native
from kvstore_hvd.world.member import Member


@dataclass
class _Kept:
    memory: Any
    work: native.Work | None = None  # none until the engine has it


_lock = threading.Lock()
_kept: list[_Kept] = []


def submit(world: Member, request: native.Request, memory: Any) -> native.Work:
    """Submit an operation on arrays that nobody else need keep. To be called inside `Member.submitting`."""
    one = _Kept(memory)
    with _lock:
        _kept[:] = [each for each in _kept if each.work is None or not each.work.done]
        _kept.append(one)
    try:
        one.work = world.engine().submit(request)
    except Exception:
        with _lock:
            _kept.remove(one)
        raise
    return one.work

"""What the threads of this process are doing, as Python sees it."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

__all__ = ["OWN_THREADS", "python_stacks"]

#: What the names of this package's threads begin with; nobody needs to see those.
OWN_THREADS = "kvstore_hvd-"

_MAIN_CALLS = 15
_OTHER_CALLS = 5
_OTHER_THREADS = 3


def python_stacks() -> str:
    """The stacks of this process, as tracebacks show them: the main thread's first, this package's threads left out."""
    # Bounded: the innermost calls of each thread, and a few threads. Any thread may call it; it stops nobody.
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    if main in frames:
        parts.append(_stack("main thread", frames.pop(main), _MAIN_CALLS))
    frames.pop(threading.get_ident(), None)
    others = [(names.get(ident, f"thread {ident}"), frame) for ident, frame in frames.items()]
    others = [(name, frame) for name, frame in others if not name.startswith(OWN_THREADS)]
    parts += [_stack(name, frame, _OTHER_CALLS) for name, frame in others[:_OTHER_THREADS]]
    if len(others) > _OTHER_THREADS:
        parts.append(f"... and {len(others) - _OTHER_THREADS} more threads")
    return "\n".join(parts)


def _stack(name: str, frame: FrameType, most: int) -> str:
    calls, depth, outer = traceback.extract_stack(frame, limit=most), 0, frame
    while outer.f_back is not None:
        depth, outer = depth + 1, outer.f_back
    left_out = depth + 1 - len(calls)
    title = f"{name}, innermost call last{f' ({left_out} outer calls left out)' if left_out > 0 else ''}:"
    return "\n".join([title, *(line.rstrip("\n") for line in traceback.format_list(calls))])

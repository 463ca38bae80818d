"""``horovod.runner.util.threads``: functions in threads."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_hvd.errors import InvalidRequestError, KVHvdError, message

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]

# Between two looks at the signals of the main thread, which a join that waits longer does not let through.
_LOOK_S = 0.1


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call a function once for each list of arguments, in several threads."""
    work: queue.SimpleQueue[tuple[int, Sequence[Any]]] = queue.SimpleQueue()
    for item in enumerate(args_list):
        work.put(item)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def call_all() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                place, args = work.get_nowait()
                try:
                    results[place] = fn(*args)
                except BaseException as error:
                    errors.append(error)
                    raise  # threading shows it; the other threads take the rest

    count = min(max_concurrent_executions, len(args_list))
    threads = [in_thread(call_all, daemon=not block_until_all_done) for _ in range(count)]
    if not block_until_all_done:
        return None
    for thread in threads:
        while thread.is_alive():
            thread.join(_LOOK_S)
    if len(results) != len(args_list):
        name = getattr(fn, "__name__", repr(fn))
        fact = f"Some threads for func {name} did not complete successfully."
        raise KVHvdError(message(fact, fix="see the exceptions that they have raised.")) from next(iter(errors), None)
    return results


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a new thread, and return the thread."""
    _check_args(args)

    def call_silently() -> None:
        with contextlib.suppress(BaseException):
            target(*args)

    thread = threading.Thread(
        target=call_silently if silent else target, args=() if silent else args, name=name, daemon=daemon
    )
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a new thread once an event is set, and return the thread."""
    if event is None:
        raise InvalidRequestError(message("Event must not be None.", fix="pass a threading.Event."))
    _check_args(args)
    if stop is None and not daemon:
        fact = "Stop event must be given for non-daemon event thread."
        raise InvalidRequestError(message(fact, fix="pass stop=threading.Event()."))

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def _check_args(args: Any) -> None:
    if not isinstance(args, tuple):
        fact = f"args must be a tuple, not {type(args)}."
        raise InvalidRequestError(message(fact, fix="for a single argument pass (arg,)."))

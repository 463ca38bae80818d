"""Records this worker's operations while it runs, and makes one file of all workers' parts when the last one is done.

No worker waits for another to leave: each says in its part that it has written everything, and the one that then finds
all parts complete makes the timeline. If a worker is killed nobody does, and the parts stay, for
``python -m kvstore_hvd.timeline merge``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import stat
import threading
from typing import Any

from kvstore_hvd import log, native
from kvstore_hvd.errors import InvalidRequestError, KVHvdError, message
from kvstore_hvd.recording.parts import Header, PartWriter, has_ended, part_path
from kvstore_hvd.recording.trace import write_trace
from kvstore_hvd.world.agree import clock_ahead, exchange
from kvstore_hvd.world.topology import Topology

# How often operations are written: what a worker that is killed takes along.
_PERIOD_S = 0.25
# Operations between two writings; 8 MiB, of which only what is used exists.
_CAPACITY = 1 << 16
_LONGEST_PATH = 4096


class Recorder:
    """The timeline that this process takes part in, one at a time. One thread at a time; not in a forked child."""

    def __init__(self) -> None:
        self._recording: _Recording | None = None

    @property
    def is_recording(self) -> bool:
        """Whether a timeline is being recorded by this process."""
        return self._own() is not None

    def _own(self) -> _Recording | None:
        recording = self._recording
        return recording if recording is not None and recording.pid == os.getpid() else None

    def start(
        self,
        file_path: Any,
        mark_cycles: bool,
        engine: native.Engine | None,
        topology: Topology,
    ) -> None:
        """Begin to record; collective. On every worker it succeeds, or fails and leaves nothing behind."""
        target, fault = _absolute(file_path)
        wish = {"target": target, "fault": fault, "mark": bool(mark_cycles), "session": secrets.token_hex(8)}
        agreed = json.loads(exchange(engine, topology, "timeline/start", json.dumps(wish, ensure_ascii=False))[0])
        target = agreed["target"]
        ahead_ns, error_ns = clock_ahead(engine, topology, "timeline/clock")
        before, made = self._own(), None
        if before is not None:
            fault = f"a timeline is being recorded already, to '{before.target}'."
        else:
            fault = agreed["fault"] or _fault_of(target)
        try:
            if not fault:
                who = agreed["session"], topology.rank, topology.size, topology.host, os.getpid(), agreed["mark"]
                header = Header(*who, ahead_ns=ahead_ns, error_ns=error_ns)
                try:
                    made = _Recording(target, header)
                except OSError as failure:
                    path = failure.filename or part_path(target, topology.rank)
                    fault = f"'{path}' cannot be written: {failure.strerror}."
            faults = exchange(engine, topology, "timeline/started", fault)
            if any(faults):
                fix = "call stop_timeline() first." if before else "give a path that all workers can write to."
                raise InvalidRequestError(_text(topology, "start_timeline", faults, fix))
        except BaseException:
            if made is not None:
                made.discard()
            raise
        assert made is not None
        self._recording = made
        if topology.size == 1:
            log.once("timeline-alone", logging.WARNING, "the timeline will be empty: there is only one worker")
        self.joined(engine, topology)
        made.thread.start()

    def stop(self, engine: native.Engine | None, topology: Topology) -> None:
        """End the recording; collective. The file is there when it returns. Does nothing when there is no recording."""
        recording = self._own()
        if recording is None:
            return
        self._recording = None
        faults = exchange(engine, topology, "timeline/stop", recording.finish())
        if any(faults):
            fix = f"make room, then run `{_merge_command(recording.target)}`."
            raise KVHvdError(_text(topology, "stop_timeline", faults, fix))

    def finish(self) -> None:
        """End the recording as far as this worker is concerned; what goes wrong is logged. Not collective."""
        recording = self._own()
        self._recording = None
        if recording is None:
            return
        fault = recording.finish()
        if fault:
            command = _merge_command(recording.target)
            log.logger.error("the timeline could not be written: %s\n  Fix: make room, then run `%s`.", fault, command)

    def joined(self, engine: native.Engine | None, topology: Topology) -> None:
        """Record what happens in this world, if a timeline is being recorded; one inside another is joined after it."""
        recording = self._own()
        if recording is not None:
            recording.join(engine, topology)

    def left(self, topology: Topology | None = None) -> None:
        """This world is left, or by default all: take what there still is of it."""
        recording = self._own()
        if recording is not None:
            recording.leave(topology)


class _Recording:
    """One timeline, on this worker: a thread writes what the engine has recorded."""

    def __init__(self, target: str, header: Header) -> None:
        self.target = target
        self.pid = header.pid
        self._header = header
        self._part = PartWriter(target, header)
        self._fault = ""  # why nothing is written any more
        self._engines: dict[int, native.Engine] = {}  # by process set; 0: of all workers
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="kvstore_hvd-timeline", daemon=True)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._part.discard()

    def join(self, engine: native.Engine | None, topology: Topology) -> None:
        with self._lock:
            if self._fault:
                return
            if topology.inside is None:
                with self._noting_faults():
                    self._part.world(topology.generation)
            if engine is not None:
                self._engines[_set_of(topology)] = engine
                engine.start_timeline(_CAPACITY)

    def leave(self, topology: Topology | None = None) -> None:
        with self._lock:
            left = list(self._engines) if topology is None else [_set_of(topology)]
            for process_set in left:
                if process_set in self._engines:
                    self._engines[process_set].stop_timeline()
            self._write()
            for process_set in left:
                self._engines.pop(process_set, None)

    def finish(self) -> str:
        """End it; returns what went wrong."""
        self._ended.set()
        if self.thread.ident is not None:
            self.thread.join()
        self.leave()
        if not self._fault:
            with self._noting_faults():
                self._part.end()
                self._merge_if_last()
        return self._fault

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            with self._lock:
                self._write()

    def _write(self) -> None:
        for process_set, engine in self._engines.items():
            events, lost = engine.take_timeline()
            if lost:
                text = "the timeline has gaps: more than %d operations were completed in %g s"
                log.once("timeline-lost", logging.WARNING, text, _CAPACITY, _PERIOD_S)
            with self._noting_faults():
                self._part.add(events, lost, process_set)
        if self._fault:
            for engine in self._engines.values():
                engine.stop_timeline()
            self._engines = {}

    def _merge_if_last(self) -> None:
        parts = [part_path(self.target, rank) for rank in range(self._header.size)]

        def are_complete() -> bool:
            return all(has_ended(path, self._header.session) for path in parts)

        # Whoever ends last finds all parts complete. Others may at the same time: one of them gets the lock, and the
        # parts are gone when it gives it back.
        if not are_complete():
            return
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(parts[0], "rb"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (FileNotFoundError, BlockingIOError):
                return
            if are_complete():
                write_trace(self.target, parts)
                for path in parts:
                    os.unlink(path)

    @contextlib.contextmanager
    def _noting_faults(self) -> Any:
        try:
            yield
        except OSError as failure:
            self._fault = f"'{failure.filename or self._part.path}': {failure.strerror}."
        except ValueError as failure:
            self._fault = f"{failure}."
        if self._fault:
            log.once("timeline-fault", logging.ERROR, "the timeline cannot be written: %s", self._fault)


def _set_of(topology: Topology) -> int:
    return 0 if topology.inside is None else topology.inside.number


def _absolute(file_path: Any) -> tuple[str, str]:
    """The path that means the same on every worker, and what is wrong with it."""
    try:
        path = os.fspath(file_path)
    except TypeError:
        return "", f"file_path is a {type(file_path).__name__}, not a path."
    if not isinstance(path, str):
        return "", "file_path is bytes; pass a str."
    if not path or "\0" in path:
        return "", "file_path is empty." if not path else "file_path has a null character."
    path = os.path.abspath(path)
    try:
        length = len(os.fsencode(path))
    except UnicodeEncodeError as error:
        return "", f"file_path cannot be written down: {error}."
    return (path, "") if length < _LONGEST_PATH else ("", "file_path is too long.")


def _fault_of(target: str) -> str:
    """What would keep the finished file from its place: a device, for example, must not be replaced."""
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else f"'{target}' is not a regular file."


def _merge_command(target: str) -> str:
    return f"python -m kvstore_hvd.timeline merge {target}"


def _text(topology: Topology, operation: str, faults: list[str], fix: str) -> str:
    said = dict.fromkeys(filter(None, faults))
    details = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
    fact = next(iter(said)) if len(said) == 1 else "the timeline cannot be recorded."
    return message(
        fact,
        rank=topology.rank,
        size=topology.size,
        operation=operation,
        details=[] if len(said) == 1 else details,
        fix=fix,
    )

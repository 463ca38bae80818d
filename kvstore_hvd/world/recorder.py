"""Records this worker's operations, and makes one file of all workers' parts when the last part is complete.

No worker waits for another: each writes the last line of its part, and the worker that then finds all parts complete
makes the timeline. After the death of a worker the parts stay, for ``python -m kvstore_hvd.timeline merge``.
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
from kvstore_hvd.timeline import Header, PartWriter, has_ended, part_path, write_trace
from kvstore_hvd.world.topology import Topology, clock_ahead, exchange

# Seconds between two writings; a killed worker loses the operations of this time.
_PERIOD_S = 0.25
# Operations that the engine keeps between two writings: at most 8 MiB.
_CAPACITY = 1 << 16
# Bytes of a path.
_LONGEST_PATH = 4096


class Recorder:
    """This process's timelines, one after the other. One thread at a time; a forked child has none."""

    def __init__(self) -> None:
        self._recording: _Recording | None = None

    @property
    def is_recording(self) -> bool:
        """Whether a timeline is being recorded by this process."""
        return self._own() is not None

    def _own(self) -> _Recording | None:
        recording = self._recording
        return recording if recording is not None and recording.pid == os.getpid() else None

    def start(self, file_path: Any, mark_cycles: bool, engine: native.Engine | None, topology: Topology) -> None:
        """Begin to record; collective. It succeeds on all workers, or fails on all and leaves no file."""
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
        made.thread.start()

    def stop(self, engine: native.Engine | None, topology: Topology) -> None:
        """End the recording; collective. The file is there when it returns. Does nothing without a recording."""
        recording = self._own()
        if recording is None:
            return
        self._recording = None
        faults = exchange(engine, topology, "timeline/stop", recording.finish())
        if any(faults):
            fix = f"make room, then run `{_merge_command(recording.target)}`."
            raise KVHvdError(_text(topology, "stop_timeline", faults, fix))

    def finish(self) -> None:
        """End this worker's recording and log its faults. Not collective."""
        recording = self._own()
        self._recording = None
        if recording is not None and (fault := recording.finish()):
            command = _merge_command(recording.target)
            log.logger.error("the timeline could not be written: %s\n  Fix: make room, then run `%s`.", fault, command)

    def joined(self, engine: native.Engine | None, topology: Topology) -> None:
        """Record the operations of this world, during a recording; the world of a process set follows that of all."""
        recording = self._own()
        if recording is not None:
            recording.join(engine, topology)

    def left(self, topology: Topology | None = None) -> None:
        """Write the last operations of this world, or of all worlds, and record it no more."""
        recording = self._own()
        if recording is not None:
            recording.leave(topology)


class _Recording:
    """One timeline on this worker, with a thread that writes the engine's records."""

    def __init__(self, target: str, header: Header) -> None:
        self.target = target
        self.pid = header.pid
        self._header = header
        self._part = PartWriter(target, header)
        self._fault = ""  # the reason why nothing is written any more
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
            if topology.process_set is None:
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
        """End the recording; returns its fault."""
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

        # The last worker finds all parts complete. Two workers may end at the same time: one of them gets the lock, and
        # removes the parts before the other gets it.
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
    return 0 if topology.process_set is None else topology.process_set.number


def _absolute(file_path: Any) -> tuple[str, str]:
    """The absolute path, and its fault."""
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
    """The fault of a path whose file must not be replaced, as of a device."""
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else f"'{target}' is not a regular file."


def _merge_command(target: str) -> str:
    return f"python -m kvstore_hvd.timeline merge {target}"


def _text(topology: Topology, operation: str, faults: list[str], fix: str) -> str:
    first, *others = dict.fromkeys(filter(None, faults))
    fact, details = first, []
    if others:
        fact = "the timeline cannot be recorded."
        details = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
    return message(fact, rank=topology.rank, size=topology.size, operation=operation, details=details, fix=fix)

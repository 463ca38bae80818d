"""Records this worker's operations, and makes one file of all workers' parts when the last part is complete.

No worker waits for another: each writes the last line of its part, and the worker that then finds all parts complete
makes the timeline. After the death of a worker the parts stay: kvhvdrun makes the timeline at the end of the job, as it
does of an elastic job; else ``python -m kvstore_hvd.timeline merge``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from kvstore_hvd import log, native
from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, KVHvdError, message
from kvstore_hvd.timeline import Header, PartWriter, has_ended, part_path, write_trace
from kvstore_hvd.world.topology import Place, clock_ahead, exchange

# Seconds between two writings; a killed worker loses the operations of this time.
_PERIOD_S = 0.25
# Operations that the engine keeps between two writings: at most 8 MiB.
_CAPACITY = 1 << 16


class Recorder:
    """This process's timelines, one after the other, with a thread that writes the engine's records.

    One thread at a time calls it; a forked child has no timeline.
    """

    def __init__(self) -> None:
        self._target = ""  # the file of the latest recording
        self._part: PartWriter | None = None  # of the recording under way
        self._fault = ""  # the reason why nothing is written any more
        self._engines: dict[int, native.Engine] = {}  # by process set; 0: of all workers
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def is_recording(self) -> bool:
        """Whether a timeline is being recorded by this process."""
        return self._part is not None and self._header.pid == os.getpid()

    def start(self, file_path: Any, mark_cycles: bool, engine: native.Engine | None, topology: Place) -> None:
        """Begin to record; collective. It succeeds on all workers, or fails on all and leaves no file."""
        target, fault = _absolute(file_path)
        session = f"{config().job}-{secrets.token_hex(8)}"
        wish = {"target": target, "fault": fault, "mark": bool(mark_cycles), "session": session}
        agreed = json.loads(exchange(engine, topology, "timeline/start", json.dumps(wish, ensure_ascii=False))[0])
        target = agreed["target"]
        ahead_ns, error_ns = clock_ahead(engine, topology, "timeline/clock")
        who = agreed["session"], topology.rank, topology.size, topology.host, os.getpid(), agreed["mark"]
        header = Header(*who, ahead_ns=ahead_ns, error_ns=error_ns)
        was_recording, part = self.is_recording, None
        fault = agreed["fault"]
        if os.path.exists(target) and not os.path.isfile(target):  # such as a device
            fault = f"'{target}' is not a regular file."
        if was_recording:
            fault = f"a timeline is being recorded already, to '{self._target}'."
        try:
            if not fault:
                part = PartWriter(target, header)
        except OSError as failure:
            path = failure.filename or part_path(target, topology.rank)
            fault = f"'{path}' cannot be written: {failure.strerror}."
        try:
            faults = exchange(engine, topology, "timeline/started", fault)
            if any(faults):
                fix = "call stop_timeline() first." if was_recording else "give a path that all workers can write to."
                raise InvalidRequestError(_text(topology, "start_timeline", faults, fix))
        except BaseException:
            if part is not None:
                with contextlib.suppress(OSError):
                    part.discard()
            raise
        if topology.size == 1:
            log.once("timeline-alone", logging.WARNING, "the timeline will be empty: there is only one worker")
        assert part is not None
        self._begin(target, header, part)

    def follow(self, engine: native.Engine | None, topology: Place) -> None:
        """Have workers that came to an elastic job record like the others; collective, in each later world of it."""
        own = [self._target, self._header.session, self._header.mark_cycles] if self.is_recording else []
        ahead_ns = self._header.ahead_ns if self.is_recording else 0
        told = list(map(json.loads, exchange(engine, topology, "timeline/follow", json.dumps([*own, ahead_ns]))))
        if len(told[0]) == 1 or all(len(each) > 1 for each in told):  # rank 0 has been in the world before
            return
        ahead_of_first_ns, error_ns = clock_ahead(engine, topology, "timeline/clock")
        if own:
            return
        target, session, mark, ahead_ns = told[0]
        who = session, topology.rank, topology.size, topology.host, os.getpid(), mark
        times = {"ahead_ns": ahead_ns + ahead_of_first_ns, "error_ns": error_ns}
        header = Header(*who, **times, generation=topology.generation)
        try:
            self._begin(target, header, PartWriter(target, header))
        except OSError as failure:
            log.logger.warning("the timeline lacks this worker: '%s': %s", failure.filename or target, failure.strerror)

    def _begin(self, target: str, header: Header, part: PartWriter) -> None:
        self._target, self._header, self._part, self._fault = target, header, part, ""
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="kvstore_hvd-timeline", daemon=True)
        self._thread.start()

    def stop(self, engine: native.Engine | None, topology: Place) -> None:
        """End the recording; collective. The file is there when it returns. Does nothing without a recording."""
        if self.is_recording:
            faults = exchange(engine, topology, "timeline/stop", self._end())
            if any(faults):
                fix = f"make room, then run `python -m kvstore_hvd.timeline merge {self._target}`."
                raise KVHvdError(_text(topology, "stop_timeline", faults, fix))

    def finish(self) -> None:
        """End this worker's recording and log its faults. Not collective."""
        if self.is_recording and (fault := self._end()):
            text = "the timeline could not be written: %s\n  Fix: make room, then run `%s %s`."
            log.logger.error(text, fault, "python -m kvstore_hvd.timeline merge", self._target)

    def joined(self, engine: native.Engine | None, topology: Place) -> None:
        """Record the operations of this world, during a recording; the world of a process set follows that of all."""
        if not self.is_recording:
            return
        with self._lock:
            if not topology.set_number and not self._fault:
                with self._noting_faults() as part:
                    part.world(topology.generation)
            if engine is not None and not self._fault:
                self._engines[topology.set_number] = engine
                engine.start_timeline(_CAPACITY)

    def left(self, topology: Place | None = None) -> None:
        """Write the last operations of this world, or of all worlds, and record it no more."""
        if not self.is_recording:
            return
        with self._lock:
            left = [each for each in self._engines if topology is None or each == topology.set_number]
            for process_set in left:
                self._engines[process_set].stop_timeline()
            self._write()
            for process_set in left:
                self._engines.pop(process_set, None)

    def _end(self) -> str:
        """End the recording; returns its fault."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self.left()
            if not self._fault:
                with self._noting_faults() as part:
                    part.end()
                    self._merge_if_last()
            return self._fault
        finally:
            self._part = None

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
            with self._noting_faults() as part:
                part.add(events, lost, process_set)
        if self._fault:
            for engine in self._engines.values():
                engine.stop_timeline()
            self._engines = {}

    def _merge_if_last(self) -> None:
        if config().worker is not None:
            return  # of an elastic job: others may come
        parts = [part_path(self._target, rank) for rank in range(self._header.size)]

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
                write_trace(self._target, parts)
                for path in parts:
                    os.unlink(path)

    @contextlib.contextmanager
    def _noting_faults(self) -> Iterator[PartWriter]:
        part = self._part
        assert part is not None
        try:
            yield part
        except OSError as failure:
            self._fault = f"'{failure.filename or part.path}': {failure.strerror}."
        except ValueError as failure:
            self._fault = f"{failure}."
        if self._fault:
            log.once("timeline-fault", logging.ERROR, "the timeline cannot be written: %s", self._fault)


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
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        return "", f"file_path cannot be written down: {error}."
    return os.path.abspath(path), ""


def _text(topology: Place, operation: str, faults: list[str], fix: str) -> str:
    fact, *others = dict.fromkeys(filter(None, faults))
    details = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault and others]
    if others:
        fact = "the timeline cannot be recorded."
    return message(fact, rank=topology.rank, size=topology.size, operation=operation, details=details, fix=fix)

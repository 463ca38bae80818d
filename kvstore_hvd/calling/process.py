"""The launcher's process as its parent sees it: started, heard until it ends, ended when the parent is interrupted."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvstore_hvd.calling.programs import launcher_command
from kvstore_hvd.calling.reports import Report, Reports
from kvstore_hvd.calling.streams import OutputStream
from kvstore_hvd.errors import LaunchError, message

__all__ = ["run_launcher"]

# The end of the launcher shows itself by the end of the reports; unless somebody else holds their socket open.
_LOOK_S = 0.5


def run_launcher(
    arguments: Sequence[str], environment: dict[str, str], call: int, reports: Reports, hear: Callable[[Report], None]
) -> int:
    """Run kvhvdrun as a child process to its end, and pass its output on."""
    # Whatever interrupts the wait (Ctrl-C, a signal handler that raises, a stream that cannot be written) ends the job
    # first, and is raised when everything of it is gone. Another Ctrl-C meanwhile kills the workers.
    with ExitStack() as stack:
        streams = [OutputStream(sys.stdout), OutputStream(sys.stderr)]
        for stream in streams:
            stack.callback(stream.close)
        command = launcher_command(sys.executable, os.getpid(), call, reports.inherited, arguments)
        job = None
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=streams[0].inherited,
                stderr=streams[1].inherited,
                pass_fds=(call, reports.inherited),
                start_new_session=True,  # a terminal's Ctrl-C is for the program, which passes it on
            )
            job = _Job(process, streams, reports, hear)
            return job.wait()
        except BaseException as error:
            if job is not None:
                job.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            elif isinstance(error, OSError):
                fix = "see ulimit -u, ulimit -n and free memory."
                raise LaunchError(message(f"the launcher cannot be started: {error}.", fix=fix)) from None
            raise


class _Job:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        streams: Sequence[OutputStream],
        reports: Reports,
        hear: Callable[[Report], None],
    ) -> None:
        self._process = process
        self._streams = streams
        self._reports = reports
        self._hear = hear
        reports.given()
        for stream in streams:
            stream.given()

    def wait(self) -> int:
        """Hear all until the launcher has ended; returns its exit code."""
        while self._reports.is_open and self._process.poll() is None:
            self._turn(_LOOK_S)
        while self._process.poll() is None:  # it only has to end
            self._turn(_LOOK_S / 10)
        while self._turn(0):  # what it has left in the pipes
            pass
        return self._process.returncode

    def end(self, number: int) -> None:
        """Send the launcher a signal that ends the job, and wait for that; Ctrl-C makes it hurry."""
        self._process.send_signal(number)
        while True:
            try:
                self.wait()
                return
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)
            except Exception:  # noqa: BLE001 - what interrupted the job is raised already; most likely it is the same
                for stream in self._streams:
                    stream.drop()

    def _turn(self, seconds: float) -> bool:
        """Wait so long for something to happen, and do it; returns whether there was anything."""
        poll = select.poll()
        for stream in self._streams:
            if stream.fileno() >= 0:
                poll.register(stream.fileno(), select.POLLIN)
        if self._reports.is_open:
            poll.register(self._reports.fileno(), select.POLLIN)
        ready = {fd for fd, _ in poll.poll(int(seconds * 1000))}
        for stream in self._streams:
            if stream.fileno() in ready:
                stream.pass_on()
        if self._reports.is_open and self._reports.fileno() in ready:
            for report in self._reports.take():
                self._hear(report)
        return bool(ready)

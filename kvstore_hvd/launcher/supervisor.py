"""The loop of kvhvdrun: start workers, pass output and signals on, end all when one fails, clean up."""

from __future__ import annotations

import errno
import os
import signal
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from kvstore_hvd.base.clocks import LOOK_S, RunningClock
from kvstore_hvd.launcher import processes
from kvstore_hvd.launcher.belonging import LEFT_GRACE_S, Remains
from kvstore_hvd.launcher.guard import Guard
from kvstore_hvd.launcher.output_files import OutputFiles
from kvstore_hvd.launcher.plan import Plan, WorkerPlan, not_started
from kvstore_hvd.launcher.relay import Relay
from kvstore_hvd.launcher.signals import ENDING, PASSED, SignalInbox
from kvstore_hvd.launcher.workers import Worker, Workers

__all__ = ["Supervisor"]

_EXIT_LOST_OUTPUT = 1
# Once all processes are gone, how long a pipe may stay open (held by a process of another user).
_DRAIN_S = 2.0
# And how long whoever reads our output has at least, for the last words of workers that have taken all of their grace.
_LAST_WORDS_S = 1.0


class Supervisor:
    """Runs one job; use once. Call from the main thread, with no other threads running."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._clock = RunningClock()
        self._to_start = deque(enumerate(plan.workers))
        self._workers: Workers
        self._remains: Remains
        self._inbox: SignalInbox
        self._relay: Relay
        self._files: OutputFiles | None = None
        self._asked: int | None = None  # the first signal that asked the job to end
        self._lost_code = 0  # exit code for output that could not be written
        self._ending = False  # all workers have been told to end
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._drop_at: float | None = None  # when a signal that ended the job no longer waits for who reads our output
        self._gone_at: float | None = None  # when the last process of the job was gone
        self._drain_from = 0.0  # since then nothing but open pipes keeps us
        self._has_told = False  # who failed first, after all that the workers have written

    def run(self) -> int:
        """Run the job to its end."""
        processes.adopt_orphans()
        with ExitStack() as stack:
            if self._plan.output_folder is not None:
                self._files = stack.enter_context(OutputFiles(self._plan.output_folder, len(self._plan.workers)))
            try:
                self._inbox = stack.enter_context(SignalInbox())
                grace_s = min(LEFT_GRACE_S, self._plan.limits.kill_grace_s)
                guard = Guard(self._plan.variable, grace_s)
                stack.callback(guard.close)
            except OSError as error:
                raise not_started("a worker", error) from None
            self._workers = Workers(guard, grace_s)
            self._relay = Relay(self._inbox.fileno())
            stack.callback(self._relay.close)
            if self._files is not None:
                self._files.write_by(self._relay.new_writer())
            self._remains = Remains(self._plan.variable, grace_s, os.getpid(), lambda: [guard.pid])
            stack.callback(self._remains.finish)
            self._loop()
        return self._exit_code()

    # -- The loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            for worker in self._workers.reap():
                self._on_end(worker)
            now = self._clock.now()
            is_over = not self._workers.running and not self._to_start
            if self._gone_at is None and is_over and self._remains.step(now):
                self._gone_at = self._drain_from = now
            if self._relay.held_up:
                self._drain_from = now
            if self._gone_at is not None and (not self._relay.reading or now > self._drain_from + _DRAIN_S):
                self._relay.flush()
                if not self._has_told:
                    self._has_told = True
                    self._last_words()
                # In this order: a writer that fails has nothing pending afterwards.
                if not self._relay.pending and not self._hear_of_losses():
                    return
            self._act_on_time(now)
            if self._to_start:
                # One at a time: signals and failures count from the first worker on.
                self._start(*self._to_start.popleft())
                self._relay.wait(0)
            else:
                self._relay.wait(self._next_event(now))
            self._on_signals(self._inbox.take())
            self._hear_of_losses()

    def _start(self, rank: int, plan: WorkerPlan) -> None:
        worker = Worker(rank)
        prefix = f"[{rank}] ".encode() if self._plan.prefix else b""
        try:
            with ExitStack() as ends:
                stdin = stdout = stderr = None
                if rank > 0:
                    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                    ends.callback(os.close, stdin)
                if self._plan.capture:
                    stdout = self._relay.connect(1, prefix, *self._kept(rank, "stdout"))
                    ends.callback(os.close, stdout)
                    stderr = self._relay.connect(2, prefix, worker.tail.add, *self._kept(rank, "stderr"))
                    ends.callback(os.close, stderr)
                caller = self._plan.caller
                worker.pid = processes.spawn(
                    plan.command,
                    plan.environment,
                    stdin,
                    stdout,
                    stderr,
                    self._plan.variable,
                    plan.cores,
                    keep=() if caller is None else caller.descriptors,
                )
        except OSError as error:
            raise not_started("a worker", error) from None
        self._workers.add(worker)
        if self._plan.verbose:
            self._say(f"rank {rank} is process {worker.pid}")

    def _kept(self, rank: int, name: str) -> list[Callable[[bytes], None]]:
        """Who keeps what a worker writes, if anybody does."""
        return [self._files.keeper(rank, name)] if self._files is not None else []

    def _next_event(self, now: float) -> float | None:
        """Seconds until something must be done even if nothing happens; None for never."""
        known = (self._stop_at, self._kill_at, self._remains.look_at)
        times = [t for t in known if t is not None]
        if self._gone_at is not None and self._relay.reading and not self._has_told:
            times.append(self._drain_from + _DRAIN_S)
        if self._gone_at is not None and self._drop_at is not None:
            times.append(self._drop_at)
        wait_s = self._workers.wait_s()
        if wait_s is not None:
            times.append(now + wait_s)
        # With a limit to keep, the clock has to be looked at.
        return max(0.0, min(*times, now + LOOK_S) - now) if times else None

    def _act_on_time(self, now: float) -> None:
        if self._stop_at is not None and now >= self._stop_at:
            self._end(signal.SIGTERM, by_us=True)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._workers.signal(signal.SIGKILL, by_us=True)
        if self._asked is not None and self._drop_at is None:
            self._drop_at = now + self._plan.limits.kill_grace_s
        if self._drop_at is not None and self._gone_at is not None:
            self._drop_at = max(self._drop_at, self._gone_at + _LAST_WORDS_S)
            if now >= self._drop_at:
                self._relay.drop()

    # -- What happens ---------------------------------------------------------------------------------------------

    def _on_end(self, worker: Worker) -> None:
        if self._plan.verbose:
            self._say(f"rank {worker.rank} {worker.ending}")
        if worker.code != 0 and not self._ending and self._stop_at is None:
            self._stop_at = self._clock.now() + self._plan.limits.survivor_time_s

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in ENDING:
                if number == signal.SIGINT and self._asked == signal.SIGINT:
                    self._workers.signal(signal.SIGKILL, by_us=True)
                    if self._gone_at is not None:  # only the reader of our output keeps us
                        self._relay.drop()
                else:
                    self._asked = self._asked or number
                    self._end(number, by_us=False)
            elif number in PASSED:
                self._workers.signal(number)
            elif number == signal.SIGTSTP:
                self._workers.signal(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                self._workers.signal(signal.SIGCONT)
            elif number == signal.SIGWINCH:
                self._relay.resize()

    def _hear_of_losses(self) -> bool:
        """Act on output that could not be written; returns whether there was any."""
        streams = self._relay.take_lost()
        for fd, error in streams:
            self._on_lost(fd, error)
        files = self._files.take_lost() if self._files is not None else []
        for text in files:
            self._lost_code = self._lost_code or _EXIT_LOST_OUTPUT
            self._say(f"{text}. What follows is lost there.")
        return bool(streams or files)

    def _on_lost(self, fd: int, error: OSError) -> None:
        """One of our streams can be written no longer."""
        if error.errno == errno.EPIPE:
            # The reader has gone. Alone, the program would end by SIGPIPE; so does the job.
            self._lost_code = 128 + signal.SIGPIPE
            self._end(signal.SIGTERM, by_us=True)
            return
        # A full disk is no reason to lose the work as well.
        self._lost_code = self._lost_code or _EXIT_LOST_OUTPUT
        name = "standard error" if fd == 2 else "standard output"
        self._say(f"{name} cannot be written: {error.strerror}. What the workers write there from here on is lost.")

    def _end(self, number: int, *, by_us: bool) -> None:
        """Tell all workers to end, and start no more of them; who still runs after the grace is killed."""
        self._ending = True
        self._to_start.clear()
        self._stop_at = None
        self._workers.signal(number, by_us=by_us)
        if self._kill_at is None:
            self._kill_at = self._clock.now() + self._plan.limits.kill_grace_s

    # -- The end --------------------------------------------------------------------------------------------------

    def _exit_code(self) -> int:
        if self._asked is not None:
            return 128 + self._asked
        culprit = self._workers.culprit()
        return culprit.exit_code if culprit is not None else self._lost_code

    def _last_words(self) -> None:
        worker = self._workers.culprit()
        if worker is None or worker.code is None or self._asked is not None:
            return
        count = len(self._plan.workers)
        text = f"rank {worker.rank} of {count} (pid {worker.pid}) {worker.ending}."
        if self._plan.caller is not None:
            self._plan.caller.tell(text)  # its last lines have just been seen
            return
        if not self._plan.capture and worker.code > 0:
            return  # its words have just been seen
        lines = worker.tail.lines()
        if count > 1:
            text += " Its last lines on stderr:" if lines else " It wrote nothing to stderr."
        self._relay.tell(f"kvhvdrun: {text}".encode(), *(b"    " + line for line in lines))

    def _say(self, text: str) -> None:
        self._relay.say(text)

"""The loop of an elastic job: hears daemons, the discovery of hosts and signals, and does what the job decides."""

from __future__ import annotations

import errno
import logging
import os
import signal
from contextlib import ExitStack
from typing import Any

from kvstore_hvd.base.clocks import LOOK_S, RunningClock
from kvstore_hvd.horovod.variables import of_worker
from kvstore_hvd.launch.connections import Connections
from kvstore_hvd.launch.daemons import Daemons
from kvstore_hvd.launch.discovery import DiscoveryError
from kvstore_hvd.launch.events import EventLog
from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.news import event_text, news_text
from kvstore_hvd.launch.options import ElasticPlan
from kvstore_hvd.launch.shares import Shares
from kvstore_hvd.launch.state import EXIT_FAILED, End, Kill, Note, Start, Tell
from kvstore_hvd.launch.status import StatusLine
from kvstore_hvd.launcher import processes
from kvstore_hvd.launcher.belonging import LEFT_GRACE_S, Remains
from kvstore_hvd.launcher.hosts import is_here
from kvstore_hvd.launcher.plan import EXIT_NOT_STARTED, not_started
from kvstore_hvd.launcher.reaper import reap
from kvstore_hvd.launcher.relay import Relay, RelayHandler
from kvstore_hvd.launcher.signals import ENDING, PASSED, SignalInbox
from kvstore_hvd.log import logger

__all__ = ["ElasticDriver"]

# A daemon may take this much longer to end than its workers.
_DAEMON_ENDS_S = 3.0
_KILL_TAKES_S = 2.0
# Once all processes are gone, how long a pipe may stay open (held by a process of another user).
_DRAIN_S = 2.0
# And how long whoever reads our output has at least, for the last words of workers that have taken all of their grace.
_LAST_WORDS_S = 1.0
# How long the event log may take to be written then.
_LOG_S = 30.0
# Between two looks whether it is.
_GLANCE_S = 0.02


class ElasticDriver:
    """Runs one elastic job; use once. Call from the main thread, with no other threads running."""

    def __init__(self, plan: ElasticPlan) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._secret = os.urandom(32).hex()  # by which workers know each other
        self._clock = RunningClock()
        # Workers are judged by a clock that goes on only while all daemons are heard: they bring what a worker says.
        self._job_now = self._looked_at = self._clock.now()
        self._job = Job(plan.settings, self._job_now)
        self._shares = Shares(plan.bind_cores, plan.environment, plan.settings.max_np)
        self._discovery_fails_since: float | None = None
        self._discovered = False
        self._strange_hosts: set[str] = set()
        self._last_event = ""
        self._asked: int | None = None  # the first signal that asked the job to end
        self._lost_code = 0  # exit code for output that could not be written
        self._end: End | None = None
        self._stop_at: float | None = None  # workers that still run are ended then
        self._give_up_at: float | None = None  # daemons that still run are killed then
        self._drop_at: float | None = None  # when a signal that ended the job no longer waits for who reads our output
        self._gone_at: float | None = None  # when the last daemon was gone
        self._drain_from = 0.0  # since then nothing but open pipes keeps us
        self._code: int | None = None  # of the job, once its end has been told
        self._inbox: SignalInbox
        self._connections: Connections
        self._relay: Relay
        self._daemons: Daemons
        self._remains: Remains
        self._log: EventLog
        self._status: StatusLine

    def run(self) -> int:
        """Run the job to its end."""
        processes.adopt_orphans()
        with ExitStack() as stack:
            self._log = stack.enter_context(EventLog(self._plan.event_log))
            stack.callback(self._plan.discovery.close)
            try:
                self._plan.discovery.start()
                self._inbox = stack.enter_context(SignalInbox())
            except OSError as error:
                raise not_started("the launcher", error) from None
            self._connections = Connections(self._inbox)
            stack.callback(self._connections.close_all)
            self._relay = Relay(self._connections.fileno())
            stack.callback(self._relay.close)
            handler = RelayHandler(self._relay)
            logging.getLogger().addHandler(handler)
            stack.callback(logging.getLogger().removeHandler, handler)
            self._status = StatusLine(self._relay)
            self._daemons = Daemons(self._plan, self._relay, self._connections)
            grace_s = min(LEFT_GRACE_S, self._settings.kill_grace_s)
            self._remains = Remains(f"KVHVD_JOB={self._settings.job}".encode(), grace_s, os.getpid())
            stack.callback(self._remains.finish)
            stack.callback(self._plan.discovery.close)  # first: it has a guard of its own
            while not self._done():
                self._turn()
            return self._code or self._lost_code

    # -- The loop -------------------------------------------------------------------------------------------------

    def _look_at_clock(self) -> float:
        now = self._clock.now()
        if not self._daemons.are_silent(now):
            self._job_now += now - self._looked_at
        self._looked_at = now
        return now

    def _turn(self) -> None:
        self._act_on_time(self._look_at_clock())
        self._act()
        workers = len(self._job.workers.running)
        generation = self._job.generation
        self._status.update(
            f"kvhvdrun: generation {generation.number}, {len(generation.left)} of {workers} workers; {self._last_event}"
            if generation.begun
            else f"kvhvdrun: {workers} workers start; {self._last_event}"
        )
        self._connections.arm()
        self._relay.wait(self._next_event(self._look_at_clock()))
        self._on_signals(self._inbox.take())
        now = self._look_at_clock()
        for line in self._connections.ready():
            for message in self._daemons.hear(line, now):
                self._take(message)
        self._reap()
        self._hear_of_losses()

    def _next_event(self, now: float) -> float:
        """Seconds until something must be done even if nothing happens."""
        times = [
            self._daemons.deadline(),
            self._plan.discovery.deadline() if self._end is None else None,
            self._stop_at,
            self._give_up_at,
            self._remains.look_at,
            None if self._gone_at is None or self._code is not None else self._drain_from + _DRAIN_S,
            None if self._code is None else now + _GLANCE_S,
        ]
        deadline = self._job.deadline(self._job_now)
        waits = [LOOK_S, *(time - now for time in times if time is not None)]
        return max(0.0, min(waits if deadline is None else [*waits, deadline - self._job_now]))

    def _act_on_time(self, now: float) -> None:
        self._daemons.act_on_time(now, lambda host, why: self._job.host_lost(host, why, self._job_now))
        if self._end is None:
            self._discover(now)
            self._job.tick(self._job_now)
        elif self._stop_at is not None and (now >= self._stop_at or not self._job.workers.running):
            self._stop_at, self._give_up_at = None, now + self._settings.kill_grace_s + _DAEMON_ENDS_S
            self._daemons.end(self._end.reason)
        if self._give_up_at is not None and self._relay.held_up and self._asked is None:
            self._give_up_at = max(self._give_up_at, now + _DAEMON_ENDS_S)  # they wait for us to read
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = now + _KILL_TAKES_S
            self._daemons.give_up()
        if self._asked is not None and self._drop_at is None:
            self._drop_at = now + self._settings.kill_grace_s
        if self._drop_at is not None:
            # Daemons end when we have read all of theirs: they are no reason to wait for longer than a second, either.
            gone_at = self._drop_at if self._gone_at is None else self._gone_at
            if now >= max(self._drop_at, gone_at + _LAST_WORDS_S):
                self._relay.drop()

    def _done(self) -> bool:
        if self._end is None or self._stop_at is not None or self._daemons:
            return False
        now = self._look_at_clock()
        if self._gone_at is None:
            self._plan.discovery.close()
            if not self._remains.step(now):
                return False
            self._gone_at = self._drain_from = now
        if self._relay.held_up:
            self._drain_from = now
        if self._relay.reading and now <= self._drain_from + _DRAIN_S:
            return False
        self._relay.flush()
        self._status.erase()
        if self._code is None:
            self._code = self._farewell()
        limit_s = _LOG_S if self._asked is None else self._settings.kill_grace_s
        if self._log.pending and now <= self._gone_at + limit_s:
            return False
        self._log.finish()
        # In this order: a writer that fails has nothing pending afterwards.
        return not self._relay.pending and not self._hear_of_losses()

    def _discover(self, now: float) -> None:
        try:
            hosts = self._plan.discovery.poll(now)
        except DiscoveryError as error:
            # Said once, and at the end: it is tried again every second.
            is_news = self._discovered and self._discovery_fails_since is None
            self._note("discovery_failed", {"text": str(error)}, is_news=is_news)
            if self._discovery_fails_since is None:
                self._discovery_fails_since = now
            limit = self._settings.elastic_timeout_s
            if not self._discovered:
                self._job.give_up(f"{error}.")
            elif now - self._discovery_fails_since >= limit:
                self._job.give_up(f"{error}; it has failed for {limit:g} s.")
            return
        if hosts is None:
            return
        self._discovered, self._discovery_fails_since = True, None
        for host in hosts.keys() - self._strange_hosts:
            if not is_here(host):
                self._strange_hosts.add(host)
                self._say(f"'{host}' is another host, and kvhvdrun uses this one only.")
        self._job.hosts(
            {host: count for host, count in hosts.items() if host not in self._strange_hosts}, self._job_now
        )

    # -- What the job decides -------------------------------------------------------------------------------------

    def _act(self) -> None:
        while actions := self._job.take():
            for action in actions:
                if isinstance(action, Note):
                    self._note(action.event, action.fields)
                elif isinstance(action, Start):
                    self._start(action)
                elif isinstance(action, Tell):
                    self._send(action.worker, {"t": "to", "worker": action.worker, "message": action.message})
                elif isinstance(action, Kill):
                    number, ended = int(action.number), action.ended
                    self._send(
                        action.worker, {"t": "signal", "worker": action.worker, "signal": number, "ended": ended}
                    )
                elif self._end is None:
                    self._begin_end(action, self._settings.survivor_time_s if action.reason else 0.0)

    def _start(self, action: Start) -> None:
        host = action.slot.host
        try:
            self._daemons.start(host, self._look_at_clock())
        except OSError as error:
            self._job.host_lost(host, f"its daemon could not be started: {error}", self._job_now)
            return
        environment, cores = self._shares.of(action.slot, self._job.slots)
        environment.update(
            KVHVD_JOB=self._settings.job,
            KVHVD_SECRET=self._secret,
            KVHVD_WORKER=str(action.worker),
            KVHVD_SLOT=str(action.slot),
            **of_worker(host, self._job.seat(action.worker)),
        )
        start = {
            "t": "start",
            "worker": action.worker,
            "command": list(self._plan.command),
            "environment": {**self._plan.environment, **environment},
            "cores": list(cores),
        }
        self._daemons.send(host, start)

    def _send(self, worker: int, message: dict[str, Any]) -> None:
        known = self._job.workers.get(worker)
        if known is not None:
            self._daemons.send(known.slot.host, message)

    def _begin_end(self, end: End, grace_s: float) -> None:
        """No more decisions: what still runs after the grace is ended, and then the daemons."""
        self._end = end
        self._stop_at = self._look_at_clock() + grace_s

    # -- What happens ---------------------------------------------------------------------------------------------

    def _take(self, message: dict[str, Any]) -> None:
        kind, now = message["t"], self._job_now
        if kind == "started":
            self._job.started(message["worker"], message["pid"], now)
        elif kind == "not_started":
            self._job.exited(message["worker"], EXIT_NOT_STARTED, [message["text"]], now)
        elif kind == "exited":
            self._job.exited(message["worker"], message["code"], message["lines"], now)
        elif kind == "from":
            try:
                self._job.heard(message["worker"], message["message"], now)
            except (ValueError, TypeError, LookupError) as error:
                logger.warning("worker %d says what makes no sense: %r", message["worker"], error)

    def _reap(self) -> None:
        """Collect every child that has ended, adopted orphans too."""
        for pid, code in reap():
            self._daemons.reaped(pid, code)
            self._plan.discovery.reaped(pid, code)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in ENDING:
                if number == signal.SIGINT and self._asked == signal.SIGINT:
                    self._signal_all(signal.SIGKILL, ended=True)
                    if self._gone_at is not None:  # only the reader of our output keeps us
                        self._relay.drop()
                else:
                    self._asked = self._asked or number
                    self._end_by(number)
            elif number in PASSED:
                self._signal_all(number)
            elif number == signal.SIGTSTP:
                self._stop()
            elif number == signal.SIGCONT:
                self._signal_all(signal.SIGCONT)
            elif number == signal.SIGWINCH:
                self._relay.resize()
                self._signal_all(signal.SIGWINCH)

    def _stop(self) -> None:
        """Ctrl-Z: stop the workers, then ourselves. Their daemons wait for us."""
        self._signal_all(signal.SIGSTOP)
        self._status.erase()
        self._relay.wait(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _end_by(self, number: int) -> None:
        """A signal ends the job: the workers get it too."""
        self._job.stop()
        self._signal_all(number, ended=True)
        if self._end is None:
            self._begin_end(End(0), self._settings.kill_grace_s)

    def _signal_all(self, number: int, *, ended: bool = False) -> None:
        self._daemons.send_all({"t": "signal", "worker": None, "signal": int(number), "ended": ended})

    def _hear_of_losses(self) -> bool:
        """Act on output and events that could not be written; returns whether there were any."""
        streams, events = self._relay.take_lost(), self._log.take_lost()
        for fd, error in streams:
            self._on_lost_output(fd, error)
        for text in events:
            self._lost_code = self._lost_code or EXIT_FAILED
            self._say(text)
        return bool(streams or events)

    def _on_lost_output(self, fd: int, error: OSError) -> None:
        """One of our streams can be written no longer."""
        if error.errno == errno.EPIPE:
            # The reader has gone. Alone, the program would end by SIGPIPE; so does the job.
            self._lost_code = 128 + signal.SIGPIPE
            self._end_by(signal.SIGTERM)
            return
        # A full disk is no reason to lose the work as well.
        self._lost_code = self._lost_code or EXIT_FAILED
        name = "standard error" if fd == 2 else "standard output"
        self._say(f"{name} cannot be written: {error.strerror}. What the workers write there from here on is lost.")

    # -- The end --------------------------------------------------------------------------------------------------

    def _farewell(self) -> int:
        """Say why the job has ended; returns its exit code."""
        end = self._end or End(EXIT_FAILED)
        code = 128 + self._asked if self._asked is not None else end.code or self._lost_code
        reason = f"signal {signal.Signals(self._asked).name}" if self._asked is not None else end.reason
        self._note("job_end", {"code": code, "reason": reason})
        if end.reason and self._asked is None:
            if self._plan.caller is None:
                self._relay.say("\n    ".join((end.reason, *end.details)))
            else:
                self._plan.caller.tell(end.reason)  # the last lines of who failed have been seen
        return code

    # -- Saying ---------------------------------------------------------------------------------------------------

    def _note(self, event: str, fields: dict[str, Any], *, is_news: bool = True) -> None:
        self._log.write(event, fields)
        self._last_event = event_text(event, fields)
        if event == "job_end":
            return  # has its own words
        if self._plan.verbose:
            self._say(self._last_event)
        elif is_news and self._end is None:  # from then on, workers end because they are told to
            text = news_text(event, fields, self._job)
            if text:
                self._say(text)

    def _say(self, text: str) -> None:
        self._relay.say(text)

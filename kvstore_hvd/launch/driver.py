"""The loop of kvhvdrun: hears daemons, the discovery of hosts and signals, and does what the job decides."""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_hvd.base.channel import ChannelError
from kvstore_hvd.base.clocks import LOOK_S, RunningClock
from kvstore_hvd.base.cores import usable_cores
from kvstore_hvd.config import config
from kvstore_hvd.errors import message, printable
from kvstore_hvd.horovod.variables import Seat, of_worker
from kvstore_hvd.launch import processes
from kvstore_hvd.launch.connections import Poller
from kvstore_hvd.launch.daemons import Daemons
from kvstore_hvd.launch.discovery import HERE, HostDiscoveryScript
from kvstore_hvd.launch.hosts import is_here, look_up, machine_of, shell_command, travelling
from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.output import Output
from kvstore_hvd.launch.state import (
    EXIT_FAILED,
    EXIT_NOT_STARTED,
    End,
    Kill,
    Note,
    Settings,
    Slot,
    Start,
    StartError,
    Tell,
)

# A daemon may take this much longer to end than its workers.
_DAEMON_ENDS_S = 3.0
_KILL_TAKES_S = 2.0
# From the end of a shell that has not reached its host to the next try.
_AGAIN_S = 1.0
# How long whoever reads our output has at least, for the last words of workers that have taken all of their grace.
_LAST_WORDS_S = 1.0
# How long the event log may take to be written at the end.
_LOG_S = 30.0
_SCARCE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_FIXES = dict.fromkeys(_SCARCE, "see ulimit -u, ulimit -n and free memory.")
_FIXES[errno.ENOEXEC] = "a script's first line names its interpreter, such as #!/bin/sh."


class Plan(NamedTuple):
    """How to run a job. `environment` is that of the workers, but for what differs between them."""

    settings: Settings
    options: Namespace  # as they were given
    command: Sequence[str]
    environment: dict[str, str]
    hosts: Mapping[str, int]
    script: HostDiscoveryScript | None  # that tells the hosts instead
    capture: bool  # False: the worker writes straight to the launcher's streams
    shell: Sequence[str]  # the words that run a command on another host; empty: there is only this one
    tell: Callable[[str, str], None] | None  # a program that calls a function, see launch/call.py


def environment_of(plan: Plan, worker: int, slot: Slot, seat: Seat, secret: str) -> dict[str, str]:
    """The environment of a worker; `seat` is its place in its first world."""
    own = {"KVHVD_JOB": plan.settings.job, "KVHVD_SECRET": secret, "KVHVD_SLOT": str(slot)}
    if plan.settings.is_static:
        names = ("KVHVD_RANK", "KVHVD_SIZE", "KVHVD_LOCAL_RANK", "KVHVD_LOCAL_SIZE")
        own.update(zip(names, map(str, seat)), KVHVD_GENERATION="0")
    else:
        own["KVHVD_WORKER"] = str(worker)
    return {**plan.environment, **own, **of_worker(slot.host, seat)}


class Driver:
    """Runs one job; use once. Call from the main thread, with no other threads running."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._secret = os.urandom(32).hex()  # by which workers know each other
        self._poller = Poller()
        self._output = Output(self._poller, plan.options, plan.settings.max_np)
        self._clock = RunningClock()
        # Workers are judged by a clock that goes on only while all daemons are heard: they bring what a worker says.
        self._job_now = self._looked_at = self._clock.now()
        self._job = Job(plan.settings, self._job_now, self._output.last_lines)
        self._threads = 0  # of OpenMP, for each worker; 0: not settled yet
        self._discovery_fails_since = math.inf
        self._discovered = False
        # Hosts of a static job whose daemons have not come, and why; when those are tried again that may come yet.
        self._missing: dict[str, str] = {}
        self._again: dict[str, float] = {}
        self._missing_until = math.inf
        self._last_event = ""
        self._not_started: StartError | None = None
        self._asked: int | None = None  # the first signal that asked the job to end
        self._lost_code = 0  # exit code for output that could not be written
        self._end: End | None = None
        self._end_grace_s = 0.0  # for workers that run when the job ends
        self._give_up_at = math.inf  # when daemons are killed that have not ended
        self._drop_at = math.inf  # when a signal that ended the job no longer waits for who reads our output
        self._is_gone = False  # the last process of the job

    def run(self) -> int:
        plan, settings = self._plan, self._settings
        processes.adopt_orphans()
        self._spare = processes.children()  # a shell that has started them may have become this process
        self._inbox = processes.SignalInbox()
        self._poller.watch(self._inbox.fileno(), lambda: None)
        self._daemons = Daemons(self._poller, self._clock, settings, plan.shell, self._take)
        if plan.script is None:
            self._take_hosts(plan.hosts)
        else:
            plan.script.daemons = self._daemons
        while self._end is None:
            self._turn()
        code = self._finish(self._end)
        if self._not_started is not None and self._asked is None:
            raise self._not_started
        return code or self._lost_code

    def _finish(self, end: End) -> int:
        """End what still runs, pass on what it has written, and say why the job has ended; returns its exit code."""
        grace_s = self._settings.kill_grace_s
        begin = self._look_at_clock()
        while self._job.running and self._look_at_clock() < begin + self._end_grace_s:
            self._turn(begin + self._end_grace_s)
        self._daemons.end(end.reason)
        # Workers that a signal has ended have had their grace.
        limit_s = _DAEMON_ENDS_S if self._asked is not None else grace_s + _DAEMON_ENDS_S
        self._give_up_at = min(self._give_up_at, self._look_at_clock() + limit_s)
        while self._daemons:
            now = self._look_at_clock()
            if self._output.held_up and self._asked is None:
                self._give_up_at = max(self._give_up_at, now + _DAEMON_ENDS_S)  # they wait for us to read
            if now >= self._give_up_at:
                self._give_up_at = now + _KILL_TAKES_S
                self._daemons.give_up()
            self._turn(self._give_up_at)
        # What daemons have left that were killed together with their guards.
        for pause_s in processes.end_children(min(processes.LEFT_GRACE_S, grace_s), self._spare):
            time.sleep(pause_s)
        gone_at, self._is_gone = self._look_at_clock(), True
        if self._asked is not None:
            self._drop_at = max(self._drop_at - _LAST_WORDS_S, gone_at + _LAST_WORDS_S)
        self._output.flush_lines()
        self._output.show("")
        code = self._farewell(end)
        self._output.step()
        # In this order: what fails has nothing pending afterwards.
        while self._output.pending or self._hear_of_losses():
            self._turn()
            if self._look_at_clock() > gone_at + (_LOG_S if self._asked is None else grace_s):
                self._output.finish_log()
        for number in processes.PASSED:  # Python's own end would let them kill this process again
            signal.signal(number, signal.SIG_IGN)
        return code if self._asked is None else 128 + self._asked

    # -- The loop -------------------------------------------------------------------------------------------------

    def _look_at_clock(self) -> float:
        now = self._clock.now()
        if not self._daemons.are_silent():
            self._job_now += now - self._looked_at
        self._looked_at = now
        return now

    def _turn(self, until: float = math.inf) -> None:
        """Do what is due, and wait for what happens, until then at most."""
        now, end = self._look_at_clock(), self._end
        until = min(until, self._drop_at, self._daemons.act_on_time(self._on_lost_host))
        if now >= self._drop_at:
            self._drop_at = math.inf
            self._output.drop()
        if end is None:
            until = min(until, self._look_after_job(now))
        self._act()
        if end is None and self._end is not None:
            return
        if not self._settings.is_static and not self._is_gone:
            self._show_status()
        wait_s = min(LOOK_S, self._output.step())
        if not self._output.held_up:
            self._daemons.acknowledge()
        self._poller.wait(min(wait_s, until - self._look_at_clock()))
        self._look_at_clock()
        self._on_signals(self._inbox.take())
        for pid, code in processes.reap():
            self._daemons.reaped(pid, code)
        self._hear_of_losses()

    def _look_after_job(self, now: float) -> float:
        """Find out the hosts, and let the job decide; returns when to do so again even if nothing happens."""
        script, until = self._plan.script, math.inf
        if script is not None:
            self._discover(script, now)
            self._job.hosts_fault = script.fault(now)
            until = script.starts_at()
        # All hosts of a static job are there before its first worker starts.
        is_first = self._settings.is_static and not self._job.workers
        if is_first and self._missing:
            until = self._await_hosts(now)
        elif not is_first or not self._daemons.are_awaited():
            self._job.tick(self._job_now)
        self._act()
        return min(until, now + self._job.wake_at - self._job_now)

    def _show_status(self) -> None:
        workers, generation = len(self._job.running), self._job.generation
        self._output.show(
            f"kvhvdrun: generation {generation.number}, {len(generation.left)} of {workers} workers; {self._last_event}"
            if generation.begun
            else f"kvhvdrun: {workers} workers start; {self._last_event}"
        )

    # -- Hosts ----------------------------------------------------------------------------------------------------

    def _discover(self, script: HostDiscoveryScript, now: float) -> None:
        try:
            hosts = script.poll(now)
        except StartError as error:
            # Said once, and at the end: it is tried again every second.
            is_news = self._discovered and self._discovery_fails_since == math.inf
            self._note(Note("discovery_failed", {"text": str(error)}, str(error) if is_news else ""))
            self._discovery_fails_since = min(self._discovery_fails_since, now)
            limit = self._settings.elastic_timeout_s
            if not self._discovered:
                self._job.give_up(str(error), error.code)
            elif now - self._discovery_fails_since >= limit:
                self._job.give_up(f"there have been no hosts for {limit:g} s: {error}", error.code)
            return
        if hosts is not None:
            look_up(hosts)
            self._discovered, self._discovery_fails_since = True, math.inf
            self._take_hosts(hosts)

    def _take_hosts(self, hosts: Mapping[str, int]) -> None:
        self._job.hosts(hosts, self._job_now)
        if self._settings.is_static and self._plan.shell:
            for host in dict.fromkeys(slot.host for slot in self._job.static_slots):
                self._start_daemon(host)
            self._missing_until = self._clock.now() + self._settings.start_timeout_s

    def _start_daemon(self, host: str) -> None:
        try:
            self._daemons.start(host)
        except OSError as error:
            self._missing[host] = f"its daemon could not be started: {error}"
            self._again.pop(host, None)

    def _on_lost_host(self, host: str, why: str, may_come: bool) -> None:
        if host == HERE and self._plan.script is not None:
            self._plan.script.lost(f"was lost: {why}")
        if self._settings.is_static and not self._job.workers:
            self._missing[host] = why
            if may_come and not self._again:
                limit = f"{self._settings.start_timeout_s:g} s (--start-timeout)"
                self._output.say(f"host {host} is not there yet, and is tried again for {limit}: {why}.")
            self._again.pop(host, None)
            if may_come:
                self._again[host] = self._clock.now() + _AGAIN_S
            return
        self._job.host_lost(host, why, self._job_now)

    def _await_hosts(self, now: float) -> float:
        """Try hosts again that may come yet, or end the job without them; returns when to do so again."""
        is_hopeless = self._missing.keys() != self._again.keys()
        if now >= self._missing_until or (is_hopeless and not self._daemons.are_awaited()):
            self._refuse_hosts()
            return math.inf
        for host in [host for host, at in self._again.items() if now >= at and not is_hopeless]:
            self._again[host] = math.inf
            self._start_daemon(host)
        return min([self._missing_until, *([] if is_hopeless else self._again.values())])

    def _refuse_hosts(self) -> None:
        """A static job does not begin without one of its hosts."""
        hosts = [host for host in dict.fromkeys(slot.host for slot in self._job.static_slots) if host in self._missing]
        details = [f"{host}: {self._missing[host]}" for host in hosts]
        words = shell_command(self._plan.shell, hosts[0], [sys.executable, "--version"])
        fix = f"try {' '.join(words)}; Python and this package have the same path on every host."
        if self._again:
            fix += " --start-timeout (seconds) gives hosts more time to come up."
        fact = f"the job cannot start on {len(details)} of its hosts."
        self._not_started = StartError(message(fact, details=details, fix=fix))
        self._job.give_up("")

    # -- What the job decides -------------------------------------------------------------------------------------

    def _act(self) -> None:
        while actions := self._job.take():
            for action in actions:
                if isinstance(action, Note):
                    self._note(action)
                elif isinstance(action, Start):
                    self._start(action)
                elif isinstance(action, Tell):
                    self._send(action.worker, "to", message=action.message)
                elif isinstance(action, Kill):
                    self._send(action.worker, "signal", signal=int(action.number), ended=action.ended)
                elif self._end is None:
                    # In a static job the others have had their time.
                    waits = action.reason and not self._settings.is_static
                    self._end, self._end_grace_s = action, self._settings.survivor_time_s if waits else 0.0

    def _start(self, action: Start) -> None:
        plan, settings, slot, number = self._plan, self._settings, action.slot, action.worker
        if self._job.workers[number].lost:
            return  # its host was lost when the start of another worker failed
        try:
            self._daemons.start(slot.host)
        except OSError as error:
            if settings.is_static:
                self._refuse(slot.host, error.errno, str(error))
            else:
                self._job.host_lost(slot.host, f"its daemon could not be started: {error}", self._job_now)
            return
        seat = self._job.seat(number)
        environment = environment_of(plan, number, slot, seat, self._secret)
        place, count = seat.local_rank, seat.local_size
        hosts = [each.host for each in self._job.static_slots] if settings.is_static else [slot.host]
        can_be_several = plan.shell and (not settings.is_static or len(set(map(machine_of, hosts))) > 1)
        are_several = bool(can_be_several or config().test_hosts)
        if are_several:
            environment["KVHVD_HOSTS"] = ",".join(socket.gethostname() if is_here(host) else host for host in hosts)
        if not settings.is_static:
            place, count = slot.index, max(slot.index + 1, sum(each.host == slot.host for each in self._job.slots))
        is_alone = settings.is_static and settings.max_np == 1
        if not is_alone and not environment.get("OMP_NUM_THREADS"):
            # Each worker's OpenMP would start a thread per core, and all would slow down. Settled once: sums of workers
            # with different numbers of threads could differ in their last bits.
            machines = [machine_of(each.host) for each in list(self._job.slots)[: settings.max_np]]
            self._threads = self._threads or max(1, len(usable_cores()) // max(map(machines.count, machines)))
            environment["OMP_NUM_THREADS"] = str(self._threads)
        prefix = f"[{number}] ".encode() if not is_alone and not plan.options.no_prefix else b""
        sent = {text.partition("=")[0] for text in plan.options.x}  # to other hosts, although they belong to a host
        if plan.capture:
            self._output.add(number, prefix)
        self._daemons.send(
            slot.host,
            "start",
            worker=number,
            command=list(plan.command),
            environment=environment if is_here(slot.host) else travelling(environment, sent),
            share=[place, count] if plan.options.bind_cores else [],
            line=are_several or not settings.is_static,
            stdin=settings.is_static and number == 0,  # on another host that of the daemon, which is empty
            capture=plan.capture,
        )

    def _refuse(self, host: str, number: int | None, text: str) -> None:
        fix = _FIXES.get(number or 0, "see the reason; a sandbox may forbid it.")
        where = "" if is_here(host) else f" on {host}"
        self._not_started = StartError(message(f"a worker could not be started{where}: {text}.", fix=fix))
        self._job.give_up("")

    def _send(self, worker: int, kind: str, **fields: Any) -> None:
        self._daemons.send(self._job.workers[worker].slot.host, kind, worker=worker, **fields)

    # -- What happens ---------------------------------------------------------------------------------------------

    def _take(self, host: str, message: dict[str, Any]) -> None:
        kind, now, number = message["t"], self._job_now, message.get("worker", 0)
        if "worker" in message and not self._is_of(host, number):
            raise ChannelError(f"it speaks for worker {number}, which is none of its own.")
        if number < 0:
            assert self._plan.script is not None
            self._plan.script.heard(message)
        elif kind == "up":
            self._missing.pop(host, None)
            self._again.pop(host, None)
        elif kind == "out":
            self._output.feed(number, message["fd"], message.get("raw", b""))
        elif kind == "say":
            self._output.say(message["text"])
        elif kind == "ending" and self._settings.is_static:
            text = f"{message['text']}.\n  Fix: to end a job, send the signal to kvhvdrun."
            self._job.give_up(text, message["code"])
        elif kind == "ending":
            self._job.host_leaves(host, message["text"], now)
        elif kind == "started":
            self._job.started(number, message["pid"], now)
        elif kind == "not_started" and self._settings.is_static:
            self._refuse(host, message["errno"], message["text"])
        elif kind == "not_started":
            self._output.feed(number, 2, printable(message["text"]).encode() + b"\n")
            self._job.exited(number, EXIT_NOT_STARTED, now)
        elif kind == "exited":
            self._job.exited(number, message["code"], now)
        elif kind == "from":
            try:
                self._job.heard(number, message["message"], now)
            except ValueError as error:
                self._output.say(f"worker {number} says what makes no sense: {error}")

    def _is_of(self, host: str, number: int) -> bool:
        """Whether this host's daemon has been told to start a worker, or a task of ours with a number below 0."""
        if number < 0:
            return host == HERE and self._plan.script is not None
        return number in self._job.workers and self._job.workers[number].slot.host == host

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in processes.ENDING:
                if number == signal.SIGINT and self._asked is not None:
                    self._signal_all(signal.SIGKILL, ended=True)
                    # Only the reader of our output may keep us, and not for long.
                    self._end_grace_s = 0.0
                    self._drop_at = self._look_at_clock() + (0.0 if self._is_gone else _LAST_WORDS_S)
                    self._give_up_at = min(self._give_up_at, self._drop_at)
                    continue
                if self._asked is None:
                    self._asked = number
                    # Daemons end when we have read all of theirs: they are no reason to wait for longer, either.
                    self._drop_at = self._look_at_clock() + self._settings.kill_grace_s + _LAST_WORDS_S
                self._end_by(number)
            elif number in processes.PASSED:
                self._signal_all(number)
            elif number == signal.SIGTSTP:
                self._stop()
            elif number == signal.SIGCONT:
                self._signal_all(signal.SIGCONT)

    def _stop(self) -> None:
        """Ctrl-Z: stop the workers, then ourselves. Their daemons wait for us."""
        self._signal_all(signal.SIGSTOP)
        self._output.show("")
        self._output.step()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _end_by(self, number: int) -> None:
        """A signal ends the job: the workers get it too."""
        self._job.give_up("")
        self._signal_all(number, ended=True)
        if self._end is None:
            self._end, self._end_grace_s = End(0), self._settings.kill_grace_s

    def _signal_all(self, number: int, *, ended: bool = False) -> None:
        self._daemons.send_all("signal", worker=None, signal=int(number), ended=ended)

    def _hear_of_losses(self) -> bool:
        """Act on output and events that could not be written; returns whether there were any."""
        lost = self._output.take_lost()
        for is_reader, text in lost:
            if is_reader:
                # The reader has gone. Alone, the program would end by SIGPIPE; so does the job.
                self._lost_code = 128 + signal.SIGPIPE
                self._end_by(signal.SIGTERM)
            else:  # a full disk is no reason to lose the work as well
                self._lost_code = self._lost_code or EXIT_FAILED
                self._output.say(text)
        return bool(lost)

    # -- The end --------------------------------------------------------------------------------------------------

    def _farewell(self, end: End) -> int:
        """Say why the job has ended; returns its exit code."""
        code, reason = end.code or self._lost_code, end.reason
        if self._asked is not None:
            code, reason = 128 + self._asked, f"signal {signal.Signals(self._asked).name}"
        self._output.log("job_end", {"code": code, "reason": reason})
        if not end.reason or self._asked is not None:
            return code
        if self._plan.tell is not None:
            self._plan.tell("ended", end.reason)  # the last lines of who failed have been seen
        elif self._plan.capture or end.code > 128:  # else its words have just been seen
            words = ""
            if end.lines is not None and self._plan.capture:
                words = " Its last lines on stderr:" if end.lines else " It wrote nothing to stderr."
            self._output.say("\n    ".join((end.reason + words, *end.details, *(end.lines or ()))))
        return code

    def _note(self, note: Note) -> None:
        self._output.log(note.event, note.fields)
        self._last_event = _event_text(note.event, note.fields)
        if self._plan.options.verbose:
            self._output.say(note.news or self._last_event)
        elif note.news and not self._settings.is_static and self._end is None:
            self._output.say(note.news)  # once the job ends, workers end because they are told to


def _event_text(event: str, fields: Mapping[str, Any]) -> str:
    """Any event, in short: for the status line, and for who wants to hear of all."""
    said = {name: str(value).partition("\n")[0] for name, value in fields.items() if name != "lines"}
    return " ".join([event.replace("_", " "), *(f"{name} {text}" for name, text in said.items())])

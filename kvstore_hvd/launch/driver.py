"""The loop of kvhvdrun: hears daemons, the discovery of hosts and signals, and does what the job decides."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from kvstore_hvd.base.clocks import LOOK_S, RunningClock
from kvstore_hvd.base.cores import usable_cores
from kvstore_hvd.config import config
from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.horovod.variables import Seat, of_worker
from kvstore_hvd.launch import processes
from kvstore_hvd.launch.connections import Poller
from kvstore_hvd.launch.daemons import Daemons
from kvstore_hvd.launch.discovery import DiscoveryError, HostDiscovery, HostDiscoveryScript
from kvstore_hvd.launch.hosts import address_of, is_here, machine_of, most_together, shell_command, travelling
from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.output import Output, Tail
from kvstore_hvd.launch.state import EXIT_FAILED, End, Kill, Note, Settings, Slot, Start, Tell

__all__ = ["Driver", "Plan", "StartError", "environment_of"]

_EXIT_NOT_STARTED = 126
# A daemon may take this much longer to end than its workers.
_DAEMON_ENDS_S = 3.0
_KILL_TAKES_S = 2.0
# How long whoever reads our output has at least, for the last words of workers that have taken all of their grace.
_LAST_WORDS_S = 1.0
# How long the event log may take to be written at the end.
_LOG_S = 30.0
# Where the tasks of the launcher's own run.
_HERE = "localhost"
_FIXES = {
    **dict.fromkeys(
        (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE), "see ulimit -u, ulimit -n and free memory."
    ),
    errno.ENOEXEC: "a script's first line names its interpreter, such as #!/bin/sh.",
}


class Plan(NamedTuple):
    """How to run a job. `environment` is that of the workers, but for what differs between them."""

    settings: Settings
    discovery: HostDiscovery
    command: Sequence[str]
    environment: dict[str, str]
    event_log: str | None = None
    output_folder: str | None = None  # where what the workers write is kept too
    bind_cores: bool = False
    capture: bool = True  # False: the worker writes straight to the launcher's streams
    prefix: bool = True
    timestamps: bool = False
    shown: Collection[int] | None = None  # ranks whose output is shown; None: all
    verbose: bool = False
    shell: Sequence[str] = ()  # the words that run a command on another host; empty: there is only this one
    sent: Collection[str] = ()  # variables that go to other hosts, although they belong to a host
    tell: Callable[[str, str], None] | None = None  # a program that calls a function, see launch/call.py


class StartError(LaunchError):
    """A job cannot be started; `code` is the exit code that shells use for this kind of failure."""

    def __init__(self, text: str, code: int = _EXIT_NOT_STARTED) -> None:
        super().__init__(text)
        self.code = code


def _not_started(what: str, number: int | None, text: str) -> StartError:
    fix = _FIXES.get(number or 0, "see the reason; a sandbox may forbid it.")
    return StartError(message(f"{what} could not be started: {text}.", fix=fix))


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
        self._clock = RunningClock()
        # Workers are judged by a clock that goes on only while all daemons are heard: they bring what a worker says.
        self._job_now = self._looked_at = self._clock.now()
        self._job = Job(plan.settings, self._job_now)
        self._cores = usable_cores()
        self._threads = 0  # of OpenMP, for each worker of an elastic job; 0: not settled yet
        self._tails: dict[int, Tail] = {}
        self._discovery_fails_since: float | None = None
        self._discovered = False
        self._strange_hosts: set[str] = set()
        self._missing: dict[str, str] = {}  # hosts of a static job whose daemons did not come, and why
        self._last_event = ""
        self._not_started: StartError | None = None
        self._asked: int | None = None  # the first signal that asked the job to end
        self._lost_code = 0  # exit code for output that could not be written
        self._end: End | None = None
        self._stop_at: float | None = None  # workers that still run are ended then
        self._give_up_at: float | None = None  # daemons that still run are killed then
        self._drop_at: float | None = None  # when a signal that ended the job no longer waits for who reads our output
        self._gone_at: float | None = None  # when the last process of the job was gone
        self._code = 0
        self._inbox: processes.SignalInbox
        self._poller: Poller
        self._output: Output
        self._daemons: Daemons

    def run(self) -> int:
        """Run the job to its end."""
        plan, settings = self._plan, self._settings
        processes.adopt_orphans()
        self._spare = processes.children()  # a shell that has started them may have become this process
        with ExitStack() as stack:
            self._poller = Poller()
            stack.callback(self._poller.close)
            self._output = Output(
                self._poller, plan.output_folder, settings.max_np, plan.event_log, plan.timestamps, plan.shown
            )
            stack.callback(self._output.close)
            try:
                self._inbox = stack.enter_context(processes.SignalInbox())
            except OSError as error:
                raise _not_started("the launcher", error.errno, str(error)) from None
            self._poller.watch(self._inbox.fileno(), lambda: None)
            self._daemons = Daemons(self._poller, self._clock, settings, plan.shell, self._take)
            if isinstance(plan.discovery, HostDiscoveryScript):
                plan.discovery.start, plan.discovery.kill = self._start_task, self._kill_task
            while not self._done():
                self._turn()
        if self._not_started is not None and self._asked is None:
            raise self._not_started
        return self._code or self._lost_code

    # -- The loop -------------------------------------------------------------------------------------------------

    def _look_at_clock(self) -> float:
        now = self._clock.now()
        if not self._daemons.are_silent():
            self._job_now += now - self._looked_at
        self._looked_at = now
        return now

    def _turn(self) -> None:
        self._act_on_time(self._look_at_clock())
        self._act()
        if self._gone_at is None and self._are_daemons_gone:
            return
        if not self._settings.is_static and self._gone_at is None:
            self._show_status()
        wait_s = self._output.step()
        if not self._output.held_up:
            self._daemons.acknowledge()
        self._poller.wait(min(wait_s, self._next_event(self._look_at_clock())))
        self._look_at_clock()
        self._on_signals(self._inbox.take())
        for pid, code in processes.reap():
            self._daemons.reaped(pid, code)
        self._hear_of_losses()

    def _show_status(self) -> None:
        workers, generation = len(self._job.workers.running), self._job.generation
        self._output.show(
            f"kvhvdrun: generation {generation.number}, {len(generation.left)} of {workers} workers; {self._last_event}"
            if generation.begun
            else f"kvhvdrun: {workers} workers start; {self._last_event}"
        )

    def _next_event(self, now: float) -> float:
        """Seconds until something must be done even if nothing happens."""
        times = [
            self._daemons.deadline(),
            self._plan.discovery.deadline() if self._end is None else None,
            self._stop_at,
            self._give_up_at,
            self._drop_at,
        ]
        deadline = self._job.deadline(self._job_now)
        waits = [LOOK_S, *(time - now for time in times if time is not None)]
        return max(0.0, min(waits if deadline is None else [*waits, deadline - self._job_now]))

    def _act_on_time(self, now: float) -> None:
        self._daemons.act_on_time(self._on_lost_host)
        if self._end is None:
            self._discover(now)
            self._job.hosts_fault = self._plan.discovery.fault(now)
            # All hosts of a static job are there before its first worker starts.
            is_first = self._settings.is_static and self._job.workers.get(0) is None
            if is_first and self._missing and not self._daemons.are_awaited():
                self._refuse_hosts()
            elif not is_first or not self._daemons.are_awaited():
                self._job.tick(self._job_now)
        elif self._stop_at is not None and (now >= self._stop_at or not self._job.workers.running):
            self._stop_at, self._give_up_at = None, now + self._settings.kill_grace_s + _DAEMON_ENDS_S
            self._daemons.end(self._end.reason)
        if self._give_up_at is not None and self._output.held_up and self._asked is None:
            self._give_up_at = max(self._give_up_at, now + _DAEMON_ENDS_S)  # they wait for us to read
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = now + _KILL_TAKES_S
            self._daemons.give_up()
        if self._drop_at is not None and now >= self._drop_at:
            self._drop_at = None
            self._output.drop()

    @property
    def _are_daemons_gone(self) -> bool:
        return self._end is not None and self._stop_at is None and not self._daemons

    def _done(self) -> bool:
        if not self._are_daemons_gone:
            return False
        now = self._look_at_clock()
        if self._gone_at is None:
            # What daemons have left that were killed together with their guards.
            grace_s = min(processes.LEFT_GRACE_S, self._settings.kill_grace_s)
            for pause_s in processes.end_children(grace_s, self._spare):
                time.sleep(pause_s)
            self._gone_at, self._give_up_at = self._look_at_clock(), None
            if self._drop_at is not None:
                self._drop_at = max(self._drop_at - _LAST_WORDS_S, self._gone_at + _LAST_WORDS_S)
            self._output.flush_lines()
            self._output.show("")
            self._code = self._farewell()
        self._output.step()
        if now > self._gone_at + (_LOG_S if self._asked is None else self._settings.kill_grace_s):
            self._output.finish_log()
        # In this order: what fails has nothing pending afterwards.
        return not self._output.pending and not self._hear_of_losses()

    # -- Hosts ----------------------------------------------------------------------------------------------------

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
                self._job.give_up(str(error), error.code)
            elif now - self._discovery_fails_since >= limit:
                self._job.give_up(f"there have been no hosts for {limit:g} s: {error}", error.code)
            return
        if hosts is None:
            return
        self._discovered, self._discovery_fails_since = True, None
        for host in hosts.keys() - self._strange_hosts:
            if not self._plan.shell and not is_here(host):
                self._strange_hosts.add(host)
                self._say(f"'{host}' is another host, and there is no ssh that could start workers there.")
        self._job.hosts(
            {host: count for host, count in hosts.items() if host not in self._strange_hosts}, self._job_now
        )
        if self._settings.is_static and self._plan.shell:
            for host in dict.fromkeys(slot.host for slot in self._job.static_slots):
                try:
                    self._daemons.start(host)
                except OSError as error:
                    self._missing[host] = f"its daemon could not be started: {error}"

    def _start_task(self, task: int) -> None:
        assert isinstance(self._plan.discovery, HostDiscoveryScript)
        try:
            self._daemons.start(_HERE)
        except OSError as error:
            self._plan.discovery.lost(f"cannot be started: {error}")
            return
        none: dict[str, Any] = {"share": [], "line": False, "stdin": False, "stdout": [], "stderr": []}
        command, environment = self._plan.discovery.command, self._plan.environment
        self._daemons.send(_HERE, "start", worker=task, command=command, environment=environment, **none)

    def _kill_task(self, task: int) -> None:
        self._daemons.send(_HERE, "signal", worker=task, signal=int(signal.SIGKILL), ended=True)

    def _on_lost_host(self, host: str, why: str) -> None:
        if host == _HERE and isinstance(self._plan.discovery, HostDiscoveryScript):
            self._plan.discovery.lost(f"was lost: {why}")
        if self._settings.is_static and self._job.workers.get(0) is None:
            self._missing[host] = why
        lines = {number: tail.lines() for number, tail in self._tails.items()}
        self._job.host_lost(host, why, self._job_now, lines)

    def _refuse_hosts(self) -> None:
        """A static job does not begin without one of its hosts."""
        hosts = [host for host in dict.fromkeys(slot.host for slot in self._job.static_slots) if host in self._missing]
        details = [f"{host}: {self._missing[host]}" for host in hosts]
        words = shell_command(self._plan.shell, hosts[0], [sys.executable, "--version"])
        fix = f"try {' '.join(words)}; Python and this package have the same path on every host."
        fact = f"the job cannot start on {len(details)} of its hosts."
        self._not_started = StartError(message(fact, details=details, fix=fix))
        self._job.give_up("")

    # -- What the job decides -------------------------------------------------------------------------------------

    def _act(self) -> None:
        while actions := self._job.take():
            for action in actions:
                if isinstance(action, Note):
                    self._note(action.event, action.fields)
                elif isinstance(action, Start):
                    self._start(action)
                elif isinstance(action, Tell):
                    self._send(action.worker, "to", message=action.message)
                elif isinstance(action, Kill):
                    self._send(action.worker, "signal", signal=int(action.number), ended=action.ended)
                elif self._end is None:
                    # In a static job the others have had their time.
                    waits = action.reason and not self._settings.is_static
                    self._begin_end(action, self._settings.survivor_time_s if waits else 0.0)

    def _start(self, action: Start) -> None:
        plan, settings, slot, number = self._plan, self._settings, action.slot, action.worker
        try:
            self._daemons.start(slot.host)
        except OSError as error:
            if settings.is_static:
                self._refuse(error.errno, str(error))
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
            environment["KVHVD_HOSTS"] = ",".join(map(address_of, hosts))
        if not settings.is_static:
            place, count = slot.index, max(slot.index + 1, sum(each.host == slot.host for each in self._job.slots))
            # Settled once: sums of workers with different numbers of threads could differ in their last bits.
            most = min(most_together(each.host for each in self._job.slots), settings.max_np)
            self._threads = self._threads or max(1, len(self._cores) // most)
            environment["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS") or str(self._threads)
        prefix = f"[{number}] ".encode() if plan.prefix else b""
        self._tails[number] = Tail()
        if plan.capture:
            self._output.add(number, prefix, self._tails[number])
        self._daemons.send(
            slot.host,
            "start",
            worker=number,
            command=list(plan.command),
            environment=environment if is_here(slot.host) else travelling(environment, plan.sent),
            share=[place, count] if plan.bind_cores else [],
            line=are_several or not settings.is_static,
            stdin=settings.is_static and number == 0,  # on another host that of the daemon, which is empty
            stdout=self._output.size_for(1, prefix) if plan.capture else None,
            stderr=self._output.size_for(2, prefix) if plan.capture else None,
        )

    def _refuse(self, number: int | None, text: str) -> None:
        self._not_started = _not_started("a worker", number, text)
        self._job.give_up("")

    def _send(self, worker: int, kind: str, **fields: Any) -> None:
        known = self._job.workers.get(worker)
        if known is not None:
            self._daemons.send(known.slot.host, kind, worker=worker, **fields)

    def _begin_end(self, end: End, grace_s: float) -> None:
        """No more decisions: what still runs after the grace is ended, and then the daemons."""
        self._end = end
        self._stop_at = self._look_at_clock() + grace_s

    # -- What happens ---------------------------------------------------------------------------------------------

    def _take(self, message: dict[str, Any]) -> None:
        kind, now, number = message["t"], self._job_now, message.get("worker", 0)
        if number < 0:
            assert isinstance(self._plan.discovery, HostDiscoveryScript)
            self._plan.discovery.heard(message)
        elif kind == "out":
            self._output.feed(number, message["fd"], message.get("raw", b""))
        elif kind == "say":
            self._say(message["text"])
        elif kind == "ending" and self._settings.is_static:
            text = f"{message['text']}.\n  Fix: to end a job, send the signal to kvhvdrun."
            self._job.give_up(text, message["code"])
        elif kind == "ending":
            self._job.host_leaves(message["host"], message["text"], now)
        elif kind == "started":
            self._job.started(number, message["pid"], now)
        elif kind == "not_started" and self._settings.is_static:
            self._refuse(message["errno"], message["text"])
        elif kind == "not_started":
            self._job.exited(number, _EXIT_NOT_STARTED, [message["text"]], now)
        elif kind == "exited":
            self._job.exited(number, message["code"], self._tails[number].lines(), now)
        elif kind == "from":
            try:
                self._job.heard(number, message["message"], now)
            except (ValueError, TypeError, LookupError) as error:
                self._say(f"worker {number} says what makes no sense: {error!r}")

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in processes.ENDING:
                if number == signal.SIGINT and self._asked == signal.SIGINT:
                    self._signal_all(signal.SIGKILL, ended=True)
                    if self._gone_at is not None:  # only the reader of our output keeps us
                        self._output.drop()
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
        self._job.stop()
        self._signal_all(number, ended=True)
        if self._end is None:
            self._begin_end(End(0), self._settings.kill_grace_s)

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
                self._say(text)
        return bool(lost)

    # -- The end --------------------------------------------------------------------------------------------------

    def _farewell(self) -> int:
        """Say why the job has ended; returns its exit code."""
        end = self._end or End(EXIT_FAILED)
        code = 128 + self._asked if self._asked is not None else end.code or self._lost_code
        reason = f"signal {signal.Signals(self._asked).name}" if self._asked is not None else end.reason
        self._note("job_end", {"code": code, "reason": reason})
        if not end.reason or self._asked is not None:
            return code
        text = end.reason
        if self._plan.tell is not None:
            self._plan.tell("ended", text)  # the last lines of who failed have been seen
        elif self._plan.capture or end.code > 128:  # else its words have just been seen
            if self._settings.is_static and self._settings.max_np > 1 and end.details is not None:
                text += " Its last lines on stderr:" if end.details else " It wrote nothing to stderr."
            self._say("\n    ".join((text, *(end.details or ()))))
        return code

    # -- Saying ---------------------------------------------------------------------------------------------------

    def _note(self, event: str, fields: dict[str, Any], *, is_news: bool = True) -> None:
        self._output.log(event, fields)
        self._last_event = _event_text(event, fields)
        if event == "job_end":
            return  # has its own words
        worker = self._job.workers.get(fields.get("worker", -1))
        if self._settings.is_static:
            if self._plan.verbose and worker is not None and event in ("worker_started", "worker_exited"):
                what = f"is process {worker.pid}" if event == "worker_started" else worker.ending
                self._say(f"rank {worker.id} {what}")
        elif self._plan.verbose:
            self._say(self._last_event)
        elif is_news and self._end is None:  # from then on, workers end because they are told to
            text = _news_text(event, fields, self._job)
            if text:
                self._say(text)

    def _say(self, text: str) -> None:
        self._output.say(text)


def _event_text(event: str, fields: Mapping[str, Any]) -> str:
    """Any event, in short: for the status line, and for who wants to hear of all."""
    words = [event.replace("_", " ")]
    for name, value in fields.items():
        if name == "text":
            words.append(f"({value.splitlines()[0] if value else ''})")
        elif name != "lines" and value is not None:
            words += [name, str(value)]
    return " ".join(words)


def _news_text(event: str, fields: Mapping[str, Any], job: Job) -> str:
    """What everybody is told of an event; empty for those that are no news."""
    worker = job.workers.get(fields.get("worker", -1))
    if event == "worker_exited" and worker is not None and worker.code and not worker.leaving and not worker.lost:
        return f"worker {worker.id} ({worker.slot}) {worker.ending}."
    if event == "host_lost":
        cooldown = f" It gets no worker for {fields['seconds']:.0f} s." if fields["seconds"] else ""
        return f"host {fields['host']} is lost: {fields['text']}.{cooldown}"
    if event == "host_leaves":
        return f"host {fields['host']} leaves: {fields['text']}."
    if event == "host_left_out":
        pair = f"it and {', '.join(fields['unreached'])} do not reach each other"
        fact = f"host {fields['host']} is left out for {fields['seconds']:.0f} s: {pair}."
        fix = "see whether a firewall lets workers connect; --network-interfaces chooses what they use."
        return message(fact, fix=fix)
    if event == "worker_killed" and worker is not None:
        return f"worker {worker.id} ({worker.slot}) is killed: {fields['why']}."
    if event == "slot_blacklisted":
        return f"slot {fields['slot']} gets no worker for {fields['seconds']:.0f} s: they crash there."
    if event == "generation_ready" and fields["generation"] > 0:
        members = fields["workers"]
        return f"generation {fields['generation']}: {len(members)} workers ({', '.join(map(str, members))})."
    if event == "generation_void" and fields["cause"] == "meeting":
        return f"generation {fields['generation']} has not met: {fields['text']}"
    if event == "waiting":
        late = [job.workers.get(number) for number in fields["workers"]]
        names = ", ".join(f"{each.id} ({each.slot})" for each in late if each is not None)
        return f"the others wait for worker {names}, and kill what has not come in {fields['seconds']:.0f} s."
    if event == "too_few":
        return f"{fields['text']}, {fields['needed']} are needed: waiting for more, for {fields['seconds']:.0f} s."
    if event == "discovery_failed":
        return str(fields["text"])
    return ""

"""The loop of kvhvdrun: reads daemons, the discovery of hosts and signals, and carries out what the job decides."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_hvd.base import files
from kvstore_hvd.base.channel import ChannelError, Poller
from kvstore_hvd.base.cores import LOOK_S, RunningClock, usable_cores
from kvstore_hvd.config import config
from kvstore_hvd.errors import message, printable
from kvstore_hvd.horovod.variables import Ranks, of_worker
from kvstore_hvd.launch import processes
from kvstore_hvd.launch.daemons import HERE, Daemons, HostDiscoveryScript
from kvstore_hvd.launch.hosts import Slot, is_here, look_up, machine_of, shell_command, travelling
from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.output import Output
from kvstore_hvd.launch.state import EXIT_FAILED, EXIT_NOT_STARTED, End, Kill, Note, Settings, Start, StartError, Tell

_DAEMON_ENDS_S = 3.0  # daemons may take this much longer to end than their workers
_KILL_TAKES_S = 2.0
_QUIET_S = 1.5  # in which workers usually join; from then on a terminal shows how many have
_RETRY_S = 1.0  # pause before the next try of a host that was not reached
_LAST_WORDS_S = 1.0  # for the reader of our output to take the last words of workers, at least
_LOG_S = 30.0  # for the event log to be written at the end
_SCARCE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_FIXES = dict.fromkeys(_SCARCE, "see ulimit -u, ulimit -n and free memory.")
_FIXES[errno.ENOEXEC] = "a script's first line names its interpreter, such as #!/bin/sh."
_FIXES[errno.ENOENT] = "install the interpreter that the script's first line (#!) names, or correct that line."


class Plan(NamedTuple):
    """How to run a job. `environment`: the variables that all workers have."""

    settings: Settings
    options: Namespace  # as they were given
    command: Sequence[str]
    environment: dict[str, str]
    hosts: Mapping[str, int]
    script: HostDiscoveryScript | None  # discovers hosts instead
    capture: bool  # False: the worker writes straight to the launcher's streams
    shell: Sequence[str]  # the words that run a command on another host; empty: there is none
    tell: Callable[[str, str], None] | None  # of a program that calls a function, see launch/call.py


def environment_of(plan: Plan, worker: int, slot: Slot, ranks: Ranks, secret: str) -> dict[str, str]:
    """The environment of a worker; `ranks` are those in its first world."""
    own = {"KVHVD_JOB": plan.settings.job, "KVHVD_SECRET": secret, "KVHVD_SLOT": str(slot)}
    if plan.settings.replaces:
        own["KVHVD_WORKER"] = str(worker)
    else:
        names = ("KVHVD_RANK", "KVHVD_SIZE", "KVHVD_LOCAL_RANK", "KVHVD_LOCAL_SIZE")
        own.update(zip(names, map(str, ranks)), KVHVD_GENERATION="0")
    return {**plan.environment, **own, **of_worker(slot.host, ranks)}


class Driver:
    """Runs one job; use once. Call from the main thread, with no other threads running."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._secret = os.urandom(32).hex()  # with which workers authenticate each other
        self._poller = Poller()
        self._output = Output(self._poller, plan.options, plan.settings.max_np)
        self._clock = RunningClock()
        # The job's clock stands still while a daemon is silent: messages of its workers may be on the way.
        self._job_now = self._looked_at = self._clock.now()
        self._job = Job(plan.settings, self._job_now, self._output.last_lines)
        self._threads = 0  # of OpenMP in each worker; 0: not decided yet
        self._discovery_fails_since = math.inf
        self._discovered = False
        # Hosts of a job without replacements whose daemons have failed to come up, and why; those that never will.
        self._missing: dict[str, str] = {}
        self._hopeless: set[str] = set()
        self._retry_at = self._missing_until = math.inf
        self._last_event = ""
        self._not_started: StartError | None = None
        self._signal: int | None = None  # the first one that ended the job
        self._lost_code = 0  # exit code for output that could not be written
        self._end: End | None = None
        self._end_grace_s = 0.0  # for workers that run when the job ends
        self._give_up_at = math.inf  # when daemons are killed
        self._drop_at = math.inf  # when unread output is dropped, after a signal has ended the job
        self._is_gone = False  # the last process of the job
        self._arrivals: socket.socket | None = None  # on which workers of this host say that they join
        self._arrived: set[int] = set()
        # What hosts did before the latest world was lost, by its generation, process set and host.
        self._failures: dict[tuple[int, int, int], str] = {}
        self._show_from = self._clock.now() + _QUIET_S

    def run(self) -> int:
        plan, settings = self._plan, self._settings
        processes.adopt_orphans()
        self._spare = processes.children()  # a shell that has started them may have become this process
        self._inbox, self._reaper = processes.SignalInbox(), processes.Reaper()
        self._poller.watch(self._inbox.fileno(), lambda: None)
        if self._output.on_terminal and plan.capture and not settings.replaces and settings.max_np > 1:
            self._arrivals = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._arrivals.setblocking(False)
            self._arrivals.bind(f"\0kvstore_hvd-{os.urandom(16).hex()}")
            self._poller.watch(self._arrivals.fileno(), self._hear_arrivals)
        self._daemons = Daemons(self._poller, self._clock, settings, plan.shell, self._take)
        if plan.script is None:
            self._take_hosts(plan.hosts)
        else:
            plan.script.daemons = self._daemons
        while self._end is None:
            self._turn()
        code = self._finish(self._end)
        if self._not_started is not None and self._signal is None:
            raise self._not_started
        return code or self._lost_code

    def _finish(self, end: End) -> int:
        """End what still runs, pass its output on, and say why the job has ended; returns the exit code."""
        grace_s, begin = self._settings.kill_grace_s, self._look_at_clock()
        while self._job.running and self._look_at_clock() < begin + self._end_grace_s:
            self._turn(begin + self._end_grace_s)
        self._daemons.end(end.reason)
        # Workers that a signal has ended have had their grace.
        limit_s = _DAEMON_ENDS_S if self._signal is not None else grace_s + _DAEMON_ENDS_S
        self._give_up_at = min(self._give_up_at, self._look_at_clock() + limit_s)
        while self._daemons:
            now = self._look_at_clock()
            if self._output.held_up and self._signal is None:
                self._give_up_at = max(self._give_up_at, now + _DAEMON_ENDS_S)  # daemons wait for us to read
            if now >= self._give_up_at:
                self._give_up_at = now + _KILL_TAKES_S
                self._daemons.give_up()
            self._turn(self._give_up_at)
            self._daemons.act_on_time(self._on_lost_host)  # without another wait when the last one has gone
        # Left by daemons that were killed together with their guards.
        for pause_s in processes.end_children(min(processes.LEFT_GRACE_S, grace_s), self._spare):
            time.sleep(pause_s)
        gone_at, self._is_gone = self._look_at_clock(), True
        if self._signal is not None:
            self._drop_at = max(self._drop_at - _LAST_WORDS_S, gone_at + _LAST_WORDS_S)
        self._output.flush_lines()
        self._output.show("")
        self._merge_timeline()
        code = self._farewell(end)
        self._output.step()
        # In this order: a sink that fails has nothing pending afterwards.
        while self._output.pending or self._report_losses():
            self._turn()
            if self._look_at_clock() > gone_at + (_LOG_S if self._signal is None else grace_s):
                self._output.finish_log()
        for number in processes.PASSED:  # Python's own end would let them kill this process again
            signal.signal(number, signal.SIG_IGN)
        return code if self._signal is None else 128 + self._signal

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
        if self._settings.replaces and not self._is_gone:
            self._output.show(f"kvhvdrun: {self._job.status}; {self._last_event}")
        elif self._arrivals is not None:
            self._output.show(self._progress(now))
        wait_s = min(LOOK_S, self._output.step())
        if not self._output.held_up:
            self._daemons.acknowledge()
        self._poller.wait(min(wait_s, until - self._look_at_clock()))
        self._look_at_clock()
        self._on_signals(self._inbox.take())
        for pid, code in self._reaper.reap():
            self._daemons.reaped(pid, code)
        self._report_losses()

    def _look_after_job(self, now: float) -> float:
        """Discover hosts, and have the job decide; returns when to do so again even if nothing happens."""
        script, until = self._plan.script, math.inf
        if script is not None:
            self._discover(script, now)
            self._job.hosts_fault = script.fault(now)
            until = script.starts_at()
        if self._settings.replaces or self._job.workers:
            self._job.tick(self._job_now)
        elif self._missing:
            until = self._await_hosts(now)
        elif not self._daemons.are_awaited():
            self._job.hosts(self._plan.hosts, self._job_now)
        self._act()
        return min(until, now + self._job.wake_at - self._job_now)

    def _progress(self, now: float) -> str:
        """The status line of a job without replacements, while its workers start; '' before and after that."""
        workers, count = self._job.workers.values(), self._settings.max_np
        joined = sum(worker.entry is not None or worker.id in self._arrived for worker in workers)
        is_shown = self._output.is_quiet and self._end is None and now >= self._show_from and joined < count
        has = "has" if joined == 1 else "have"
        return f"kvhvdrun: {len(workers)} workers started, {joined} {has} joined" if is_shown else ""

    def _hear_arrivals(self) -> None:
        assert self._arrivals is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(self._settings.max_np):
                text = self._arrivals.recv(16)
                if text.isdigit():
                    self._arrived.add(int(text))

    # -- Hosts ----------------------------------------------------------------------------------------------------

    def _discover(self, script: HostDiscoveryScript, now: float) -> None:
        try:
            hosts = script.poll(now)
        except StartError as error:
            # Reported once, and at the end: the next try follows in a second.
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
        if self._settings.replaces:
            self._job.hosts(hosts, self._job_now)
        elif self._plan.shell:  # the job hears of the hosts once all have a daemon
            for host in hosts:
                self._start_daemon(host)
            self._missing_until = self._clock.now() + self._settings.start_timeout_s

    def _start_daemon(self, host: str) -> None:
        try:
            self._daemons.start(host)
        except OSError as error:
            self._missing[host] = f"its daemon could not be started: {error}"
            self._hopeless.add(host)

    def _on_lost_host(self, host: str, why: str, may_come: bool) -> None:
        if host == HERE and self._plan.script is not None:
            self._plan.script.lost(f"was lost: {why}")
        if self._settings.replaces or self._job.workers:
            self._job.host_lost(host, why, self._job_now)
            return
        if may_come and not self._missing:
            limit = f"{self._settings.start_timeout_s:g} s (--start-timeout)"
            self._output.say(f"host {host} is not there yet, and is tried again for {limit}: {why}.")
        self._missing[host], self._retry_at = why, min(self._retry_at, self._clock.now() + _RETRY_S)
        if not may_come:
            self._hopeless.add(host)

    def _await_hosts(self, now: float) -> float:
        """Try hosts again that may come up yet, or end the job without them; returns when to do so again."""
        if now < self._missing_until and not self._hopeless:
            if now >= self._retry_at:
                self._retry_at = math.inf
                for host in list(self._missing):
                    self._start_daemon(host)
            return min(self._missing_until, self._retry_at)
        if now >= self._missing_until or not self._daemons.are_awaited():
            hosts = [host for host in self._plan.hosts if host in self._missing]
            words = shell_command(self._plan.shell, hosts[0], [sys.executable, "--version"])
            fix = f"try {' '.join(words)}; Python and this package have the same path on every host."
            if set(hosts) - self._hopeless:
                fix += " --start-timeout (seconds) gives hosts more time to come up."
            details = [f"{host}: {self._missing[host]}" for host in hosts]
            self._refuse(f"the job cannot start on {len(hosts)} of its hosts.", fix, details)
        return self._missing_until

    def _refuse(self, fact: str, fix: str, details: Sequence[str] = ()) -> None:
        """End a job without replacements that cannot start."""
        self._not_started = StartError(message(fact, details=details, fix=fix))
        self._job.give_up("")

    # -- Actions of the job ---------------------------------------------------------------------------------------

    def _act(self) -> None:
        while actions := self._job.take():
            for action in actions:
                if isinstance(action, Note):
                    self._note(action)
                elif isinstance(action, Start):
                    self._start(action.worker, action.slot)
                elif isinstance(action, Tell):
                    self._send(action.worker, "to", message=action.message)
                elif isinstance(action, Kill):
                    self._send(action.worker, "signal", signal=int(action.number))
                elif self._end is None:
                    self._end, self._end_grace_s = action, action.grace_s

    def _start(self, number: int, slot: Slot) -> None:
        plan, settings = self._plan, self._settings
        if self._job.workers[number].lost:
            return  # with its host, when the start of another worker failed
        try:
            self._daemons.start(slot.host)
        except OSError as error:
            if settings.replaces:
                self._job.host_lost(slot.host, f"its daemon could not be started: {error}", self._job_now)
            else:
                self._refuse_worker(slot.host, error.errno, str(error))
            return
        ranks = self._job.ranks_of(number)
        environment = environment_of(plan, number, slot, ranks, self._secret)
        slots = list(dict.fromkeys((*self._job.slots, slot)))  # the slot of an elastic job may just have gone
        machines = [machine_of(each.host) for each in slots]
        hosts = [slot.host] if settings.replaces else [each.host for each in slots]
        are_several = bool(config().test_hosts) or bool(plan.shell and (settings.replaces or len(set(machines)) > 1))
        if are_several:
            environment["KVHVD_HOSTS"] = ",".join(socket.gethostname() if is_here(host) else host for host in hosts)
        if self._arrivals is not None and is_here(slot.host):
            environment["KVHVD_ARRIVALS"] = self._arrivals.getsockname()[1:].decode()
        is_alone = not settings.replaces and settings.max_np == 1
        if not is_alone and not environment.get("OMP_NUM_THREADS"):
            # By default each worker has a thread per core, which slows all down. The number stays: with another one,
            # the last bits of a sum could differ between workers.
            used = machines[: settings.max_np]
            self._threads = self._threads or max(1, len(usable_cores()) // max(map(used.count, used)))
            environment["OMP_NUM_THREADS"] = str(self._threads)
        if plan.capture:
            is_plain = is_alone or plan.options.no_prefix
            self._output.add(number, b"" if is_plain else f"[{number}] ".encode())
        beside = [each for each in slots if each.host == slot.host]
        share = [beside.index(slot), len(beside)] if settings.replaces else [ranks.local_rank, ranks.local_size]
        sent = {text.partition("=")[0] for text in plan.options.x}  # to other hosts, although they belong to a host
        self._daemons.send(
            slot.host,
            "start",
            worker=number,
            command=list(plan.command),
            environment=environment if is_here(slot.host) else travelling(environment, sent),
            share=share if plan.options.bind_cores else [],
            control=are_several or settings.replaces,  # whether it gets a control connection
            stdin=number == 0 and not settings.replaces,  # on another host that of the daemon, which is empty
            capture=plan.capture,
        )

    def _refuse_worker(self, host: str, number: int | None, text: str) -> None:
        where = "" if is_here(host) else f" on {host}"
        fix = _FIXES.get(number or 0, "see the reason; a sandbox may forbid it.")
        self._refuse(f"a worker could not be started{where}: {text}.", fix)

    def _send(self, worker: int, kind: str, **fields: Any) -> None:
        self._daemons.send(self._job.workers[worker].slot.host, kind, worker=worker, **fields)

    # -- Messages and signals -------------------------------------------------------------------------------------

    def _take(self, host: str, message: dict[str, Any]) -> None:
        kind, now, number = message["t"], self._job_now, message.get("worker", 0)
        worker, script = self._job.workers.get(number), self._plan.script
        is_own = host == HERE and script is not None if number < 0 else worker is not None and worker.slot.host == host
        if "worker" in message and not is_own:
            raise ChannelError(f"it speaks for worker {number}, which is none of its own.")
        if number < 0 and script is not None:
            script.heard(message)
        elif kind == "up":
            self._missing.pop(host, None)
        elif kind == "out":
            self._output.feed(number, message["fd"], message.get("raw", b""))
        elif kind == "say":
            self._output.say(message["text"])
        elif kind == "ending":
            self._job.host_leaves(host, message["text"], message["code"], now)
        elif kind == "started":
            self._job.started(number, message["pid"], now)
        elif kind == "not_started" and not self._settings.replaces:
            self._refuse_worker(host, message["errno"], message["text"])
        elif kind == "not_started":
            self._output.feed(number, 2, printable(message["text"]).encode() + b"\n")
            self._job.exited(number, EXIT_NOT_STARTED, now)
        elif kind == "exited":
            self._job.exited(number, message["code"], now)
        elif kind == "from" and message["message"]["t"] == "failure":
            self._on_failure(message["message"]["part"])
        elif kind == "from":
            try:
                self._job.heard(number, message["message"], now)
            except ValueError as error:
                self._output.say(f"worker {number} says what makes no sense: {error}")

    def _on_failure(self, part: str) -> None:
        """Write down what the workers of a host did before the world was lost; of the latest world only."""
        try:
            told = json.loads(part)
            world = int(told["generation"]), int(told["set_number"]), int(told["host"])
        except (ValueError, KeyError, TypeError):
            self._output.say("a worker tells of a failure in words that make no sense")
            return
        if world[0] < max((generation for generation, *_ in self._failures), default=0):
            return
        self._failures = {key: text for key, text in self._failures.items() if key[0] == world[0]}
        path, is_news = self._plan.environment["KVHVD_FAILURE_FILE"], not self._failures
        self._failures[world] = part
        try:
            files.replace(path, files.failure_file(self._failures.values()))
            if is_news:
                self._output.say(f"what the workers did before is in {path}: see `kvhvdrun explain`")
        except OSError as error:
            self._output.say(f"the file of the failure cannot be written: {error}")

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGINT and self._signal is not None:
                self._signal_all(signal.SIGKILL)
                # The reader of our output may delay the end, but not for long.
                self._end_grace_s = 0.0
                self._drop_at = self._look_at_clock() + (0.0 if self._is_gone else _LAST_WORDS_S)
                self._give_up_at = min(self._give_up_at, self._drop_at)
            elif number in processes.ENDING:
                if self._signal is None:
                    self._signal = number
                    # Daemons end when all of their output is read, so they wait no longer, either.
                    self._drop_at = self._look_at_clock() + self._settings.kill_grace_s + _LAST_WORDS_S
                self._end_by(number)
            elif number in processes.PASSED:
                self._signal_all(number)
            elif number == signal.SIGTSTP:  # Ctrl-Z
                self._signal_all(signal.SIGSTOP)
                self._output.show("")
                self._output.step()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                self._signal_all(signal.SIGCONT)

    def _end_by(self, number: int) -> None:
        self._job.give_up("")
        self._signal_all(number)
        if self._end is None:
            self._end, self._end_grace_s = End(0), self._settings.kill_grace_s

    def _signal_all(self, number: int) -> None:
        self._daemons.send_all("signal", worker=None, signal=int(number))

    def _report_losses(self) -> bool:
        """Act on output and events that could not be written; returns whether there were any."""
        lost = self._output.take_lost()
        for is_reader, text in lost:
            if is_reader:
                # Without kvhvdrun, SIGPIPE would end the program.
                self._lost_code = 128 + signal.SIGPIPE
                self._end_by(signal.SIGTERM)
            else:  # a full disk is no reason to lose the work as well
                self._lost_code = self._lost_code or EXIT_FAILED
                self._output.say(text)
        return bool(lost)

    def _merge_timeline(self) -> None:
        """Make the timeline of a job whose workers could not: one has died, or others came."""
        path = config().timeline
        if path in ("", "DYNAMIC"):
            return
        from kvstore_hvd import timeline  # here, for a quick start

        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a long timeline takes minutes
        try:
            text, parts = timeline.merge(os.path.abspath(path), self._plan.settings.job)
            for part in parts:
                os.unlink(part)
        except Exception as error:  # noqa: BLE001 - the exit code of the job counts
            text = f"the timeline cannot be made of its parts: {error}"
        except KeyboardInterrupt:
            text = f"interrupted; `python -m kvstore_hvd.timeline merge {path}` makes the timeline"
        signal.signal(signal.SIGINT, before)
        for line in text.splitlines():
            self._output.say(line)

    # -- The end --------------------------------------------------------------------------------------------------

    def _farewell(self, end: End) -> int:
        """Say why the job has ended; returns its exit code."""
        code, reason = end.code or self._lost_code, end.reason
        if self._signal is not None:
            code, reason = 128 + self._signal, f"signal {signal.Signals(self._signal).name}"
        self._output.log("job_end", {"code": code, "reason": reason})
        if not end.reason or self._signal is not None:
            return code
        if self._plan.tell is not None:
            self._plan.tell("ended", end.reason)  # the last lines of the culprit have been shown
        elif self._plan.capture or end.code > 128:  # else its words have just been shown
            words, lines = "", end.lines or ()
            if end.lines is not None and self._plan.capture:
                words = " Its last lines on stderr:" if lines else " It wrote nothing to stderr."
            if lines and self._output.is_in_sight(end.worker):
                words, lines = " Its last lines on stderr are above.", ()
            self._output.say("\n    ".join((end.reason + words, *end.details, *lines)))
        return code

    def _note(self, note: Note) -> None:
        self._output.log(note.event, note.fields)
        values = {name: str(value).partition("\n")[0] for name, value in note.fields.items() if name != "lines"}
        words = (note.event.replace("_", " "), *(f"{name} {text}" for name, text in values.items()))
        self._last_event = " ".join(words)
        if self._plan.options.verbose:
            self._output.say(note.news or self._last_event)
        elif note.news and self._settings.replaces and self._end is None:
            self._output.say(note.news)  # later, workers end because the job does

"""What becomes of a job when a rank or a host is lost: python -m hosts.faults [--runs N] [EVENT...] prints a table.

Four ranks on two hosts, under the mpirun beside this Python; run from the folder `tests`, as root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hosts.network import Network
from support.launchers import Launcher, mpirun

#: How long a host, and a rank that is stopped, may say nothing here.
SILENCE_S, TIMEOUT_S = 3, 6
# How long the job may take to end after the event, and what it leaves may take to go.
_END_S, _LEAVE_S = 20, 5

EVENTS: dict[str, Callable[[Network, list[int]], None]] = {
    "a rank is killed": lambda _, pids: os.kill(pids[3], signal.SIGKILL),
    "a link's process is killed": lambda _, pids: os.kill(pids[2], signal.SIGKILL),
    "a rank is stopped": lambda _, pids: os.kill(pids[3], signal.SIGSTOP),
    "a link's process is stopped": lambda _, pids: os.kill(pids[2], signal.SIGSTOP),
    "a host crashes": lambda network, _: network.crash("node1"),
    "a host is cut off": lambda network, _: network.cut("node1"),
}


class Outcome:
    """What the ranks have told after an event, each with the seconds since then, and when the job ended."""

    def __init__(self, folder: Path, at: float, ended_s: float | None, left: list[str]) -> None:
        self.ended_s, self.left = ended_s, left
        self.texts: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        for path in folder.glob("rank?"):
            for line in path.read_text().splitlines():
                stamp, _, text = line.partition(" ")
                if text.startswith("lost "):
                    rank = int(path.name[-1])
                    self.seconds[rank], self.texts[rank] = float(stamp) - at, text.removeprefix("lost ")


def cause(network: Network, mpi: Launcher, event: str) -> Outcome:
    """Run the program, cause the event in its midst, and wait for the end; kills the job if that does not come."""
    for path in network.folder.glob("rank?"):
        path.unlink()
    program = Path(__file__).with_name("program.py")
    limits = {"KVHVD_LINK_TIMEOUT": str(SILENCE_S), "KVHVD_TIMEOUT": str(TIMEOUT_S)}
    job = network.mpirun(mpi, [2, 2], "-W", "ignore", program, 100, **limits)
    try:
        pids = _running(network, job)
        at = time.time()
        EVENTS[event](network, pids)
        ended_s = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_END_S)
            ended_s = time.time() - at
        limit = time.monotonic() + _LEAVE_S
        while (left := _left(network)) and time.monotonic() < limit:
            time.sleep(0.02)
        return Outcome(network.folder, at, ended_s, left)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _left(network: Network) -> list[str]:
    """What there still is on the hosts that run."""
    left = [f"{name}: process {_command(pid)}" for name in network.running for pid in network.processes(name)]
    return left + [f"{name}: {file}" for name in network.running for file in network.shared_files(name)]


def _running(network: Network, job: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the ranks, by their numbers on this machine, once all of them are at work."""
    limit = time.monotonic() + 60
    while True:
        texts = [path.read_text() for path in sorted(network.folder.glob("rank?"))]
        if len(texts) == 4 and all(" step 20\n" in text for text in texts):
            break
        errors = (network.folder / "err").read_text()
        assert job.poll() is None and time.monotonic() < limit, f"the job does not begin: {errors}"
        time.sleep(0.02)
    pids = []
    for text in texts:
        words = text.split()
        pids.append(next(pid for pid in network.processes(words[5]) if _inner(pid) == words[2]))
    return pids


def _inner(pid: int) -> str:
    """The number of a process on its own host."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(line.split()[-1] for line in lines if line.startswith("NSpid:"))
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    return str(pid)


def main() -> None:
    """Print a row for each event: who told of it, and after how many seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--texts", action="store_true", help="also what the ranks said in the last run")
    parser.add_argument("events", nargs="*", default=list(EVENTS))
    options = parser.parse_args()
    mpi = mpirun()
    assert mpi is not None, "no mpirun beside this Python"
    sys.stdout.write(f"{mpi.version}; silence {SILENCE_S} s, timeout {TIMEOUT_S} s; {options.runs} runs\n")
    sys.stdout.write("Seconds after the event: median (worst).\n\n")
    sys.stdout.write("| event | told by ranks (times) | same host | other host | job ended | left behind |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for event in options.events:
        outcomes = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder, Network(Path(folder), 2) as network:
                outcomes.append(cause(network, mpi, event))
        told = ", ".join(f"{r}: {sum(r in one.seconds for one in outcomes)}" for r in range(4))
        cells = [event, told]
        for there in ((2, 3), (0, 1)):
            cells += [_summary([one.seconds[r] for one in outcomes for r in there if r in one.seconds])]
        cells.append(_summary([one.ended_s for one in outcomes if one.ended_s is not None]))
        cells[-1] += "".join(f"; {n} never" for n in [sum(one.ended_s is None for one in outcomes)] if n)
        kinds = Counter(re.sub(r" \d+ |_[0-9a-f]{6,}_\d", " ", each)[:40] for one in outcomes for each in one.left)
        cells.append("; ".join(f"{kind} ({times})" for kind, times in kinds.items()) or "nothing")
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
        if options.texts:
            for rank, text in sorted(outcomes[-1].texts.items()):
                sys.stdout.write(f"    {rank}: {text}\n")


def _summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else "-"


if __name__ == "__main__":
    main()

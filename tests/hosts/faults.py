"""What becomes of a job of four ranks on two hosts, under the mpirun beside this Python, when a rank or host is lost.
benchmarks/hosts_faults.py makes a table of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hosts.network import Network
from support.launchers import Launcher

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
    limits = {"KVHVD_LINK_TIMEOUT": str(SILENCE_S), "KVHVD_TIMEOUT": str(TIMEOUT_S), "KVHVD_FAILURE_FILE": "lost.json"}
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
    found = [text.split() for text in texts]
    return [network.number(words[5], int(words[2])) for words in found]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    return str(pid)

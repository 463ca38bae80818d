"""Processes with chosen ids: in a PID namespace of their own, whose init is a program of a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
_UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def why_impossible() -> str:
    """Why this system does not allow it; empty where it does."""
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    if not _LAST_PID.exists():
        return "this kernel does not let ids be chosen (CONFIG_CHECKPOINT_RESTORE)"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", f"echo 300 > {_LAST_PID}"], capture_output=True, text=True, timeout=60, check=False
    )
    return "" if tried.returncode == 0 else f"no PID namespace can be made here: {tried.stderr.strip()}"


def run_as_init(program: str, environ: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run Python code as the first process of a PID namespace, which ends with it."""
    return subprocess.run(
        [*_UNSHARE, sys.executable, "-c", program],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def start_with_id(pid: int, limit_s: float = 30.0) -> subprocess.Popen[bytes]:
    """Start a process that has this id, a session of its own and nothing of its parent's environment.

    To be called inside the namespace.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        _LAST_PID.write_text(str(pid - 1))
        process = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
        if process.pid == pid:
            return process
        process.kill()  # another one came between, or the number is still in use
        process.wait()
    raise AssertionError(f"process id {pid} was not to be had")


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children_of(pid: int) -> list[int]:
    """Ids of the processes whose parent it is."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return found

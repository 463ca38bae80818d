"""Jobs of kvhvdrun whose workers run a few lines of Python."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import kvstore_hvd
from support.launchers import environment, kvhvdrun
from support.patience import patient

#: Where the package that is tested is imported from: the installed one has its extension, a source tree may not.
PACKAGES = Path(kvstore_hvd.__file__).resolve().parents[1]
LIMIT_S = patient(60)

# What every worker's program begins with.
PRELUDE = """
import os, signal, subprocess, sys, threading
rank = int(os.environ['KVHVD_RANK'])
def say(text, stream=sys.stdout):
    stream.write(text); stream.flush()
def forever():
    threading.Event().wait(100)
"""


def processes(marker: str) -> list[int]:
    """Running processes that carry the marker in their environment, or its value among their arguments."""
    value = marker.partition("=")[2].encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            proc = Path("/proc", entry)
            arguments = (proc / "cmdline").read_bytes().split(b"\0")
            if value in arguments or marker.encode() in (proc / "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def variables_of(marker: str = "") -> dict[str, str]:
    """Return the environment of a job that carries this marker."""
    name, _, value = marker.partition("=")
    return {**environment(), "PYTHONPATH": str(PACKAGES), **({name: value} if marker else {})}


def start(marker: str, ranks: int, program: str, *options: str, **more: object) -> subprocess.Popen[bytes]:
    """Start kvhvdrun with workers that run `program`."""
    variables = more.pop("variables", {})
    environ = {**variables_of(marker), **variables}  # type: ignore[dict-item]
    command = [*kvhvdrun().prefix, "-np", str(ranks), *options, sys.executable, "-c", PRELUDE + program]
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(command, env=environ, **given)  # type: ignore[call-overload, no-any-return]


def run(marker: str, ranks: int, program: str, *options: str, **more: object) -> tuple[int, bytes, bytes]:
    """Run it to its end: exit code, stdout, stderr."""
    text = more.pop("input", None)
    if text is not None:
        more["stdin"] = subprocess.PIPE
    process = start(marker, ranks, program, *options, **more)
    try:
        out, err = process.communicate(text, timeout=LIMIT_S)  # type: ignore[arg-type]
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def wait_for(process: subprocess.Popen[bytes], lines: int) -> list[bytes]:
    """Read lines from stdout: workers say so when they are ready."""
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(lines)]


def line_with(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """Read until a line that has this in it."""
    assert process.stdout is not None
    assert process.stderr is not None
    while text not in (line := process.stdout.readline()):
        assert line, f"the job ended before {text!r}: {process.stderr.read().decode()}"
    return line


def end_by(process: subprocess.Popen[bytes], number: int) -> tuple[int, bytes, bytes]:
    """Send the launcher a signal and wait for its end: exit code, and the rest of stdout and stderr."""
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err

"""What the system refuses, or hides, is told as an error of the package that says what helps."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import LIMIT_S, run, variables_of
from support.launchers import kvhvdrun

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
SOURCE = Path(__file__).resolve().parents[1] / "support" / "refusals.cpp"

# Joins the world and adds up ones; prints what comes of it.
PROGRAM = """
import numpy as np, kvstore_hvd
try:
    say(f"sum {kvstore_hvd.allreduce(np.ones(2), name='x').tolist()}\\n")
except kvstore_hvd.KVHvdError as error:
    say(f"{type(error).__name__}: {error}\\n")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that refuses calls of the system, to be preloaded."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("refusals") / "librefusals.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-D_GNU_SOURCE"]
    subprocess.run([COMPILER, *flags, "-o", str(path), str(SOURCE), "-ldl"], check=True)
    return str(path)


def told(marker: str, program: str, *, ranks: int = 2, **variables: str) -> list[str]:
    """What each rank of a job prints; nothing may come on stderr but the launcher's own lines."""
    code, out, err = run(marker, ranks, program, variables=variables)
    assert code == 0, (code, out, err)
    assert b"Traceback" not in err, err
    text = out.decode()
    return ["\n".join(re.findall(rf"^\[{rank}\] (.*)$", text, re.MULTILINE)) for rank in range(ranks)]


@pytest.mark.parametrize("answer", ["{'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': -1 << 60}.get", "int"])
def test_a_machine_that_does_not_tell_its_memory(marker: str, answer: str) -> None:
    """A call of the system that is refused leaves a number of pages below zero, or an error."""
    texts = told(marker, f"os.sysconf = {answer}\n{PROGRAM}")
    assert texts == ["sum [2.0, 2.0]"] * 2


def told_by_all(texts: list[str], what: str, fix: str) -> None:
    """Every rank has a LaunchError with the reason and a fix, each once."""
    for rank, text in enumerate(texts):
        assert re.match(rf"LaunchError: \[rank {rank}/{len(texts)}\] ", text), text
        assert len(re.findall(what, text)) == 1, text
        (line,) = (line for line in text.splitlines() if "Fix: " in line)
        assert line.startswith("  Fix: "), text
        assert re.search(fix, line), text


@pytest.mark.parametrize(
    ("name", "number", "what", "fix"),
    [
        ("memfd_create", errno.EPERM, "creating the shared segment: Operation not permitted", "sandbox"),
        ("memfd_create", errno.ENOSYS, "creating the shared segment: Function not implemented", "sandbox"),
        ("memfd_create", errno.EMFILE, "creating the shared segment: Too many open files", "ulimit -n"),
        ("eventfd", errno.EMFILE, "creating an eventfd: Too many open files", "ulimit -n"),
        ("dontfork", errno.EINVAL, "keeping the shared segment from forked children: Invalid argument", "sandbox"),
        ("dofork", errno.ENOMEM, "keeping the arena for forked children: Cannot allocate memory", "ulimit -v"),
    ],
)
def test_a_call_that_is_refused(marker: str, shim: str, name: str, number: int, what: str, fix: str) -> None:
    variables = {"LD_PRELOAD": shim, f"REFUSE_{name}": str(number)}
    told_by_all(told(marker, PROGRAM, **variables), what, fix)


def test_limits_that_cannot_be_read(marker: str, shim: str) -> None:
    """Where a sandbox denies prlimit, launcher and workers do without."""
    texts = told(marker, PROGRAM, LD_PRELOAD=shim, REFUSE_getrlimit=str(errno.EPERM))
    assert texts == ["sum [2.0, 2.0]"] * 2


def test_a_limit_of_files_that_is_too_small(marker: str) -> None:
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n" + PROGRAM
    told_by_all(told(marker, limited), "sizing the shared segment: File too large", "ulimit -f")


def unshares(*options: str) -> list[str]:
    """A command that runs another one in namespaces of its own; skips where that is not allowed."""
    command = ["unshare", "--user", "--map-root-user", *options]
    allowed = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    if not allowed:
        pytest.skip(f"this system does not allow {' '.join(command)}")
    return command


@pytest.mark.parametrize(("kind", "option"), [("PID", "--pid"), ("time", "--time")])
def test_workers_in_namespaces_of_their_own(marker: str, kind: str, option: str) -> None:
    """They cannot see whether the others live: that is said, and none takes a living one for dead."""
    own = unshares(option, "--fork", "--kill-child")
    program = f"import sys\nsay = sys.stdout.write\n{PROGRAM}"
    command = [*kvhvdrun().prefix, "-np", "2", *own, sys.executable, "-c", program]
    done = subprocess.run(command, env=variables_of(marker), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "died" not in done.stdout + done.stderr
    for rank in range(2):
        text = "\n".join(re.findall(rf"^\[{rank}\] (.*)$", done.stdout, re.MULTILINE))
        assert text.startswith(f"LaunchError: [rank {rank}/2] "), text
        assert f"the workers are in different {kind} namespaces" in text
        assert len(re.findall(rf"{kind.lower()}:\[\d+\]: rank [01]", text)) == 2, text
        assert len(re.findall(r"^  Fix: start all of them in one container", text, re.MULTILINE)) == 1, text


def test_an_elastic_job_without_a_loopback(marker: str) -> None:
    command = [*unshares("--net"), *kvhvdrun().prefix, "--min-np", "2", sys.executable, "-c", "1"]
    done = subprocess.run(command, env=variables_of(marker), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 126, done.stderr
    assert "kvhvdrun: the launcher could not be started: " in done.stderr
    assert done.stderr.endswith("  Fix: an elastic job needs the network of this host itself: ip link set lo up\n")


@pytest.mark.parametrize("options", [["-np", "2"], ["--min-np", "2"], ["--help"]], ids=" ".join)
def test_a_misspelt_setting_is_an_error_as_any_other(marker: str, options: list[str]) -> None:
    command = [*kvhvdrun().prefix, *options, sys.executable, "-c", "print('started')"]
    variables = {**variables_of(marker), "KVHVD_TIMEUOT": "3"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert re.fullmatch(
        r"kvhvdrun: .*\n  KVHVD_TIMEUOT does not exist; did you mean KVHVD_TIMEOUT\?\n  Fix: .*\n", done.stderr
    ), done.stderr

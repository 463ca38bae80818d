"""What jobs of kvhvdrun need at their start, and what they say where it is not there or the system refuses it."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import ELASTIC, PRELUDE
from support.launchers import kvhvdrun

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

LIMITED = """
import resource
import kvstore_hvd
from kvstore_hvd import mxnet as hvd
def allow(more):
    used = len(os.listdir('/proc/self/fd')) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""


def test_too_few_are_said_by_all(run):
    """When a world is joined, and when a process set is added."""
    err = run("-np 2", LIMITED + "allow(10)\nkvstore_hvd.init()", code=1).err
    assert "joining the world of 2 workers takes 14 open files, and this process has 10 left." in err
    assert "Fix: `ulimit -n " in err
    assert err.count("did not arrive") == 0
    program = """
hvd.init(process_sets='dynamic')
first = hvd.add_process_set([0, 1])
if rank > 0: allow(6)
try:
    hvd.add_process_set([1, 2])
except kvstore_hvd.errors.LaunchError as error:
    say(f'{error}\\n')
hvd.barrier()
"""
    out = run("-np 3", LIMITED + program, KVHVD_START_TIMEOUT="3").out
    # Less than 6 when the watcher of a world has opened files since.
    text = r"joining process set 2 of 2 workers takes 14 open files, and this process has [0-6] left\."
    assert len(re.findall(text, out)) >= 2 * 3, out  # of two workers, told to all


def test_a_full_table_of_descriptors_kills_nobody(run):
    program = """
kvstore_hvd.init()
kvstore_hvd.barrier()  # imports its module
allow(0)
for step in range(20): kvstore_hvd.barrier()
say('through\\n')
"""
    assert run("-np 3", LIMITED + program).out.count("through") == 3


def test_more_descriptors_than_select_takes(run):
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
report(rank=rank, total=float(kvstore_hvd.allreduce(np.ones(1), 'x')[0]), highest=held[-1])
"""
    reports = run("-np 4", program, KVHVD_TEST_HOSTS="2").reports()
    assert [(one["total"], one["highest"] > 1023) for one in reports] == [(4.0, True)] * 4


@pytest.mark.parametrize(
    "options",
    ["-np 9", "--min-np 9 -H localhost:9", "--min-np 18 --host-discovery-script 'echo localhost:9 127.0.0.1:9'"],
)
def test_as_many_files_as_kvhvdrun_asks_for_suffice(run, tmp_path, options):
    (tmp_path / "finish").touch()

    def attempt(files, code):
        limit = ["bash", "-c", f'ulimit -n {files} && exec "$@"', "bash", *kvhvdrun().prefix]
        program = [ELASTIC] if "--min-np" in options else [["true"]]
        words = options.replace(" 127", "; echo 127")
        return str(run(words, *program, launcher=limit, code=code, KVHVD_ELASTIC_TIMEOUT="60").err)

    needed = re.search(r"needs (\d+) open files, and only 15 are allowed", attempt(15, 2))
    assert needed is not None
    assert attempt(int(needed[1]), 0) == ""


TRAIN = """
import kvstore_hvd.mxnet as hvd
from support.networks import built, step, trainer_of
from support.zero_copy import are_in_arena, bytes_in_place, gradient_bytes
hvd.init()
net = built('dense')
step(net, trainer_of(net), 'dense', 1, rank)
report(inside=are_in_arena(net), in_place=bytes_in_place() == gradient_bytes(net))
"""


@pytest.mark.parametrize("limit", ["-f 4194304", "-v 8388608"])
def test_gradients_are_in_shared_memory_also_under_limits(run, limit):
    """Of files or of addresses, in KiB: it takes a part of what there is."""
    command = ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *kvhvdrun().prefix]
    assert run("-np 2", TRAIN, launcher=command).reports() == [{"inside": [True] * 4, "in_place": True}] * 2


COMPILER = shutil.which(os.environ.get("CXX", "g++"))
SOURCE = Path(__file__).resolve().parents[1] / "support" / "refusals.cpp"

PROGRAM = """
import numpy as np, kvstore_hvd
try:
    say(f"sum {kvstore_hvd.allreduce(np.ones(2), name='x').tolist()}\\n")
except kvstore_hvd.KVHvdError as error:
    say(f"{type(error).__name__}: {error}\\n")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """A library that refuses calls of the system, to be preloaded."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("refusals") / "librefusals.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-D_GNU_SOURCE"]
    subprocess.run([COMPILER, *flags, "-o", str(path), str(SOURCE), "-ldl"], check=True)
    return str(path)


def told(run, program, **variables):
    """What each rank of a job prints; nothing may come on stderr but the launcher's own lines."""
    job = run("-np 2", program, **variables)
    assert "Traceback" not in job.err, job.err
    return [job.of(rank).strip() for rank in range(2)]


def test_a_machine_that_does_not_tell_its_memory_or_its_limits(run, shim):
    """A call of the system that is refused leaves a number of pages below zero; a sandbox denies prlimit."""
    unknown = "os.sysconf = {'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': -1 << 60}.get\n" + PROGRAM
    assert told(run, unknown, LD_PRELOAD=shim, REFUSE_getrlimit=str(errno.EPERM)) == ["sum [2.0, 2.0]"] * 2


LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"


@pytest.mark.parametrize(
    ("name", "number", "what", "fix"),
    [
        ("memfd_create", errno.EPERM, "creating the shared segment: Operation not permitted", "sandbox"),
        ("eventfd", errno.EMFILE, "creating an eventfd: Too many open files", "ulimit -n"),
        ("dontfork", errno.EINVAL, "keeping the shared segment from forked children: Invalid argument", "sandbox"),
        ("dofork", errno.ENOMEM, "keeping the arena for forked children: Cannot allocate memory", "ulimit -v"),
        ("", 0, "sizing the shared segment: File too large", "ulimit -f"),
    ],
)
def test_a_call_that_is_refused(run, shim, name, number, what, fix):
    """Every rank has a LaunchError with the reason and a fix, each once."""
    variables = {"LD_PRELOAD": shim, f"REFUSE_{name}": str(number)} if name else {}
    for rank, text in enumerate(told(run, PROGRAM if name else LIMIT + PROGRAM, **variables)):
        assert re.match(rf"LaunchError: \[rank {rank}/2\] ", text), text
        assert len(re.findall(what, text)) == 1, text
        (line,) = re.findall("^.*Fix: .*", text, re.MULTILINE)
        assert re.match(f"  Fix: .*{fix}", line), text


def unshares(*options):
    """A command that runs another one in namespaces of its own; skips where that is not allowed."""
    command = ["unshare", "--user", "--map-root-user", *options]
    allowed = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    if not allowed:
        pytest.skip(f"this system does not allow {' '.join(command)}")
    return command


@pytest.mark.parametrize(("kind", "option"), [("PID", "--pid"), ("time", "--time")])
def test_workers_in_namespaces_of_their_own(run, kind, option):
    """They cannot see whether the others live: that is said, and none takes a living one for dead."""
    job = run("-np 2", [*unshares(option, "--fork", "--kill-child"), sys.executable, "-c", PRELUDE + PROGRAM])
    assert "died" not in job.out + job.err
    for rank in range(2):
        text = job.of(rank)
        assert text.startswith(f"LaunchError: [rank {rank}/2] "), text
        assert f"the workers are in different {kind} namespaces" in text
        assert len(re.findall(rf"{kind.lower()}:\[\d+\]: rank [01]", text)) == 2, text
        assert len(re.findall(r"^  Fix: start all of them in one container", text, re.MULTILINE)) == 1, text


def test_an_elastic_job_without_a_loopback(run):
    assert run("--min-np 2", ["true"], launcher=[*unshares("--net"), *kvhvdrun().prefix]).err == ""

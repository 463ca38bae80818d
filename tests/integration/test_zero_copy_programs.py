"""Whole programs with gradients in shared memory: how they start, under which limits they run, and how they end."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.launchers import environment, kvhvdrun, with_tests
from support.patience import patient

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mxnet") is None, reason="there is no MXNet")

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = patient(90)


def run(program: str, ranks: int, *, limit: str = "", code: int = 0, **variables: str) -> str:
    """Run the program under kvhvdrun; checks its exit code and returns what it printed."""
    command = kvhvdrun().command(ranks, [sys.executable, str(TESTS / "support" / "zero_copy_worker.py"), program])
    if limit:
        command = ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *command]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        env=with_tests({**environment(), "OMP_NUM_THREADS": "1", "KVHVD_TIMEOUT": "30", **variables}),
    )
    assert result.returncode == code, result.stdout
    assert "Traceback" not in result.stdout, result.stdout
    return result.stdout


def weights(output: str, ranks: int) -> str:
    """Return the checksum of the weights, which is the same on all ranks."""
    found = re.findall(r"weights (\w+) inside", output)
    assert len(found) == ranks, output
    assert len(set(found)) == 1, output
    return found[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("program", ["train", "string"])
def test_same_weights_with_and_without(program: str, ranks: int) -> None:
    """From the first line to the last, with a store and with its name; arrays are alive at the end."""
    inside = 4 if ranks > 1 else 0
    output = run(program, ranks)
    assert output.count(f"inside {inside} of 4") == ranks, output
    off = run(program, ranks, KVHVD_ZERO_COPY="0")
    assert off.count("inside 0 of 4") == ranks, off
    assert weights(output, ranks) == weights(off, ranks)


@pytest.mark.parametrize("variables", [{"MXNET_ENGINE_TYPE": "NaiveEngine"}, {"KVHVD_ARENA_MIB": "1"}])
def test_other_ways_to_run(variables: dict[str, str]) -> None:
    """MXNet's synchronous engine, and an arena just large enough."""
    output = run("train", 2, **variables)
    assert output.count("inside 4 of 4") == 2, output
    assert weights(output, 2) == weights(run("train", 2), 2)


@pytest.mark.parametrize("limit", ["-v 8388608", "-f 4194304"])
def test_limited_address_space_and_file_size(limit: str) -> None:
    """Under `ulimit` (in KiB) the arena takes a part of what there is."""
    output = run("train", 2, limit=limit)
    assert output.count("inside 4 of 4") == 2, output
    assert weights(output, 2) == weights(run("train", 2), 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_outlive_a_lost_world(ranks: int) -> None:
    """After a worker's death the others may use and free their arrays, and end as they like."""
    output = run("lost", ranks, code=128 + signal.SIGKILL)
    assert output.count("caught PeerLostError") == ranks - 1, output
    assert output.count("survived") == ranks - 1, output


def test_a_child_that_ends_as_a_program_does() -> None:
    """Its exit handlers leave the parent's world and gradients alone."""
    output = run("forked", 2)
    assert output.count("inside 4 of 4") == 2, output

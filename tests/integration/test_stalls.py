"""Ranks that come late: who says so, and what; real processes, real signals, real MXNet."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.patience import patient
from support.runs import Run

pytestmark = pytest.mark.slow

WORKER = Path(__file__).resolve().parents[1] / "support" / "stall_worker.py"


class Stall(Run):
    """A job whose ranks wait for the test."""

    def __init__(self, what: str, ranks: int, folder: Path, marker: str, **variables: str) -> None:
        self.folder = folder
        super().__init__(WORKER, [what, str(folder)], ranks, folder, marker, **variables)

    def release(self) -> None:
        """Let the late rank go on."""
        (self.folder / "go").touch()

    def finish(self) -> tuple[int, str]:
        """Let all ranks end."""
        self.release()
        (self.folder / "end").touch()
        return self.end()


@pytest.fixture
def start(tmp_path: Path, marker: str) -> Iterator[object]:
    """Start a job; the fixture `marker` checks that nothing of it is left."""
    runs: list[Stall] = []

    def start_one(what: str, ranks: int, **variables: str) -> Stall:
        runs.append(Stall(what, ranks, tmp_path, marker, **variables))
        return runs[-1]

    yield start_one
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(timeout=patient(30))


def lines_of(output: str, rank: int) -> list[str]:
    return [line.split("] ", 1)[1] for line in output.splitlines() if line.startswith(f"[{rank}] ")]


def others(ranks: int) -> str:
    return "rank 0" if ranks == 2 else f"ranks 0, 2-{ranks - 1}"


WAITS = r"rank 0 has waited \d+ s for other workers\."
LATE = r"the other workers have waited \d+ s for rank 1\."


@pytest.mark.parametrize("engine", ["ThreadedEnginePerDevice", "NaiveEngine"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_late_rank_is_named_and_says_where_it_is(start, ranks: int, engine: str) -> None:  # type: ignore[no-untyped-def]
    """Rank 0 says who waits for whom, rank 1 shows its stack, the others are silent; and the training goes on."""
    run = start("late", ranks, KVHVD_STALL_CHECK_TIME_S="1", MXNET_ENGINE_TYPE=engine)
    run.until(lambda text: re.search(WAITS, text) and "time.sleep" in text)
    run.release()
    run.until(lambda text: "the stall is over" in text and text.count("trained") == ranks)
    code, output = run.finish()
    assert code == 0, output
    waiting = "\n".join(lines_of(output, 0))
    assert re.search(
        rf"{WAITS}\n +allreduce '\w*(weight|bias)' \(key \d\): \d+ s, submitted by {others(ranks)}, "
        r"not by rank 1\n",
        waiting,
    ), output
    assert re.search(r"\n +rank 1 \(.*pid \d+\): see its own report\n", waiting), output
    late = "\n".join(lines_of(output, 1))
    assert re.search(rf"{LATE}\n +It has not submitted '\w*(weight|bias)' \(key \d\)", late), output
    assert re.search(r"\n +main thread, innermost call last:\n", late), output
    assert "in write_a_long_checkpoint\n" in late, output
    assert not re.search(LATE, waiting), output
    assert not re.search(WAITS, late), output
    for rank in range(2, ranks):
        assert "waited" not in "\n".join(lines_of(output, rank)), output


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stopped_rank_is_said_to_be_stopped(start, ranks: int) -> None:  # type: ignore[no-untyped-def]
    """It cannot speak; who waits for it sees its process, and says how to continue it."""
    run = start("stop", ranks, HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    output = run.until(lambda text: "continues it" in text)
    (pid,) = re.findall(r"stopping (\d+)", output)
    assert re.search(rf"\[0\] +rank 1 \(.*pid {pid}\): its process is stopped; `kill -CONT {pid}` continues it", output)
    os.kill(int(pid), signal.SIGCONT)
    run.until(lambda text: "the stall is over" in text and text.count("trained") == ranks)
    code, output = run.finish()
    assert code == 0, output


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shutdown_time_ends_the_world_on_all_ranks(start, ranks: int) -> None:  # type: ignore[no-untyped-def]
    """Every rank gets an error that names the late one, that one too."""
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    run = start("late", ranks, **variables)
    run.until(lambda text: text.count("caught: ") == ranks - 1)
    run.release()
    run.until(lambda text: text.count("caught: ") == ranks)
    code, output = run.finish()
    assert code == 7, output
    for rank in range(ranks):
        who = "rank 0 " if rank else ""  # the head names the rank itself
        (caught,) = re.findall(rf"^\[{rank}\] caught: (.*)$", output, re.MULTILINE)
        assert re.match(
            rf"TransportError: \[rank {rank}/{ranks}\] .*{who}waited \d+ s, longer than the stall shutdown time, "
            "for rank 1",
            caught,
        ), output


@pytest.mark.parametrize("variables", [{"HOROVOD_STALL_CHECK_DISABLE": "1"}, {"KVHVD_STALL_CHECK_TIME_S": "0"}])
def test_the_check_can_be_switched_off(start, variables: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    """Then nobody looks, although ranks wait: nothing is reported, and nobody ends the world."""
    shutdown = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"}
    run = start("missed", 2, **{"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", **shutdown, **variables})
    run.until(lambda text: "missed, 0 inspectors" in text)
    run.release()
    run.until(lambda text: text.count("trained") == 2)
    code, output = run.finish()
    assert code == 0, output
    assert "waited" not in output, output


def test_ranks_that_wait_for_each_other_all_say_so(start) -> None:  # type: ignore[no-untyped-def]
    """Each of them waits, and each of them is late."""
    code, output = start("crossed", 2, KVHVD_STALL_CHECK_TIME_S="0.5", KVHVD_STALL_SHUTDOWN_TIME_S="3").end()
    assert code == 7, output
    for rank in (0, 1):
        own = "\n".join(lines_of(output, rank))
        assert f"allreduce 'of-rank-{rank}': " in own, output
        assert f"submitted by rank {rank}, not by rank {1 - rank}" in own, output
        assert f"It has not submitted 'of-rank-{1 - rank}'\n" in own, output
        assert re.search(r"stall_worker.py\", line \d+, in crossed\n", own), output


@pytest.mark.parametrize(
    ("ranks", "number", "variables"), [(2, 1, {}), (2, 0, {"HOROVOD_STALL_CHECK_DISABLE": "1"}), (1, 0, {})]
)
def test_the_thread_follows_the_world(start, ranks: int, number: int, variables: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    """One for each world of several ranks; none in a forked child, nor after leaving; and it delays no exit."""
    code, output = start(f"threads-{number}", ranks, **variables).end()
    assert code == 0, output
    assert output.count("counted") == ranks, output

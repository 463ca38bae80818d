"""kvhvdrun without its processes: options, shares of cores, and how output is cut into lines."""

from __future__ import annotations

import os
import random
import re
import resource
import socket
import sys
from pathlib import Path

import pytest

from kvstore_hvd import launch
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launcher import capacity
from kvstore_hvd.launcher.output import LineStream, Sink, Tail

# -- Output -------------------------------------------------------------------------------------------------------


def streams(count: int) -> tuple[Sink, list[LineStream]]:
    sink = Sink()
    return sink, [LineStream(sink, f"[{rank}] ".encode()) for rank in range(count)]


def test_lines_of_workers_do_not_tear() -> None:
    sink, (a, b) = streams(2)
    a.feed(b"one ")
    b.feed(b"uno\ndos ")
    a.feed(b"line\n")
    b.feed(b"tres\n")
    assert bytes(sink.pending) == b"[1] uno\n[0] one line\n[1] dos tres\n"


def test_the_last_line_may_lack_its_end() -> None:
    sink, (a, b) = streams(2)
    a.feed(b"no end")
    a.flush()
    b.feed(b"next\n")
    assert bytes(sink.pending) == b"[0] no end\n[1] next\n"


def test_an_unfinished_line_goes_on_without_a_second_prefix() -> None:
    sink, (a,) = streams(1)
    a.feed(b"name? ")
    a.flush()
    a.feed(b"thanks\nbye\n")
    assert bytes(sink.pending) == b"[0] name? thanks\n[0] bye\n"


def test_an_unfinished_line_that_was_interrupted_gets_its_prefix_again() -> None:
    sink, (a, b) = streams(2)
    a.feed(b"name? ")
    a.flush()
    b.feed(b"hello\n")
    a.feed(b"thanks\n")
    assert bytes(sink.pending) == b"[0] name? \n[1] hello\n[0] thanks\n"


def test_progress_bars_pass() -> None:
    sink, (a, b) = streams(2)
    a.feed(b"10%\r20%\r")
    a.feed(b"30%\r\n")
    assert bytes(sink.pending) == b"[0] 10%\r[0] 20%\r[0] 30%\r\n"
    sink.pending.clear()
    a.feed(b"50%\r60%")
    b.feed(b"done\n")
    assert bytes(sink.pending) == b"[0] 50%\r\n[1] done\n"


def test_binary_junk_passes_whatever_the_cuts() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    data = bytes(rng.choice(b"\r\n\0\xff\x80ab") for _ in range(3000))
    whole, (a,) = streams(1)
    a.feed(data)
    a.flush()
    cut, (b,) = streams(1)
    rest = data
    while rest:
        size = rng.randrange(1, 20)
        b.feed(rest[:size])
        rest = rest[size:]
    b.flush()
    assert whole.pending == cut.pending, f"seed {seed}"
    without = LineStream(plain := Sink(), b"")
    without.feed(data)
    without.flush()
    assert bytes(plain.pending) == data, f"seed {seed}"


def test_a_very_long_line_is_whole_and_not_held_without_bound() -> None:
    sink, (a,) = streams(1)
    for _ in range(80):
        a.feed(b"x" * 65536)
    assert len(sink.pending) > 4 << 20
    a.feed(b"\n")
    assert bytes(sink.pending) == b"[0] " + b"x" * (80 * 65536) + b"\n"


def test_a_closed_sink_drops() -> None:
    sink, (a,) = streams(1)
    sink.closed = True
    a.feed(b"x\n")
    assert not sink.pending


def test_the_tail_is_bounded_and_knows_progress_bars() -> None:
    tail = Tail()
    stream = LineStream(Sink(), b"", tail.add)
    for number in range(100):
        stream.feed(b"line %d\n" % number)
    stream.feed(b"10%\r20%\r\nlast")
    stream.flush()
    assert tail.lines()[-3:] == [b"line 99", b"20%", b"last"]
    assert len(tail.lines()) <= 21
    stream.feed(b"y" * 100_000 + b"\n")
    assert len(b"".join(tail.lines())) <= 8192


# -- Options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["-np", "2"], 2, "no command was given"),
        ([], 2, "no command was given"),
        (["true"], 2, "the number of workers is missing"),
        (["-np", "0", "true"], 2, "-np 0: expected a whole number of at least 1"),
        (["-np", "-3", "true"], 2, "-np -3: expected"),
        (["-np", "two", "true"], 2, "-np two: expected"),
        (["-np", "257", "true"], 2, "-np 257: a job has at most 256 workers on one host"),
        (["-np", "1000000", "true"], 2, "-np 1000000: a job has at most 256 workers"),
        (["-H", "localhost:1000000", "true"], 2, "a job has at most 256 workers"),
        (["-np", "2", "no-such-command-here"], 127, "command 'no-such-command-here' was not found"),
        (["-np", "2", "/"], 126, "'/' is a directory"),
        (["-np", "3", "-H", "localhost:2", "true"], 2, "-np 3, but the hosts have 2 slots"),
        (["-H", "localhost:2,elsewhere:2", "true"], 2, "'elsewhere' is another host"),
        (["-H", "a b c", "true"], 2, "is not HOST:N"),
        (["--hostfile", "/no/such/file", "true"], 2, "the host file cannot be read"),
        (["-np", "2", "--start-timeout", "soon", "true"], 2, "KVHVD_START_TIMEOUT: 'soon' is not"),
    ],
)
def test_what_cannot_work_is_said(
    capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    assert launch.main(arguments) == code
    out, err = capfd.readouterr()
    assert err.startswith("kvhvdrun: ")
    assert text in err
    assert "Traceback" not in err
    assert out == ""


def test_a_script_that_is_not_executable_gets_a_hint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert launch.main(["-np", "2", str(script)]) == 126
    assert "is not executable" in (err := capfd.readouterr().err)
    assert f"Fix: kvhvdrun -np N {os.path.basename(sys.executable)} {script}" in err


# -- Numbers of workers that cannot be ----------------------------------------------------------------------------


def test_as_many_workers_as_the_native_engine_takes() -> None:
    header = Path(__file__).resolve().parents[2] / "native/include/kvstore_hvd/failure.hpp"
    match = re.search(r"kMaxRanks = (\d+);", header.read_text())
    assert match is not None
    assert int(match[1]) == capacity.MAX_WORKERS


def limit(monkeypatch: pytest.MonkeyPatch, which: int, soft: int) -> None:
    given = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (soft, soft) if asked == which else given(asked))


def test_more_workers_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    limit(monkeypatch, resource.RLIMIT_NPROC, 10)
    capacity.check_count(8)
    with pytest.raises(LaunchError, match=r"-np 9: only 10 processes are allowed here \(ulimit -u\)"):
        capacity.check_count(9)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # whom the kernel does not hold to it
    capacity.check_count(9)


def test_more_workers_than_a_control_group_may_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "pids.max"
    monkeypatch.setattr(capacity, "_PIDS_MAX", (str(path),))
    capacity.check_count(20)  # there is no such group
    path.write_text("max\n")
    capacity.check_count(20)
    path.write_text("20\n")
    with pytest.raises(LaunchError, match=r"only 20 processes .*control group"):
        capacity.check_count(20)


def test_more_workers_than_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, resource.RLIMIT_NOFILE, 64)
    capacity.check_count(24)
    with pytest.raises(LaunchError, match=r"needs 66 open files, and only 64 are allowed[^\n]*\n  Fix: ulimit -n 66"):
        capacity.check_count(25)
    limit(monkeypatch, resource.RLIMIT_NOFILE, 8)
    capacity.check_count(1)  # it has our streams
    limit(monkeypatch, resource.RLIMIT_NOFILE, resource.RLIM_INFINITY)
    capacity.check_count(256)


def plan(*arguments: str) -> launch.Plan:
    return launch._plan(launch._parser().parse_args(arguments))


def test_options_of_the_program_are_its_own() -> None:
    command = plan("-np", "2", "-v", "true", "-np", "7", "--no-prefix", "--", "-v").workers[0].command
    assert command[1:] == ["-np", "7", "--no-prefix", "--", "-v"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", socket.gethostname()])
def test_hosts_that_are_this_one(host: str) -> None:
    assert len(plan("-H", f"{host}:3", "true").workers) == 3
    assert len(plan("-np", "1", "-H", f"{host}:3", "true").workers) == 1


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all of them\n\nlocalhost slots=2  # here\n127.0.0.1:3\n")
    assert len(plan("--hostfile", str(path), "true").workers) == 5


def test_variables_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "usable_cores", lambda: list(range(8)))
    # As inside a worker of mpirun; none of it is true for our workers.
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_btl", "^ofi")  # a choice of the user's
    made = plan("-np", "3", "--start-timeout", "7", "true")
    environs = [worker.environment for worker in made.workers]
    assert [environ["KVHVD_RANK"] for environ in environs] == ["0", "1", "2"]
    for environ in environs:
        assert environ["KVHVD_SIZE"] == environ["KVHVD_LOCAL_SIZE"] == "3"
        assert environ["KVHVD_RANK"] == environ["KVHVD_LOCAL_RANK"]
        assert environ["KVHVD_START_TIMEOUT"] == "7"
        assert environ["OMP_NUM_THREADS"] == "2"
        assert environ["OMPI_MCA_btl"] == "^ofi"
        assert not [n for n in environ if n.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD", "OMPI_MCA_orte"))]
        assert len(environ["KVHVD_SECRET"]) == 64
        assert environ["KVHVD_SECRET"] not in " ".join(made.workers[0].command)
    assert len({(environ["KVHVD_JOB"], environ["KVHVD_SECRET"]) for environ in environs}) == 1
    assert plan("-np", "1", "true").workers[0].environment["KVHVD_SECRET"] != environs[0]["KVHVD_SECRET"]


def test_omp_num_threads_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert plan("-np", "2", "true").workers[0].environment["OMP_NUM_THREADS"] == "5"


def test_one_worker_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in plan("-np", "1", "true").workers[0].environment


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3, 4)]),
        ([4, 9], 2, [(4,), (9,)]),
        ([4, 9], 3, [(4,), (9,), (4,)]),
    ],
)
def test_shares_of_cores(cores: list[int], count: int, shares: list[tuple[int, ...]]) -> None:
    assert [launch._share(cores, rank, count) for rank in range(count)] == shares

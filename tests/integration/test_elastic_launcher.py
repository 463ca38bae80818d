"""The launcher of elastic jobs, with its daemons, real processes and real signals; the workers train nothing."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.elastic_launches import Launch
from support.jobs import LIMIT_S, processes
from support.patience import of_the_product

# Slow: the short choice of tests is for another MXNet and MPI, which nothing here has to do with.
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

# Long enough for whatever a test does meanwhile; such jobs are ended by what happens to them.
LONG = "steps=100000"


@pytest.fixture
def job(marker: str, tmp_path: Path) -> Any:
    def start(*options: str, **more: Any) -> Launch:
        return Launch(marker, tmp_path, *options, **more)

    return start


@pytest.fixture
def finish(tmp_path: Path) -> Path:
    """A file that a test makes when workers whose act is ``until=`` this file shall end well."""
    return tmp_path / "finish"


# -- Start and end ------------------------------------------------------------------------------------------------


def test_a_job_without_faults(job: Any) -> None:
    launch = job("--min-np", "2", "--max-np", "3", acts="steps=5")
    code, out, err = launch.end()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(
        line for n in range(3) for line in (f"[{n}] generation 0 rank {n} of 3", f"[{n}] done after 5 steps")
    )
    kinds = [entry["event"] for entry in launch.events]
    assert kinds[:2] == ["job_start", "host_added"]
    assert kinds.count("worker_started") == kinds.count("worker_entered") == kinds.count("worker_finished") == 3
    assert kinds.index("generation_ready") < kinds.index("generation_joined")
    assert launch.members(0) == [0, 1, 2]
    assert kinds[-1] == "job_end"
    end = launch.events[-1]
    assert (end["code"], end["reason"]) == (0, "")
    assert all(isinstance(entry["time"], float) and isinstance(entry["monotonic"], float) for entry in launch.events)
    started = launch.of("worker_started")
    assert [(entry["worker"], entry["slot"]) for entry in started] == [(n, f"localhost:{n}") for n in range(3)]


def test_streams_stay_apart_and_prefixes_can_be_left_away(job: Any) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr)"
    code, out, err = job("--min-np", "2", command=[sys.executable, "-c", program]).end()
    assert (code, sorted(out.splitlines()), sorted(err.splitlines())) == (
        0,
        ["[0] out", "[1] out"],
        ["[0] err", "[1] err"],
    )
    code, out, _ = job("--min-np", "2", "--no-prefix", command=[sys.executable, "-c", program]).end()
    assert (code, out) == (0, "out\nout\n")


def test_what_workers_get(job: Any) -> None:
    program = (
        "import os; names = [n for n in sorted(os.environ) if n.startswith(('KVHVD_', 'OMP'))]; "
        "print(*(n for n in names if not n.startswith('KVHVD_TEST')), os.environ['KVHVD_WORKER'])"
    )
    _, out, _ = job("--min-np", "2", command=[sys.executable, "-c", program]).end()
    own = {name for name in os.environ if name.startswith("KVHVD_") and not name.startswith("KVHVD_TEST")}
    given = {"KVHVD_DAEMON", "KVHVD_JOB", "KVHVD_SECRET", "KVHVD_SLOT", "KVHVD_WORKER", "OMP_NUM_THREADS"}
    names = " ".join(sorted(own | given))
    assert sorted(out.splitlines()) == [f"[0] {names} 0", f"[1] {names} 1"]


def test_horovods_variables_of_workers(job: Any) -> None:
    """Those of the first world, and the slot."""
    program = (
        "import os; print(os.environ['KVHVD_SLOT'], *(f'{n}={v}' for n, v in sorted(os.environ.items()) "
        "if n.startswith('HOROVOD_') and n.split('_')[1] in ('RANK', 'SIZE', 'LOCAL', 'CROSS', 'HOSTNAME', 'CPU', "
        "'CONTROLLER')), flush=True)"
    )
    options = ("--min-np", "3", "--max-np", "3", "-H", "127.0.0.2:1,localhost:5", "--no-prefix")
    code, out, _ = job(*options, command=[sys.executable, "-c", program]).end()
    assert code == 0
    slots = ["127.0.0.2:0", "localhost:0", "localhost:1"]
    assert sorted(out.splitlines()) == [
        f"{slot} HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo HOROVOD_CROSS_RANK=0 HOROVOD_CROSS_SIZE=1 "
        f"HOROVOD_HOSTNAME={slot[:-2]} HOROVOD_LOCAL_RANK={rank} HOROVOD_LOCAL_SIZE=3 HOROVOD_RANK={rank} "
        "HOROVOD_SIZE=3"
        for rank, slot in enumerate(slots)
    ]


def test_the_secret_is_on_no_command_line_and_not_with_the_daemon(job: Any) -> None:
    program = """
import os
secret = os.environ['KVHVD_SECRET'].encode()
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        assert secret not in open(f'/proc/{pid}/cmdline', 'rb').read()
    except OSError: pass
assert secret not in open(f'/proc/{os.getppid()}/environ', 'rb').read()
"""
    assert job("--min-np", "1", command=[sys.executable, "-c", program]).end()[0] == 0


def test_hosts_that_are_names_of_this_one(job: Any) -> None:
    launch = job("--min-np", "3", "-H", "localhost:2,127.0.0.2:1", acts="steps=5")
    code, out, _ = launch.end()
    assert code == 0, out
    assert [entry["slot"] for entry in launch.of("worker_started")][:3] != []
    assert {entry["slot"] for entry in launch.of("worker_started")} == {"localhost:0", "localhost:1", "127.0.0.2:0"}


def test_modules_in_the_users_folder_are_not_taken_for_the_launchers(job: Any, tmp_path: Path) -> None:
    script = tmp_path / "kvhvdrun"  # as installed: its own folder is the first one in Python's path
    script.write_text("import sys; from kvstore_hvd.launch import main; sys.exit(main())\n")
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("json", "signal", "select", "secrets"):
        (folder / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    code, _, err = job("--min-np", "1", prefix=[sys.executable, str(script)], command=["true"], cwd=folder).end()
    assert (code, err) == (0, "")


# -- Losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_replaced(job: Any, finish: Path, rank: int) -> None:
    launch = job("--min-np", "2", "--max-np", "3", acts=f"until={finish}")
    launch.until_joined(0)
    launch.kill(rank)
    survivors = [worker for worker in range(3) if worker != rank]
    launch.until_joined_by(*survivors, 3)
    finish.touch()
    code, out, err = launch.end()
    assert code == 0, launch.told()
    assert launch.members(1) in (survivors, [*survivors, 3])
    last = launch.of("generation_ready")[-1]
    assert last["workers"] == [*survivors, 3]
    assert f"kvhvdrun: worker {rank} (localhost:{rank}) was killed by SIGKILL.\n" in err
    assert f"[3] generation {last['generation']} rank 2 of 3" in out


def test_two_are_killed_at_once(job: Any, finish: Path) -> None:
    launch = job("--min-np", "2", "--max-np", "4", acts=f"until={finish}")
    launch.until_joined(0)
    launch.kill(0, 2)
    launch.until(lambda: [1, 3] in [entry["workers"][:2] for entry in launch.of("generation_ready")])
    launch.until_count(4, after=0)
    finish.touch()
    assert launch.end()[0] == 0
    assert sorted(launch.of("generation_ready")[-1]["workers"]) == [1, 3, 4, 5]


@pytest.mark.parametrize("when", ["start", "enter", "world"])
def test_a_worker_dies_on_its_way_into_the_first_world(job: Any, when: str) -> None:
    launch = job("--min-np", "2", acts=f"steps=50 1:die_at={when}")
    code, _, _ = launch.end()
    assert code == 0, launch.told()
    if when == "world":
        assert launch.of("generation_void")[0]["generation"] == 0
    assert launch.of("generation_ready")[-1]["workers"] == [0, 2]


def test_a_survivor_dies_while_the_next_world_is_formed(job: Any) -> None:
    launch = job("--min-np", "1", "--max-np", "3", acts="steps=150 0:die 0:at=10 1:die_at=ready")
    code, _, _ = launch.end()
    assert code == 0, launch.told()
    assert launch.of("generation_ready")[-1]["workers"][0] == 2


def test_a_newcomer_dies_in_the_meeting(job: Any, finish: Path) -> None:
    launch = job("--min-np", "1", "--max-np", "2", acts=f"until={finish} 1:die 1:at=10 2:die_at=world")
    launch.until(lambda: launch.of("slot_blacklisted"))
    (met,) = [entry["generation"] for entry in launch.of("generation_ready") if entry["workers"] == [0, 2]]
    launch.until_joined(met + 1)  # in the lost one, no real worker could have come to its end
    finish.touch()
    code, _, _ = launch.end()
    assert code == 0, launch.told()
    assert launch.of("slot_blacklisted")[0]["slot"] == "localhost:1"


def test_a_stopped_worker_is_killed_soon_after_the_others_have_timed_out(job: Any) -> None:
    launch = job("--min-np", "2", "--max-np", "3", acts="steps=100 1:stop 1:at=10 0:timeout 0:at=30")
    code, _, err = launch.end()
    assert code == 0, launch.told()
    (killed,) = launch.of("worker_killed")
    void = launch.of("generation_void")[0]
    assert (killed["worker"], void["cause"]) == (1, "timeout")
    assert launch.events.index(void) < launch.events.index(killed)
    assert "worker 1 (localhost:1) is killed: it did not answer while the others waited for it." in err


def test_a_program_that_always_fails(job: Any) -> None:
    launch = job("--min-np", "2", command=[sys.executable, "-c", "raise SystemExit(7)"])
    code, _, err = launch.end()
    assert code == 7
    assert "exited with code 7. It wrote nothing to stderr." in err
    assert len(launch.of("worker_started")) == 4


def test_a_program_that_fails_whoever_runs_it(job: Any) -> None:
    # Five must fail after the first. One that ends before the driver has heard from all that they have met does not
    # count, so that there may be more of them on a busy machine.
    acts = " ".join(f"{worker}:crash=3 {worker}:say=ValueError" for worker in range(1, 30))
    launch = job("--min-np", "2", "--max-np", "2", "--blacklist-cooldown-range", "1", "1", acts=acts)
    code, _, err = launch.end()
    assert code == 3, launch.told()
    assert "kvhvdrun: workers keep failing, and so do their replacements soon after they start." in err
    last = re.search(r"Most recently, worker (\d+) \(localhost:1\) exited with code 3\.", err)
    assert last is not None, launch.told()
    assert 6 <= int(last[1]) < 30
    assert err.endswith("Its last lines on stderr:\n    ValueError\n")


def test_the_first_words_are_those_of_the_culprit(job: Any) -> None:
    code, _, err = job("--min-np", "1", acts="crash=5 say=ValueError").end()
    assert code == 5
    assert "kvhvdrun: no worker of generation 0 is left" in err
    assert err.endswith("Its last lines on stderr:\n    ValueError\n")


def test_a_slot_is_blacklisted_and_comes_back(job: Any, finish: Path) -> None:
    acts = f"until={finish} 1:crash=3 1:at=2 2:crash=3"
    launch = job("--min-np", "1", "--max-np", "2", "--blacklist-cooldown-range", "1", "1", acts=acts)
    launch.until_joined_by(0, 3)
    finish.touch()
    code, _, err = launch.end()
    assert code == 0, launch.told()
    (note,) = launch.of("slot_blacklisted")
    assert (note["slot"], note["seconds"]) == ("localhost:1", 1.0)
    third = next(entry for entry in launch.of("worker_started") if entry["worker"] == 3)
    assert third["slot"] == "localhost:1"
    assert launch.events.index(note) < launch.events.index(third)
    assert "kvhvdrun: slot localhost:1 gets no worker for 1 s: they crash there." in err


def test_too_many_resets(job: Any) -> None:
    launch = job("--min-np", "1", "--max-np", "3", "--reset-limit", "1", acts=LONG)
    launch.until_joined(0)
    launch.kill(1)
    _, members = launch.until_count(2)
    launch.kill(members[0])
    code, out, err = launch.end()
    assert code == 1
    text = "Horovod was shutdown because number of resets during elastic job exceeded limit: 1"
    assert f"kvhvdrun: {text}\n" in err
    assert f"fail: {text}" in out


# -- Discovery ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A file that the discovery script prints."""
    return tmp_path / "hosts"


def test_hosts_come_and_go(job: Any, hosts: Path) -> None:
    hosts.write_text("localhost:2\n")
    launch = job("--min-np", "1", "--host-discovery-script", f"cat {hosts}", acts=LONG)
    launch.until_joined(0)
    hosts.write_text("localhost:2\n127.0.0.2\n")
    generation, members = launch.until_count(3)
    assert members == [0, 1, 2]
    assert [entry["result"] for entry in launch.of("updated")] == [2]
    hosts.write_text("127.0.0.2:1\n")
    launch.until(lambda: launch.of("generation_joined")[-1]["generation"] > generation)
    assert launch.members(generation + 1) == [2]
    assert [entry["result"] for entry in launch.of("updated")] == [2, 1]
    ended = {entry["worker"]: entry["code"] for entry in launch.of("worker_exited")}
    launch.until(lambda: len(launch.of("worker_exited")) == 2)
    ended = {entry["worker"]: entry["code"] for entry in launch.of("worker_exited")}
    assert ended == {0: 0, 1: 0}
    launch.process.send_signal(signal.SIGTERM)
    code, out, _ = launch.end()
    assert code == 143
    assert "[0] leave: this worker is not needed any more" in out
    assert [(e["host"], e["slots"]) for e in launch.of("host_added")] == [("localhost", 2), ("127.0.0.2", 1)]
    assert [(e["host"], e["slots"]) for e in launch.of("host_removed")] == [("localhost", 0)]


def test_a_change_is_one_reset(job: Any, hosts: Path) -> None:
    """However many workers it brings, and takes away; a second one is another."""
    hosts.write_text("localhost:2\n")
    options = ("--min-np", "1", "--reset-limit", "1", "--host-discovery-script", f"cat {hosts}")
    launch = job(*options, acts=LONG)
    launch.until_joined(0)
    hosts.write_text("localhost:1\n127.0.0.2:3\n")
    launch.until_count(4)
    hosts.write_text("localhost:1\n127.0.0.2:2\n")
    code, _, err = launch.end()
    assert code == 1
    assert "number of resets during elastic job exceeded limit: 1" in err


def test_fewer_slots_than_needed(job: Any, hosts: Path) -> None:
    hosts.write_text("localhost:1\n")
    launch = job("--min-np", "2", "--host-discovery-script", f"cat {hosts}", "--elastic-timeout", "1.5")
    code, _, err = launch.end()
    assert code == 1
    assert err == "kvhvdrun: there are 1 slots, 2 are needed, and no more came within 1.5 s.\n"
    assert launch.of("worker_started") == []


def test_a_script_that_fails_at_first(job: Any) -> None:
    script = "echo no idea >&2; exit 4"
    code, _, err = job("--min-np", "1", "--host-discovery-script", script).end()
    assert code == 1
    assert "the host discovery script exited with code 4; it says: no idea." in err


def test_a_script_that_prints_nonsense_at_first(job: Any) -> None:
    code, _, err = job("--min-np", "1", "--host-discovery-script", "echo a b c").end()
    assert code == 1
    assert "what the host discovery script printed are no hosts: 'a b c' is not HOST:N" in err


def test_a_script_that_fails_later_changes_nothing(job: Any, hosts: Path, finish: Path) -> None:
    hosts.write_text("localhost:1\n")
    launch = job("--min-np", "1", "--host-discovery-script", f"cat {hosts}", acts=f"until={finish}")
    launch.until_joined(0)
    hosts.unlink()
    launch.until(lambda: launch.of("discovery_failed"))
    hosts.write_text("localhost:2\n")
    assert launch.until_count(2)[1] == [0, 1]
    finish.touch()
    assert launch.end()[0] == 0


def test_a_script_that_fails_for_long_ends_the_job(job: Any, hosts: Path) -> None:
    hosts.write_text("localhost:1\n")
    options = ("--min-np", "1", "--host-discovery-script", f"cat {hosts}", "--elastic-timeout", "1")
    launch = job(*options, acts=LONG)
    launch.until_joined(0)
    hosts.unlink()
    code, _, err = launch.end()
    assert code == 1
    assert "it has failed for 1 s." in err


def test_a_script_that_hangs_does_not_hold_the_job_up(job: Any, hosts: Path, finish: Path) -> None:
    script = f"if test -e {hosts}; then sleep 1000; else touch {hosts}; echo localhost:2; fi"
    launch = job("--min-np", "1", "--host-discovery-script", script, acts=f"until={finish}")
    launch.until_joined(0)
    launch.until(hosts.exists)
    launch.kill(1)
    launch.until_count(1)
    launch.until_joined_by(0, 2)
    finish.touch()
    assert launch.end()[0] == 0
    assert launch.of("generation_ready")[-1]["workers"] == [0, 2]


def test_another_host_is_not_used(job: Any) -> None:
    code, _, err = job("--min-np", "1", "--host-discovery-script", "echo localhost; echo elsewhere:4").end()
    assert code == 0
    assert err == "kvhvdrun: 'elsewhere' is another host, and several hosts are not supported yet; it is not used.\n"


# -- Loss of a daemon, and of the launcher ------------------------------------------------------------------------


def gone_soon(marker: str, since: float) -> None:
    limit_s = of_the_product(5)
    while processes(marker):
        assert time.monotonic() < since + limit_s, f"processes are left after {limit_s} s"
        time.sleep(0.01)  # between two looks at /proc, which has no events


def test_the_only_daemon_is_killed(job: Any, marker: str) -> None:
    launch = job("--min-np", "2", acts=LONG)
    launch.until_joined(0)
    (daemon,) = launch.daemons()
    since = time.monotonic()
    os.kill(daemon, signal.SIGKILL)
    code, _, err = launch.end()
    gone_soon(marker, since)
    assert code == 137
    assert f"was lost with its host: its daemon (pid {daemon}) was killed by SIGKILL." in err
    assert "no worker of generation 0 is left" in err


def test_a_stopped_daemon_is_lost(job: Any, marker: str) -> None:
    launch = job("--min-np", "2", acts=LONG, variables={"KVHVD_LEASE": "2"})
    launch.until_joined(0)
    (daemon,) = launch.daemons()
    os.kill(daemon, signal.SIGSTOP)
    code, _, err = launch.end()
    assert code == 137
    assert "its daemon has said nothing for 3 s (KVHVD_LEASE)" in err


def test_one_of_two_daemons_is_killed(job: Any, finish: Path) -> None:
    launch = job("--min-np", "1", "-H", "localhost:1,127.0.0.2:2", acts=f"until={finish}")
    launch.until_joined(0)
    before = launch.daemons()
    assert len(before) == 2
    slots = {entry["worker"]: entry["slot"] for entry in launch.of("worker_started")}
    second = Path(f"/proc/{launch.pid(1)}/stat").read_text().rpartition(")")[2].split()[1]
    assert slots[1] == "127.0.0.2:0"
    os.kill(int(second), signal.SIGKILL)
    launch.until_count(3, after=0)
    finish.touch()
    code, _, err = launch.end()
    assert code == 0, launch.told()
    assert launch.members(1)[0] == 0
    assert len(launch.of("generation_ready")[-1]["workers"]) == 3
    assert err.count("was lost with its host") == 2


def test_the_launcher_is_killed(job: Any, marker: str) -> None:
    launch = job("--min-np", "2", "-H", "localhost:1,127.0.0.2:1", acts=f"{LONG} deaf")
    launch.until_joined(0)
    since = time.monotonic()
    launch.process.kill()
    _, _, err = launch.end()
    gone_soon(marker, since)
    assert "The workers on localhost are being ended." in err
    assert "The workers on 127.0.0.2 are being ended." in err


def test_launcher_and_daemon_are_killed_at_once(job: Any, marker: str) -> None:
    launch = job("--min-np", "2", acts=f"{LONG} deaf")
    launch.until_joined(0)
    since = time.monotonic()
    (daemon,) = launch.daemons()
    launch.process.kill()
    os.kill(daemon, signal.SIGKILL)
    launch.end()
    gone_soon(marker, since)


def test_the_launcher_is_killed_while_a_script_runs(job: Any, hosts: Path, marker: str) -> None:
    script = f"if test -e {hosts}; then setsid sleep 1000; true; fi; touch {hosts}; echo localhost:1"
    launch = job("--min-np", "1", "--host-discovery-script", script, acts=LONG)
    launch.until_joined(0)
    launch.until(lambda: any(b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes(marker)))
    since = time.monotonic()
    launch.process.kill()
    launch.end()
    gone_soon(marker, since)


# -- Signals to the launcher --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_end_the_job(job: Any, number: signal.Signals) -> None:
    launch = job("--min-np", "2", acts=LONG)
    launch.until_joined(0)
    launch.process.send_signal(number)
    code, _, err = launch.end()
    assert code == 128 + number
    assert "kvhvdrun: " not in err
    assert launch.events[-1]["reason"] == f"signal {number.name}"
    assert len(launch.of("worker_started")) == 2  # nobody took the place of those that the signal ended


@pytest.mark.parametrize("event", ["job_start", "worker_started", "worker_entered"])
def test_ctrl_c_while_workers_start(job: Any, event: str) -> None:
    launch = job("--min-np", "2", acts=LONG)
    launch.until(lambda: launch.of(event))
    launch.process.send_signal(signal.SIGINT)
    assert launch.end()[0] == 130


def test_a_second_ctrl_c_kills(job: Any) -> None:
    program = "import signal; signal.signal(2, signal.SIG_IGN); print('ready', flush=True)\nwhile 1: signal.pause()"
    command = [sys.executable, "-c", program]
    launch = job("--min-np", "2", command=command, variables={"KVHVD_KILL_GRACE": "100"})
    assert [launch.process.stdout.readline() for _ in range(2)]
    launch.process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # nothing tells that the launcher has passed it on
    launch.process.send_signal(signal.SIGINT)
    assert launch.end()[0] == 130


def test_workers_deaf_to_the_signal_are_killed_after_the_grace(job: Any) -> None:
    launch = job("--min-np", "2", acts=f"{LONG} deaf", variables={"KVHVD_KILL_GRACE": "0.3"})
    launch.until_joined(0)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 143


def test_user_signals_are_passed_on(job: Any) -> None:
    program = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: (print('got it', flush=True), sys.exit(0)))
print('ready', flush=True)
while 1: signal.pause()
"""
    launch = job("--min-np", "2", command=[sys.executable, "-c", program])
    assert [launch.process.stdout.readline() for _ in range(2)]
    launch.process.send_signal(signal.SIGUSR1)
    code, out, _ = launch.end()
    assert (code, sorted(out.splitlines())) == (0, ["[0] got it", "[1] got it"])


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_z_and_fg(job: Any, finish: Path) -> None:
    launch = job("--min-np", "2", acts=f"until={finish}", variables={"KVHVD_LEASE": "2"})
    launch.until_joined(0)
    workers = [launch.pid(0), launch.pid(1)]
    launch.process.send_signal(signal.SIGTSTP)
    launch.until(lambda: [state(pid) for pid in (launch.process.pid, *workers)] == ["T"] * 3)
    time.sleep(4)  # longer than launcher and daemons wait for each other's beats
    assert [state(pid) for pid in (launch.process.pid, *workers)] == ["T"] * 3
    launch.process.send_signal(signal.SIGCONT)
    finish.touch()
    code, _, err = launch.end()
    assert (code, err) == (0, ""), launch.told()
    assert len(launch.of("generation_ready")) == 1


def test_the_reader_of_the_output_goes_away(job: Any) -> None:
    program = "import time\nwhile 1: print('x' * 1000, flush=True); time.sleep(0.01)"
    launch = job("--min-np", "2", command=[sys.executable, "-c", program])
    launch.process.stdout.readline()
    launch.process.stdout.close()
    assert launch.process.wait(timeout=LIMIT_S) == 141


# -- On a terminal ------------------------------------------------------------------------------------------------


def test_the_status_line(job: Any) -> None:
    ours, theirs = pty.openpty()
    launch = job("--min-np", "2", acts="steps=40", stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
        while select.select([ours], [], [], LIMIT_S)[0] and (data := os.read(ours, 65536)):
            text += data
    os.close(ours)
    assert launch.end()[0] == 0
    assert b"\x1b[2mkvhvdrun: generation 0, 2 of 2 workers; generation joined generation 0\x1b[0m" in text
    assert text.rstrip().endswith(b"\x1b[K") or text.endswith(b"\r\x1b[K")
    # What workers write begins on a line of its own.
    assert b"\r\x1b[K[0] done after 40 steps" in text or b"\n[0] done after 40 steps" in text


# -- The event log ------------------------------------------------------------------------------------------------


def test_an_event_log_that_cannot_be_made(job: Any) -> None:
    code, _, err = job("--min-np", "1", "--event-log", "/no/such/folder/log").end()
    assert code == 2
    assert "--event-log: '/no/such/folder/log' cannot be made: No such file or directory." in err


def test_an_event_log_that_cannot_be_written(job: Any) -> None:
    code, _, err = job("--min-np", "1", "--event-log", "/dev/full", acts="steps=1").end()
    assert code == 1
    assert err == ("kvhvdrun: the event log cannot be written: No space left on device. What follows is lost there.\n")

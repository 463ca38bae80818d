"""What kvhvdrun starts its workers with: each other, a secret and cores; and what it cannot start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvstore_hvd.base.cores import describe, suffice
from support.jobs import LIMIT_S, run, variables_of
from support.launchers import kvhvdrun

# Slow: the short choice of tests is for another MXNet and MPI, which nothing here has to do with.
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def test_workers_share_memory(marker: str) -> None:
    program = """
from kvstore_hvd.worlds.bootstrap import discover
from kvstore_hvd.worlds.rendezvous import share_segment
fd = share_segment(discover(), lambda told: os.memfd_create('x'))
os.pwrite(fd, b'x', rank)
say(f'{os.fstat(fd).st_ino}\\n')
"""
    code, out, err = run(marker, 4, program)
    assert code == 0, err
    assert len({line[4:] for line in out.splitlines()}) == 1


def test_a_worker_that_never_comes_is_named_by_all_others(marker: str) -> None:
    program = """
from kvstore_hvd.worlds.bootstrap import discover
from kvstore_hvd.worlds.rendezvous import share_segment
if rank == 1: forever()
share_segment(discover(), lambda told: os.memfd_create('x'))
"""
    code, _, err = run(marker, 3, program, "--start-timeout", "2")
    assert code == 1
    assert b"[rank 0/3] rank 1 did not arrive within 2 s." in err
    assert b"[rank 2/3] the start failed" in err


def test_the_secret_is_on_no_command_line(marker: str) -> None:
    program = """
secret = os.environ['KVHVD_SECRET']
for pid in os.listdir('/proc'):
    if pid.isdigit():
        try:
            assert secret.encode() not in open(f'/proc/{pid}/cmdline', 'rb').read()
        except OSError: pass
"""
    assert run(marker, 2, program)[0] == 0


def test_bind_cores_pins(marker: str) -> None:
    cores = len(os.sched_getaffinity(0))
    code, out, _ = run(marker, 2, "say(f'{len(os.sched_getaffinity(0))}\\n')", "--bind-cores")
    assert code == 0
    assert all(int(line[4:]) in (max(1, cores // 2), (cores + 1) // 2) for line in out.splitlines())


def test_a_script_without_an_interpreter_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("echo\n")
    script.chmod(0o755)
    done = subprocess.run(
        [*kvhvdrun().prefix, "-np", "2", str(script)],
        env=variables_of(),
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 126
    assert str(script).encode() in done.stderr
    assert b"#!" in done.stderr


@pytest.mark.parametrize("together", [True, False])
def test_who_waits_spins_only_if_there_is_a_core_for_each(marker: str, together: bool) -> None:
    """Those that the workers may use count, not those of the machine; pinned to one each they have one each."""
    cores = sorted(os.sched_getaffinity(0))
    if not together and len(cores) < 2:
        pytest.skip("needs two cores")
    program = f"""
import kvstore_hvd
os.sched_setaffinity(0, {{{cores[:1] * 2 if together else cores[:2]}[rank]}})
kvstore_hvd.init()
kvstore_hvd.barrier()
"""
    code, _, err = run(marker, 2, program, variables={"KVHVD_LOG_LEVEL": "info"})
    assert code == 0, err
    # A control group may allow less than that, too.
    allowed = suffice([describe()] * 2)
    assert err.count(b"a worker that waits does not spin") == (0 if allowed and not together else 2), err

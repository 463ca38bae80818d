"""kvhvdrun and processes that are none of its own, although they have the process id of a worker that has ended."""

from __future__ import annotations

import pytest

from support.jobs import PACKAGES, variables_of
from support.launchers import kvhvdrun, with_tests
from support.pid_namespace import run_as_init, why_impossible

LIMIT_S = 90
WHY_NOT = why_impossible()

pytestmark = [
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

# Runs as the init of the namespace. Rank 1 ends; a stranger gets its number while rank 0 goes on until it may end.
PROGRAM = """
import os, signal, subprocess, sys, time
from support.pid_namespace import is_running, start_with_id
how, launcher = {how!r}, {launcher!r}
worker = '''
import os, sys, time
print(os.environ["KVHVD_RANK"], os.getpid(), flush=True)
if os.environ["KVHVD_RANK"] == "0": sys.stdin.read()
'''
job = subprocess.Popen([*launcher, '-np', '2', '-v', sys.executable, '-c', worker],
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
pids = dict(line.split()[1:] for line in (job.stdout.readline().decode() for _ in range(2)))
ended = b''
while b'rank 1 exited with code 0' not in ended:
    ended = job.stderr.readline()
    assert ended
stranger = start_with_id(int(pids['1']))
if how == 'killed':
    job.kill()
else:
    job.stdin.close()
job.wait(60)
end = time.monotonic() + 60
while is_running(int(pids['0'])) and time.monotonic() < end:
    time.sleep(0.02)
assert not is_running(int(pids['0'])), 'rank 0 is left'
deadline = time.monotonic() + 3  # for whoever wants to kill the stranger, too
while how == 'killed' and time.monotonic() < deadline:
    time.sleep(0.02)
print('the stranger lives' if is_running(stranger.pid) else 'the stranger was killed', flush=True)
stranger.kill()
"""

# The same with a worker of an elastic job whose slot is taken by another one, and with the daemon itself.
ELASTIC = """
import json, os, signal, subprocess, sys, time
from support.pid_namespace import is_running, start_with_id
worker = '''
import os, signal, sys, time
from pathlib import Path
if os.environ["KVHVD_WORKER"] == "0": os.kill(os.getpid(), signal.SIGKILL)
while not Path(sys.argv[1]).exists(): time.sleep(0.02)
'''
log, end = {folder!r} + '/events', {folder!r} + '/end'
job = subprocess.Popen([*{launcher!r}, '--event-log', log, '--min-np', '1', '-H', 'localhost:2',
                        sys.executable, '-c', worker, end], stdin=subprocess.DEVNULL)
def events():
    try:
        return [json.loads(line) for line in open(log).read().splitlines(keepends=True) if line.endswith('\\n')]
    except FileNotFoundError:
        return []
def started():
    return {{event['worker']: event['pid'] for event in events() if event['event'] == 'worker_started'}}
limit = time.monotonic() + 60
while 2 not in started():
    assert time.monotonic() < limit and job.poll() is None, events()
    time.sleep(0.02)
stranger = start_with_id(started()[0])
open(end, 'w').close()
job.wait(60)
print('the stranger lives' if is_running(stranger.pid) else 'the stranger was killed', flush=True)
stranger.kill()
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_a_stranger_with_the_number_of_a_worker_that_has_ended_is_spared(marker: str, how: str) -> None:
    program = PROGRAM.format(how=how, launcher=list(kvhvdrun().prefix))
    done = run_as_init(program, with_tests(variables_of(marker)), LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the stranger lives\n", done.stderr


def test_a_stranger_with_the_number_of_an_elastic_worker_is_spared(marker: str, tmp_path: object) -> None:
    program = ELASTIC.format(folder=str(tmp_path), launcher=list(kvhvdrun().prefix))
    done = run_as_init(program, with_tests(variables_of(marker)), LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the stranger lives\n"), done.stderr


def test_the_package_that_is_tested_is_found_in_the_namespace(marker: str) -> None:
    done = run_as_init("import kvstore_hvd; print(kvstore_hvd.__file__)", variables_of(marker), LIMIT_S)
    assert done.stdout.startswith(str(PACKAGES)), done.stderr

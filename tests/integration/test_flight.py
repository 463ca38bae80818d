"""What the workers of a job did before a failure, and what they do now, as `kvhvdrun` tells it from outside of them."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from kvstore_hvd.base import files
from support.launchers import kvhvdrun
from support.patience import patient

# Some steps of two sums; rank 1 then does what its argument says.
PROGRAM = """
import numpy as np
import kvstore_hvd
from kvstore_hvd.world import process

kvstore_hvd.init()

def come_late():
    wait_for('go')

for step in range(20):
    if rank == 1 and step == 10:
        say('now\\n')
        if fault == 'dies':
            while not process.current().member.engine().missed(1):  # until another one comes to the sum
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == 'is stopped':
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == 'hangs':
            come_late()
    names = ['left', 'right']
    if rank == 1 and step == 10 and fault == 'has another order':
        names.reverse()
    for name in names:
        if rank == 1 and fault == 'is slow':
            time.sleep(0.05)
        kvstore_hvd.allreduce(np.ones(100, np.float32), name)
if fault == 'is slow':
    time.sleep(1.5)  # the figures are a second old at most
    if rank == 1:
        os._exit(1)
    kvstore_hvd.allreduce(np.ones(100, np.float32), 'last')
"""
FIRST = r"First that is not over: allreduce 'left', number 11 of its name, submitted by ranks? .*, not by ranks? 1[-,]"
# Milliseconds of a sleep of 50.
LATE = r"([4-9]\d(\.\d)?|\d{3})"
SAYS = {
    "dies": [FIRST, r"PeerLostError: rank 1 \(\S+, pid \d+\) died", r"rank 1 \(.*'right' was over [\d.e-]+ s before"],
    "is stopped": [FIRST, r"TimeoutError: ", r"rank 1 \(\S+, pid \d+\) was stopped", r"What to do: find who stopped"],
    "hangs": [FIRST, r"rank 1 \(.*waited for nothing: .*\S+:\d+ in wait_for", r"see why rank 1 did not come"],
    "is slow": [rf"rank 1 \(\S+, pid \d+\) was slow: it came last in \d\d+ % of 4\d operations, {LATE} ms behind"],
    "has another order": [
        r"First that is not over: allreduce 'right', number 11 of its name, submitted by rank 1, not by ranks 0, 2,"
        r"|First that is not over: allreduce 'left', number 11 of its name, submitted by ranks 0, 2, not by rank 1,",
        r"rank 0 \(.*waited in allreduce 'left' for rank 1",
        r"rank 1 \(.*waited in allreduce 'right' for ranks 0, 2",
        r"What to do: have all workers submit the same operations, .* in the same order",
    ],
}


def tell(*words, code=0):
    """What `kvhvdrun explain` and the like print."""
    command = [*kvhvdrun().prefix, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(30), check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("hosts", ["", pytest.param("2,1", marks=pytest.mark.alike)])
@pytest.mark.parametrize("fault", SAYS)
def test_a_failure_is_explained_by_its_file_alone(start, tmp_path, fault, hosts):
    """It has no values of arrays, and nothing else is written."""
    file = tmp_path / "failure.json"
    variables = {"KVHVD_FAILURE_FILE": str(file), "KVHVD_TIMEOUT": "3", "KVHVD_TEST_HOSTS": hosts}
    job = start("-np 3", f"fault = {fault!r}\n{PROGRAM}", **variables)
    job.until(file.exists, "the file")
    job.go().end(None)
    assert f"what the workers did before is in {file}" in job.err, job.describe()
    text = tell("explain", file)
    for pattern in SAYS[fault]:
        assert re.search(pattern, text), f"{pattern}\n{text}"
    assert len(text.splitlines()) <= 10
    told = json.loads(file.read_text())
    assert len(told["parts"]) == (2 if hosts else 1)
    assert file.stat().st_size < 100_000
    assert not list(tmp_path.glob("failure.json.*"))
    told["parts"][-1]["time"] += 3600.5  # the clocks of the hosts differ
    file.write_text(json.dumps(told))
    assert tell("explain", file).splitlines()[1:] == text.splitlines()[1:]


def test_a_running_job_is_told_without_its_help(start):
    """Rank 1 computes in C with the GIL, so that none of its Python threads runs."""
    program = """
import numpy as np, re
import kvstore_hvd
kvstore_hvd.init()
kvstore_hvd.allreduce(np.ones(3), 'first')
def search_for_long():
    say(f'now {os.getpid()}\\n')
    re.match('(a|a?)+$', 'a' * 40 + 'b')
if rank == 1:
    time.sleep(1.5)
    search_for_long()
kvstore_hvd.allreduce(np.ones(3), 'x')
"""
    job = start("-np 3", program).until_printed("now")
    (pid,) = re.findall(r"now (\d+)", job.out)
    (name,) = set(re.findall(r"job (\w+), generation 0: 3 workers", tell("status", pid)))
    table = tell("status", name)
    for waits in (0, 2):
        assert re.search(rf"(?m)^{waits} \(.*waits in allreduce 'x' for rank 1, \d+\.\d s", table), table
    stacks = tell("stacks", name)
    assert re.search(r"rank 1 \(\S+, pid \d+\):\n(.*\n)*?.* in search_for_long\n", stacks), stacks
    assert name in tell("explain")
    assert "no job nothing runs on this host" in tell("status", "nothing", code=2)
    job.end(None, signal.SIGTERM)


def test_ctrl_backslash_asks_those_that_can_answer(start):
    """Not a shell, nor a worker that has not joined yet; the job goes on."""
    program = """
say('started\\n')
if rank == 1: wait_for('go')
import kvstore_hvd
def wait_long():
    kvstore_hvd.init()
wait_long()
"""
    job = start(f"-np 2 sh -c '\"$@\"; exit $?' sh {sys.executable}", program).until_printed("started", 2)

    def answers():
        job.process.send_signal(signal.SIGQUIT)
        time.sleep(0.1)
        return "in wait_long" in job.of(0)

    job.until(answers, "a stack")
    job.go().end()
    assert "wait_for" not in job.err


# Steps of 20 ms and more, in which rank 1 comes late: to the first of several sums that all wait for; with gradients,
# which nobody waits for before the last, and a sum for the metric after them.
STEPS = {
    "sums": "compute(); [add(f'x{i}') for i in range(10)]",
    "gradients": """
compute()
sums = []
for i in range(10):
    time.sleep(0.002)
    sums.append(mx_hvd.allreduce(mx.nd.ones(100), name=f'x{i}'))
for one in sums: one.wait_to_read()
time.sleep(0.002)
add('metric')
""",
    "mxnet": "compute(); [mx_hvd.allreduce(mx.nd.ones(9), name=f'x{i}').asnumpy() for i in range(4)]",
}


@pytest.mark.parametrize("hosts", ["", pytest.param("2,1", marks=pytest.mark.alike)])
@pytest.mark.parametrize("step", STEPS)
def test_a_slow_worker_is_reported_and_measured(start, tmp_path, step, hosts):
    """In the log, by the stall check; in the file of metrics."""
    program = f"""
import numpy as np
import kvstore_hvd
if {"mx." in STEPS[step]}:
    import mxnet as mx
    import kvstore_hvd.mxnet as mx_hvd
kvstore_hvd.init()
def compute():
    time.sleep(0.07 if rank == 1 else 0.02)
def add(name):
    kvstore_hvd.allreduce(np.ones(3), name)
step = compile({STEPS[step]!r}, 'step.py', 'exec')
while True:
    asked = np.array([os.path.exists('go')], np.int32)
    if kvstore_hvd.allreduce(asked, 'end', op='max')[0]: break
    exec(step)
"""
    file = tmp_path / "metrics.prom"
    job = start("-np 3", program, KVHVD_STALL_CHECK_TIME_S="2", KVHVD_METRICS_FILE=str(file), KVHVD_TEST_HOSTS=hosts)
    job.until_printed("ms behind the median").go().end()
    line = r"rank 1 \(\S+, pid \d+\) came last in \d+ % of [\d,]+ operations, [\d.,]+ ms behind the median: "
    line += r"the others waited for it in \d+ % of the time; it was at \S+:\d+ in \S+"
    assert re.search(line, job.of(0)), job.describe()
    assert "behind the median" not in job.of(1) + job.of(2)
    if hosts:
        return  # each writes the file
    lines = [each for each in file.read_text().splitlines() if not each.startswith("#")]
    values = {name: float(value) for name, value in (each.split() for each in lines)}
    behind = {rank: value for name, value in values.items() for rank in re.findall(r'behind_sec.*rank="(\d)"', name)}
    assert behind["1"] > sum(value for rank, value in behind.items() if rank != "1")
    assert all(re.fullmatch(r'kvstore_hvd_\w+\{job="\w+"(,rank="\d")?\} [\d.e-]+', each) for each in lines)


@pytest.mark.parametrize("hosts", ["", pytest.param("2,1", marks=pytest.mark.alike)])
def test_workers_that_cost_nothing_are_not_slow(start, hosts):
    """Rank 1 pauses once, so that it then comes last in each step; meanwhile the others load their next batch."""
    program = """
import mxnet as mx
import kvstore_hvd.mxnet as hvd
hvd.init()
net = mx.gluon.nn.Dense(3, in_units=3)
net.initialize()
trainer = hvd.DistributedTrainer(net.collect_params(), 'sgd')
data = (mx.np if mx.__version__ >= '2' else mx.nd).ones((2, 3))
def train(steps, load_s):
    for _ in range(steps):
        time.sleep(load_s)
        with mx.autograd.record(): loss = net(data).sum()
        loss.backward()
        trainer.step(2)
train(3, 0)
if rank == 1: time.sleep(0.3)
train(100, 0.05)
mx.nd.waitall()
figures = hvd.report()
if rank == 0: report(waited_ms=[figures[each]['waited_ms'] for each in (0, 2)])
"""
    job = start("-np 3", program, KVHVD_STALL_CHECK_TIME_S="1", KVHVD_TEST_HOSTS=hosts).end()
    assert "behind the median" not in job.err, job.err
    (told,) = job.reports()
    assert max(told["waited_ms"]) < 1500, told


@pytest.mark.parametrize("hosts", ["", pytest.param("3,1", marks=pytest.mark.alike)])
def test_a_failure_in_a_process_set_is_told_where_it_began(start, tmp_path, hosts):
    """The loss of the world of all workers follows from it. Each worker has a wait of its own; names are one line."""
    file = tmp_path / "failure.json"
    program = """
import mxnet as mx
import kvstore_hvd.mxnet as hvd
three = hvd.ProcessSet([0, 1, 2])
hvd.init(process_sets=[three])
time.sleep({0: 60, 1: 0, 2: 2, 3: 60}[rank])
hvd.allreduce(mx.nd.ones(2), name='x\\ny', process_set=three).wait_to_read()
"""
    start("-np 4", program, KVHVD_FAILURE_FILE=str(file), KVHVD_TIMEOUT="4", KVHVD_TEST_HOSTS=hosts).end(None)
    text = tell("explain", file)
    assert re.search(r"generation 0, process set 1: 3 workers on .*\nTimeoutError: rank 1 waited 4 s", text), text
    first = r"allreduce 'x\\ny', number 1 of its name, submitted by ranks 1-2, not by rank 0, [4-9]"
    assert re.search(first, text), text
    (own,) = re.findall(r"rank 2 .* waited in allreduce 'x\\ny' for rank 0, for ([\d.]+) s", text)
    assert float(own) < 3.5


def test_a_worker_that_an_elastic_job_replaces_is_explained(start, tmp_path):
    file = tmp_path / "failure.json"
    program = """
import numpy as np
import kvstore_hvd
from kvstore_hvd import elastic
rank = kvstore_hvd.init().rank

@elastic.run
def train(state):
    if not os.path.exists('one') and rank == 1:
        open('one', 'w').close()
        os.kill(os.getpid(), signal.SIGSTOP)
    kvstore_hvd.allreduce(np.ones(2), 'x')

train(elastic.ObjectState())
"""
    job = start("-np 3 --min-np 2", program, KVHVD_FAILURE_FILE=str(file), KVHVD_TIMEOUT="3").end()
    assert job.err.count(f"what the workers did before is in {file}") == 1, job.describe()
    assert re.search(r"(?m)^  rank 1 \(.*\) was stopped", tell("explain", file))


@pytest.mark.parametrize("hosts", ["", pytest.param("2,1", marks=pytest.mark.alike)])
def test_an_error_of_the_program_and_a_reset_leave_no_file(start, tmp_path, hosts):
    file = tmp_path / "failure.json"
    program = """
import numpy as np
import kvstore_hvd
for i in range(2):
    kvstore_hvd.allreduce(np.ones(3), 'x')
    kvstore_hvd.reset()
if rank == 1:
    raise RuntimeError('of the program')
kvstore_hvd.allreduce(np.ones(3), 'x')
"""
    start("-np 3", program, KVHVD_FAILURE_FILE=str(file), KVHVD_TEST_HOSTS=hosts).end(1)
    assert not file.exists()


def test_a_file_that_is_a_pipe_holds_nobody_up(start, tmp_path):
    """It cannot be read, to keep what it has of the same world."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = """
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
if rank == 1: wait_for('go')
try:
    kvstore_hvd.allreduce(np.ones(3), 'x')
except kvstore_hvd.HorovodInternalError:
    say('lost\\n')
kvstore_hvd.reset()
report(total=kvstore_hvd.allreduce(np.ones(3), 'y').tolist())
"""
    job = start("-np 2", program, KVHVD_FAILURE_FILE=str(pipe), KVHVD_TIMEOUT="1").until_printed("lost").go().end()
    assert [one["total"] for one in job.reports()] == [[2.0] * 3] * 2
    assert job.err.count("the file of the failure cannot be written") == 1


def test_files_replace_no_device_and_are_complete(tmp_path):
    pipe, small = tmp_path / "pipe", tmp_path / "small"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):  # nobody reads it
        files.replace(str(pipe), b"text")
    assert pipe.is_fifo()
    files.replace(str(small), b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):  # like a full disk
            files.replace(str(small), b"n" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert small.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_no_file_of_a_failure_is_refused(tmp_path):
    wrong = tmp_path / "wrong.json"
    for content in ("", "[]", "{}", '{"format": 2, "parts": []}', '{"format": 1, "parts": [3]}', "[" * 100_000):
        wrong.write_text(content)
        assert "Fix: " in tell("explain", wrong, code=2)

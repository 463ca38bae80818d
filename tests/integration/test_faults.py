"""Ranks that die, stop, leave or fail while others wait for them: real processes, real signals."""

import re
import signal
import time

import pytest

from support.jobs import stopped
from support.launchers import kvhvdrun, mpirun

# Every rank sums until rank 2, the last one, suffers the fault. Whoever is told checks that no call hangs: exit code 7.
SUM = """
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
for step in range(1000):
    if step == 3 and rank == 2:
        say('suffers\\n')
        {fault}
    try:
        kvstore_hvd.allreduce(np.ones(3), 'weight')
    except kvstore_hvd.HorovodInternalError as error:
        say(f'caught: {{type(error).__name__}}: {{error}}\\n', sys.stderr)
        break
for _ in range(2):
    try:
        kvstore_hvd.allreduce(np.ones(2), 'late')
    except kvstore_hvd.HorovodInternalError as error:
        say('again\\n')
sys.exit(7)
"""


def caught(job):
    """The errors that ranks 0 and 1 report, each of them exactly once."""
    errors = []
    for rank in range(2):
        own = job.of(rank)
        assert (own.count("caught: "), own.count("again")) == (1, 2), job.describe()
        errors.append(own)
    return errors


@pytest.mark.alike
@pytest.mark.parametrize(
    ("fault", "how", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"died \(SIGKILL\)", 137),
        ("os._exit(3)", "exited with code 3", 3),
        ("raise OSError('no caf\\udce9')", r"ended early: OSError: no caf\\udce9", 1),
        ("sys.exit(0)", r"left in good order.*, while rank [01] is waiting in allreduce 'weight'", 7),
    ],
)
def test_a_rank_that_ends_is_named_by_all_others(run, fault, how, code):
    """With host and cause; and the job ends with the culprit's exit code, unless that is success."""
    job = run("-np 3", SUM.format(fault=fault), code=code)
    for error in caught(job):
        assert re.search(rf"PeerLostError: \[rank [01]/3\] .*rank 2 \(.*pid \d+\) {how}", error), error
        assert "  Fix: " in error


LEAVES = """
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
kvstore_hvd.allreduce(np.ones(1), 'both')
if rank == 1: sys.exit()
try:
    kvstore_hvd.allreduce(np.ones(1), 'alone')
except kvstore_hvd.HorovodInternalError as error:
    say(f'caught: {error}\\n', sys.stderr)
"""


@pytest.mark.parametrize("launcher", [kvhvdrun(), mpirun()], ids=["tcp", "mpi"])
def test_a_rank_that_ends_on_another_host_is_named(run, launcher):
    """Although it ends in good order, and with who waits for it, in what."""
    if launcher is None:
        pytest.skip("no mpirun and mpi4py beside this interpreter")
    told = run("-np 2", LEAVES, launcher=launcher, KVHVD_TEST_HOSTS="2").err
    how = r"rank 1 \(.*pid \d+\) left in good order.*, while rank 0 is waiting in allreduce 'alone'"
    assert re.search(rf"caught: \[rank 0/2\] .*{how}", told), told
    assert "Fix: give all workers the same number of steps" in told


# Operations of either rank are pending when rank 1 fails: announced, and not announced because MXNet still computes.
PENDING = """
import kvstore_hvd
import mxnet as mx
store = mx.kv.create('horovod')
x, own = mx.nd.ones(1000), mx.nd.ones(1000)
store.pushpull('met', x, out=x)
x.wait_to_read()
def submit():
    store.pushpull(f'of rank {rank}', own, out=own)
    late = mx.nd.ones((400, 400))
    for _ in range(300):
        late = mx.nd.dot(late, late) * 0
    store.pushpull(f'late of rank {rank}', late, out=late)
submit()
if rank == 1:
    raise ValueError('the data set is empty')
while True:
    store.pushpull('x', x, out=x)
"""


def test_an_error_of_the_program_is_all_that_is_printed(run):
    """One traceback on each rank, although what was pending has failed as well; the others name the error."""
    job = run("-np 2", PENDING, code=1)
    assert "ended early: ValueError: the data set is empty" in job.of(0)
    # Rank 0 may find first that what it sums up is the result of an operation that has failed.
    ends = ("  Fix: correct the ValueError on rank 1.", "ended early: ValueError: the data set is empty.")
    for rank, last in enumerate((ends, "ValueError: the data set is empty")):
        own = job.of(rank).splitlines()
        assert own.count("Traceback (most recent call last):") == 1, job.describe()
        assert own[-1].endswith(last), job.describe()


@pytest.mark.alike
def test_ctrl_c_ends_all_ranks(start):
    """Also one that waits in an operation, and one that does not react."""
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    job = start("-np 3", SUM.format(fault=deaf), KVHVD_KILL_GRACE="0.5").until_printed("suffers")
    job.end(128 + signal.SIGINT, signal.SIGINT)


# Rank 1 is stopped while both sum in rank 0's arena; rank 0 uses its array again, and rank 1 goes on.
SUMS = """
import mxnet as mx
import kvstore_hvd
store = mx.kv.create('horovod')
net = mx.gluon.nn.Dense(2048, in_units=8192, use_bias=False)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore=store)
module = mx.np if mx.__version__.startswith('2') else mx.nd
for trial in range(5):
    with mx.autograd.record():
        loss = net(module.ones((1, 8192))).mean()
    loss.backward()
    trainer.allreduce_grads()
    grad = net.weight.grad()
    grad[:] = 1
    store.pushpull('sum', grad, out=grad)
    assert (grad.asnumpy() == 2).all()
    say(f'trial {trial} {os.getpid()}\\n')
    try:
        while True:
            store.pushpull('sum', grad, out=grad)
            grad.wait_to_read()
    except Exception as error:
        say(f'failed {trial} {type(error).__name__}\\n')
    if rank == 0:
        grad[:] = 7
        grad.wait_to_read()
        say(f'used again {trial}\\n')
        wait_for(f'go{trial}')
        say(f'changed {(grad.asnumpy() != 7).sum()}\\n')
    kvstore_hvd.reset()
"""


@pytest.mark.slow
def test_a_rank_that_was_stopped_past_the_deadline_changes_nothing_later(start):
    """It may be about to write into an array of the other worker, which has had its error by then."""
    job = start("-np 2", SUMS, KVHVD_TIMEOUT="1")
    for trial in range(5):
        job.until_printed(f"trial {trial}", 2)
        (pid,) = re.findall(rf"\[1\] trial {trial} (\d+)", job.out)
        time.sleep(0.1 + trial * 0.0071)  # amid one of many sums
        with stopped(int(pid)):
            job.until_printed(f"[0] used again {trial}")
        job.until_printed(f"[1] failed {trial}")
        (job.folder / f"go{trial}").touch()
    assert job.end().out.count("changed 0\n") == 5


@pytest.mark.alike
@pytest.mark.parametrize("fault", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(600)"])
def test_a_rank_that_stands_still_is_named_at_the_deadline(run, fault):
    """Who has waited, in what, and for whom."""
    for error in caught(run("-np 3", SUM.format(fault=fault), code=7, KVHVD_TIMEOUT="3")):
        waited = r"waited 3 s (in allreduce .*)?for rank 2 \(.*pid \d+\), which did not submit it\."
        assert re.search(rf"TimeoutError: .*{waited}", error), error

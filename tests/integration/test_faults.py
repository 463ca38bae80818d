"""Ranks that die, leave or fail while others wait for them. Ranks that are stopped or late: test_stalls."""

import re

import pytest

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
        ("sys.exit(0)", r"ended its program.*, while rank [01] is waiting in allreduce 'weight'", 7),
    ],
)
def test_a_rank_that_ends_is_named_by_all_others(run, fault, how, code):
    """With host and cause; and the job ends with the culprit's exit code, unless that is success."""
    job = run("-np 3", SUM.format(fault=fault), code=code)
    for error in caught(job):
        assert re.search(rf"PeerLostError: \[rank [01]/3\] .*rank 2 \(.*pid \d+\) {how}", error), error
        fix = {7: "Fix: call the same operations on all", 1: "Fix: correct the OSError"}.get(
            code, "elastic.run under `kvhvdrun --min-np`"
        )
        assert fix in error


def test_a_training_that_reads_nothing_raises_the_loss(run):
    """Not that an update had no input, because its gradient was lost."""
    program = """
import mxnet as mx
from kvstore_hvd.errors import HorovodInternalError
import kvstore_hvd
net = mx.gluon.nn.Dense(4, in_units=4)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore='horovod')
mx.npx.set_np() if mx.__version__ >= '2' else None
one = (mx.np if mx.__version__ >= '2' else mx.nd).ones((2, 4))
try:
    for step in range(10**9):
        if step == 3 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        with mx.autograd.record():
            loss = net(one).sum()
        loss.backward()
        trainer.step(1)
except HorovodInternalError as error:
    report(text=str(error))
"""
    job = run("-np 2", program, code=137)
    (told,) = job.reports()
    assert "rank 1" in told["text"] and "died (SIGKILL)" in told["text"]


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
    for _ in range(100):
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

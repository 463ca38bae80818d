"""Whole programs with gradients in shared memory: under which limits they run, and how they end."""

import re

import pytest

from support.launchers import kvhvdrun

MAKE = """
import zlib
import kvstore_hvd
import mxnet as mx
from support.zero_copy import are_in_arena
module = mx.np if mx.__version__.startswith('2') else mx.nd
def make(kvstore):
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.Dense(64, activation='tanh', in_units=8), nn.Dense(3, in_units=64))
    mx.random.seed(1)
    net.initialize(mx.init.Normal(0.1))
    return net, mx.gluon.Trainer(net.collect_params(), 'sgd', {'learning_rate': 0.01}, kvstore=kvstore)
def step(net, trainer):
    with mx.autograd.record():
        loss = (net(module.ones((4, 8)) * (rank + 1)) ** 2).mean()
    loss.backward()
    trainer.step(1)
def gradients(net):
    return [p.grad() for p in net.collect_params().values()]
"""

# A child that ends as a program does, not with os._exit, after it has written to the gradients.
TRAIN = """
net, trainer = make('horovod')
step(net, trainer)
before = [grad.asnumpy() for grad in gradients(net)]
child = os.fork()
if child == 0:
    for grad in gradients(net):
        grad[:] = 3
        assert (grad.asnumpy() == 3).all()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert all((one == other.asnumpy()).all() for one, other in zip(before, gradients(net)))
step(net, trainer)
values = b''.join(p.data().asnumpy().tobytes() for p in net.collect_params().values())
say(f'weights {zlib.crc32(values):08x} inside {sum(are_in_arena(net))}\\n')
kept = [net, trainer, *gradients(net)]  # alive at the end
"""


def weights(run, inside, *command, **variables):
    """The checksum of the weights, which is the same on all ranks."""
    job = run("-np 2", MAKE + TRAIN, launcher=command and (*command, *kvhvdrun().prefix), **variables)
    found = re.findall(rf"weights (\w+) inside {inside}$", job.out, re.MULTILINE)
    assert len(found) == 2, job.describe()
    assert len(set(found)) == 1, job.describe()
    return str(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-f 4194304", "-v 8388608", "naive", "arena"])
def test_same_weights_with_and_without(run, how):
    """Under `ulimit` (in KiB) the arena takes a part of what there is; also MXNet's synchronous engine has it."""
    variables = {"naive": {"MXNET_ENGINE_TYPE": "NaiveEngine"}, "arena": {"KVHVD_ARENA_MIB": "1"}}.get(how, {})
    limit = () if variables else ("bash", "-c", f'ulimit {how} && exec "$@"', "bash")
    assert weights(run, 4, *limit, **variables) == weights(run, 0, KVHVD_ZERO_COPY="0")


@pytest.mark.slow
def test_gradients_outlive_a_lost_world(run):
    """After a worker's death the others read, write and free their arrays, train another net alone, and end."""
    program = (
        MAKE
        + """
net, trainer = make(mx.kv.create('horovod'))
step(net, trainer)
mx.nd.waitall()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(1000):
        step(net, trainer)
        mx.nd.waitall()
except kvstore_hvd.HorovodInternalError as error:
    say(f'caught {type(error).__name__}\\n')
kept = gradients(net)
for gradient in kept:
    gradient[:] = 5
    assert (gradient.asnumpy() == 5).all()
del net, trainer
kept.pop()
mx.nd.waitall()
fresh, _ = make(None)
with mx.autograd.record():
    loss = (fresh(module.ones((4, 8))) ** 2).mean()
loss.backward()
mx.nd.waitall()
say('survived\\n')
sys.exit(7)
"""
    )
    job = run("-np 2", program, code=137)
    assert "caught PeerLostError" in job.out
    assert "survived" in job.out

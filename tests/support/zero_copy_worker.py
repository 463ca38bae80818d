"""One rank of a short training with gradients in shared memory: ``zero_copy_worker.py PROGRAM``.

It prints what it saw: the weights' checksum, and how many gradients lie in the arena.
"""

from __future__ import annotations

import os
import signal
import sys
import zlib
from typing import Any

import kvstore_hvd

import mxnet as mx  # isort: skip

from support.zero_copy import are_in_arena

KEPT: list[Any] = []


def make(kvstore: Any) -> tuple[Any, Any]:
    """Return a network, initialised, and its trainer."""
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.Dense(64, activation="tanh", in_units=8), nn.Dense(3, in_units=64))
    mx.random.seed(1)
    net.initialize(mx.init.Normal(0.1))
    return net, mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=kvstore)


def step(net: Any, trainer: Any) -> None:
    """Train on a batch of this worker's own."""
    rank = kvstore_hvd.topology().rank if kvstore_hvd.is_initialized() else 0
    module = mx.np if mx.__version__.startswith("2") else mx.nd
    with mx.autograd.record():
        loss = (net(module.ones((4, 8)) * (rank + 1)) ** 2).mean()
    loss.backward()
    trainer.step(1)


def show(net: Any) -> None:
    """Print what the weights are and where the gradients lie."""
    values = b"".join(p.data().asnumpy().tobytes() for p in net.collect_params().values())
    inside = are_in_arena(net)
    print(f"weights {zlib.crc32(values):08x} inside {sum(inside)} of {len(inside)}", flush=True)


def train(kvstore: Any) -> None:
    """Train, and end with everything alive: arrays, nets and trainers."""
    net, trainer = make(mx.kv.create("horovod") if kvstore is None else kvstore)
    for _ in range(4):
        step(net, trainer)
    show(net)
    KEPT.extend([net, trainer, *[p.grad() for p in net.collect_params().values()]])


def lost() -> None:
    """Rank 1 dies; the others read, write and free their gradients, train another net alone, and end."""
    net, trainer = make(mx.kv.create("horovod"))
    step(net, trainer)
    mx.nd.waitall()
    if kvstore_hvd.topology().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1000):
            step(net, trainer)
            mx.nd.waitall()
    except kvstore_hvd.HorovodInternalError as error:
        print(f"caught {type(error).__name__}", flush=True)
    gradients = [p.grad() for p in net.collect_params().values()]
    for gradient in gradients:
        gradient[:] = 5
        assert (gradient.asnumpy() == 5).all()
    del net, trainer
    gradients.pop()
    mx.nd.waitall()
    fresh, _ = make(None)
    with mx.autograd.record():
        module = mx.np if mx.__version__.startswith("2") else mx.nd
        loss = (fresh(module.ones((4, 8))) ** 2).mean()
    loss.backward()
    mx.nd.waitall()
    KEPT.extend([*gradients, fresh])
    print("survived", flush=True)
    sys.exit(7)


def forked() -> None:
    """A child that ends as a program does, not with os._exit, after it has written to the gradients."""
    net, trainer = make(mx.kv.create("horovod"))
    step(net, trainer)
    before = [p.grad().asnumpy() for p in net.collect_params().values()]
    child = os.fork()
    for p in net.collect_params().values():
        if child == 0:
            p.grad()[:] = 3
            assert (p.grad().asnumpy() == 3).all()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    after = [p.grad().asnumpy() for p in net.collect_params().values()]
    assert all((one == other).all() for one, other in zip(before, after))
    step(net, trainer)
    show(net)


if __name__ == "__main__":
    program = sys.argv[1]
    if program in ("train", "string"):
        train("horovod" if program == "string" else None)
    else:
        {"lost": lost, "forked": forked}[program]()

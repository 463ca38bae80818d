"""One rank of a short program, which its first argument names; prints what it saw."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvstore_hvd
from kvstore_hvd import config
from kvstore_hvd.process import process


def late_reset(folder: str) -> None:
    """Rank 0 comes later than the others are ready to wait; all of them try until they meet.

    The folder is for the ranks' signs that they have waited in vain.
    """
    topology = kvstore_hvd.init()
    os.environ["KVHVD_START_TIMEOUT"] = "1"  # not of the start itself, which takes its time on a busy machine
    config.reload()
    signs = [Path(folder, str(rank)) for rank in range(topology.size)]
    while topology.rank == 0 and not all(sign.exists() for sign in signs[1:]):
        time.sleep(0.02)  # between two looks at a folder
    failures = 0
    while True:
        try:
            generation = kvstore_hvd.reset().generation
            break
        except kvstore_hvd.LaunchError:
            failures += 1
            assert failures < 100
            signs[topology.rank].touch()
    total = kvstore_hvd.allreduce(np.ones(1), "after")[0]
    print(
        f"rank {topology.rank} generation {generation} total {total:g} failures {'some' if failures else 'none'}",
        flush=True,
    )


def forked_child() -> None:
    """A child may neither join the world nor reset it; its parent goes on."""
    topology = kvstore_hvd.init()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (kvstore_hvd.init, kvstore_hvd.reset, lambda: kvstore_hvd.allreduce(np.ones(1), "child")):
            try:
                call()
            except kvstore_hvd.ShutdownError:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    total = kvstore_hvd.allreduce(np.ones(1), "parent")[0]
    print(f"rank {topology.rank} refused {os.WEXITSTATUS(status)} total {total:g}", flush=True)


def pending_at_exit(code: str) -> None:
    """Rank 1 leaves without an operation that the others have submitted; nobody reads what became of it.

    `code` is the one that the others end with.
    """
    import mxnet as mx

    store = mx.kv.create("horovod")
    store.barrier()
    if store.rank != 1:
        store.pushpull("lost", mx.nd.ones((3,)))
        print("submitted")  # not flushed: that is for the end of the process
        sys.exit(int(code))


def layers_at_exit(how: str) -> None:
    """The program ends, or leaves the world, before MXNet has computed layers that need the other workers.

    The layers themselves, local variables, are gone by then.
    """
    import mxnet as mx

    import kvstore_hvd.mxnet as hvd

    hvd.init()
    net = mx.gluon.nn.HybridSequential()
    net.add(*(hvd.SyncBatchNorm(in_channels=3) for _ in range(4)))
    net.initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    data = (mx.np if int(mx.__version__.split(".")[0]) >= 2 else mx.nd).ones((4, 3))
    for _ in range(3):
        with mx.autograd.record():
            loss = net(data).sum()
        loss.backward()
        trainer.step(4)
    if how == "shutdown":
        hvd.shutdown()
    print("submitted", flush=True)


def interrupted(submits: str) -> None:
    """Rank 0 leaves with an operation that the others have not submitted, and gets Ctrl-C as it waits for it.

    "late": MXNet computes the operation's input until then.
    """
    import mxnet as mx

    computed = threading.Event()

    class Late(mx.operator.CustomOp):
        def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            computed.wait()
            self.assign(out_data[0], req[0], in_data[0])

    @mx.operator.register("late")
    class _Property(mx.operator.CustomOpProp):
        def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> Late:
            return Late()

    store = mx.kv.create("horovod")
    store.barrier()
    if store.rank == 0:
        array = mx.nd.ones((3,))
        store.pushpull("alone", mx.nd.Custom(array, op_type="late") if submits == "late" else array)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            process.current().shutdown()
        except KeyboardInterrupt:
            print("rank 0 was interrupted", flush=True)
        else:
            print("rank 0 left in good order", flush=True)
        computed.set()
        with contextlib.suppress(mx.MXNetError, kvstore_hvd.KVHvdError):
            mx.nd.waitall()  # MXNet 2 hangs at exit when an operator written in Python is running
    else:
        try:
            kvstore_hvd.allreduce(np.ones(1), "other")
        except kvstore_hvd.HorovodInternalError as error:
            print(f"rank {store.rank} got: {error}", flush=True)


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "late_reset": late_reset,
        "forked_child": forked_child,
        "pending_at_exit": pending_at_exit,
        "layers_at_exit": layers_at_exit,
        "interrupted": interrupted,
    }
    programs[sys.argv[1]](*sys.argv[2:])

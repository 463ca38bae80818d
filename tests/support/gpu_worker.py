"""A worker of a job on stand-ins of GPUs: the whole package, with the real kernels over memory that processes share.

    gpu_worker.py KERNELS GPUS WHAT

KERNELS is from `host_kernels.compiled`, GPUS how many the machine has (workers share them when they are fewer).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvstore_hvd
from kvstore_hvd.errors import HorovodInternalError
from support.fake_cuda import CUDARuntimeError, FakeCuda, fake_cuda
from support.gpu_claims import OnGPU
from support.gpu_ranks import samples
from support.host_kernels import host_kernels, loaded
from support.patience import patient

COUNTS = (1, 5000, 300_000)
# Open to the end of this process, as a real GPU is: the package's own end comes later than that of `main`.
_MACHINE = contextlib.ExitStack()


def reduce() -> None:
    """Reduce and broadcast arrays of all kinds, and compare with what the engine of the CPU gives."""
    world = kvstore_hvd.topology()
    for number, (dtype, count) in enumerate(itertools.product(("float32", "float16", "int64"), COUNTS)):
        mine = samples(world.rank, count, dtype, number).view(dtype)
        expected = kvstore_hvd.allreduce(mine, f"cpu {number}", op="average" if count == 5000 else "sum")
        array = OnGPU(mine.copy())
        kvstore_hvd.allreduce(array, f"gpu {number}", op="average" if count == 5000 else "sum", out=array)
        if np.array_equal(array.values.view(np.uint8), expected.view(np.uint8)):
            continue
        # Around a ring additions have another order: in integers the bits, else about the same.
        np.testing.assert_allclose(array.values, expected, rtol=2e-2, atol=2e-2 if dtype == "float16" else 1e-5)
        assert dtype != "int64"
        assert count == max(COUNTS)
        first = kvstore_hvd.broadcast(array.values.copy(), 0, f"compared {number}")
        np.testing.assert_array_equal(first, array.values)
    array = OnGPU(np.full(5000, world.rank, np.float32))
    kvstore_hvd.broadcast(array, world.size - 1, "root", out=array)
    np.testing.assert_array_equal(array.values, np.full(5000, world.size - 1, np.float32))


def at_launch(cuda: FakeCuda, number: int, what: Any) -> None:
    """Call `what` before the launch of a kernel of this worker, where `number` says which."""
    numbers = itertools.count(1)
    cuda.before = lambda name: what() if name == "launch" and next(numbers) == number else None


def lose(cuda: FakeCuda, what: Any) -> None:
    """Let the last worker do something when the others' kernels are waiting for its; print how they learn of it."""
    world = kvstore_hvd.topology()
    launching = [Path(tempfile.gettempdir()) / f"rank {rank} launches" for rank in range(world.size - 1)]

    def when_others_launch() -> None:
        # Not while their engines still wait for this one's: they would learn of it in another way.
        until = time.monotonic() + patient(10)
        while not all(each.exists() for each in launching):
            assert time.monotonic() < until, "the other workers launch nothing"
            time.sleep(0.01)
        time.sleep(1)  # this one's engine is in another thread, and may not have run meanwhile
        what()

    def launch_late() -> None:
        launching[world.rank].touch()
        time.sleep(0.3)  # the time of an operation runs already, that of its kernel does not

    at_launch(cuda, 3, when_others_launch if world.rank == world.size - 1 else launch_late)
    for number in itertools.count():
        array = OnGPU(np.full(5000, world.rank, np.float32))
        try:
            kvstore_hvd.allreduce(array, f"array {number}", out=array)
        except HorovodInternalError as error:
            print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
            return
        np.testing.assert_array_equal(array.values, np.full(5000, sum(range(world.size)), np.float32))


def recover(cuda: FakeCuda) -> None:
    """A launch fails on one worker; all start anew, in a world with kernels and memory of its own."""

    def fail() -> None:
        raise CUDARuntimeError("cudaErrorLaunchFailure: planted")

    lose(cuda, fail)
    kvstore_hvd.reset()
    reduce()


def main(path: Path, gpus: int, what: str) -> None:
    """Be a worker."""
    cuda = FakeCuda(is_shared=True)
    del cuda.devices[gpus:]
    _MACHINE.enter_context(host_kernels(loaded(path)))
    _MACHINE.enter_context(fake_cuda(cuda))
    kvstore_hvd.init()
    cuda.set_device(kvstore_hvd.topology().local_rank % gpus)
    pid = os.getpid()
    ways: dict[str, Callable[[], None]] = {
        "reduce": reduce,
        "die": lambda: lose(cuda, lambda: os.kill(pid, signal.SIGKILL)),
        "stop": lambda: lose(cuda, lambda: os.kill(pid, signal.SIGSTOP)),
        "recover": lambda: recover(cuda),
    }
    ways[what]()
    print(f"rank {kvstore_hvd.topology().rank}: the end", flush=True)
    if what in ("die", "stop"):
        raise SystemExit(1)  # whoever lives has an error


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

"""One rank of a job that loses a worker: ``fuzz_worker.py SEED SIGNAL``, with the signal 9 (SIGKILL) or 19 (SIGSTOP).

Every rank runs random programs. In one of the first ones the victim, a rank that the seed chooses, sends itself the
signal: between two operations, or from another thread at any time. Ranks that are told of it print the error behind
``caught: ``. After SIGSTOP somebody has to continue the victim; then all meet again, and programs are right as before.
"""

import contextlib
import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from fuzz.executor import Executor
from fuzz.programs import generate
from fuzz.runner import agree
from kvstore_hvd.errors import HorovodInternalError
from kvstore_hvd.mxnet import process_sets

PROGRAMS = 200
AFTERWARDS = 3


class Victim:
    def __init__(self, draw: random.Random, number: int) -> None:
        self._number = number
        self._program = draw.randrange(1, 12)
        #: None: it happens between two operations, and not at any time.
        self.delay_s = draw.choice((None, draw.random() * 0.05))
        self._step = draw.randrange(4)

    def before_step(self, program: int, step: int) -> None:
        """Die, or be stopped, when the moment has come; `program` is counted from 0."""
        if (program, step) != (self._program, self._step) and program <= self._program:
            return
        if self.delay_s is None or program > self._program:
            self._send()
        elif program == self._program:
            threading.Timer(self.delay_s, self._send).start()

    def _send(self) -> None:
        print(f"victim: {os.getpid()}", flush=True)
        number, self._number = self._number, 0
        if number:
            os.kill(os.getpid(), number)


def check(executor: Executor, seed: int, rank: int, size: int, *before_step: Callable[[int], None]) -> None:
    program = generate(seed, size, leavers=False)
    agree(program, executor.run(program, *before_step), rank)


def main(seed: int, number: int) -> int:
    """Lose a worker; returns the exit code: 7 for ranks that were told."""
    hvd.init()
    process_sets.allow_dynamic()
    rank, size = hvd.rank(), hvd.size()
    draw = random.Random(seed)
    is_victim = rank == draw.randrange(size)
    victim = Victim(draw, number)
    executor = Executor(rank, size)
    try:
        for each in range(PROGRAMS):
            moment = [functools.partial(victim.before_step, each)] if is_victim else []
            check(executor, seed * 1000 + each, rank, size, *moment)
    except HorovodInternalError as error:
        print(f"caught: {type(error).__name__}: {error}", flush=True)
    else:
        print("nobody was told", flush=True)
        return 1
    if number != signal.SIGSTOP:
        time.sleep(0.2)  # the others are told by the victim's end, not by this worker's
        return 7
    if victim.delay_s is None:
        kvstore_hvd.reset()
    else:  # sets may have been in the making: begin without any
        with contextlib.suppress(HorovodInternalError):
            hvd.shutdown()
        hvd.init(process_sets="dynamic")
        executor = Executor(rank, size)
    for after in range(AFTERWARDS):
        check(executor, seed * 1000 + 500 + after, rank, size)
    print("met again", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

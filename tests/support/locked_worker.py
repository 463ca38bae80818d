"""One of two ranks, of which rank 1 is stopped with a lock of the world: ``locked_worker.py CASE TABLE SCHEDULE``.

The last two are the places of the locks in the segment. Rank 0 then makes a small allreduce that needs the lock, while
another thread of its interpreter looks whether it can run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvstore_hvd
from kvstore_hvd.comm.base import Request
from kvstore_hvd.process import process

case, table, schedule = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
#: Too much for an announcement to carry, and little enough to be submitted with the interpreter lock.
COUNT = 10_000
TICKS = 10


def request(name: str, array: Any) -> Request:
    """An allreduce in place, as those of NumPy arrays are."""
    place = [array.ctypes.data]
    return Request("allreduce", f"np/{name}", f"'{name}'", place, place, array.shape, "float32")


def is_segment(descriptor: str) -> bool:
    try:
        return "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # that of the listing
        return False


def stop_with(offset: int) -> None:
    """Be stopped inside the lock until somebody continues this process."""
    (segment,) = (each for each in os.listdir("/proc/self/fd") if is_segment(each))
    memory = mmap.mmap(int(segment), offset + mmap.PAGESIZE)
    word, holder = (ctypes.c_uint32.from_buffer(memory, offset + each) for each in (0, 4))
    assert word.value == 0
    word.value, holder.value = 1, 1
    print(f"stopping {os.getpid()}", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    word.value = 0


def wait_until_stopped(pid: int) -> None:
    """Until the process is stopped, as proc(5) says."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def tick(entered: threading.Event) -> None:
    """Say so when the interpreter still runs this thread, some time after the other one went into the engine."""
    entered.wait()
    for _ in range(TICKS):
        time.sleep(0.05)
    print("the interpreter runs on", flush=True)


def rank_1(array: Any) -> None:
    """Announce what rank 0 needs, and be stopped."""
    communicator = process.current().member.communicator()
    if case == "schedule":  # rank 0 is the last one, and has to put the tensor into the schedule
        work = communicator.submit(request("x", array))
        stop_with(schedule)
        communicator.wait(work)
        return
    stop_with(table)
    if case == "two threads":
        kvstore_hvd.allreduce(np.ones(1, np.float32), "of another thread")
    kvstore_hvd.allreduce(array, "x", out=array)


def rank_0(array: Any) -> None:
    """Sum, while another thread looks."""
    entered = threading.Event()
    threading.Thread(target=tick, args=[entered], daemon=True).start()
    communicator = process.current().member.communicator()
    wait_until_stopped(communicator.process(1)[0])
    other = np.ones(1, np.float32)
    if case == "two threads":  # the first one waits for the lock, and has the engine meanwhile
        other_thread = threading.Thread(target=kvstore_hvd.allreduce, args=[other, "of another thread", "sum", other])
        other_thread.start()
        while communicator.waiting(0.0) is not None:
            time.sleep(0.01)
    entered.set()
    kvstore_hvd.allreduce(array, "x", out=array)
    if case == "two threads":
        other_thread.join()
        assert other.tolist() == [2]


rank = kvstore_hvd.init().rank
array = np.full(1 if case == "table" else COUNT, rank + 1, np.float32)
if case == "two threads":
    kvstore_hvd.allreduce(array.copy(), "x")  # a name that is known needs no lock of the table
kvstore_hvd.barrier("met")
(rank_1 if rank == 1 else rank_0)(array)
assert (array == 3).all(), array
print("summed", flush=True)

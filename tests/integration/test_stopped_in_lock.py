"""A rank that is stopped while it holds a lock of the world: the interpreters of the others run on, and say so."""

import os
import re
import shutil
import signal
import subprocess

import pytest

from support.jobs import TESTS

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")]

# Rank 1 is stopped with a lock; rank 0 makes an allreduce that needs it, while another thread looks whether it can run.
PROGRAM = """
import ctypes, mmap
import numpy as np
import kvstore_hvd
from kvstore_hvd import native
from kvstore_hvd.world import process
from support.jobs import status_of
def stop_with(offset):  # inside the lock, until somebody continues this process
    links = {each: os.path.realpath(f'/proc/self/fd/{each}') for each in os.listdir('/proc/self/fd')}
    (segment,) = (each for each, link in links.items() if 'memfd:' in link)
    memory = mmap.mmap(int(segment), offset + mmap.PAGESIZE)
    word, holder = (ctypes.c_uint32.from_buffer(memory, offset + each) for each in (0, 4))
    assert word.value == 0
    word.value, holder.value = 1, 1
    say(f'stopping {os.getpid()}\\n')
    os.kill(os.getpid(), signal.SIGSTOP)
    word.value = 0
def tick():  # some time after the other thread went into the engine
    entered.wait()
    time.sleep(0.5)
    say('the interpreter runs on\\n')
kvstore_hvd.init()
# More than an announcement carries, and little enough to be submitted with the interpreter lock.
array = np.full(1 if CASE == 'table' else 10_000, rank + 1, np.float32)
kvstore_hvd.barrier('met')
engine = process.current().member.engine()
if rank == 1 and CASE == 'schedule':  # rank 0 is the last one, and has to put the tensor into the schedule
    place = [array.ctypes.data]
    work = engine.submit(native.Request('allreduce', 'np/x', "'x'", place, place, array.shape, 'float32'))
    stop_with(OFFSET)
    engine.wait(work)
elif rank == 1:
    stop_with(OFFSET)
    kvstore_hvd.allreduce(array, 'x', out=array)
else:
    entered = threading.Event()
    threading.Thread(target=tick, daemon=True).start()
    while status_of(engine.process(1)[0])[0] != 'T':
        time.sleep(0.01)
    entered.set()
    kvstore_hvd.allreduce(array, 'x', out=array)
assert (array == 3).all(), array
say('summed\\n')
"""


@pytest.mark.parametrize("case", ["table", "schedule"])
def test_threads_of_the_others_run_on(start, tmp_path, case):
    """Also while a small array is submitted, which takes no time as a rule and keeps the interpreter lock."""
    compiled = tmp_path / "offsets"  # where the locks lie in a segment
    command = [str(COMPILER), "-std=c++17", f"-I{TESTS.parent / 'native'}", "-o", str(compiled)]
    subprocess.run([*command, str(TESTS / "support" / "lock_offsets.cpp")], check=True)
    table, schedule = subprocess.run([str(compiled)], check=True, capture_output=True, text=True).stdout.split()
    program = f"CASE, OFFSET = {case!r}, {table if case == 'table' else schedule}\n" + PROGRAM
    job = start("-np 2", program, KVHVD_STALL_CHECK_TIME_S="1").until_printed("the interpreter runs on")
    job.until_printed("rank 0 has been blocked in the engine")
    assert "summed" not in job.out
    (pid,) = re.findall(r"stopping (\d+)", job.out)
    assert f"its process is stopped; `kill -CONT {pid}` continues it" in job.err
    os.kill(int(pid), signal.SIGCONT)
    assert job.end().out.count("summed") == 2

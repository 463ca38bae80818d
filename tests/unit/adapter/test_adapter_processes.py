"""The adapter where it takes a process of its own: with NaiveEngine, across a fork, and at the end of a program."""

import os
import subprocess
import sys
import textwrap

from support.pair import TIMEOUT_S

# What every program begins with.
PRELUDE = f"""
import faulthandler, os, signal, sys
faulthandler.dump_traceback_later({TIMEOUT_S}, exit=True)
sys.path[:0] = {sys.path!r}
import kvstore_hvd.store.kvstore  # the module that needs MXNet imports it
from kvstore_hvd import errors
from support.pair import TIMEOUT_S, World, mx, ramp
assert type(mx.kv.create("horovod")) is kvstore_hvd.Horovod
"""


def run_alone(body, **variables):
    """Run `body` in a fresh process, after the prelude; returns what it printed."""
    command, how = [sys.executable, "-c", PRELUDE + textwrap.dedent(body)], {"capture_output": True, "text": True}
    done = subprocess.run(command, env={**os.environ, **variables}, timeout=2 * TIMEOUT_S, **how)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_naive_engine():
    out = run_alone(
        """
        world = World(naive=True)
        array = mx.nd.ones((4,))
        work = world.submit("w", theirs := ramp((4,)))
        world.pushpull("w", [array], [array])
        world.other.wait(work)
        print(array.asnumpy().tolist(), theirs.tolist())
        world.submit("w", ramp((5,)))
        try:
            world.pushpull("w", [array], [array])
        except errors.MismatchError as error:
            print(str(error).splitlines()[0], world.adapter.take_unread_error())
        world.submit("b", ramp((4,), start=5), root=1)
        world.broadcast("b", array, 1)
        print(array.asnumpy().tolist())
        world.close()
        """,
        MXNET_ENGINE_TYPE="NaiveEngine",
    )
    assert out.splitlines() == [
        "[2.0, 3.0, 4.0, 5.0] [2.0, 3.0, 4.0, 5.0]",
        "[rank 0/2] allreduce 'w': ranks disagree on shape. None",
        "[5.0, 6.0, 7.0, 8.0]",
    ]


FORK = """
def fork(in_flight):
    world = World()
    array = mx.nd.ones((4,))
    if in_flight:
        slow = mx.nd.ones((1000, 1000)) / 1000
        for _ in range(10):
            slow = mx.nd.dot(slow, slow)
        array = slow[0, :4] * 0 + 1
    world.pushpull("w", [array], [array])
    world.submit("w", ramp((4,)))
    if not in_flight:
        array.wait_to_read()
    # fork() waits for MXNet's operations, with the GIL held.
    child = os.fork()
    if child == 0:
        world.adapter.after_fork_in_child()
        signal.alarm(int(TIMEOUT_S))
        try:
            world.pushpull("v", [array], [array])
            code = 1
        except errors.ShutdownError as error:
            code = 0 if "forked child" in str(error) else 2
        if world.adapter.take_unread_error() is not None or (mx.nd.ones((2,)) + 1).asnumpy().tolist() != [2.0, 2.0]:
            code = 3
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), array.asnumpy().tolist())
    world.pushpull("v", [array], [array])
    world.submit("v", ramp((4,)))
    print(array.asnumpy().tolist())
    return world, array
world, _ = fork(in_flight=False)
world.close()
world, array = fork(in_flight=True)
import atexit
atexit.register(world.engine.shutdown, "the program ended")
world.pushpull("u", [array], [array])
"""


def test_a_forked_child_neither_hangs_nor_disturbs():
    """Whether an operation is in flight or not. The parent ends while one is pending."""
    assert run_alone(FORK).splitlines() == ["0 [2.0, 3.0, 4.0, 5.0]", "[3.0, 5.0, 7.0, 9.0]"] * 2

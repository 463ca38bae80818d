"""The adapter between MXNet's engine and ours, against a second rank that lives in the same process.

Each process makes a private world of two, so the tests decide when the other rank submits and what, whatever the number
of processes that run them.
"""

from __future__ import annotations

import gc
import os
import signal  # noqa: F401 - for the programs below
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import errors, mxnet_compat, native

mxnet_compat.numpy_shim.install()
mx = pytest.importorskip("mxnet")

from kvstore_hvd.mxnet_compat.engine_errors import register_errors  # noqa: E402

TIMEOUT_S = 30.0
register_errors(mx)


def handles(arrays: list[Any]) -> list[int]:
    return [mxnet_compat.handle_of(array) for array in arrays]


def until(ask: Callable[[], Any]) -> Any:
    """Ask until there is an answer: MXNet's threads report an error a little later than it happens."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        answer = ask()
        if answer is not None:
            return answer
        time.sleep(0.005)
    pytest.fail("no answer in time")


class World:
    """Rank 0 is the adapter's, rank 1 works on NumPy arrays."""

    def __init__(self, naive: bool = False) -> None:
        self.segment = native.Segment.create(2)
        self.engine = native.Engine(self.segment, 0, TIMEOUT_S, False)
        self.other = native.Engine(self.segment, 1, TIMEOUT_S, False)
        self.adapter = native.MXNetAdapter(self.engine, mxnet_compat.libmxnet_path(), naive)
        self.submitted: list[np.ndarray] = []  # must live until their requests are done

    def pushpull(self, name: str, inputs: list[Any], outputs: list[Any], priority: int = 0) -> None:
        code = native.OPS["sum"]
        self.adapter.pushpull(name, repr(name), handles(inputs), handles(outputs), code, 1.0, 1.0, priority)

    def broadcast(self, name: str, array: Any, root: int) -> None:
        self.adapter.broadcast(name, repr(name), mxnet_compat.handle_of(array), root, 0)

    def submit(self, name: str, array: np.ndarray, root: int = -1) -> native.Work:
        """Let rank 1 take part, in place; a broadcast when there is a root."""
        self.submitted.append(array)
        collective = "allreduce" if root < 0 else "broadcast"
        place = [array.ctypes.data]
        dtype = str(array.dtype)
        return self.other.submit(
            native.request(collective, name, repr(name), place, place, array.shape, dtype, root=max(root, 0))
        )

    def close(self) -> None:
        other = threading.Thread(target=self.other.shutdown)
        other.start()
        self.engine.shutdown()
        other.join()


@pytest.fixture
def pair() -> Iterator[World]:
    world = World()
    yield world
    world.close()
    mx.nd.waitall()


def ramp(shape: tuple[int, ...], dtype: str = "float32", start: int = 1) -> np.ndarray:
    size = int(np.prod(shape))
    return (np.arange(start, start + size) % 50).reshape(shape).astype(dtype)


def test_waits_for_the_producer_and_holds_the_consumer_without_blocking(pair: World) -> None:
    ours, theirs = ramp((3, 4)), ramp((3, 4), start=7)
    gradient = mx.nd.array(ours) * 3
    pair.pushpull("w", [gradient], [gradient])
    after = gradient + 1
    # Only now does the other rank take part: neither call above has waited for it.
    work = pair.submit("w", theirs)
    expected = ours * 3 + ramp((3, 4), start=7)
    np.testing.assert_array_equal(after.asnumpy(), expected + 1)
    pair.other.wait(work)
    np.testing.assert_array_equal(theirs, expected)


def test_arrays_may_be_dropped_while_the_operation_runs(pair: World) -> None:
    gradient = mx.nd.ones((1000,)) * 2
    pair.pushpull("w", [gradient], [gradient])
    del gradient
    gc.collect()
    theirs = ramp((1000,))
    pair.other.wait(pair.submit("w", theirs))
    np.testing.assert_array_equal(theirs, ramp((1000,)) + 2)


@pytest.mark.parametrize(
    ("inputs", "outputs", "times"),
    [
        ("a", "a", 1),
        ("a", "b", 1),
        ("aa", "ab", 2),
        ("av", "v", 2),
        ("abv", "bva", 3),
        ("av", "b", 2),
        ("cd", "cd", 2),
        ("a", "abcd", 1),
    ],
)
def test_arrays_that_occur_twice_or_are_views_of_each_other(pair: World, inputs: str, outputs: str, times: int) -> None:
    ours, theirs = ramp((4,)), ramp((4,), start=10)
    arrays = {name: mx.nd.array(ours) for name in "ab"}
    arrays["v"] = arrays["a"].reshape((2, 2))
    halves = mx.nd.array(np.concatenate([ours, ours]))
    arrays["c"], arrays["d"] = halves[:4], halves[4:]
    pair.pushpull("w", [arrays[n] for n in inputs], [arrays[n] for n in outputs])
    work = pair.submit("w", theirs)
    for name in outputs:
        result = arrays[name].asnumpy().reshape(-1)
        np.testing.assert_array_equal(result, times * ours + ramp((4,), start=10))
    pair.other.wait(work)


def test_arrays_of_several_devices(pair: World) -> None:
    arrays = [mx.nd.ones((5,), ctx=mx.cpu(i)) * (i + 1) for i in range(3)]
    pair.pushpull("w", arrays, arrays)
    pair.other.wait(pair.submit("w", theirs := np.full(5, 10, "float32")))
    assert [array.asnumpy().tolist() for array in arrays] == [[16.0] * 5] * 3
    assert theirs.tolist() == [16.0] * 5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (33, 5)])
def test_every_dtype_and_shape_of_numpy_arrays(pair: World, dtype: str, shape: tuple[int, ...]) -> None:
    with mx.util.np_shape(True):
        array = mx.np.array(ramp(shape, dtype), dtype=dtype)
        pair.pushpull("w", [array], [array])
        theirs = ramp(shape, dtype, start=3)
        pair.other.wait(pair.submit("w", theirs))
        result = array.asnumpy()
    assert result.shape == shape
    assert result.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(result, ramp(shape, dtype) + ramp(shape, dtype, start=3))
    np.testing.assert_array_equal(result, theirs)


def test_operations_of_one_name_start_in_the_order_of_the_calls(pair: World) -> None:
    slow = mx.nd.ones((1000, 1000)) / 1000
    for _ in range(10):
        slow = mx.nd.dot(slow, slow)
    late, early = slow[0, :4] * 0 + 1, mx.nd.ones((4,)) * 2
    pair.pushpull("w", [late], [late])
    pair.pushpull("w", [early], [early])
    works = [pair.submit("w", np.full(4, value, "float32")) for value in (10, 20)]
    np.testing.assert_array_equal(early.asnumpy(), np.full(4, 22))
    np.testing.assert_array_equal(late.asnumpy(), np.full(4, 11))
    for work in works:
        pair.other.wait(work)


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_is_in_place(pair: World, root: int) -> None:
    array, theirs = mx.nd.array(ramp((6,))), ramp((6,), start=20)
    pair.broadcast("w", array, root)
    pair.other.wait(pair.submit("w", theirs, root=root))
    np.testing.assert_array_equal(array.asnumpy(), ramp((6,), start=20 if root else 1))
    np.testing.assert_array_equal(array.asnumpy(), theirs)


def convolution() -> Any:
    """Return a network and an input for which oneDNN rearranges weights and results."""
    network = mx.gluon.nn.Conv2D(64, 3, in_channels=16)
    network.initialize()
    image = np.random.RandomState(0).uniform(size=(8, 16, 32, 32)).astype("float32")
    if mxnet_compat.version_number() >= 20000:
        return network, mx.np.array(image)
    return network, mx.nd.array(image)


@pytest.mark.parametrize("wait", [True, False], ids=["idle", "in flight"])
def test_weights_that_inference_has_rearranged(pair: World, wait: bool) -> None:
    network, image = convolution()
    network(image).wait_to_read()  # MXNet 2 makes the parameters now
    weight = next(iter(network.collect_params().values())).data()
    before = weight.asnumpy()
    for _ in range(3):
        result = network(image)
        if wait:
            result.wait_to_read()
    pair.pushpull("w", [weight], [weight])
    theirs = ramp(before.shape)
    pair.other.wait(pair.submit("w", theirs))
    np.testing.assert_array_equal(theirs, before + ramp(before.shape))
    np.testing.assert_array_equal(weight.asnumpy(), theirs)
    assert np.isfinite(network(image).asnumpy()).all()
    pair.broadcast("b", weight, 1)
    pair.other.wait(pair.submit("b", theirs := ramp(before.shape), root=1))
    np.testing.assert_array_equal(weight.asnumpy(), theirs)


def test_results_of_a_convolution(pair: World) -> None:
    network, image = convolution()
    activation, expected = network(image), network(image).asnumpy()
    pair.pushpull("w", [activation], [activation])
    pair.other.wait(pair.submit("w", theirs := np.zeros_like(expected)))
    np.testing.assert_array_equal(theirs, expected)
    np.testing.assert_array_equal(activation.asnumpy(), expected)


def test_gradients_of_a_training_step(pair: World) -> None:
    network, image = convolution()
    with mx.autograd.record():
        loss = (network(image) ** 2).sum()
    loss.backward()
    gradients = [parameter.grad() for parameter in network.collect_params().values()]
    expected = [gradient.asnumpy() for gradient in gradients]
    theirs = [np.zeros_like(array) for array in expected]
    for i, gradient in enumerate(gradients):
        pair.pushpull(str(i), [gradient], [gradient], priority=-i)
    works = [pair.submit(str(i), theirs[i]) for i in reversed(range(len(theirs)))]
    for i, gradient in enumerate(gradients):
        np.testing.assert_array_equal(gradient.asnumpy(), expected[i])
    for work in works:
        pair.other.wait(work)
    for array, right in zip(theirs, expected):
        np.testing.assert_array_equal(array, right)


def test_is_plain_and_chunk_id() -> None:
    world = World()
    array = mx.nd.ones((4, 2))
    sparse = array.tostype("row_sparse")
    arrays = [array, array.reshape((8,)), array[1:3], array.copy(), sparse]
    assert [world.adapter.is_plain(handle) for handle in handles(arrays)] == [True, True, True, True, False]
    ids = [world.adapter.chunk_id(handle) for handle in handles(arrays)]
    assert [chunk == ids[0] for chunk in ids] == [True, True, True, False, False]
    world.close()


# ---- Errors.


def test_an_error_is_raised_at_the_first_read_and_leaves_the_world_usable(pair: World) -> None:
    array = mx.nd.array(ramp((4,)))
    pair.pushpull("w", [array], [array])
    work = pair.submit("w", ramp((5,)))
    with pytest.raises(errors.MismatchError) as caught:
        array.wait_to_read()
    assert isinstance(caught.value, mx.base.MXNetError)
    assert str(caught.value) == (
        "[rank 0/2] allreduce 'w': ranks disagree on shape.\n"
        "  (4,): rank 0    (5,): rank 1\n"
        "  Nothing was reduced. Fix: build the same network on every rank."
    )
    with pytest.raises(errors.MismatchError, match="rank 1/2"):
        pair.other.wait(work)
    np.testing.assert_array_equal(array.asnumpy(), ramp((4,)))
    assert pair.adapter.take_unread_error() is None
    pair.pushpull("w", [array], [array])
    pair.other.wait(pair.submit("w", theirs := ramp((4,))))
    np.testing.assert_array_equal(array.asnumpy(), 2 * ramp((4,)))
    np.testing.assert_array_equal(theirs, 2 * ramp((4,)))


def test_an_error_that_nobody_read_is_given_out_once(pair: World) -> None:
    arrays = [mx.nd.ones((4,)) for _ in range(3)]
    for i, array in enumerate(arrays):
        pair.pushpull(str(i), [array], [array])
    works = [pair.submit(str(i), ramp((5,))) for i in range(3)]
    with pytest.raises(errors.MismatchError):
        arrays[0].wait_to_read()
    for work in works:
        with pytest.raises(errors.MismatchError):
            pair.other.wait(work)
    error = until(pair.adapter.take_unread_error)
    assert isinstance(error, errors.MismatchError)
    assert "'0'" not in str(error)
    # However many reports there were: afterwards nothing is left to raise.
    gone = threading.Event()
    for _ in range(2):
        gone.wait(0.05)
        pair.adapter.take_unread_error()
    for array in arrays:
        np.testing.assert_array_equal(array.asnumpy(), np.ones(4))


def failing_array() -> Any:
    """Return an array whose producer fails when it runs, not when it is called."""
    return mx.nd.random.normal(0, -1, (4,))


@pytest.mark.parametrize("where", ["input", "output"])
def test_a_failed_producer_releases_the_other_ranks(pair: World, where: str) -> None:
    failed, fine = failing_array(), mx.nd.ones((4,))
    arrays = ([failed], [fine]) if where == "input" else ([fine], [failed])
    pair.pushpull("w", *arrays)
    theirs = ramp((4,))
    with pytest.raises(errors.InputFailedError, match=r"rank 1/2.*\n.*rank 0: an operation that should have produced"):
        pair.other.wait(pair.submit("w", theirs))
    np.testing.assert_array_equal(theirs, ramp((4,)))
    with pytest.raises(mx.base.MXNetError, match="scale"):
        fine.asnumpy()
    assert pair.adapter.take_unread_error() is None


def test_a_failed_producer_that_nobody_read(pair: World) -> None:
    failed = failing_array()
    pair.pushpull("w", [failed], [failed])
    with pytest.raises(errors.InputFailedError):
        pair.other.wait(pair.submit("w", ramp((4,))))
    error = until(pair.adapter.take_unread_error)
    assert isinstance(error, errors.InputFailedError)
    assert str(error).startswith("[rank 0/2] allreduce 'w': an operation that should have produced an input failed.\n")
    assert "scale" in str(error)
    assert pair.adapter.take_unread_error() is None


def overlapping(array: Any) -> list[Any]:
    return [array[:4], array[1:5]]


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: [mx.nd.ones((4,)), mx.nd.ones((5,))], "its own arrays differ: float32 x 4 and float32 x 5."),
        (
            lambda: [mx.nd.ones((4,)), mx.nd.ones((4,), dtype="float16")],
            "its own arrays differ: float32 x 4 and float16 x 4.",
        ),
        (lambda: [mx.nd.ones((4,), dtype="bool")], "an input has dtype bool, which cannot be reduced."),
        (lambda: [mx.nd.ones((4, 2)).tostype("row_sparse")], "an input is sparse, empty or not on the CPU."),
        (lambda: overlapping(mx.nd.ones((8,))), "an output overlaps another array in part."),
    ],
    ids=["sizes", "dtypes", "bool", "sparse", "overlap"],
)
def test_arrays_that_cannot_be_used_fail_on_every_rank(pair: World, make: Callable[[], list[Any]], fact: str) -> None:
    arrays = make()
    pair.pushpull("w", arrays, arrays)
    with pytest.raises(errors.InputFailedError) as caught:
        pair.other.wait(pair.submit("w", ramp((4,))))
    assert f"\n  rank 0: {fact}\n" in str(caught.value)
    with pytest.raises(errors.InputFailedError) as caught:
        arrays[0].wait_to_read()
    assert fact in str(caught.value)


def test_a_lost_world_is_raised_by_reads_only() -> None:
    world = World()
    array = mx.nd.ones((4,))
    world.pushpull("w", [array], [array])
    world.other.abort("the test says so")
    with pytest.raises(errors.TransportError, match="the test says so"):
        array.wait_to_read()
    world.pushpull("w", [array], [array])
    with pytest.raises(errors.TransportError, match="the test says so"):
        array.wait_to_read()
    assert world.adapter.take_unread_error() is None
    world.close()


def test_operations_outlive_the_adapter_and_its_engine() -> None:
    world = World()
    array = mx.nd.ones((4,))
    world.close()
    world.pushpull("w", [array], [array])
    with pytest.raises(errors.ShutdownError):
        array.wait_to_read()
    del world
    gc.collect()
    np.testing.assert_array_equal(array.asnumpy(), np.ones(4))


def test_the_library_must_be_the_loaded_one() -> None:
    world = World()
    with pytest.raises(RuntimeError, match="not loaded"):
        native.MXNetAdapter(world.engine, "/nowhere/libmxnet.so", False)
    world.close()


def test_python_may_be_busy(pair: World) -> None:
    """The GIL is nowhere on the way: a thread that never lets it go for long does not hold operations up."""
    stop = threading.Event()
    array = mx.nd.ones((4,))

    def count() -> None:
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=count)
    busy.start()
    try:
        for _ in range(50):
            pair.pushpull("w", [array], [array])
            pair.submit("w", np.zeros(4, "float32"))
            array.wait_to_read()
    finally:
        stop.set()
        busy.join()
    np.testing.assert_array_equal(array.asnumpy(), np.ones(4))


# ---- What can only be tried in a process of its own.


def run_alone(body: str, **variables: str) -> str:
    """Run `body` in a fresh process, with this module's names; returns what it printed."""
    program = (
        f"import sys, faulthandler; faulthandler.dump_traceback_later({TIMEOUT_S}, exit=True)\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('adapter_tests', {__file__!r})\n"
        "tests = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(tests)\n"
        "globals().update({k: v for k, v in vars(tests).items() if not k.startswith('__')})\n"
    ) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        timeout=2 * TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_naive_engine() -> None:
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
            print(str(error).splitlines()[0])
        print(array.asnumpy().tolist(), world.adapter.take_unread_error())
        world.submit("b", ramp((4,), start=5), root=1)
        world.broadcast("b", array, 1)
        print(array.asnumpy().tolist())
        world.close()
        """,
        MXNET_ENGINE_TYPE="NaiveEngine",
    )
    assert out.splitlines() == [
        "[2.0, 3.0, 4.0, 5.0] [2.0, 3.0, 4.0, 5.0]",
        "[rank 0/2] allreduce 'w': ranks disagree on shape.",
        "[2.0, 3.0, 4.0, 5.0] None",
        "[5.0, 6.0, 7.0, 8.0]",
    ]


FORK = """
    world = World()
    array = mx.nd.ones((4,))
    if IN_FLIGHT:
        slow = mx.nd.ones((1000, 1000)) / 1000
        for _ in range(10):
            slow = mx.nd.dot(slow, slow)
        array = slow[0, :4] * 0 + 1
    world.pushpull("w", [array], [array])
    world.submit("w", ramp((4,)))
    if not IN_FLIGHT:
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
    world.close()
"""


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "in flight"])
def test_a_forked_child_neither_hangs_nor_disturbs(in_flight: bool) -> None:
    out = run_alone(FORK.replace("IN_FLIGHT", str(in_flight)))
    assert out.splitlines() == ["0 [2.0, 3.0, 4.0, 5.0]", "[3.0, 5.0, 7.0, 9.0]"]


def test_the_process_ends_while_an_operation_is_pending() -> None:
    out = run_alone(
        """
        import atexit
        world = World()
        array = mx.nd.ones((4,))
        atexit.register(world.engine.shutdown, "the program ended")
        world.pushpull("w", [array], [array])
        print("ending")
        """
    )
    assert out == "ending\n"

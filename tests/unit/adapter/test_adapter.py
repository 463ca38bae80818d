"""The adapter between MXNet's engine and ours: sums and broadcasts of arrays in every state, and in MXNet's order."""

import gc
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvstore_hvd import errors, native
from support.pair import TIMEOUT_S, World, handles, mx, ramp
from support.patience import until


def test_waits_for_the_producer_and_holds_the_consumer_without_blocking(pair):
    """Arrays may be dropped while the operation runs."""
    ours, theirs = ramp((3, 4)), ramp((3, 4), start=7)
    gradient = mx.nd.array(ours) * 3
    pair.pushpull("w", [gradient], [gradient])
    after = gradient + 1
    del gradient
    gc.collect()
    # Only now does the other rank take part: neither call above has waited for it.
    work = pair.submit("w", theirs)
    expected = ours * 3 + ramp((3, 4), start=7)
    np.testing.assert_array_equal(after.asnumpy(), expected + 1)
    pair.other.wait(work)
    np.testing.assert_array_equal(theirs, expected)


@pytest.mark.parametrize(
    ("inputs", "outputs", "times"),
    [("a", "abcd", 1), ("aa", "ab", 2), ("abv", "bva", 3), ("av", "b", 2), ("cd", "cd", 2)],
)
def test_arrays_that_occur_twice_or_are_views_of_each_other(pair, inputs, outputs, times):
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


def test_what_arrays_are_and_which_library_is_loaded(pair):
    array = mx.nd.ones((4, 2))
    arrays = handles(others := [array, array.reshape((8,)), array[1:3], array.copy(), array.tostype("row_sparse")])
    assert [pair.adapter.is_plain(handle) for handle in arrays] == [True, True, True, True, False], others
    ids = [pair.adapter.chunk_id(handle) for handle in arrays]
    assert [chunk == ids[0] for chunk in ids] == [True, True, True, False, False]
    with pytest.raises(RuntimeError, match="not loaded"):
        native.MXNetAdapter(pair.engine, "/nowhere/libmxnet.so", False)


@pytest.mark.parametrize("read", [mx.nd.NDArray.wait_to_read, mx.nd.NDArray.asnumpy, lambda x: (x + 1).asnumpy(), None])
def test_an_error_is_raised_where_its_array_is_read_with_its_class_and_text(pair, read):
    array = mx.nd.array(ramp((4,)))
    pair.pushpull("w", [array], [array])
    work = pair.submit("w", ramp((5,)))
    with pytest.raises(errors.MismatchError) as caught:
        read(array) if read else mx.nd.waitall()
    assert isinstance(caught.value, mx.base.MXNetError)
    assert str(caught.value) == (
        "[rank 0/2] allreduce 'w': ranks disagree on shape.\n"
        "  (4,): rank 0    (5,): rank 1\n"
        "  Nothing was changed. Fix: pass an array of the same shape on every rank."
    )
    with pytest.raises(errors.MismatchError, match="rank 1/2"):
        pair.other.wait(work)
    assert pair.adapter.take_unread_error() is None


@pytest.mark.parametrize("where", ["input", "output", "before the call", "nobody reads"])
def test_a_failed_producer_releases_the_other_ranks(pair, where):
    """MXNet drops an operation while it is pushed if the producer has failed before the call."""
    failed, fine = mx.nd.random.normal(0, -1, (4,)), mx.nd.ones((4,))  # fails when it runs, not when it is called
    if where == "before the call":
        time.sleep(0.3)
    pair.pushpull("w", [fine if where == "output" else failed], [failed if where == "output" else fine])
    theirs = ramp((4,))
    with pytest.raises(errors.InputFailedError, match=r"rank 1/2.*\n.*rank 0: an operation that should have produced"):
        pair.other.wait(pair.submit("w", theirs))
    np.testing.assert_array_equal(theirs, ramp((4,)))
    if where in ("input", "output"):
        with pytest.raises(mx.base.MXNetError, match="scale"):
            fine.asnumpy()
    else:
        error = until(pair.adapter.take_unread_error)
        assert isinstance(error, errors.InputFailedError)
        text = "[rank 0/2] allreduce 'w': an operation that should have produced an input failed.\n"
        assert str(error).startswith(text)
        assert "scale" in str(error)
    assert pair.adapter.take_unread_error() is None


ONES = mx.nd.ones


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: [ONES((4,)), ONES((4,), dtype="float16")], "its own arrays differ: float32 x 4 and float16 x 4."),
        (lambda: [ONES((4,), dtype="bool")], "an input has dtype bool, which cannot be reduced."),
        (lambda: [ONES((4, 2)).tostype("row_sparse")], "an input is sparse or empty."),
        (lambda: [(memory := ONES((8,)))[:4], memory[1:5]], "an output overlaps another array in part."),
    ],
    ids=["dtypes", "bool", "sparse", "overlap"],
)
def test_arrays_that_cannot_be_used_fail_on_every_rank(pair, make, fact):
    arrays = make()
    pair.pushpull("w", arrays, arrays)
    with pytest.raises(errors.InputFailedError) as caught:
        pair.other.wait(pair.submit("w", ramp((4,))))
    assert f"\n  rank 0: {fact}\n" in str(caught.value)
    with pytest.raises(errors.InputFailedError) as caught:
        arrays[0].wait_to_read()
    assert fact in str(caught.value)


def test_operations_outlive_the_adapter_and_its_engine():
    world = World()
    array = mx.nd.ones((4,))
    world.close()
    world.pushpull("w", [array], [array])
    with pytest.raises(errors.ShutdownError):
        array.wait_to_read()
    del world
    gc.collect()
    np.testing.assert_array_equal(array.asnumpy(), np.ones(4))


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_forked_child_neither_hangs_nor_disturbs(pair, in_flight):
    array = mx.nd.ones((4,))
    if in_flight:
        slow = mx.nd.ones((1000, 1000)) / 1000
        for _ in range(10):
            slow = mx.nd.dot(slow, slow)
        array = slow[0, :4] * 0 + 1
    pair.pushpull("w", [array], [array])
    pair.submit("w", ramp((4,)))
    if not in_flight:
        array.wait_to_read()
    child = os.fork()  # which waits for MXNet's operations, with the GIL held
    if child == 0:
        signal.alarm(int(TIMEOUT_S))
        try:
            pair.adapter.after_fork_in_child()
            with pytest.raises(errors.ShutdownError, match="forked child"):
                pair.pushpull("v", [array], [array])
            assert pair.adapter.take_unread_error() is None
            assert (mx.nd.ones((2,)) + 1).asnumpy().tolist() == [2, 2]
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert array.asnumpy().tolist() == [2, 3, 4, 5]
    pair.pushpull("v", [array], [array])
    pair.submit("v", ramp((4,)))
    assert array.asnumpy().tolist() == [3, 5, 7, 9]


NAIVE = """
from kvstore_hvd import errors
from support.pair import World, mx, ramp
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
"""


def test_an_engine_that_waits_for_each_operation():
    variables = {
        **os.environ,
        "MXNET_ENGINE_TYPE": "NaiveEngine",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    told = subprocess.check_output([sys.executable, "-c", NAIVE], text=True, timeout=2 * TIMEOUT_S, env=variables)
    assert told.splitlines() == [
        "[2.0, 3.0, 4.0, 5.0] [2.0, 3.0, 4.0, 5.0]",
        "[rank 0/2] allreduce 'w': ranks disagree on shape. None",
        "[5.0, 6.0, 7.0, 8.0]",
    ]

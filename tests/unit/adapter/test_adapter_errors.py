"""Errors of operations in MXNet's engine: who raises them, when, how often, and what still works afterwards."""

import gc
import time

import numpy as np
import pytest

from kvstore_hvd import errors
from support.pair import World, mx, ramp, until


def test_an_error_is_raised_at_the_first_read_and_leaves_the_world_usable(pair):
    array = mx.nd.array(ramp((4,)))
    pair.pushpull("w", [array], [array])
    work = pair.submit("w", ramp((5,)))
    with pytest.raises(errors.MismatchError) as caught:
        array.wait_to_read()
    assert isinstance(caught.value, mx.base.MXNetError)
    assert str(caught.value) == (
        "[rank 0/2] allreduce 'w': ranks disagree on shape.\n"
        "  (4,): rank 0    (5,): rank 1\n"
        "  Nothing was changed. Fix: pass an array of the same shape on every rank."
    )
    with pytest.raises(errors.MismatchError, match="rank 1/2"):
        pair.other.wait(work)
    np.testing.assert_array_equal(array.asnumpy(), ramp((4,)))
    assert pair.adapter.take_unread_error() is None
    pair.pushpull("w", [array], [array])
    pair.other.wait(pair.submit("w", theirs := ramp((4,))))
    np.testing.assert_array_equal(array.asnumpy(), 2 * ramp((4,)))
    np.testing.assert_array_equal(theirs, 2 * ramp((4,)))


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

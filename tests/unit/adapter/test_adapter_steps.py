"""A step's gradients in one call of the adapter; a second rank in the same process submits each by itself."""

import contextlib
import gc

import numpy as np
import pytest

from kvstore_hvd import errors, mxnet_compat, native
from support.patience import until

mx = pytest.importorskip("mxnet")

SMALL = 12  # elements
MANY = 20  # more gradients than one operation takes


def gradients(number=MANY, size=SMALL):
    return [mx.nd.ones((size,)) * (i + 1) for i in range(number)]


def ones(number=MANY, size=SMALL):
    return [np.ones(size, np.float32) for _ in range(number)]


@pytest.mark.parametrize("size", [SMALL, 100_000])
def test_the_other_rank_may_submit_in_any_order(pair, size):
    """No gradient of an operation waits for another's sum; a step may be used again, and be dropped meanwhile."""
    ours, theirs = gradients(size=size), ones(size=size)
    step = pair.prepare(ours)
    for number in range(2):
        for place in range(MANY):
            ours[place][:], theirs[place][:] = place + 1, 1
        pair.adapter.pushpull_step(step, False)
        if number == 1:
            del step
            gc.collect()
        for place in reversed(range(MANY)):
            pair.other.wait(pair.submit(f"g{place}", theirs[place]))
    for place, (mine, other) in enumerate(zip(ours, theirs)):
        assert (mine.asnumpy() == place + 2).all()
        assert (other == place + 2).all()


def test_a_step_is_in_turn_with_single_operations(pair):
    """Operations of one name take part in the order of the calls, in a step or not."""
    (ours,) = gradients(1)
    handle = mxnet_compat.handle_of(ours)
    step = pair.prepare([ours])
    pair.adapter.pushpull_step(step, False)
    pair.adapter.pushpull("g0", "'g0'", [handle], [handle])
    pair.adapter.pushpull_step(step, False)
    for factor in (1, 10, 100):
        pair.other.wait(pair.submit("g0", np.full(SMALL, factor, np.float32)))
    assert (ours.asnumpy() == 112).all()


def test_arrays_that_share_memory_are_summed_one_after_the_other(pair):
    """MXNet would wait for ever for an operation that names one memory twice."""
    whole = mx.nd.ones((4, 3))
    pair.adapter.pushpull_step(pair.prepare([whole, whole[1:3], whole]), False)
    theirs = [np.full((4, 3), 1, np.float32), np.full((2, 3), 10, np.float32), np.full((4, 3), 100, np.float32)]
    for work in [pair.submit(f"g{place}", array) for place, array in enumerate(theirs)]:
        pair.other.wait(work)
    assert whole.asnumpy()[:, 0].tolist() == [102, 112, 112, 102]


@pytest.mark.parametrize("is_read", [True, False])
def test_one_that_fails_fails_its_operation_and_is_named(pair, is_read):
    """The first of two, whichever failed first. The others are summed; an error that nobody has read is kept once."""
    ours, theirs = gradients(4), ones(4)
    theirs[1] = theirs[2] = np.ones(SMALL + 1, np.float32)
    pair.adapter.pushpull_step(pair.prepare(ours), False)
    for place in (2, 1, 3, 0):
        with pytest.raises(errors.MismatchError) if place in (1, 2) else contextlib.nullcontext():
            pair.other.wait(pair.submit(f"g{place}", theirs[place]))
    if is_read:
        with pytest.raises(errors.MismatchError, match=r"allreduce 'g1': ranks disagree on shape"):
            ours[0].wait_to_read()
        assert [array.asnumpy()[0] for array in ours] == [2, 2, 3, 5]
    else:
        unread = until(pair.adapter.take_unread_error)
        assert isinstance(unread, errors.MismatchError)
        assert "'g1'" in str(unread)
    assert pair.adapter.take_unread_error() is None
    mx.nd.waitall()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_failed_input_fails_all_of_its_operation(pair, is_read):
    ours = gradients(2)
    square = mx.nd.ones((3, 3))
    mx.nd.linalg.potrf(mx.nd.zeros((3, 3)) - 1, out=square)  # not positive definite
    pair.adapter.pushpull_step(pair.prepare([ours[0], square, ours[1]]), False)
    for place, size in enumerate([(SMALL,), (3, 3), (SMALL,)]):
        array = np.ones(size, np.float32)
        with pytest.raises(errors.InputFailedError, match=r"input \(or that of .* grouped with, 'g0' to 'g2'\) failed"):
            pair.other.wait(pair.submit(f"g{place}", array))
        assert (array == 1).all()
    if is_read:
        with pytest.raises(mx.base.MXNetError, match="potrf"):
            square.wait_to_read()
        pair.adapter.take_unread_error()
        return
    unread = until(pair.adapter.take_unread_error)
    assert isinstance(unread, errors.InputFailedError)
    assert str(unread).startswith("[rank 0/2] allreduce 'g0': an operation that should have produced an input (or that")
    assert "potrf" in str(unread)
    assert pair.adapter.take_unread_error() is None


def test_a_lost_world_fails_every_operation(pair):
    ours = gradients()
    step = pair.prepare(ours)
    pair.adapter.pushpull_step(step, False)
    pair.other.abort("the test says so")
    for place in (0, MANY - 1):
        with pytest.raises(errors.TransportError, match="the test says so"):
            ours[place].wait_to_read()
    pair.adapter.pushpull_step(step, False)
    with pytest.raises(errors.TransportError, match="the test says so"):
        mx.nd.waitall()
    mx.nd.waitall()


def test_what_needs_a_closer_look_is_not_prepared(pair):
    with mx.util.np_shape(True):
        empty = mx.np.zeros((0, 3))
    for odd in (mx.nd.sparse.zeros("row_sparse", (2, 3)), empty, mx.np.ones((2,), dtype=bool)):
        assert pair.prepare([*gradients(2), odd]) is None
    pair.adapter = native.MXNetAdapter(pair.engine, mxnet_compat.libmxnet_path(), True)  # NaiveEngine
    assert pair.prepare(gradients(2)) is None

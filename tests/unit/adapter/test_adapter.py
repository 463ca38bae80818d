"""The adapter between MXNet's engine and ours: sums and broadcasts of arrays in every state, and in MXNet's order."""

import gc
import time

import numpy as np
import pytest

from kvstore_hvd import errors, native
from support.gluon import is_mxnet_2
from support.pair import World, handles, mx, ramp
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


def test_operations_of_one_name_start_in_the_order_of_the_calls(pair):
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


def test_weights_and_results_that_onednn_has_rearranged(pair):
    network = mx.gluon.nn.Conv2D(64, 3, in_channels=16)
    network.initialize()
    kind = mx.np if is_mxnet_2() else mx.nd
    image = kind.array(np.random.RandomState(0).uniform(size=(8, 16, 32, 32)).astype("float32"))
    network(image).wait_to_read()  # MXNet 2 makes the parameters now
    weight = next(iter(network.collect_params().values())).data()
    before = weight.asnumpy()
    for _ in range(3):
        activation = network(image)
    pair.pushpull("w", [weight], [weight])  # while they are used
    pair.other.wait(pair.submit("w", theirs := ramp(before.shape)))
    np.testing.assert_array_equal(theirs, before + ramp(before.shape))
    np.testing.assert_array_equal(weight.asnumpy(), theirs)
    expected = activation.asnumpy()
    pair.pushpull("a", [activation], [activation])
    pair.other.wait(pair.submit("a", theirs := np.zeros_like(expected)))
    np.testing.assert_array_equal(theirs, expected)
    assert np.isfinite(network(image).asnumpy()).all()
    pair.broadcast("b", weight, 1)
    pair.other.wait(pair.submit("b", theirs := ramp(before.shape), root=1))
    np.testing.assert_array_equal(weight.asnumpy(), theirs)


def test_what_arrays_are_and_which_library_is_loaded(pair):
    array = mx.nd.ones((4, 2))
    arrays = handles(others := [array, array.reshape((8,)), array[1:3], array.copy(), array.tostype("row_sparse")])
    assert [pair.adapter.is_plain(handle) for handle in arrays] == [True, True, True, True, False], others
    ids = [pair.adapter.chunk_id(handle) for handle in arrays]
    assert [chunk == ids[0] for chunk in ids] == [True, True, True, False, False]
    with pytest.raises(RuntimeError, match="not loaded"):
        native.MXNetAdapter(pair.engine, "/nowhere/libmxnet.so", False)


# -- Errors of operations: who raises them, when, how often, and what still works afterwards ---------------------------


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

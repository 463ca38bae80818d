"""The adapter between MXNet's engine and ours: sums and broadcasts of arrays in every state, and in MXNet's order."""

import gc

import numpy as np
import pytest

from kvstore_hvd import native
from support.gluon import is_mxnet_2
from support.pair import handles, mx, ramp


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

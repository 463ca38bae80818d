"""Collectives inside ``autograd.record()``: gradients of the sum of all workers' losses."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.mxnet_compat import engine_is_naive
from support.arrays import contribution, make
from support.gluon import array, is_mxnet_2

mx = pytest.importorskip("mxnet")


@pytest.fixture(autouse=True)
def _arrays_of_numpy():
    """Shapes without dimensions or elements, as MXNet 2 has them anyway."""
    with mx.util.np_shape(True):
        yield


def inputs(kind, size, shape, dtype="float32", grad_req="write"):
    """Every rank's array, with a gradient; `shape` may be a function of the rank."""
    arrays = []
    for rank in range(size):
        x = make(kind, contribution(rank, shape(rank) if callable(shape) else shape, dtype))
        x.attach_grad(grad_req)
        arrays.append(x)
    return arrays


def loss(y, rank):
    """Of one rank: another one for each."""
    return (y * y * (rank + 1)).sum() if isinstance(y, mx.np.ndarray) else mx.nd.sum(y * y * (rank + 1))


def check(kind, rank, size, shape, distributed, together, dtype="float32", tolerance=1e-5):
    """Compare the gradient of one rank with that of a process that has all the data.

    `distributed` makes this rank's output of its array; `together` the list of all ranks' outputs, of all arrays.
    """
    mine = inputs(kind, size, shape, dtype)[rank]
    with mx.autograd.record():
        y = distributed(mine)
        assert type(y) is type(mine)
        total = loss(y, rank)
    total.backward()
    everybody = inputs(kind, size, shape, dtype)
    with mx.autograd.record():
        outputs = together(everybody)
        total = sum(loss(each, other) for other, each in enumerate(outputs))
    total.backward()
    np.testing.assert_allclose(y.asnumpy(), outputs[rank].asnumpy(), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(mine.grad.asnumpy(), everybody[rank].grad.asnumpy(), rtol=tolerance, atol=tolerance)


def joined(kind, arrays):
    """All rows, one array after the other."""
    return mx.np.concatenate(arrays, axis=0) if kind is mx.np else mx.nd.concat(*arrays, dim=0)


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_between_convolutions(rank, size, collective):
    """Their gradients come in layouts of oneDNN's, which functions written in Python misread.

    All ranks have the same data, so that the collective changes nothing but, for a broadcast, who has the gradient.
    """
    with mx.util.np_shape(is_mxnet_2()):  # in MXNet 1 a convolution cannot be made otherwise
        for channels in (8, 16, 32):
            generator = np.random.default_rng(channels)
            first, second = (mx.gluon.nn.Conv2D(channels, 3, in_channels=channels) for _ in range(2))
            start = generator.standard_normal((2, channels, 12, 12)).astype("float32")
            for layer in (first, second):
                layer.initialize()
                layer(array(start))
                for parameter in layer.collect_params().values():
                    parameter.set_data(array((generator.standard_normal(parameter.shape) * 0.1).astype("float32")))
            gradients = []
            for is_distributed in (False, True):
                x = array(start)
                x.attach_grad()
                with mx.autograd.record():
                    y = first(x)
                    if is_distributed:
                        y = hvd.broadcast(y, 0) if collective == "broadcast" else hvd.allreduce(y, op=hvd.Average)
                    total = (second(y) ** 2).sum()
                total.backward()
                gradients.append(x.grad.asnumpy())
            factor = 1 if collective == "allreduce" else size if rank == 0 else 0
            scale = np.abs(gradients[0]).max()
            np.testing.assert_allclose(gradients[1] / scale, gradients[0] * factor / scale, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 2), (1,), (17, 5)], ids=str)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_allreduce(kind, rank, size, op, shape):
    """The gradient is reduced in the same way, with the same factors."""
    factor = 1 / size if op == "Average" else 1
    check(
        kind,
        rank,
        size,
        shape,
        lambda x: hvd.allreduce(x, op=getattr(hvd, op), prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: [sum(xs) * 1.5 * factor] * size,
    )


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dtypes(kind, rank, size, dtype):
    """Gradients have the array's dtype."""
    tolerance = 2e-2 if dtype == "float16" else 1e-12
    check(kind, rank, size, (4, 3), hvd.allreduce, lambda xs: [sum(xs) / size] * size, dtype, tolerance)


@pytest.mark.parametrize("uneven", [False, True])
def test_allgather(kind, rank, size, uneven):
    """Each rank gets the sum of all gradients of its own rows."""
    check(
        kind,
        rank,
        size,
        lambda other: (2 + (other if uneven else 0), 3),
        hvd.allgather,
        lambda xs: [joined(kind, xs)] * size,
    )


def test_broadcast(kind, rank, size):
    """The root gets the sum of all gradients, the others get zeros."""
    for root in range(size):
        together = lambda xs, root=root: [xs[root] + sum(x * 0 for x in xs)] * size  # noqa: E731
        check(kind, rank, size, (3, 4), lambda x, root=root: hvd.broadcast(x, root), together)


@pytest.mark.parametrize("rows", [8, 5, 1])
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_reducescatter(kind, rank, size, op, rows):
    """The gradients of all shares, one after the other; some ranks may have no rows."""
    factor = 0.5 * (1 / size if op == "Average" else 1)
    shares = [len(each) for each in np.array_split(np.arange(rows), size)]
    starts = np.cumsum([0, *shares])

    def together(xs):
        whole = sum(x.as_np_ndarray() for x in xs) * factor
        parts = [whole[start : start + share] for start, share in zip(starts, shares)]
        return parts if kind is mx.np else [part.as_nd_ndarray() for part in parts]

    if kind is mx.nd and 0 in shares:
        pytest.skip("mx.nd has no such shapes")
    check(
        kind,
        rank,
        size,
        (rows, 3),
        lambda x: hvd.reducescatter(x, op=getattr(hvd, op), prescale_factor=0.5),
        together,
    )


def test_alltoall(kind, rank, size):
    """Gradients go back where the rows came from."""
    # Not symmetric, so that to send rows back is not to send them again.
    counts = [[1 + (2 * sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]

    def together(xs):
        outputs = []
        for receiver in range(size):
            starts = [sum(counts[sender][:receiver]) for sender in range(size)]
            outputs.append(joined(kind, [x[s : s + c[receiver]] for x, s, c in zip(xs, starts, counts)]))
        return outputs

    shape = lambda sender: (sum(counts[sender]), 2)  # noqa: E731
    check(kind, rank, size, shape, lambda x: hvd.alltoall(x, splits=counts[rank])[0], together)


def test_rows_that_a_rank_does_not_have(rank, size):
    """A rank without rows takes part in the backward pass of the others."""
    mine = mx.np.ones((rank, 3))
    mine.attach_grad()
    with mx.autograd.record():
        gathered = hvd.allgather(mine)
        total = (gathered * gathered).sum() if size > 1 else gathered.sum()
    total.backward()
    assert mine.grad.shape == (rank, 3)
    assert (mine.grad.asnumpy() == 2 * size).all()


def test_without_dimensions(rank, size):
    """One number."""
    x = mx.np.array(float(rank + 1))
    x.attach_grad()
    with mx.autograd.record():
        y = hvd.allreduce(x, op=hvd.Sum)
        z = y * y
    z.backward()
    assert y.shape == x.grad.shape == ()
    assert float(x.grad.asnumpy()) == 2 * size * size * (size + 1) / 2


def test_grouped(kind, rank, size):
    """Each array has its own gradient, also where another one has none."""
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        constant, x = make(kind, np.ones((size, 2), "float32")), make(kind, np.ones((size, 3), "float32"))
        x.attach_grad()
        with mx.autograd.record():
            first, second = call([constant, x])
            total = first.sum() + (second * (rank + 1)).sum()
        total.backward()
        everybody = size * (size + 1) / 2
        expected = {"grouped_allreduce": everybody / size, "grouped_allgather": everybody}.get(call.__name__)
        if expected is None:
            expected = np.repeat(np.arange(1, size + 1), 3).reshape(size, 3) / size
        np.testing.assert_allclose(x.grad.asnumpy(), np.broadcast_to(expected, (size, 3)), rtol=1e-6)


def test_gradients_that_add_up(kind, rank, size):
    """`grad_req='add'`, and an array that is used twice."""
    (x,) = inputs(kind, 1, (4,), grad_req="add")
    for _ in range(2):
        with mx.autograd.record():
            total = (hvd.allreduce(x, op=hvd.Sum) + 2 * hvd.allreduce(x, op=hvd.Sum)).sum()
        total.backward()
    assert x.grad.asnumpy().tolist() == [2 * 3 * size] * 4


@pytest.mark.skipif(engine_is_naive(), reason="NaiveEngine is not asynchronous")
def test_backward_in_any_order(kind, rank, size):
    """Ranks that come to independent gradients in different orders; names that are used again; calls without a name."""
    xs = [make(kind, np.full((5,), number + 1, "float32")) for number in range(6)]
    for x in xs:
        x.attach_grad()
    with mx.autograd.record():
        names = ["again", "again", None, None, "other", None]
        ys = [hvd.allreduce(x, name=name, op=hvd.Sum) * (number + 1) for number, (x, name) in enumerate(zip(xs, names))]
    for number in range(6) if rank % 2 else reversed(range(6)):
        ys[number].backward()
    assert [x.grad.asnumpy()[0] for x in xs] == [(number + 1) * size for number in range(6)]
    # The counts of calls without a name are as before.
    assert hvd.allreduce(xs[0], op=hvd.Sum).asnumpy()[0] == size


def test_second_backward_uses_the_graph_again(rank, size):
    """`retain_graph`."""
    x = mx.nd.ones((2,))
    x.attach_grad()
    with mx.autograd.record():
        y = hvd.allreduce(x, op=hvd.Sum) * 3
    for _ in range(2):
        y.backward(retain_graph=True)
        assert x.grad.asnumpy().tolist() == [3 * size] * 2


def test_in_a_network(rank, size):
    """Between layers of Gluon: gradients of the weights as with all data in one process."""
    from support.gluon import array, gradients, network, samples

    def build():
        dense = mx.gluon.nn.Dense(4, in_units=3, activation="tanh")
        return network(dense, seed=3)

    data, _ = samples(2 * size, inputs=3)
    net = build()
    with mx.autograd.record():
        features = hvd.allgather(net(array(data[2 * rank : 2 * rank + 2])))
        total = (features * features * (rank + 1)).sum()
    total.backward()
    mine = [hvd.allreduce(array(each), op=hvd.Sum).asnumpy() for each in gradients(net)]
    alone = build()
    with mx.autograd.record():
        features = alone(array(data))
        total = (features * features).sum() * (size * (size + 1) / 2)
    total.backward()
    for one, other in zip(mine, gradients(alone)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_ops_without_a_gradient(rank, size, op):
    """Refused where a gradient may be asked for; else they work while recording."""
    x, label = mx.nd.ones((2,)), mx.nd.ones((2,))
    x.attach_grad()
    with mx.autograd.record():
        y = x * 2
        for array in (x, y):
            with pytest.raises(kvstore_hvd.InvalidRequestError, match=f"op {op} has no gradient"):
                hvd.allreduce(array, op=getattr(hvd, op))
        assert hvd.allreduce(label, op=getattr(hvd, op)).asnumpy()[0] == 1
        with mx.autograd.pause():
            assert hvd.allreduce(y, op=getattr(hvd, op)).shape == (2,)


def test_in_place_is_refused(rank, size):
    """An array of the graph cannot be overwritten; others can."""
    x, other = mx.nd.ones((2,)), mx.nd.ones((2,))
    x.attach_grad()
    with mx.autograd.record():
        y = x * 2
        calls = (hvd.allreduce_, lambda a: hvd.grouped_allreduce_([a]), lambda a: hvd.broadcast_(a, 0))
        for call in calls:
            with pytest.raises(kvstore_hvd.InvalidRequestError, match="cannot be overwritten"):
                call(y)
            call(other)


def test_outside_of_recording(rank, size):
    """Nothing is recorded."""
    x = mx.nd.ones((2,))
    x.attach_grad()
    y = hvd.allreduce(x)
    with pytest.raises(mx.MXNetError):
        y.backward()


@pytest.mark.skipif(engine_is_naive(), reason="NaiveEngine raises in backward() itself")
def test_backward_in_another_world(rank, size, capfd):
    """The gradient cannot be had; the program is told where it reads it."""
    x = mx.nd.ones((2,))
    x.attach_grad()
    with mx.autograd.record():
        y = hvd.allreduce(x)
    hvd.shutdown()
    hvd.init()
    y.backward()
    with pytest.raises(mx.MXNetError):
        x.grad.wait_to_read()
    mx.nd.waitall()
    assert "the forward pass was in generation" in capfd.readouterr().out


@pytest.mark.skipif(not is_mxnet_2(), reason="MXNet 1 traces with symbols, which are refused for what they are")
def test_hybridized_blocks(rank, size):
    """A block that is hybridized has no values to exchange: refused."""

    class Reducing(mx.gluon.HybridBlock):
        def forward(self, x):
            return hvd.allreduce(x)

    block = Reducing()
    block.hybridize()
    with pytest.raises(kvstore_hvd.InvalidRequestError, match="while a block is being hybridized"):
        block(mx.np.ones((2,)))

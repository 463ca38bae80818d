"""Collectives inside ``autograd.record()``: gradients of the sum of all workers' losses. Those of `allreduce` are in
random programs."""

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from support.arrays import contribution, make
from support.gluon import array, is_mxnet_2, network

mx = pytest.importorskip("mxnet")


@pytest.fixture(autouse=True)
def _arrays_of_numpy():
    """Shapes without dimensions or elements, as MXNet 2 has them anyway."""
    with mx.util.np_shape(True):
        yield


def inputs(kind, size, shape):
    """Every rank's array, with a gradient; `shape` may be a function of the rank."""
    arrays = []
    for rank in range(size):
        x = make(kind, contribution(rank, shape(rank) if callable(shape) else shape, "float32"))
        x.attach_grad("add" if rank % 2 else "write")
        arrays.append(x)
    return arrays


def loss(y, rank):
    return (y * y * (rank + 1)).sum() if isinstance(y, mx.np.ndarray) else mx.nd.sum(y * y * (rank + 1))


def check(kind, rank, size, shape, distributed, together):
    """Compare the gradient of one rank with that of a process that has all the data. `distributed` makes this rank's
    output of its array; `together` the list of all ranks' outputs, of all arrays."""
    mine = inputs(kind, size, shape)[rank]
    with mx.autograd.record():
        y = distributed(mine)
        assert type(y) is type(mine)
        total = loss(y, rank)
    total.backward()
    everybody = inputs(kind, size, shape)
    with mx.autograd.record():
        outputs = together(everybody)
        total = sum(loss(each, other) for other, each in enumerate(outputs))
    total.backward()
    for ours, theirs in ((y, outputs[rank]), (mine.grad, everybody[rank].grad)):
        np.testing.assert_allclose(ours.asnumpy(), theirs.asnumpy(), rtol=1e-5, atol=1e-5)


def joined(kind, arrays):
    return mx.np.concatenate(arrays, axis=0) if kind is mx.np else mx.nd.concat(*arrays, dim=0)


def test_between_convolutions(rank, size):
    """Their gradients come in layouts of oneDNN's, which functions written in Python misread. All ranks have the same
    data, so that a broadcast changes nothing but who has the gradient."""
    start = np.random.default_rng(8).standard_normal((2, 16, 12, 12)).astype("float32")
    gradients = []
    with mx.util.np_shape(is_mxnet_2()):  # in MXNet 1 a convolution cannot be made otherwise
        first, second = (network(mx.gluon.nn.Conv2D(16, 3, in_channels=16)) for _ in range(2))
        for is_distributed in (False, True):
            x = array(start)
            x.attach_grad()
            with mx.autograd.record():
                y = hvd.broadcast(first(x), 0) if is_distributed else first(x)
                total = (second(y) ** 2).sum()
            total.backward()
            gradients.append(x.grad.asnumpy())
    scale = np.abs(gradients[0]).max()
    np.testing.assert_allclose(gradients[1] / scale, gradients[0] * (size if rank == 0 else 0) / scale, atol=1e-4)


def test_allgather(kind, rank, size):
    """Each rank gets the sum of all gradients of its own rows, also who has none."""
    rows = lambda other: (other + (kind is mx.nd), 3)  # noqa: E731
    if kind is mx.np and size == 1:
        pytest.skip("a sum of nothing")
    check(kind, rank, size, rows, hvd.allgather, lambda xs: [joined(kind, xs)] * size)


def test_broadcast(kind, rank, size):
    """The root gets the sum of all gradients, the others get zeros."""
    for root in range(size):
        together = lambda xs, root=root: [xs[root] + sum(x * 0 for x in xs)] * size  # noqa: E731
        for shape in ((3, 4), ()):
            check(kind, rank, size, shape, lambda x, root=root: hvd.broadcast(x, root), together)


@pytest.mark.needs(3)
def test_broadcast_within_a_process_set(dynamic, rank, size):
    members = hvd.add_process_set(range(1, size))
    if rank > 0:
        x = array(np.ones(2, "float32"))
        x.attach_grad()
        with mx.autograd.record():
            (hvd.broadcast(x, 1, process_set=members) * rank).backward()
        assert x.grad.asnumpy().tolist() == [(rank == 1) * sum(range(size))] * 2


@pytest.mark.parametrize(("op", "rows"), [("Sum", 1), ("Average", 5)])
def test_reducescatter(kind, rank, size, op, rows):
    """The gradients of all shares, one after the other; some ranks may have no rows."""
    factor = 0.5 * (1 / size if op == "Average" else 1)
    shares = [len(each) for each in np.array_split(np.arange(rows), size)]
    starts = np.cumsum([0, *shares])
    if kind is mx.nd and 0 in shares:
        pytest.skip("mx.nd has no such shapes")

    def together(xs):
        whole = sum(x.as_np_ndarray() for x in xs) * factor
        parts = [whole[start : start + share] for start, share in zip(starts, shares)]
        return parts if kind is mx.np else [part.as_nd_ndarray() for part in parts]

    call = lambda x: hvd.reducescatter(x, op=getattr(hvd, op), prescale_factor=0.5)  # noqa: E731
    check(kind, rank, size, (rows, 3), call, together)


def test_alltoall(kind, rank, size):
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


def test_grouped(kind, rank, size):
    everybody = size * (size + 1) / 2
    for call, expected in (
        (hvd.grouped_allreduce, np.full((size, 1), everybody / size)),
        (hvd.grouped_allgather, np.full((size, 1), everybody)),
        (hvd.grouped_reducescatter, np.arange(1, size + 1)[:, None] / size),
    ):
        constant, x = make(kind, np.ones((size, 2), "float32")), make(kind, np.ones((size, 3), "float32"))
        x.attach_grad()
        with mx.autograd.record():
            first, second = call([constant, x])
            total = first.sum() + (second * (rank + 1)).sum()
        total.backward()
        np.testing.assert_allclose(x.grad.asnumpy(), np.broadcast_to(expected, (size, 3)), rtol=1e-6)


def test_backward_in_any_order(rank, size):
    """Ranks that come to independent gradients in different orders; names that are used again; calls without a name.
    Twice, with `retain_graph`, and `grad_req='add'`."""
    xs = [mx.nd.full((5,), number + 1) for number in range(6)]
    for x in xs:
        x.attach_grad("add")
    with mx.autograd.record():
        names = ["again", "again", None, None, "other", None]
        ys = [hvd.allreduce(x, name=name, op=hvd.Sum) * (number + 1) for number, (x, name) in enumerate(zip(xs, names))]
    for number in range(6) if rank % 2 else reversed(range(6)):
        ys[number].backward(retain_graph=True)
        ys[number].backward()
    assert [x.grad.asnumpy()[0] for x in xs] == [2 * (number + 1) * size for number in range(6)]
    # The counts of calls without a name are as before. Outside of recording nothing is recorded.
    y = hvd.allreduce(xs[0], op=hvd.Sum)
    assert y.asnumpy()[0] == size
    with pytest.raises(mx.MXNetError):
        y.backward()


def test_ops_without_a_gradient(rank, size):
    """Refused where a gradient may be asked for; else they work while recording."""
    x, label = mx.nd.ones((2,)), mx.nd.ones((2,))
    x.attach_grad()
    with mx.autograd.record():
        y = x * 2
        for op in (hvd.Min, hvd.Product):
            for array in (x, y):
                with pytest.raises(kvstore_hvd.InvalidRequestError, match=f"(?i)op {op.name} has no gradient"):
                    hvd.allreduce(array, op=op)
            assert hvd.allreduce(label, op=op).asnumpy()[0] == 1
        with mx.autograd.pause():
            assert hvd.allreduce(y, op=hvd.Min).shape == (2,)


def test_in_place_is_refused(rank, size):
    x, other = mx.nd.ones((2,)), mx.nd.ones((2,))
    x.attach_grad()
    with mx.autograd.record():
        y = x * 2
        for call in (
            hvd.allreduce_,
            lambda a: hvd.allreduce_(a, name="named"),
            lambda a: hvd.grouped_allreduce_([a]),
            lambda a: hvd.broadcast_(a, 0),
        ):
            with pytest.raises(kvstore_hvd.InvalidRequestError, match="cannot be overwritten"):
                call(y)
            call(other)


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

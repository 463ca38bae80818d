"""`hvd.allgather`, `hvd.alltoall`, `hvd.reducescatter`: what random programs (see `test_hvd_allreduce`) do not say."""

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from support.arrays import assert_same_bits, contribution, make

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.sizes


def rows_of(rank, rows):
    return contribution(rank, (rows, 3), "float32")


def test_layouts_of_onednn(rank, size):
    """An input that is computed first, and that oneDNN keeps in a layout of its own."""
    picture = mx.nd.array(contribution(rank, (2, 3, 8, 8), "float32"))
    weight = mx.nd.array(contribution(0, (16, 3, 3, 3), "float32"))
    out = mx.nd.Convolution(picture, weight, kernel=(3, 3), num_filter=16, no_bias=True)
    got = hvd.allgather(out)
    assert_same_bits(got[2 * rank : 2 * rank + 2].asnumpy(), out.asnumpy())


def test_operations_of_a_name_keep_the_order_of_the_calls(rank, size):
    """Also if the first one waits in MXNet's engine, on some workers, for its array, and the second one does not."""
    later = mx.nd.dot(mx.nd.ones((400, 4000)), mx.nd.ones((4000, 400 + 1600 * (rank > 0)))).sum() * 0 + rank
    sums = hvd.allreduce(later, op=hvd.Sum, name="same")
    assert hvd.allgather(mx.nd.array([rank]), name="same").asnumpy().tolist() == list(range(size))
    later = mx.nd.dot(mx.nd.ones((400, 4000)), mx.nd.ones((4000, 400 + 1600 * (rank > 0)))).sum() * 0 + rank
    copies = hvd.broadcast(later, size - 1, name="same")
    assert hvd.broadcast_object({"root": rank}, size - 1, name="same") == {"root": size - 1}
    assert (sums.asscalar(), copies.asscalar()) == (sum(range(size)), size - 1)


def test_alltoall(kind, rank, size):
    """Splits in all forms, uneven ones, some of them empty."""
    splits = [[(r + to) % 3 + (to == size - 1) for to in range(size)] for r in range(size)]
    mine = rows_of(rank, sum(splits[rank]))
    starts = [sum(splits[r][:rank]) for r in range(size)]
    parts = [rows_of(r, sum(splits[r]))[starts[r] : starts[r] + splits[r][rank]] for r in range(size)]
    for form in (make(kind, np.array(splits[rank], "int32")), np.array(splits[rank], "int32"), splits[rank]):
        got, received = hvd.alltoall(make(kind, mine), splits=form)
        assert (type(got), str(np.dtype(received.dtype))) == (type(make(kind, mine)), "int32")
        assert received.asnumpy().tolist() == [splits[r][rank] for r in range(size)]
        assert_same_bits(got.asnumpy(), np.concatenate(parts))


def test_alltoall_refuses_on_every_rank(rank, size):
    x = mx.nd.ones((size, 2))
    last = rank == size - 1
    ones = [1] * size
    for splits in ([*ones, 1], [2, *ones[1:]], [0, *ones[1:]], [-1, *ones[1:]], np.array(ones, "float32")):
        with pytest.raises(ValueError, match="splits is|splits has dtype float32" if last else "refused the call"):
            hvd.alltoall(x, splits=splits if last else ones)
    with pytest.raises(TypeError if last else ValueError, match="splits is" if last else "refused the call"):
        hvd.alltoall(x, splits=["a"] * size if last else ones)
    if size > 1:
        with pytest.raises(ValueError, match="cannot be divided" if last else "refused the call"):
            hvd.alltoall(mx.nd.ones((size + last, 2)))
    assert hvd.alltoall(x).asnumpy().tolist() == x.asnumpy().tolist()


def test_wrong_arguments(rank, size):
    x = mx.nd.ones((2, 2))
    scalar = mx.np.array(1.0)
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(ValueError, match="no dimensions"):
            call(scalar)
        with pytest.raises(TypeError, match=r"tensor is a numpy\.ndarray"):
            call(np.ones(2))
        with pytest.raises(kvstore_hvd.UnsupportedDtypeError, match="dtype bool"):
            call(mx.np.array([True], dtype="bool"))
    for op in (hvd.Min, hvd.Adasum):
        with pytest.raises(ValueError, match=f"{op.name.capitalize()} is not supported"):
            hvd.reducescatter(x, op=op)
    if size > 1:
        first = rank == 0
        with pytest.raises(TypeError if first else ValueError, match="numpy" if first else "rank 0 refused the call"):
            hvd.grouped_allgather([x, np.ones(2) if first else x])
    assert hvd.allgather(x).shape == (2 * size, 2)


@pytest.mark.needs(2)
def test_mismatches(rank, size):
    """Every rank gets the same error with all ranks' values, and the world works on."""
    first = rank == 0
    others = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
    with pytest.raises(kvstore_hvd.MismatchError, match=rf"\(2, 3\): rank 0\n  \(2, 4\): {others}"):
        hvd.allgather(mx.nd.ones((2, 3 if first else 4)))
    with pytest.raises(kvstore_hvd.MismatchError, match="number of tensors"):
        hvd.grouped_allgather([mx.nd.ones((2, 3))] * (1 + first), name="counts")
    with pytest.raises(kvstore_hvd.MismatchError):
        if first:
            hvd.allgather(mx.nd.ones((2, 3)), name="kinds with others")
        else:
            hvd.allreduce(mx.nd.ones((2, 3)), name="kinds with others").wait_to_read()
    assert hvd.allgather(mx.nd.ones((1,))).shape == (size,)

"""Collectives of `hvd`: what random programs (`fuzz`) do not say.

Operations of every kind, dtype, shape, factor, root, process set and disagreement are tests of `tests/fuzz`: a new
reduce op or dtype has its arithmetic in `fuzz/model.py`, is drawn in `fuzz/programs.py` and called in `fuzz/calls.py`;
its kernels are compared in `tests/native/test_reduce.cpp`.
"""

import contextlib
import inspect

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import MismatchError
from support.arrays import assert_same_bits, contribution, make

mx = pytest.importorskip("mxnet")


def test_average_and_op(rank, size):
    """The old parameter works and warns; with op it is a ValueError, before anything is submitted."""
    x = mx.nd.ones((2,)) * (rank + 1)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        total = hvd.allreduce(x, average=False)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        mean = hvd.allreduce(x, True)
    assert total.asnumpy()[0] == size * (size + 1) / 2
    assert mean.asnumpy()[0] == hvd.allreduce(x).asnumpy()[0] == (size + 1) / 2
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        for average in (False, True) * 3:  # the short way of names that are known
            y = hvd.allreduce_(x.copy(), average=average, name=f"y{average}")
            assert y.asnumpy()[0] == (size + 1) / 2 * (1 if average else size)
    for call in (hvd.allreduce, hvd.allreduce_):
        with pytest.raises(ValueError, match="both average and op are given"):
            call(x, average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match="op Adasum is not supported"):
            call(x, op=hvd.Adasum, name="y")
    with pytest.raises(ValueError, match="both average and op"):
        hvd.grouped_allreduce([x], average=False, op=hvd.Average)


def test_a_priority_that_one_rank_refuses(rank, size):
    """Nothing was submitted or counted: the next call without a name still meets those of the others."""
    for operation in ("allreduce_", "grouped_allgather", "broadcast", "alltoall", "reducescatter"):
        call, x = getattr(hvd, operation), mx.nd.ones((size, 2))
        arguments = ([x] if "grouped" in operation else x, *([0] if operation == "broadcast" else []))
        if rank == size - 1:
            with pytest.raises(TypeError, match=f"{operation.rstrip('_')}: priority is 'high'"):
                call(*arguments, priority="high")
            with pytest.raises(kvstore_hvd.errors.InvalidRequestError, match=f"priority {2**31} does not fit"):
                call(*arguments, priority=2**31)
        result = call(*arguments, priority=3)
        result = result[0] if isinstance(result, (list, tuple)) else result
        assert (result.asnumpy() == 1).all()  # means, copies


@pytest.mark.needs(2)
def test_a_group_fails_as_a_whole(kind, rank, size):
    """Where the workers disagree about one array, none is changed."""
    arrays = [make(kind, np.ones((3 + (rank == 0) * (place == 1),), "float32")) for place in range(2)]
    hvd.grouped_allreduce_(arrays, op=hvd.Sum, name="group that differs")
    for each, text in zip(arrays, ("disagree on the other arrays of the group", "disagree on shape")):
        with pytest.raises(MismatchError, match=text):
            each.wait_to_read()
    with contextlib.suppress(MismatchError):  # what nobody has read yet
        kvstore_hvd.world.process.current().member.check()
    assert all((each.asnumpy() == 1).all() for each in arrays)
    assert all((each.asnumpy() == size).all() for each in hvd.grouped_allreduce([arrays[0]] * 2, op=hvd.Sum))


def test_a_group_is_a_list(rank, size):
    """An array in its place is refused; an empty list returns itself."""
    empty = []
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter):
        assert call(empty) is empty
        for wrong in (mx.nd.ones(3), np.ones(3), None):
            with pytest.raises(TypeError, match=r"tensors is a \w+, not a list(.|\n)*Fix: pass a list of arrays"):
                call(wrong)


@pytest.mark.sizes
def test_layouts_of_onednn(rank, size):
    """An input that is computed first, and that oneDNN keeps in a layout of its own."""
    picture = mx.nd.array(contribution(rank, (2, 3, 8, 8), "float32"))
    weight = mx.nd.array(contribution(0, (16, 3, 3, 3), "float32"))
    out = mx.nd.Convolution(picture, weight, kernel=(3, 3), num_filter=16, no_bias=True)
    assert_same_bits(hvd.allgather(out)[2 * rank : 2 * rank + 2].asnumpy(), out.asnumpy())


@pytest.mark.sizes
def test_operations_of_a_name_keep_the_order_of_the_calls(rank, size):
    """Also if the first one waits in MXNet's engine, on some workers, for its array, and the second one does not."""

    def later():
        number = mx.nd.dot(mx.nd.ones((400, 4000)), mx.nd.ones((4000, 2000))).sum() * 0 + rank
        if rank == 0:
            number.wait_to_read()
        return number

    sums = hvd.allreduce(later(), op=hvd.Sum, name="same")
    assert hvd.allgather(mx.nd.array([rank]), name="same").asnumpy().tolist() == list(range(size))
    copies = hvd.broadcast(later(), size - 1, name="same")
    assert hvd.broadcast_object({"root": rank}, size - 1, name="same") == {"root": size - 1}
    assert (sums.asscalar(), copies.asscalar()) == (sum(range(size)), size - 1)


@pytest.mark.sizes
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
    for form in (mx.nd.array, mx.np.array):  # random programs have lists, and arrays of NumPy
        got, received = hvd.alltoall(x, splits=form(ones, dtype="int32"))
        assert (got.asnumpy().tolist(), received.asnumpy().tolist()) == (x.asnumpy().tolist(), ones)
        assert (type(got), type(received)) == (type(x), type(form(ones)))


@pytest.mark.sizes
def test_wrong_arguments(rank, size):
    x = mx.nd.ones((2, 2))
    for root in (size, -1, "0", True, None):
        with pytest.raises(ValueError, match=f"there is no rank {root!r}"):
            hvd.broadcast(x, root)
    scalar = mx.np.array(1.0)
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(ValueError, match="no dimensions"):
            call(scalar)
    for op in (hvd.Min, hvd.Adasum):
        with pytest.raises(ValueError, match=rf"{op.name.capitalize()} is not supported(.|\n)*hvd.Average, hvd.Sum\.$"):
            hvd.reducescatter(x, op=op)
    if size > 1:
        first = rank == 0
        with pytest.raises(TypeError if first else ValueError, match="numpy" if first else "rank 0 refused the call"):
            hvd.grouped_allgather([x, np.ones(2) if first else x])
        with pytest.raises(MismatchError, match="disagree on the number of tensors"):
            hvd.grouped_allgather([x] if first else [x, x], name="one and two")
    assert hvd.allgather(x).shape == (2 * size, 2)
    assert hvd.allgather(mx.np.ones((2, *[1] * 19))).shape == (2 * size, *[1] * 19)


def test_arguments_have_horovods_places():
    how = "name priority prescale_factor postscale_factor process_set"
    for names, places in {
        ("allreduce", "allreduce_"): f"tensor average {how} op",
        ("grouped_allreduce", "grouped_allreduce_"): f"tensors average {how} op",
        ("broadcast", "broadcast_"): "tensor root_rank name priority process_set",
        ("allgather",): "tensor name priority process_set",
        ("alltoall",): "tensor splits name priority process_set",
        ("reducescatter",): f"tensor op {how}",
        ("broadcast_parameters",): "params root_rank prefix process_set",
        ("broadcast_object",): "obj root_rank name process_set",
        ("allgather_object",): "obj name process_set",
    }.items():
        for name in names:
            assert list(inspect.signature(getattr(hvd, name)).parameters) == places.split()

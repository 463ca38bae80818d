"""row_sparse gradients: in the store, in Trainers and optimizers, and in `hvd.allreduce`."""

import contextlib
import itertools

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import InvalidRequestError, MismatchError, UnsupportedDtypeError
from kvstore_hvd.join import Join
from kvstore_hvd.store import sparse as store_sparse
from support.arrays import assert_same_bits, sum_of_ranks
from support.gluon import assert_alike, distributed, is_mxnet_2, scaler_of

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.sizes

ROWS, WIDTH = 12, 3
FLOATS = ("float16", "float32", "float64")
in_gluon = pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2: Embedding(sparse_grad=True) is an AssertionError of Gluon")

#: Which rows each rank has.
CASES = {
    "disjoint": lambda rank: [rank, rank + 6],
    "overlapping": lambda rank: [0, rank + 1, 11],
    "equal": lambda rank: [2, 3, 7],
    "some empty": lambda rank: [] if rank % 2 == 0 else [1, 4],
    "all empty": lambda rank: [],
}


def values_of(rank, ids, dtype="float32"):
    return np.random.default_rng(rank + 1).uniform(-1, 1, (len(ids), WIDTH)).astype(dtype)


def sparse(ids, rows, dtype="float32"):
    if len(ids) == 0:
        return mx.nd.sparse.zeros("row_sparse", (ROWS, WIDTH), dtype=dtype)
    return mx.nd.sparse.row_sparse_array((rows, ids), shape=(ROWS, WIDTH), dtype=dtype)


def contribution(rank, case, dtype="float32"):
    ids = CASES[case](rank)
    return sparse(ids, values_of(rank, ids, dtype), dtype)


def assert_sum(got, size, case, dtype):
    """Compare with the sum of all ranks' dense arrays, and the rows with those that there are."""
    dense = sum_of_ranks([contribution(rank, case, dtype).asnumpy() for rank in range(size)])
    assert got.stype == "row_sparse"
    assert np.dtype(got.dtype) == dtype
    assert got.indices.asnumpy().tolist() == sorted({row for rank in range(size) for row in CASES[case](rank)})
    assert_same_bits(got.asnumpy(), dense)


def test_pushpull(kv, rank, size):
    for place, case in enumerate(CASES):
        dtype = FLOATS[place % len(FLOATS)]
        mine = contribution(rank, case, dtype)
        out = sparse([5], np.ones((1, WIDTH)), dtype)
        kv.pushpull(f"{case}/out", mine, out=out)
        assert_sum(out, size, case, dtype)
        assert_same_bits(mine.asnumpy(), contribution(rank, case, dtype).asnumpy())
        kv.push(f"{case}/two", mine)
        kv.pull(f"{case}/two", out=out)
        assert_sum(out, size, case, dtype)
        kv.pushpull(f"{case}/in place", mine)
        assert_sum(mine, size, case, dtype)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rows_have_the_bits_of_dense_sums(rank, size, dtype):
    """Sum and Average with factors: as a dense array of the same values."""
    ids = CASES["overlapping"](rank)
    rows = values_of(rank, ids, dtype) if dtype in FLOATS else (values_of(rank, ids) * 30 + 40).astype(dtype)
    for op in (hvd.Sum, hvd.Average):
        mine, factors = sparse(ids, rows, dtype), {"prescale_factor": 0.3, "postscale_factor": 1.7}
        dense = hvd.allreduce(mine.tostype("default"), op=op, **factors)
        there = hvd.allreduce(mine.copyto(mx.cpu(1)), op=op, **factors)
        assert there.ctx == mx.cpu(1)
        assert_same_bits(there.asnumpy(), dense.asnumpy())
        assert hvd.allreduce_(mine, op=op, **factors) is mine
        assert_same_bits(mine.asnumpy(), dense.asnumpy())


def test_indices_without_order_and_of_more_dimensions(kv, rank, size):
    """Results are sorted; a row that an array has twice is the sum of both; a row may have any shape, also none."""
    for ids, values in (([4, 1, 4], [3, 1, 1]), ([4, 1], [4, 1])):
        rows = np.repeat(np.array(values, "float32")[:, None], WIDTH, axis=1)
        x = mx.nd.sparse.row_sparse_array((rows, ids), shape=(ROWS, WIDTH))
        kv.pushpull(len(ids), x)
        assert x.indices.asnumpy().tolist() == [1, 4]
        assert x.asnumpy()[:, 0].tolist() == [0, size, 0, 0, 4 * size, *[0] * 7]
    for shape in ((5,), (5, 2, 2)):
        x = mx.nd.sparse.row_sparse_array((np.ones((1, *shape[1:]), "float32"), [rank]), shape=shape)
        kv.pushpull(str(shape), x)
        assert x.shape == shape
        assert_same_bits(x.asnumpy()[:size], np.ones((size, *shape[1:]), "float32"))


def test_grouped(kv, rank, size):
    """Groups of sparse arrays are reduced; those of both kinds are refused. A store takes both in one call."""
    mine = [contribution(rank, case) for case in ("disjoint", "some empty")]
    got = hvd.grouped_allreduce(mine, op=hvd.Sum)
    for array, case in zip(got, ("disjoint", "some empty")):
        assert_sum(array, size, case, "float32")
    with pytest.raises(InvalidRequestError, match="group of its own"):
        hvd.grouped_allreduce([mine[0], mx.nd.ones((2,))])
    two = [sparse([rank], np.ones((1, WIDTH))), sparse([11], np.ones((1, WIDTH)))]  # of two devices
    halves = [sparse([4], np.full((1, WIDTH), value), "float16") for value in (2048, 1, 1)]  # rounded once
    dense = [each.tostype("default") for each in halves]
    kv.pushpull(["sparse", "dense"], [halves, dense])
    assert_same_bits(halves[2].asnumpy(), dense[0].asnumpy())
    dense = mx.nd.ones((2,))
    kv.pushpull([1, 2, 3], [two, [dense], [mine[0]]])
    for each in two:
        assert each.asnumpy()[:, 0].tolist() == [*[1] * size, *[0] * (11 - size), size]
    assert dense.asnumpy().tolist() == [size] * 2
    assert_sum(mine[0], size, "disjoint", "float32")


def test_wrong_arguments(kv, rank):
    x = contribution(rank, "equal")
    with pytest.raises(InvalidRequestError, match="Max"):
        hvd.allreduce(x, op=hvd.Max)
    with pytest.raises(UnsupportedDtypeError, match="csr"):
        hvd.allreduce(x.tostype("default").tostype("csr"))
    with pytest.raises(UnsupportedDtypeError, match="one storage type"):
        kv.pushpull(1, x, out=mx.nd.ones((ROWS, WIDTH)))
    with pytest.raises(InvalidRequestError, match="shape"):
        kv.pushpull(1, x, out=mx.nd.sparse.zeros("row_sparse", (ROWS, WIDTH + 1)))
    for name in (None, "one"):
        with pytest.raises(UnsupportedDtypeError):
            hvd.broadcast(x, 0, name=name)
    for make in (hvd.DistributedOptimizer, lambda optimizer, **how: hvd.DistributedTrainer({}, optimizer, **how)):
        with pytest.raises(InvalidRequestError, match="sparse_as_dense"):
            make(mx.optimizer.create("sgd"), sparse_as_dense="yes")
    x.attach_grad()
    with mx.autograd.record(), pytest.raises(InvalidRequestError, match="row_sparse arrays have no gradient here"):
        hvd.allreduce(x)


@pytest.mark.parametrize("index", [ROWS, -1])
def test_indices_beyond_the_array(kv, rank, size, index):
    """What one worker cannot exchange is an error on all, also for its group; other keys of a store are summed."""
    x, y = contribution(rank, "equal"), contribution(rank, "equal")
    if rank == 0:
        x = sparse([index], np.ones((1, WIDTH)))
    refused = pytest.raises(InvalidRequestError, match=f"from {index} to {index}" if rank == 0 else "rank 0 refused")
    with refused:
        hvd.grouped_allreduce_([y, x])
    with refused:
        kv.pushpull([9, 10], [x, y])
    assert_sum(y, size, "equal", "float32")  # once


@pytest.mark.needs(2)
def test_workers_that_differ(kv, rank, size):
    last, x = rank == size - 1, contribution(rank, "equal")
    kv.set_gradient_compression({"type": "fp16" if last else "none"})
    of_last = rf"disagree on {{}}(.|\n)* {{}}: rank {size - 1}\n"
    with pytest.raises(MismatchError, match=of_last.format("compression", "fp16")):
        kv.pushpull(1, x)
    with pytest.raises(MismatchError, match=of_last.format("prescale_factor", r"2\.0")):
        hvd.allreduce(x, name="x", prescale_factor=1.0 + last)
    with pytest.raises(MismatchError, match=None if last else "array is row_sparse, and not all others' are"):
        hvd.allreduce(x.tostype("default") if last else x, name="x").wait_to_read()


@pytest.mark.needs(2)
def test_join(rank, size):
    """A worker in `hvd.join` cannot contribute rows: the others are told so."""
    if rank:
        with pytest.raises(InvalidRequestError, match="not supported with Join"):
            hvd.allreduce(contribution(rank, "equal"), name="while joined")
    hvd.join()
    x = contribution(rank, "equal")
    assert_sum(hvd.allreduce(x, op=hvd.Sum, name="afterwards"), size, "equal", "float32")


STEPS, BATCH = 4, 5
OPTIMIZER = {"learning_rate": 0.5, "lazy_update": False, "wd": 0.01}


def train(trainer_of, sparse_grad, ranks, batch, steps=STEPS, around=contextlib.nullcontext):
    net = mx.gluon.nn.Embedding(ROWS, WIDTH, sparse_grad=sparse_grad)
    net.initialize()
    net.weight.set_data(mx.nd.array(np.random.default_rng(7).uniform(-1, 1, (ROWS, WIDTH))))
    trainer = trainer_of(net.collect_params())
    with around(trainer):
        for number in range(steps):
            words = [np.random.default_rng([rank, number]).integers(0, ROWS - 2, BATCH) for rank in ranks]
            with mx.autograd.record():
                ((net(mx.nd.array(np.concatenate(words))) - 0.25) ** 2).sum().backward()
            assert net.weight.list_grad()[0].stype == ("row_sparse" if sparse_grad else "default")
            trainer.step(batch)
    return net.weight.data().asnumpy()


@in_gluon
@pytest.mark.parametrize(
    ("kind", "as_dense"),
    [(None, None), *itertools.product(("DistributedTrainer", "DistributedOptimizer"), (True, False))],
)
def test_training(rank, size, kind, as_dense, monkeypatch):
    batch, how = (BATCH * size, {}) if as_dense is None else (BATCH, {"sparse_as_dense": as_dense})
    if as_dense:
        monkeypatch.setattr(store_sparse, "pushpull", None)  # which waits

    def trainer_of(params):
        if as_dense is None:
            return mx.gluon.Trainer(params, "sgd", OPTIMIZER, kvstore="horovod")
        return distributed(kind, params, "sgd", OPTIMIZER, **how)

    sparsely, densely = (train(trainer_of, sparse_grad, [rank], batch) for sparse_grad in (True, False))
    np.testing.assert_allclose(sparsely, densely, rtol=1e-6, atol=1e-7)
    local = lambda params: mx.gluon.Trainer(params, "sgd", OPTIMIZER, kvstore=None)  # noqa: E731
    np.testing.assert_allclose(sparsely, train(local, False, range(size), BATCH * size), rtol=1e-5, atol=1e-6)
    assert_alike(sparsely)


@in_gluon
def test_an_overflow_on_another_worker(rank, size):
    """AMP skips the step on all."""
    layer = mx.gluon.nn.Embedding(ROWS, WIDTH, sparse_grad=True)
    layer.initialize(mx.init.One())
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **OPTIMIZER))
    trainer = mx.gluon.Trainer(layer.collect_params(), optimizer, kvstore=None)
    scaler_of(trainer)
    with mx.autograd.record():
        layer(mx.nd.array([rank])).sum().backward()
    if rank == size - 1:
        layer.weight.grad()[:] = np.inf
    trainer.step(1)
    assert (layer.weight.data().asnumpy() == 1).all()


@in_gluon
def test_first_step_while_a_weight_is_read(rank, size):
    """The broadcast of the initial weights waits until they are free, on some workers only; the gradients do not."""
    layer = mx.gluon.nn.Embedding(50, 4, sparse_grad=True)
    layer.initialize(mx.init.Constant(0.5 + rank))
    trainer = mx.gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="horovod")
    with mx.autograd.record():
        layer(mx.nd.array([1, 2])).sum().backward()
    layer.weight.list_grad()[0].wait_to_read()
    if rank > 0:
        mx.nd.dot(layer.weight.data(), mx.nd.ones((4, 200_000))).sum()
    trainer.step(size)
    assert layer.weight.data().asnumpy()[:3, 0].tolist() == [0.5, -0.5, -0.5]


@in_gluon
def test_uneven_inputs(rank, size):
    """Within a `Join`, workers without input have no rows; the parameters are those of dense training."""
    trainer_of = lambda params: hvd.DistributedTrainer(params, "sgd", OPTIMIZER)  # noqa: E731
    around = lambda trainer: Join([trainer])  # noqa: E731
    weights = [train(trainer_of, sparse_grad, [rank], BATCH, 2 + rank, around) for sparse_grad in (True, False)]
    np.testing.assert_allclose(*weights, rtol=1e-6, atol=1e-7)


@in_gluon
def test_sparse_weights_are_refused(rank):
    """They would live in a store with servers."""
    weight = mx.gluon.Parameter("table", shape=(ROWS, WIDTH), stype="row_sparse", grad_stype="row_sparse")
    weight.initialize()
    trainer = mx.gluon.Trainer([weight], "sgd", kvstore="horovod")
    with pytest.raises(NotImplementedError, match="stype='default'"):
        trainer._init_kvstore()

"""``hvd.join()``: workers that have nothing more to do, table D of the contract."""

import os
import signal
import time

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import HorovodInternalError, InputFailedError, InvalidRequestError, MismatchError
from kvstore_hvd.join import Join
from kvstore_hvd.mxnet_compat import bfloat16
from kvstore_hvd.world import process
from support.gluon import mlp
from support.patience import until

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.sizes


def sum_of(x):
    return hvd.allreduce(x, op=hvd.Sum)


@pytest.mark.parametrize("ahead_s", [0, 1_000_000, -1_000_000])
def test_the_last_one(rank, size, monkeypatch, ahead_s):
    """Hosts count their monotonic clocks from their own starts."""
    topology, clock = process.current().topology, time.monotonic_ns
    if topology.host_count == 1 and ahead_s:
        pytest.skip("needs several hosts")
    if topology.host != topology.hosts[0]:
        monkeypatch.setattr(time, "monotonic_ns", lambda: clock() + ahead_s * 10**9)
    for last in range(size):
        if rank == last:
            for _ in range(3):
                hvd.allreduce(mx.nd.ones(1), name="again").wait_to_read()
        assert hvd.join() == last
    assert 0 <= hvd.join() < size


def test_own_operations_come_first(rank, size):
    """Those whose arrays are still computed when it is called, and that the others wait for."""
    kv, n = mx.kv.create("horovod"), 1000
    for _ in range(2):
        x = mx.nd.ones((n, n))
        x.wait_to_read()
        if rank == 0:
            until(lambda: size == 1 or process.current().member.engine().missed(1))
            for _ in range(5):
                x = mx.nd.dot(x, x) / n
        kv.pushpull(0, x)
        if rank != 0:
            x.wait_to_read()
        hvd.join()
        assert (x.asnumpy() == size).all()


def test_again_and_again(rank, size):
    """One host may be told of the end of a join, and begin the next one, before another has heard of all its ranks."""
    for turn in range(30):
        for _ in range((rank + turn) % 3):
            sum_of(mx.nd.ones(1)).wait_to_read()
        hvd.join()


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_uneven_allreduces(rank, size, dtype):
    """Who has joined contributes zeros, averages are still divided by the number of all workers; no extremes."""
    for step in range(1 + 2 * rank):
        present = sum(step < 1 + 2 * r for r in range(size))
        x = mx.nd.ones((3, 5), dtype=dtype) * 2
        np.testing.assert_array_equal(sum_of(x).asnumpy(), np.full((3, 5), 2 * present, dtype))
        if dtype.startswith("float"):
            expected = np.full((3, 5), 2 * present / size, dtype)
            np.testing.assert_allclose(hvd.allreduce(x, prescale_factor=0.5, postscale_factor=2).asnumpy(), expected)
    if rank == size - 1:
        x = mx.nd.array([-2, -3, -5], dtype=dtype)
        for op in (hvd.Min, hvd.Max, hvd.Product):
            np.testing.assert_array_equal(hvd.allreduce(x, op=op).asnumpy(), x.asnumpy())
    assert hvd.join() == size - 1


def test_bfloat16(rank, size):
    if rank == size - 1:
        x = mx.nd.empty((3,), dtype=bfloat16())
        mx.nd._internal._copyto(mx.nd.array([-2, 0.5, 3]), out=x)
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Sum):
            wide = mx.nd._internal._copyto(hvd.allreduce(x, op=op), out=mx.nd.zeros(3))
            assert wide.asnumpy().tolist() == [-2, 0.5, 3]
    hvd.join()


def test_many_at_once(rank, size):
    """Grouped, of any size, in place, under names, in any order, from stores and NumPy."""
    kv = mx.kv.create("horovod")
    if rank == size - 1:
        sizes = [1, 5, 1000, 300_000, 2_000_000]
        group = hvd.grouped_allreduce([mx.nd.ones(each) for each in sizes], op=hvd.Sum)
        named = [hvd.allreduce_(mx.nd.ones(each), op=hvd.Sum, name=f"n{each}") for each in reversed(sizes)]
        own = mx.nd.ones((7, 3))
        kv.pushpull(3, own)
        kv.set_gradient_compression({"type": "fp16"})
        kv.pushpull(4, rounded := mx.nd.ones(5))
        for result in (*group, *named, own, rounded):
            assert (result.asnumpy() == 1).all()
        assert kvstore_hvd.allreduce(np.arange(4), "numpy").tolist() == [0, 1, 2, 3]
        hvd.barrier()
    assert hvd.join() == size - 1


def test_what_is_not_supported(rank, size):
    """It fails on the workers that call it, which name it and can go on."""
    if size > 1 and rank == size - 1:
        x = mx.nd.ones((2 * size, 2))
        text = r"{} is not supported with Join at this time\."
        for name, call in {
            "Allgather": lambda: hvd.allgather(x),
            "Alltoall": lambda: hvd.alltoall(x),
            "Reducescatter": lambda: hvd.reducescatter(x),
            "Broadcast_object": lambda: hvd.broadcast_object(1),
            "Allgather_object": lambda: hvd.allgather_object(1),
        }.items():
            with pytest.raises(InvalidRequestError, match=text.format(name)) as caught:
                call()
            assert "called join()" in str(caught.value)
        with pytest.raises(InputFailedError, match=text.format("Broadcast")):
            hvd.broadcast(x, 0).asnumpy()
        assert sum_of(x).asnumpy().sum() == 4 * size
    assert hvd.join() in range(size)
    assert hvd.allgather(mx.nd.ones((1, 2))).shape == (size, 2)


def test_factors(rank, size):
    """Those that would make the values of a worker that has joined count in an extreme or a product."""
    if rank == size - 1:
        x = mx.nd.array([2, 4])
        for op, factor in ((hvd.Product, 2.0), (hvd.Min, -1.0), (hvd.Max, 0.0)):
            if size > 1:
                with pytest.raises(InputFailedError, match=f"with prescale_factor {factor:g} is not supported"):
                    hvd.allreduce(x, op=op, prescale_factor=factor).asnumpy()
        for op in (hvd.Min, hvd.Max):
            assert hvd.allreduce(x, op=op, prescale_factor=2.0).asnumpy().tolist() == [4, 8]
        assert hvd.allreduce(x, op=hvd.Product, postscale_factor=2.0).asnumpy().tolist() == [4, 8]
    assert hvd.join() == size - 1


@pytest.mark.needs(3)
def test_within_a_process_set(dynamic, rank, size):
    """Who is not a member is not concerned; ranks are those among all workers."""
    some = hvd.add_process_set([0, size - 1])
    if some.included():
        for last in (0, size - 1):
            if rank == last:
                assert hvd.allreduce(mx.nd.ones(3), op=hvd.Sum, process_set=some).asnumpy().tolist() == [1, 1, 1]
            assert hvd.join(process_set=some) == last
    else:
        with pytest.raises(InvalidRequestError):
            hvd.join(process_set=some)
    hvd.barrier()


def test_a_lost_world_ends_the_wait(rank, size):
    if size == 1:
        assert hvd.join() == 0
        return
    hvd.barrier()  # all are in this test
    if rank == size - 1:
        kvstore_hvd.world.process.current().abort("the test says so")
    with pytest.raises(HorovodInternalError, match="the test says so"):
        hvd.join()
    kvstore_hvd.reset()
    assert hvd.join() in range(size)


@pytest.mark.needs(2)
def test_beside_contexts(rank, size):
    """Refused within one, whose workers wait for each other at its end, unless it does nothing. Where others are in
    one, both wait for any time, but not for each other."""
    trainer = hvd.DistributedTrainer(mlp().collect_params(), "sgd")
    with Join([trainer]), pytest.raises(InvalidRequestError, match="cannot be used within Join"):
        hvd.join()
    with Join([trainer], enable=False):
        assert hvd.join() in range(size)
    with pytest.raises(MismatchError, match=r"at the end of another Join or in hvd.join\(\)"):
        if rank == 0:
            hvd.join()
        else:
            with Join([trainer]):
                pass
    kvstore_hvd.reset()  # contexts are counted anew
    assert hvd.join() in range(size)


@pytest.mark.needs(2)
def test_interrupted(rank, size):
    """Ctrl-C in join() frees the others, who would have gone on with the zeros of this worker."""
    first, *_ = hvd.allgather(mx.nd.array([os.getpid()], dtype="int64")).asnumpy().tolist()
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            hvd.join()
    else:
        is_sent = False
        with pytest.raises(HorovodInternalError, match=r"rank 0 left join\(\) with KeyboardInterrupt"):
            while True:
                if sum_of(mx.nd.ones(1)).asscalar() < size and rank == 1 and not is_sent:  # rank 0 is in join()
                    os.kill(first, signal.SIGINT)
                    is_sent = True
    kvstore_hvd.reset()

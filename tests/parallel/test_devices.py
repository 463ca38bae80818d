"""Operations on arrays of devices, end to end but for the device: `HostExecutor` takes its place."""

import contextlib
import functools

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, TransportError
from kvstore_hvd.mxnet import gathers
from kvstore_hvd.world import process, segment
from support.arrays import assert_same_bits, contribution, request_of, sum_of_ranks
from support.host_executor import HostExecutor
from support.patience import until

mx = pytest.importorskip("mxnet")
# MXNet 1 asks SciPy for a module that has moved.
pytestmark = pytest.mark.filterwarnings("error", "ignore:Please import .csr_matrix:DeprecationWarning")


@pytest.fixture
def executors(monkeypatch, size):
    """The executors that are made from now on, in a fresh world."""
    if size == 1:
        pytest.skip("a world of one has no communicator")
    made = []

    def create(engine, topology, ordinal):
        made.append(HostExecutor(engine))
        return made[-1]

    monkeypatch.setattr(segment, "create_executor", create)
    kvstore_hvd.barrier()
    kvstore_hvd.reset()
    process.current().member.start_device(0)
    yield made
    with contextlib.suppress(HorovodInternalError):
        kvstore_hvd.barrier()  # the others are not disturbed
    kvstore_hvd.reset()
    assert all(executor.is_closed for executor in made)


request = functools.partial(request_of, on_device=True)


@pytest.mark.sizes
def test_batches_one_after_another(executors, size):
    """More batches than the link to other hosts has places, with nothing of the host's memory between them."""
    engine = process.current().member.engine()
    array = np.empty(7, np.float32)
    for value in range(30):
        array[:] = value
        engine.run(request(array, "again"))
        assert (array == size * value).all()


def test_gathers_of_mxnets_arrays(executors, rank, size, monkeypatch):
    """Allgather, alltoall and reducescatter of arrays on a GPU, for which the CPU stands in here, go to the device."""
    monkeypatch.setattr(gathers, "gpu_of", lambda world, context: mx.cpu(0))
    rows = [contribution(r, (2 * r + 1, 3), "float32") for r in range(size)]
    assert_same_bits(hvd.allgather(mx.nd.array(rows[rank])).asnumpy(), np.concatenate(rows))
    whole = [contribution(r, (size + 1, 5), "float32") for r in range(size)]
    splits = [1] * (size - 1) + [2]
    got, counts = hvd.alltoall(mx.nd.array(whole[rank]), splits)
    assert_same_bits(got.asnumpy(), np.concatenate([each[rank : rank + splits[rank]] for each in whole]))
    assert counts.asnumpy().tolist() == [splits[rank]] * size
    share = hvd.reducescatter(mx.nd.array(whole[rank]), op=hvd.Sum).asnumpy()
    first = rank + min(rank, 1)
    assert_same_bits(share, sum_of_ranks(whole)[first : first + 1 + (rank == 0)])
    assert executors[0].kinds == ["exchange", "exchange", "reducescatter"]


def test_an_array_on_another_gpu_is_an_error_of_all(executors, rank, size, monkeypatch):
    """One worker's array is where its operations do not take place: all are told, and nobody waits."""
    monkeypatch.setattr(gathers, "gpu_of", lambda world, context: mx.cpu(rank // (size - 1)))
    with pytest.raises(
        InvalidRequestError, match=r"\[rank [0-9]/[0-9]\] an array is on GPU 1, but|rank [0-9] refused the call"
    ):
        hvd.allgather(mx.nd.ones((2, 2)), name="elsewhere")
    kvstore_hvd.barrier()


def test_a_lost_world_ends_what_is_under_way(executors, rank, size):
    """A device that hangs, and a worker that aborts: what is under way is aborted before callers hear of it."""
    engine = process.current().member.engine()
    engine.run(request(np.ones(5, np.float32), "before"))
    kvstore_hvd.barrier()
    executors[0].hangs = True
    work = engine.submit(request(np.ones(5, np.float32), "hangs"))
    until(lambda: len(executors[0].kinds) == 2)
    kvstore_hvd.barrier()
    if rank == 0:
        process.current().abort("the test ends it")
    with pytest.raises(TransportError, match="the test ends it"):
        engine.wait(work)
    assert executors[0].is_aborted

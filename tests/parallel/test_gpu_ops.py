"""`kvstore_hvd.allreduce` and `broadcast` of arrays on GPUs; stand-ins take the place of CuPy and the device."""

import contextlib

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd import errors, numpy_ops
from kvstore_hvd.world import process, segment
from support.arrays import assert_same_bits, contribution, expected_sum
from support.fake_cuda import COMPILER, CUDARuntimeError, fake_cuda, host_kernels
from support.gpu_claims import DLPack, OnGPU
from support.host_executor import HostExecutor
from support.launchers import launched


@pytest.fixture
def kernels():
    """The real kernels, which a worker alone launches itself; several workers have a `HostExecutor`."""
    if launched().size > 1:
        return contextlib.nullcontext()
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    return host_kernels()


@pytest.fixture
def gpu(monkeypatch, tmp_path, size, kernels):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(segment, "create_executor", lambda engine, topology, ordinal: HostExecutor(engine))
    monkeypatch.setattr(numpy_ops, "_executors", {})
    with kernels, fake_cuda() as machine:
        kvstore_hvd.barrier()
        kvstore_hvd.reset()
        yield machine
        with contextlib.suppress(errors.HorovodInternalError):
            kvstore_hvd.barrier()  # the others are not disturbed
        kvstore_hvd.reset()
        for executor in numpy_ops._executors.values():
            executor.close()


@pytest.mark.parametrize("dtype", ["float16", "int64"])
def test_sums(gpu, rank, size, dtype):
    """Into a new array, into another one, and in place: the bits of what the CPU gives."""
    given = contribution(rank, (3, 5), dtype)
    expected = expected_sum(size, (3, 5), dtype)
    assert_same_bits(kvstore_hvd.allreduce(OnGPU(given), "new").values, expected)
    both = np.concatenate([given, np.zeros_like(given)])
    array, out = OnGPU(both[:3]), OnGPU(both[3:])  # neighbours in one piece of memory
    assert kvstore_hvd.allreduce(array, "out", out=out) is out
    assert_same_bits(out.values, expected)
    array = OnGPU(given.copy())
    assert kvstore_hvd.allreduce(array, "in place", out=array) is array
    assert_same_bits(array.values, expected)
    how = {"op": "average", "prescale": 0.5, "postscale": 3.0}
    there, here = (kvstore_hvd.allreduce(each, "how", **how) for each in (OnGPU(given), given))
    assert_same_bits(there.values, here)
    got = kvstore_hvd.broadcast(OnGPU(given), size - 1, "x")
    assert_same_bits(got.values, contribution(size - 1, (3, 5), dtype))
    assert kvstore_hvd.allreduce(OnGPU(np.zeros((0, 3), np.float32)), "empty").values.shape == (0, 3)


def test_streams_are_waited_for(gpu, rank, size):
    """What is written in a stream, and what still reads the array for the result, ends first."""
    array, out = OnGPU(np.ones(3, np.float32), stream=1), OnGPU(np.ones(3, np.float32), stream=2)
    kvstore_hvd.allreduce(array, "x", out=out)
    waits = [call for call in gpu.calls if call[0] == "streamSynchronize" and call[1]]
    assert waits == [("streamSynchronize", 1), ("streamSynchronize", 2)]


ONES = np.ones(4, np.float32)
LONGER = np.ones(8, np.float32)
WRONG = {
    "out on the CPU": (lambda: (OnGPU(ONES), ONES.copy()), TypeError),
    "out on a GPU, array not": (lambda: (ONES, OnGPU(ONES)), TypeError),
    "out read-only": (lambda: (OnGPU(ONES), OnGPU(ONES, data=(0x1000, True))), errors.InvalidRequestError),
    "out of another shape": (lambda: (OnGPU(ONES), OnGPU(ONES[:3])), errors.InvalidRequestError),
    "array begins within out": (lambda: (OnGPU(LONGER[2:]), OnGPU(LONGER[:6])), errors.InvalidRequestError),
    "out on another GPU": (lambda: (OnGPU(ONES), OnGPU(ONES, data=(0x77000, False))), errors.InvalidRequestError),
    "no memory": (lambda: (OnGPU(ONES, data=(0, False)), None), errors.InvalidRequestError),
    "memory of the host": (lambda: (OnGPU(ONES, data=(0x66000, False)), None), errors.InvalidRequestError),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arrays(gpu, rank, size, case):
    """The error comes at once, nothing is sent, and the world goes on: the others wait for the right call."""
    gpu.places |= {0x77000: 5, 0x66000: -2}
    make, error = WRONG[case]
    array, out = make()
    if rank == size - 1:
        with pytest.raises(error, match=rf"^\[rank {rank}/{size}\] allreduce 'x': (.|\n)*Fix: "):
            kvstore_hvd.allreduce(array, "x", out=out)
        with pytest.raises(error, match=rf"^\[rank {rank}/{size}\] broadcast 'x': (.|\n)*Fix: "):
            kvstore_hvd.broadcast(array, 0, "x", out=out)
    assert kvstore_hvd.allreduce(OnGPU(ONES), "x").values.tolist() == [size] * 4


def test_bfloat16_needs_an_out(gpu, rank, size):
    values = np.full(4, 0x3F80, np.uint16)  # ones
    array = DLPack(4, 16, (4,))
    array.tensor.data, array.tensor.byte_offset = values.ctypes.data, 0
    with pytest.raises(errors.UnsupportedDtypeError, match="CuPy has no bfloat16"):
        kvstore_hvd.allreduce(array, "x")
    kvstore_hvd.allreduce(array, "x", out=array)
    assert (values.astype(np.uint32) << 16).view(np.float32).tolist() == [size] * 4


@pytest.mark.needs(2)
def test_reasons_come_before_their_consequences(gpu, rank, size):
    kvstore_hvd.allreduce(OnGPU(ONES), "before")
    kvstore_hvd.barrier()
    gpu.failures["pointerGetAttributes"] = CUDARuntimeError("cudaErrorInitializationError")
    kvstore_hvd.barrier()
    if rank == 0:
        process.current().abort("the test ends it")
    with pytest.raises(errors.TransportError, match="the test ends it"):
        while True:
            kvstore_hvd.barrier()
    with pytest.raises(errors.TransportError, match="the test ends it"):
        kvstore_hvd.allreduce(OnGPU(ONES), "lost")
    kvstore_hvd.shutdown()
    with pytest.raises(errors.ShutdownError, match="left the world"):
        kvstore_hvd.allreduce(OnGPU(ONES), "left")
    del gpu.failures["pointerGetAttributes"]
    kvstore_hvd.init()
    assert kvstore_hvd.allreduce(OnGPU(ONES), "after").values.tolist() == [size] * 4

"""What the engine learns of arrays on a GPU, and which it refuses."""

import numpy as np
import pytest

from kvstore_hvd.errors import InvalidRequestError, UnsupportedDtypeError
from kvstore_hvd.gpu.arrays import device_array, is_on_gpu
from support.fake_cuda import fake_cuda
from support.gpu_claims import DLPack, Interface


@pytest.fixture(autouse=True)
def cuda():
    with fake_cuda() as machine:
        machine.set_device(2)
        yield machine


def test_version_3():
    array = Interface(stream=7)
    found = device_array(array)
    assert (found.address, found.shape, found.dtype, found.device, found.stream) == (0x1000, (2, 3), "float32", 2, 7)
    assert (found.count, found.nbytes, found.is_read_only, found.owner) == (6, 24, False, array)
    assert device_array(Interface(stream=None)).stream is None
    assert device_array(Interface(data=(0x10, True))).is_read_only


def test_only_arrays_without_gaps_in_the_order_of_c():
    for shape, strides in [((2, 3), (12, 4)), ((1, 3), (999, 4)), ((0, 3), (1, 1)), ((), ())]:
        assert device_array(Interface(shape=shape, strides=strides)).shape == shape
    for shape, strides in [((2, 3), (4, 8)), ((2, 3), (24, 4)), ((3,), (-4,)), ((3,), (0,)), ((2,), (6,))]:
        with pytest.raises(InvalidRequestError, match=r"ascontiguousarray"):
            device_array(Interface(shape=shape, strides=strides))


UNREADABLE = r"what the array says(.|\n)*Fix: "


@pytest.mark.parametrize(
    ("array", "error", "text"),
    [
        *((Interface(**{field: ...}), InvalidRequestError, UNREADABLE) for field in ("typestr", "shape", "data")),
        (Interface(typestr=["<f4"]), InvalidRequestError, UNREADABLE),
        (Interface(shape=3), InvalidRequestError, UNREADABLE),
        (Interface(data=0x1000), InvalidRequestError, UNREADABLE),
        (DLPack(2, 32, (1,), capsule=b"dltensor_versioned"), InvalidRequestError, UNREADABLE),
        (Interface("|b1"), UnsupportedDtypeError, r"cannot send dtype(.|\n)*Supported: float16"),
        (Interface(">f4"), UnsupportedDtypeError, r"cannot send dtype(.|\n)*Supported: float16"),
        (Interface(mask=Interface()), InvalidRequestError, "has a mask"),
        (Interface(stream=0), InvalidRequestError, "stream 0, which is ambiguous"),
        (Interface(data=(0x1002, False)), InvalidRequestError, "0x1002 is no multiple of the 4 bytes"),
        (Interface(shape=(-1, -2)), InvalidRequestError, "no array of shape"),
        (DLPack(6, 8, (1,)), UnsupportedDtypeError, "cannot send dtype"),
        (DLPack(2, 32, (1,), lanes=4), UnsupportedDtypeError, "32 bits of DLPack's kind 2, 4 lanes"),
        (DLPack(2, 32, (1,), kind=1), InvalidRequestError, "on a device of type 1"),
        (DLPack(2, 32, (2, 2), (1, 2)), InvalidRequestError, "ascontiguousarray"),
    ],
)
def test_what_cannot_be_sent_is_said(array, error, text):
    assert is_on_gpu(array)
    with pytest.raises(error, match=rf"^\[rank 1/2\] allreduce 'x': (.|\n)*{text}"):
        device_array(array, rank=1, size=2, operation="allreduce", name="x")


def test_dlpack(cuda):
    array = DLPack(4, 16, (4, 5), (5, 1))
    cuda.places[0x2040] = 3
    found = device_array(array)
    assert (found.address, found.shape, found.dtype, found.device) == (0x2040, (4, 5), "bfloat16", 3)
    assert array.streams == [1] == [found.stream]
    assert device_array(DLPack(2, 32, (1,), kind=13)).device == 3


def test_who_is_on_a_gpu():
    class OnTheCPU:
        @property
        def __cuda_array_interface__(self):
            raise AttributeError("as a tensor of PyTorch has none")

    assert is_on_gpu(Interface())
    assert is_on_gpu(DLPack(2, 32, (1,)))
    assert not any(is_on_gpu(each) for each in (OnTheCPU(), np.zeros(3), object(), [1.0]))

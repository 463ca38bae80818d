"""What the engine learns of arrays on a GPU, and which it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_hvd.errors import InvalidRequestError, UnsupportedDtypeError
from kvstore_hvd.gpu.arrays import device_array, is_on_gpu
from support.fake_cuda import FakeCuda, fake_cuda


@pytest.fixture(autouse=True)
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as machine:
        machine.set_device(2)
        yield machine


class Interface:
    """An array with ``__cuda_array_interface__``."""

    def __init__(self, typestr: str = "<f4", shape: Any = (2, 3), **fields: Any) -> None:
        self.fields = {
            "typestr": typestr,
            "shape": shape,
            "data": (0x1000, False),
            "version": 3,
            "strides": None,
        } | fields

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.fields


def test_version_3() -> None:
    array = Interface(stream=7)
    found = device_array(array)
    assert (found.address, found.shape, found.dtype, found.device, found.stream) == (0x1000, (2, 3), "float32", 2, 7)
    assert (found.count, found.nbytes, found.is_read_only, found.owner) == (6, 24, False, array)
    assert device_array(Interface(stream=None)).stream is None
    assert device_array(Interface(data=(1, True))).is_read_only


def test_version_2_is_as_the_default_stream_leaves_it() -> None:
    assert device_array(Interface(version=2)).stream == 1


@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [("<f2", "float16"), ("<f8", "float64"), ("|i1", "int8"), ("|u1", "uint8"), ("<i4", "int32"), ("<i8", "int64")],
)
def test_types(typestr: str, dtype: str) -> None:
    assert device_array(Interface(typestr)).dtype == dtype


@pytest.mark.parametrize("typestr", ["|b1", "<u4", "<c8", ">f4", "<V2"])
def test_types_that_do_not_travel(typestr: str) -> None:
    with pytest.raises(
        UnsupportedDtypeError, match=r"\[rank 1/2\] allreduce 'x': cannot send dtype(.|\n)*Supported: float16"
    ):
        device_array(Interface(typestr), rank=1, size=2, operation="allreduce", name="x")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), (12, 4)), ((1, 3), (999, 4)), ((0, 3), (1, 1)), ((), ()), ((5, 1, 2), (8, 3, 4))],
)
def test_arrays_without_gaps(shape: Any, strides: Any) -> None:
    assert device_array(Interface(shape=shape, strides=strides)).shape == shape


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), (4, 8)), ((2, 3), (24, 4)), ((3,), (-4,)), ((3,), (0,)), ((3,), (6,))]
)
def test_arrays_with_gaps_or_another_order(shape: Any, strides: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"ascontiguousarray"):
        device_array(Interface(shape=shape, strides=strides))


def test_masks_and_stream_0_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="mask"):
        device_array(Interface(mask=Interface("|b1")))
    with pytest.raises(InvalidRequestError, match="stream 0"):
        device_array(Interface(stream=0))


def test_an_empty_array_has_no_address() -> None:
    found = device_array(Interface(shape=(0,), data=(0, False)))
    assert (found.address, found.count, found.device) == (0, 0, 2)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLPack:
    """An array with ``__dlpack__``, written out as dlpack.h has it."""

    def __init__(self, code: int, bits: int, shape: tuple[int, ...], strides: Any = None, lanes: int = 1) -> None:
        self.tensor = _DLTensor(0x2000, (ctypes.c_int32 * 2)(2, 3), len(shape), code, bits, lanes)
        self.tensor.shape = (ctypes.c_int64 * len(shape))(*shape)
        if strides is not None:
            self.tensor.strides = (ctypes.c_int64 * len(strides))(*strides)
        self.tensor.byte_offset = 64
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


def test_dlpack() -> None:
    array = DLPack(4, 16, (4, 5), (5, 1))
    found = device_array(array)
    assert (found.address, found.shape, found.dtype, found.device) == (0x2040, (4, 5), "bfloat16", 3)
    assert array.streams == [1] == [found.stream]


def test_dlpack_is_refused_alike() -> None:
    with pytest.raises(UnsupportedDtypeError):
        device_array(DLPack(6, 8, (1,)))
    with pytest.raises(UnsupportedDtypeError):
        device_array(DLPack(2, 32, (1,), lanes=2))
    with pytest.raises(InvalidRequestError):
        device_array(DLPack(2, 32, (2, 2), (1, 2)))


def test_bfloat16_of_both_kinds_comes_by_dlpack() -> None:
    class Both(Interface, DLPack):
        def __init__(self) -> None:
            Interface.__init__(self, "<V2")
            DLPack.__init__(self, 4, 16, (2,))

    assert device_array(Both()).dtype == "bfloat16"


class OnTheCPU:
    """As a tensor of PyTorch on the CPU."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError("not on a GPU")


def test_who_is_on_a_gpu() -> None:
    assert is_on_gpu(Interface())
    assert is_on_gpu(DLPack(2, 32, (1,)))
    assert not is_on_gpu(OnTheCPU())
    assert not is_on_gpu(np.zeros(3))
    assert not is_on_gpu(object())
    assert not is_on_gpu([1.0])

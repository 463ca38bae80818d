"""Arrays that say they are on a GPU, some of them truly (in the memory of `fake_cuda`), some of them not."""

import ctypes
from typing import Any

import numpy as np


class Interface:
    """An array with ``__cuda_array_interface__`` and no memory; a field of ``...`` is left out."""

    def __init__(self, typestr: Any = "<f4", shape: Any = (2, 3), **fields: Any) -> None:
        told = {"typestr": typestr, "shape": shape, "data": (0x1000, False), "version": 3, "strides": None} | fields
        self.fields = {key: value for key, value in told.items() if value is not ...}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.fields


class OnGPU(Interface):
    """An array of the stand-in, whose memory is that of a NumPy array; what is given besides replaces what it says."""

    def __init__(self, values: Any, **fields: Any) -> None:
        self.values = np.ascontiguousarray(values)
        super().__init__(**dict(self.values.__array_interface__, version=3, strides=None, stream=None) | fields)


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

    def __init__(
        self,
        code: int,
        bits: int,
        shape: tuple[int, ...],
        strides: Any = None,
        lanes: int = 1,
        kind: int = 2,
        capsule: bytes = b"dltensor",
    ) -> None:
        self.tensor = _DLTensor(0x2000, (ctypes.c_int32 * 2)(kind, 3), len(shape), code, bits, lanes)
        self.tensor.shape = (ctypes.c_int64 * len(shape))(*shape)
        if strides is not None:
            self.tensor.strides = (ctypes.c_int64 * len(strides))(*strides)
        self.tensor.byte_offset = 64
        self.streams: list[Any] = []
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.tensor), self._capsule, None)

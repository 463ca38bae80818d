"""Arrays of any library on a GPU.

An array describes itself by ``__cuda_array_interface__`` (CuPy, Numba, PyTorch, RAPIDS) or by DLPack (``__dlpack__``:
JAX, and bfloat16, which the interface cannot name).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore_hvd.errors import InvalidRequestError, KVHvdError, UnsupportedDtypeError, message
from kvstore_hvd.gpu.runtime import active, checked, cupy
from kvstore_hvd.mxnet_compat.arrays import DLTensor
from kvstore_hvd.native import ITEM_BYTES

#: Number of the default stream in version 3 of ``__cuda_array_interface__``.
LEGACY_STREAM = 1

# Names of the interface for dtypes; it has none for bfloat16.
_TYPES = {np.dtype(name).str: name for name in ITEM_BYTES if name != "bfloat16"}
# Device types of dlpack.h: CUDA, CUDA's managed memory.
_DLPACK_DEVICES = (2, 13)
# Codes of types in dlpack.h, by NumPy's kinds, and dtypes by code and bits.
_CODES = {"i": 0, "u": 1, "f": 2}
_DLPACK_TYPES = {(_CODES[np.dtype(name).kind], 8 * np.dtype(name).itemsize): name for name in _TYPES.values()}
_DLPACK_TYPES[4, 16] = "bfloat16"
# Lengths are sent as signed 64-bit numbers.
_TOO_LARGE = 1 << 63


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous array on a GPU."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    device: int
    stream: int | None  # number of the stream that writes the content; None: the content is ready
    is_read_only: bool
    owner: Any  # keeps the memory alive

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * ITEM_BYTES[self.dtype]


def is_on_gpu(array: Any) -> bool:
    """Whether `array` says that it is on a GPU; imports nothing, raises nothing."""
    if _interface_of(array) is not None:
        return True
    with contextlib.suppress(Exception):
        return int(array.__dlpack_device__()[0]) in _DLPACK_DEVICES
    return False


def device_array(array: Any, **call: Any) -> DeviceArray:
    """Describe an array that `is_on_gpu`; `call` is for errors: keywords of `message`."""
    interface = _interface_of(array)
    try:
        # Before version 3 (PyTorch) the interface does not name the stream that writes the content. bfloat16 has no
        # name there: its elements are two raw bytes, or the interface is missing.
        is_vague = interface is not None and (interface.get("version", 2) < 3 or interface["typestr"] == "<V2")
        if interface is not None and not (is_vague and hasattr(array, "__dlpack__")):
            return _from_interface(array, interface)
        return _from_dlpack(array)
    except KVHvdError as error:
        fact, _, fix = str(error).partition("\n  Fix: ")
        raise type(error)(message(fact, fix=fix, **call)) from error.__cause__
    except Exception as error:
        # The library of the array, or the program, may raise any error and leave out any field.
        fact = f"what the array says about itself cannot be used: {type(error).__name__}: {error}."
        fix = "see its __cuda_array_interface__, or what its __dlpack__ returns."
        raise InvalidRequestError(message(fact, fix=fix, **call)) from error


def empty_like(array: DeviceArray, **call: Any) -> Any:
    """A new CuPy array with the shape and dtype, on the same device."""
    if array.dtype == "bfloat16":
        fact, fix = "CuPy has no bfloat16 for a new array.", "pass an out, of the same library."
        raise UnsupportedDtypeError(message(fact, fix=fix, **call))
    with active(array.device), checked("allocate an array"):
        return cupy().empty(array.shape, array.dtype)


def synchronize(array: DeviceArray) -> None:
    """Wait until the array's content is written."""
    if array.stream is not None:
        with active(array.device), checked("wait for the array"):
            cupy().cuda.runtime.streamSynchronize(array.stream)


def _interface_of(array: Any) -> dict[str, Any] | None:
    """The array's ``__cuda_array_interface__``; None if it has none."""
    # PyTorch's tensors on the CPU have the attribute and raise, as do those on a GPU that it cannot describe.
    with contextlib.suppress(Exception):
        if hasattr(type(array), "__cuda_array_interface__"):
            interface = array.__cuda_array_interface__
            return interface if isinstance(interface, dict) else None
    return None


def _from_interface(array: Any, interface: dict[str, Any]) -> DeviceArray:
    dtype = _TYPES.get(interface["typestr"])
    if dtype is None:
        raise _unsupported(interface["typestr"])
    if interface.get("mask") is not None:
        raise InvalidRequestError(message("the array has a mask.", fix="pass its data only."))
    shape = tuple(int(length) for length in interface["shape"])
    strides = interface.get("strides")
    if strides is not None:
        unit = ITEM_BYTES[dtype]
        _check_contiguous(shape, [int(stride) // unit if stride % unit == 0 else 0 for stride in strides])
    address, is_read_only = interface["data"]
    # Version 2 names no stream: its content is as the default stream leaves it.
    stream = interface.get("stream") if interface.get("version", 2) >= 3 else LEGACY_STREAM
    if stream is not None and (not isinstance(stream, int) or stream < 1):
        fact = f"__cuda_array_interface__ names stream {stream!r}, which is {'ambiguous' if stream == 0 else 'none'}."
        raise InvalidRequestError(message(fact, fix="name 1, 2, or the address of a stream."))
    address = int(address or 0)
    device = _device_of(address, shape, dtype)
    return DeviceArray(address, shape, dtype, device, stream, bool(is_read_only), array)


def _device_of(address: int, shape: Sequence[int], dtype: str) -> int:
    """The GPU of an address, after a check that kernels can work there."""
    runtime, unit = cupy().cuda.runtime, ITEM_BYTES[dtype]
    nbytes = math.prod(shape) * unit
    fact, fix = "", "pass a copy of the array."
    if not all(0 <= length < _TOO_LARGE for length in (*shape, nbytes)):
        fact = f"there is no array of shape {tuple(shape)}."
    elif nbytes and not address:
        fact = f"an array of shape {tuple(shape)} has no memory (its address is 0)."
    elif nbytes and address % unit:
        fact = f"the array's address {address:#x} is no multiple of the {unit} bytes of an element."
    else:
        with checked("ask where an array lies"):
            # An array without elements may have no memory.
            device = int(runtime.pointerGetAttributes(address).device if nbytes else runtime.getDevice())
        if device >= 0:
            return device
        fact, fix = "the array says that it is on a GPU, but its memory is not.", "copy it to the GPU."
    raise InvalidRequestError(message(fact, fix=fix))


def _from_dlpack(array: Any) -> DeviceArray:
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    cupy()  # reports a missing CuPy or driver before the other library reports its own error
    # The content must be ready in the default stream. The capsule stays unconsumed, so its end frees the producer's
    # hold on the memory.
    capsule = array.__dlpack__(stream=LEGACY_STREAM)
    tensor = DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    if tensor.device_type not in _DLPACK_DEVICES:
        fact = f"the array says that it is on a GPU, but gives DLPack one on a device of type {tensor.device_type}."
        raise InvalidRequestError(message(fact, fix="pass an array of CUDA's (type 2, or 13)."))
    dtype = _DLPACK_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        lanes = f", {tensor.lanes} lanes" if tensor.lanes != 1 else ""
        raise _unsupported(f"{tensor.bits} bits of DLPack's kind {tensor.code}{lanes}")
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        _check_contiguous(shape, tensor.strides[: tensor.ndim])
    address = tensor.data + tensor.byte_offset if tensor.data else 0
    device = _device_of(address, shape, dtype)
    return DeviceArray(address, shape, dtype, device, LEGACY_STREAM, False, (array, capsule))


def _unsupported(what: str) -> UnsupportedDtypeError:
    details, fix = [f"Supported: {' '.join(ITEM_BYTES)}"], "cast with .astype('float32') or .astype('int32')."
    return UnsupportedDtypeError(message(f"cannot send dtype {what} from a GPU.", details=details, fix=fix))


def _check_contiguous(shape: Sequence[int], strides: Sequence[int]) -> None:
    is_wrong, expected = len(strides) != len(shape), 1
    for length, stride in zip(reversed(shape), reversed(strides)):
        is_wrong = is_wrong or (length != 1 and stride != expected)
        expected *= length
    if is_wrong and 0 not in shape:
        fact = "an array on a GPU has gaps or another order than C's"
        fact = f"{fact} (shape {tuple(shape)}, strides {tuple(strides)} elements)."
        raise InvalidRequestError(message(fact, fix="pass cupy.ascontiguousarray(array), and copy the result back."))

"""MXNet's arrays, whose interface differs between versions, and its autograd. Importing this does not import MXNet."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kvstore_hvd.mxnet_compat.hooks import require_mxnet


class DLTensor(ctypes.Structure):
    """The structure by which libraries hand arrays to each other (``dlpack.h``); the start of a ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _instance_of(module: str, name: str) -> Callable[[object], bool]:
    """Whether a thing is of a class of MXNet's. Does not import MXNet."""

    def is_instance(thing: object) -> bool:
        cls = getattr(sys.modules.get(module), name, None)
        return cls is not None and isinstance(thing, cls)

    return is_instance


#: Arrays of MXNet, ``mx.nd`` (sparse too) or ``mx.np``; and things of Gluon.
is_ndarray = _instance_of("mxnet.ndarray.ndarray", "NDArray")
is_np_ndarray = _instance_of("mxnet.numpy.multiarray", "ndarray")
is_parameter = _instance_of("mxnet.gluon.parameter", "Parameter")
is_block = _instance_of("mxnet.gluon.block", "Block")
is_trainer = _instance_of("mxnet.gluon.trainer", "Trainer")


def context_of(x: Any) -> Any:
    """Where the array lives, such as ``cpu(0)``: a ``Context`` in MXNet 1, a ``Device`` in 2. Does not wait."""
    return x.device if hasattr(type(x), "device") else x.ctx  # 2.0 warns about its older names


class Facts(NamedTuple):
    """What an operation asks of an array more than once."""

    handle: int
    dtype: str
    stype: str
    context: Any


def facts_of(x: Any) -> Facts:
    """The answers of `handle_of`, `dtype_name` and `context_of`, and how the array is stored."""
    context = x.device if hasattr(type(x), "device") else x.ctx
    return Facts(x.handle.value or 0, _name_of(x.dtype), x.stype, context)


def handle_of(x: Any) -> int:
    """The NDArrayHandle of the array, for the native adapter. Valid as long as the array lives."""
    return int(x.handle.value or 0)


def address_of(x: Any) -> int | None:
    """Where the elements of a dense array begin; 0 if it has none. Waits until they are computed."""
    # None when they are in a layout of oneDNN's.
    # Valid as long as the array lives and MXNet is not asked to write to it.
    if 0 in x.shape:
        return 0
    x.wait_to_read()
    base, managed = require_mxnet().base, ctypes.c_void_p()
    if base._LIB.MXNDArrayToDLPack(x.handle, ctypes.byref(managed)) != 0:
        return None
    described = DLTensor.from_address(managed.value or 0)
    address = int(described.data or 0) + int(described.byte_offset)
    base.check_call(base._LIB.MXNDArrayCallDLPackDeleter(managed))
    return address


def bfloat16() -> Any:
    """The dtype that MXNet takes for bfloat16: to NumPy a structure with one field of that name."""
    import numpy as np

    return np.dtype([("bfloat16", np.uint16)])


def dtype_name(x: Any) -> str:
    """NumPy's name of an array's or parameter's dtype, such as ``'float32'``; ``'bfloat16'`` for MXNet's own."""
    return _name_of(x.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    import numpy as np

    if isinstance(dtype, str) and dtype == "bfloat16":  # of a parameter
        return dtype
    dtype = np.dtype(dtype)
    # MXNet describes bfloat16 to NumPy as a structure with one field of that name.
    return str(dtype.names[0] if dtype.names else dtype.name)


def read_into(arrays: Iterable[Any], places: Iterable[tuple[Any, Any]]) -> None:
    """Copy all elements of dense arrays to memory of this process; waits for them. On any device, of any layout."""
    base = require_mxnet().base
    copy = base._LIB.MXNDArraySyncCopyToCPU
    for x, (address, count) in zip(arrays, places):
        if count.value:
            base.check_call(copy(x.handle, address, count))


def write_from(x: Any, address: int, size: int) -> None:
    """Overwrite all elements of a dense array from memory of this process. Waits for what else is done with it."""
    if not size:
        return
    base, place = require_mxnet().base, ctypes.c_void_p()
    base.check_call(base._LIB.MXNDArrayWaitToWrite(x.handle))
    base.check_call(base._LIB.MXNDArrayGetData(x.handle, ctypes.byref(place)))  # this also gives it a plain layout
    if context_of(x).device_type.startswith("cpu"):
        ctypes.memmove(place.value or 0, address, size)
    else:
        copy = base._LIB.MXNDArraySyncCopyFromCPU
        base.check_call(copy(x.handle, ctypes.c_void_p(address), ctypes.c_size_t(x.size)))


# -- MXNet's files of arrays: src/ndarray/ndarray.cc, NDArray::Save -------------------------------------------------

_LIST, _ARRAY, _ARRAY_OF_NP = 0x112, 0xF993FAC9, 0xF993FACA
_DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")
_FLAGS = {name: flag for flag, name in enumerate((*_DTYPES, "int16", "uint16", "uint32", "uint64", "bfloat16"))}
_SIZES = (4, 8, 2, 1, 4, 1, 8, 1, 2, 2, 4, 8, 2)  # bytes of an element, by flag


def parts_of_file(arrays: Mapping[str, tuple[tuple[int, ...], str, bool, Any]]) -> list[Any]:
    """The bytes of a file that MXNet loads, of arrays by name: shape, dtype, whether it is of mx.np, and values."""
    parts: list[Any] = [struct.pack("<QQQ", _LIST, 0, len(arrays))]
    for shape, dtype, is_np, values in arrays.values():
        magic = _ARRAY_OF_NP if is_np else _ARRAY
        head = struct.pack(f"<Iii{len(shape)}q", magic, 0, len(shape), *shape)
        parts += [head, struct.pack("<iii", 1, 0, _FLAGS[dtype]), values]  # on cpu(0)
    parts.append(struct.pack("<Q", len(arrays)))
    for name in map(str.encode, arrays):
        parts.append(struct.pack("<Q", len(name)) + name)
    return parts


def arrays_of_file(data: bytes) -> dict[str, memoryview]:
    """The values of the arrays in a file of `parts_of_file`, by name."""
    whole, at, values = memoryview(data), 24, []
    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        dims = struct.unpack_from("<i", data, at + 8)[0]
        shape = struct.unpack_from(f"<{dims}q", data, at + 12)
        at += 12 + 8 * dims
        size = math.prod(shape) * _SIZES[struct.unpack_from("<i", data, at + 8)[0]]
        values.append(whole[at + 12 : at + 12 + size])
        at += 12 + size
    names, at = [], at + 8
    for _ in values:
        length = struct.unpack_from("<Q", data, at)[0]
        names.append(data[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return dict(zip(names, values))


# -- Autograd ---------------------------------------------------------------------------------------------------------


def is_recording() -> bool:
    """Whether this thread is inside ``autograd.record()``. Does not import MXNet."""
    mxnet = sys.modules.get("mxnet")
    return mxnet is not None and bool(mxnet.autograd.is_recording())


def is_tracing() -> bool:
    """Whether a block is being hybridized in this thread, in MXNet 2: arrays have no values then."""
    traces = getattr(sys.modules.get("mxnet"), "_deferred_compute", None)
    return traces is not None and bool(traces.is_deferred_compute())


def is_in_graph(array: Any) -> bool:
    """Whether gradients may flow to the array: it has one itself, or was recorded. Takes time for long recordings."""
    mx = require_mxnet()
    try:
        mx.autograd.get_symbol(array)
    except mx.MXNetError:
        return False
    return True


def differentiable(array: Any, result: Any, gradient: Callable[[Any], Any]) -> Any:
    """Record that `result` was computed from `array`; to be called while recording."""
    mx = require_mxnet()
    shape, count = result.shape, result.size
    is_plain, is_plain_result = _is_plain(array), _is_plain(result)

    def backward(output_gradient: Any) -> Any:
        with mx.util.np_shape(True):  # each thread has its own
            given = output_gradient.as_np_ndarray()
            if not is_plain_result:
                given = given[:count].reshape(shape)
            found = gradient(given)
            if not is_plain:
                found = _flat(found)
            return found.as_np_ndarray() if isinstance(output_gradient, mx.np.ndarray) else found.as_nd_ndarray()

    with mx.util.np_shape(True):
        # MXNet drops the gradient of a function's input whose gradients are to be added up, and its functions fail for
        # arrays without dimensions or elements. An operator of its own before and after the function hides both.
        source = mx.nd._internal._copy(array.as_nd_ndarray()) if is_plain else _flat(array)
        with mx.autograd.pause():
            target = result if is_plain_result else _flat(result)
        recorded = _function()(target.as_nd_ndarray(), backward)(source.as_nd_ndarray())
        if is_plain_result:
            # Gradients from a convolution come in a layout of oneDNN's, which functions misread. This operator's own
            # gradient never does.
            recorded = mx.nd.slice_axis(recorded, axis=0, begin=0, end=None)
        else:
            recorded = recorded.as_np_ndarray()[:count].reshape(shape)
        return recorded.as_np_ndarray() if isinstance(array, mx.np.ndarray) else recorded.as_nd_ndarray()


def _is_plain(array: Any) -> bool:
    return bool(array.shape) and 0 not in array.shape


def _flat(array: Any) -> Any:
    """The elements in one dimension, and one more if there are none."""
    mx = require_mxnet()
    flat = array.as_np_ndarray().reshape(-1)
    if array.size:
        return flat
    return mx.np.concatenate([flat, mx.nd.zeros((1,), context_of(array), array.dtype).as_np_ndarray()])


@functools.cache
def _function() -> type:
    import mxnet as mx

    class Function(mx.autograd.Function):  # type: ignore[misc]
        def __init__(self, result: Any, gradient: Callable[[Any], Any]) -> None:
            super().__init__()
            self._result = result
            self._gradient = gradient

        def forward(self, *inputs: Any) -> Any:
            result, self._result = self._result, None
            return result

        def backward(self, *output_grads: Any) -> Any:
            return self._gradient(output_grads[0])

    return Function

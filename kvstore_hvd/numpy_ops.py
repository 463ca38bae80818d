"""Blocking collectives on arrays of NumPy and of GPUs, through the engine of the stores."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Literal, Optional, TypeVar

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, UnsupportedDtypeError, fault_of_text, message
from kvstore_hvd.gpu.arrays import device_array, empty_like, is_on_gpu, synchronize
from kvstore_hvd.gpu.executor import Executor
from kvstore_hvd.gpu.runtime import active
from kvstore_hvd.world import process
from kvstore_hvd.world.gpus import create_executor
from kvstore_hvd.world.member import Member

__all__ = ["allreduce", "barrier", "broadcast"]

#: A numpy.ndarray, or an array on a GPU. The result is of the same class.
Array = TypeVar("Array")
Op = Literal["sum", "average", "min", "max", "product"]


def allreduce(
    array: Array,
    name: str,
    op: Op = "sum",
    out: Optional[Array] = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Array:
    """Reduce an array over all workers and wait for the result.

    Parameters
    ----------
    array : numpy.ndarray
        This worker's contribution; C-contiguous, of equal shape and dtype on all workers. Dtypes: float16, bfloat16
        (of ml_dtypes), float32, float64, int8, uint8, int32, int64. Or an array on a GPU that has
        ``__cuda_array_interface__`` or DLPack, on all workers; needs CuPy.
    name : str
        Matches the call with those of the other workers.
    op : str
        ``'sum'`` (the default; `hvd.allreduce` averages by default), ``'average'``, ``'min'``, ``'max'`` or
        ``'product'``; formed in the order of ranks.
    out : numpy.ndarray, optional
        Receives the result; may be `array` itself (in place). By default a new array, of CuPy if it is on a GPU.
    prescale, postscale : float
        Factors for every contribution, and for the result.

    Returns
    -------
    numpy.ndarray
        `out`, with equal bits on all workers; complete, in whatever stream it is used.

    Raises
    ------
    MismatchError
        The workers disagree; nothing was changed.
    InvalidRequestError, UnsupportedDtypeError, InvalidTypeError
        The arguments are wrong.
    HorovodInternalError
        The world is lost.
    """
    _check_call("allreduce", name, op)
    mxnet_compat.collectives.counts.reductions += 1
    return _run("allreduce", name, array, out, op, float(prescale), float(postscale))  # type: ignore[no-any-return]


def broadcast(array: Array, root: int, name: str, out: Optional[Array] = None) -> Array:
    """Give every worker the root's array and wait for it.

    Parameters
    ----------
    array, name, out
        As in `allreduce`; the values of `array` matter on the root only.
    root : int
        Rank of the worker that has the values.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    KVHvdError, InvalidTypeError
        As `allreduce`.
    """
    size = process.current().topology.size
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        fix = f"use a root of 0 to {size - 1}." if size > 1 else "use root 0."
        raise InvalidRequestError(_text("broadcast", name, f"there is no rank {root!r}.", fix))
    _check_call("broadcast", name)
    mxnet_compat.collectives.counts.broadcasts += 1
    return _run("broadcast", name, array, out, root=int(root))  # type: ignore[no-any-return]


def barrier(name: str = "barrier") -> None:
    """Wait until every worker has called it. Does not wait for pending operations on MXNet arrays."""
    _check_call("barrier", name)
    process.current().member.barrier(name)


def _check_call(operation: str, name: str, op: str = "sum") -> None:
    if not isinstance(name, str):
        raise InvalidTypeError(_text(operation, repr(name), f"name is a {type(name).__name__}.", "pass a str."))
    fault = fault_of_text(name)
    if fault:
        fix = "use a name that can be written as UTF-8 text."
        raise InvalidRequestError(_text(operation, ascii(name), f"the name {fault}", fix))
    if not isinstance(op, str) or op not in native.OPS:
        fix = f"use one of {', '.join(native.OPS)}."
        raise InvalidRequestError(_text(operation, name, f"there is no op {op!r}.", fix))


def _run(
    collective: str,
    name: str,
    array: Any,
    out: Any,
    op: str = "sum",
    pre: float = 1.0,
    post: float = 1.0,
    root: int = 0,
) -> Any:
    world = process.current().member
    if not isinstance(array, np.ndarray) and is_on_gpu(array):
        return _run_on_gpu(world, collective, name, array, out, (op, pre, post, root))
    dtype = _checked_dtype(collective, name, array, "array")
    if out is None:
        out = np.empty_like(array)
    else:
        if out is not array:
            _checked_dtype(collective, name, out, "out")
        overlaps = _address(out) != _address(array) and np.may_share_memory(out, array)
        fact, fix = _fault_of_out(array, out, not out.flags.writeable, overlaps)
        if fact:
            raise InvalidRequestError(_text(collective, name, fact, fix))
    source, target = _address(array), _address(out)
    if not world.is_alone:
        with world.submitting():
            world.engine().run(
                native.Request(
                    collective, f"np/{name}", f"'{name}'", [source], [target], array.shape, dtype, op, pre, post, root
                )
            )
    elif pre != 1.0 or post != 1.0:
        native.scale(dtype, source, target, array.size, pre, post)
    elif out is not array:
        np.copyto(out, array)
    return out


def _checked_dtype(operation: str, name: str, array: Any, role: str) -> str:
    """The name of the array's dtype, after all checks of the array that need no other worker."""
    if not isinstance(array, np.ndarray):
        fact = f"{role} is a {type(array).__name__}, not a numpy.ndarray."
        fix = "pass a NumPy array; arrays of MXNet go through a store, mx.kv.create('horovod')."
        if is_on_gpu(array):  # CuPy's class has the same name
            fact, fix = f"{role} is on a GPU.", "pass array and out both on the GPU."
        raise InvalidTypeError(_text(operation, name, fact, fix))
    dtype = _name_of(array.dtype)
    if not dtype:
        shown = array.dtype.name if array.dtype.isnative else f"{array.dtype.str} (foreign byte order)"
        fact = f"cannot {'reduce' if operation == 'allreduce' else operation} dtype {shown}."
        details = f"Supported: {' '.join(native.DTYPES)}"
        raise UnsupportedDtypeError(_text(operation, name, fact, "cast with .astype(...).", details))
    if not array.flags.c_contiguous:
        fix = "copy it with numpy.ascontiguousarray(x)."
        raise InvalidRequestError(_text(operation, name, f"{role} is not C-contiguous.", fix))
    return dtype


# NumPy takes about a microsecond for each of the two attributes.
@functools.lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    """The name of a dtype that can be reduced; '' for others."""
    return str(dtype.name) if dtype.name in native.DTYPES and dtype.isnative else ""


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _fault_of_out(array: Any, out: Any, is_read_only: bool, overlaps: bool) -> tuple[str, str]:
    """The fault of `out`, and its fix."""
    if out.shape != array.shape or out.dtype != array.dtype:
        fact = f"out is {out.dtype} {out.shape}, but array is {array.dtype} {array.shape}."
        return fact, "pass an out of the same shape and dtype."
    if is_read_only:
        return "out is read-only.", "pass an array that can be written."
    return ("out overlaps array.", "pass the array itself, or separate memory.") if overlaps else ("", "")


def _text(operation: str, name: str, fact: str, fix: str, *details: str) -> str:
    where = process.current().topology.prefix
    return message(fact, **where, operation=operation, name=name, fix=fix, details=details)


# -- Arrays of a GPU, of any library ----------------------------------------------------------------------------------

# Seconds between two looks at the device.
_LOOK_S = 20e-6

_executors: dict[int, Executor] = {}  # of a world of one, by device
_lock = threading.Lock()


def _run_on_gpu(world: Member, collective: str, name: str, array: Any, out: Any, how: tuple[Any, ...]) -> Any:
    """Run a collective on arrays of a GPU; `how`: op, prescale, postscale and root."""
    call: dict[str, Any] = {**world.topology.prefix, "operation": collective, "name": name}
    # CUDA fails after the loss of the world and in a forked child: `submitting` raises that cause first.
    with world.submitting():
        source = device_array(array, **call)
        if out is None:
            out = empty_like(source, **call)
        elif not is_on_gpu(out):
            fact = f"out is a {type(out).__name__} that is not on a GPU, but array is on GPU {source.device}."
            raise InvalidTypeError(message(fact, **call, fix="pass an out on the same GPU."))
        target = source if out is array else device_array(out, **call)
        if target.device != source.device:
            fact = f"out is on GPU {target.device}, but array is on GPU {source.device}."
            raise InvalidRequestError(message(fact, **call, fix="pass an out on the same GPU."))
        overlaps = 0 < abs(target.address - source.address) < source.nbytes
        fact, fix = _fault_of_out(source, target, target.is_read_only, overlaps)
        if fact:
            raise InvalidRequestError(message(fact, **call, fix=fix))
        # All work on the arrays ends before other workers read or write them.
        synchronize(source)
        if target is not source:
            synchronize(target)
        inputs, outputs = [source.address], [target.address]
        op, pre, post, root = how
        if world.is_alone:
            what = source.count, source.count, (), source.dtype, op, pre, post, False, root
            operation = native.DeviceOperation(name, name, inputs, outputs, *what)
            _run_alone(world, collective, operation, source.device)
        else:
            world.start_device(source.device)
            # The name is that of an operation on the CPU, so that workers that differ get an error.
            of_cpu = collective, f"np/{name}", f"'{name}'", inputs, outputs, source.shape, source.dtype
            world.engine().run(native.Request(*of_cpu, op, pre, post, root, on_device=True))
    return out


def _run_alone(world: Member, collective: str, operation: native.DeviceOperation, device: int) -> None:
    """Copy and scale on the device, for the bits that several workers get; the program's current device stays."""
    with _lock, active(device):
        if device not in _executors:
            _executors[device] = create_executor(None, world.topology, device)
        for _ in _executors[device].start(collective, [operation]):
            time.sleep(_LOOK_S)

"""Blocking collectives on NumPy arrays, and on arrays of GPUs by `gpu_ops`, through the engine of the stores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, Optional, TypeVar

import numpy as np

from kvstore_hvd import gpu_ops, mxnet_compat, native
from kvstore_hvd.errors import (
    InvalidRequestError,
    InvalidTypeError,
    ShutdownError,
    UnsupportedDtypeError,
    fault_of_text,
    message,
)
from kvstore_hvd.gpu.arrays import is_on_gpu
from kvstore_hvd.world import process

__all__ = ["allreduce", "allreduce_init", "barrier", "broadcast"]

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
    if _is_on_gpu(array):
        return gpu_ops.allreduce(array, name, op, out, float(prescale), float(postscale))  # type: ignore[no-any-return]
    out = _check_arrays("allreduce", name, array, out)
    _run("allreduce", name, array, out, op, float(prescale), float(postscale))
    return out


def allreduce_init(
    array: Array,
    name: str,
    op: Op = "sum",
    out: Optional[Array] = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Callable[[], Array]:
    """Prepare an allreduce of the same arrays for many calls, which then cost the least.

    As MPI's persistent collectives (MPI-4.1, 6.13): all arguments are checked now, and nothing is communicated. Calls
    are matched by name, also with those of `allreduce`. Prepare it again after `reset`.

    Parameters
    ----------
    array, name, op, out, prescale, postscale
        As `allreduce`, but of NumPy only. The memory of both arrays must not be replaced (``resize``).

    Returns
    -------
    callable
        Without arguments: reduces the values of `array`, waits, and returns `out`. Raises `MismatchError` and
        `HorovodInternalError` as `allreduce`, and `ShutdownError` after the end of the world that prepared it.

    Raises
    ------
    InvalidRequestError, UnsupportedDtypeError, InvalidTypeError
        The arguments are wrong.
    """
    _check_call("allreduce", name, op)
    mxnet_compat.collectives.counts.reductions += 1
    out = _check_arrays("allreduce", name, array, out)
    scale = (float(prescale), float(postscale))
    world = process.current().member
    if world.is_alone:
        generation = world.topology.generation

        def run_alone() -> Array:
            if not world.is_alone or world.topology.generation != generation:
                fact = f"it was prepared in a world that has ended (generation {generation})."
                raise ShutdownError(_text("allreduce", name, fact, "call allreduce_init() again."))
            _alone(array, *scale, out)
            return out

        return run_alone
    request = _request("allreduce", name, array, out, op, *scale)
    return world.engine().prepare(request, out, array)


def broadcast(array: Array, root: int, name: str, out: Optional[Array] = None) -> Array:
    """Give every worker the root's array and wait for it.

    Parameters
    ----------
    array : numpy.ndarray
        C-contiguous, of equal shape and dtype on all workers; its values matter on the root only. Dtypes and arrays on
        GPUs as in `allreduce`.
    root : int
        Rank of the worker that has the values.
    name : str
        Matches the call with those of the other workers.
    out : numpy.ndarray, optional
        Receives the result; may be `array` itself (in place). By default a new array.

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
    if _is_on_gpu(array):
        return gpu_ops.broadcast(array, int(root), name, out)  # type: ignore[no-any-return]
    out = _check_arrays("broadcast", name, array, out)
    _run("broadcast", name, array, out, root=int(root))
    return out


def barrier(name: str = "barrier") -> None:
    """Wait until every worker has called it. Does not wait for pending operations on MXNet arrays."""
    _check_call("barrier", name)
    process.current().member.barrier(name)


def _is_on_gpu(array: Any) -> bool:
    return not isinstance(array, np.ndarray) and is_on_gpu(array)


def _run(
    collective: str,
    name: str,
    array: Any,
    out: Any,
    op: str = "sum",
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
) -> None:
    world = process.current().member
    if world.is_alone:
        _alone(array, prescale, postscale, out)
        return
    with world.submitting():
        world.engine().run(_request(collective, name, array, out, op, prescale, postscale, root))


def _request(
    collective: str,
    name: str,
    array: Any,
    out: Any,
    op: str,
    prescale: float,
    postscale: float,
    root: int = 0,
) -> native.Request:
    return native.Request(
        collective,
        f"np/{name}",
        f"'{name}'",
        [_address(array)],
        [_address(out)],
        array.shape,
        _name_of(array.dtype),
        op,
        prescale,
        postscale,
        root,
    )


def _alone(array: Any, prescale: float, postscale: float, out: Any) -> None:
    if prescale == 1.0 and postscale == 1.0:
        if out is not array:
            np.copyto(out, array)
        return
    native.scale(_name_of(array.dtype), _address(array), _address(out), array.size, prescale, postscale)


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


def _check_arrays(operation: str, name: str, array: Any, out: Optional[Any]) -> Any:
    """The array for the result, after all checks of both arrays that need no other worker."""
    _check_array(operation, name, array, "array")
    if out is None:
        return np.empty_like(array)
    if out is not array:
        _check_array(operation, name, out, "out")
    fact = fix = ""
    if out.shape != array.shape or out.dtype != array.dtype:
        fact = f"out is {out.dtype.name} {out.shape}, but array is {array.dtype.name} {array.shape}."
        fix = "pass an out of the same shape and dtype."
    elif not out.flags.writeable:
        fact, fix = "out is read-only.", "pass an array that can be written."
    elif out is not array and _address(out) != _address(array) and np.may_share_memory(out, array):
        fact, fix = "out overlaps array.", "pass the array itself, or separate memory."
    if fact:
        raise InvalidRequestError(_text(operation, name, fact, fix))
    return out


def _check_array(operation: str, name: str, array: Any, role: str) -> None:
    if not isinstance(array, np.ndarray):
        fact = f"{role} is a {type(array).__name__}, not a numpy.ndarray."
        fix = "pass a NumPy array; arrays of MXNet go through a store, mx.kv.create('horovod')."
        if is_on_gpu(array):  # CuPy's class has the same name
            fact = f"{role} is on a GPU."
            fix = "pass array and out both on the GPU, to allreduce or broadcast; what is prepared is on the CPU."
        raise InvalidTypeError(_text(operation, name, fact, fix))
    if not _name_of(array.dtype):
        shown = array.dtype.name if array.dtype.isnative else f"{array.dtype.str} (foreign byte order)"
        details = (f"Supported: {' '.join(native.DTYPES)}",)
        raise UnsupportedDtypeError(
            _text(operation, name, f"cannot {_VERBS[operation]} dtype {shown}.", "cast with .astype(...).", details)
        )
    if not array.flags.c_contiguous:
        fix = "copy it with numpy.ascontiguousarray(x)."
        raise InvalidRequestError(_text(operation, name, f"{role} is not C-contiguous.", fix))


# NumPy takes about a microsecond for each of the two attributes.
@functools.lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    """The name of a dtype that can be reduced; '' for others."""
    return str(dtype.name) if dtype.name in native.DTYPES and dtype.isnative else ""


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


_VERBS = {"allreduce": "reduce", "broadcast": "broadcast"}


def _text(operation: str, name: str, fact: str, fix: str, details: tuple[str, ...] = ()) -> str:
    where = process.current().topology.speaker
    return message(fact, **where, operation=operation, name=name, fix=fix, details=details)

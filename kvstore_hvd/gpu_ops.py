"""Blocking collectives on arrays of a GPU, of any library, through the engine of the stores."""

from __future__ import annotations

import threading
import time
from typing import Any

from kvstore_hvd import native
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, message
from kvstore_hvd.gpu.arrays import DeviceArray, device_array, empty_like, is_on_gpu, synchronize
from kvstore_hvd.gpu.executor import Executor
from kvstore_hvd.gpu.runtime import active
from kvstore_hvd.native import DeviceOperation
from kvstore_hvd.world import process
from kvstore_hvd.world.gpus import create_executor

# Seconds between two looks at the device.
_LOOK_S = 20e-6


def allreduce(array: Any, name: str, op: str, out: Any, prescale: float, postscale: float) -> Any:
    """See `numpy_ops.allreduce`, which has checked the other arguments and that `array` is on a GPU."""
    return _run("allreduce", array, name, out, op, prescale, postscale)


def broadcast(array: Any, root: int, name: str, out: Any) -> Any:
    """See `numpy_ops.broadcast`, as for `allreduce`."""
    return _run("broadcast", array, name, out, root=root)


def _run(
    collective: str,
    array: Any,
    name: str,
    out: Any,
    op: str = "sum",
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
) -> Any:
    world = process.current().member
    speaker: dict[str, Any] = {**world.topology.speaker, "operation": collective, "name": name}
    # CUDA fails after the loss of the world and in a forked child: `submitting` raises that cause first.
    with world.submitting():
        source = device_array(array, **speaker)
        if out is None:
            out = empty_like(source, **speaker)
        elif not is_on_gpu(out):
            fact = f"out is a {type(out).__name__} that is not on a GPU, but array is on GPU {source.device}."
            raise InvalidTypeError(message(fact, **speaker, fix="pass an out on the same GPU."))
        target = source if out is array else device_array(out, **speaker)
        _check(source, target, speaker)
        # All work on the arrays ends before other workers read or write them.
        synchronize(source)
        if target is not source:
            synchronize(target)
        inputs, outputs = [source.address], [target.address]
        if world.is_alone:
            count, how = source.count, (source.dtype, op, prescale, postscale, False, root)
            operation = DeviceOperation(name, name, inputs, outputs, count, count, (), *how)
            _run_alone(collective, operation, source.device)
        else:
            world.start_device(source.device)
            what = source.shape, source.dtype, op, prescale, postscale, root
            # The name is that of an operation on the CPU, so that workers that differ get an error.
            label = f"'{name}'"
            request = native.Request(collective, f"np/{name}", label, inputs, outputs, *what, on_device=True)
            world.engine().run(request)
    return out


def _check(source: DeviceArray, target: DeviceArray, speaker: dict[str, Any]) -> None:
    fact = fix = ""
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        fact = f"out is {target.dtype} {target.shape}, but array is {source.dtype} {source.shape}."
        fix = "pass an out of the same shape and dtype."
    elif target.device != source.device:
        fact = f"out is on GPU {target.device}, but array is on GPU {source.device}."
        fix = "pass an out on the same GPU."
    elif target.is_read_only:
        fact, fix = "out is read-only.", "pass an array that can be written."
    elif 0 < abs(target.address - source.address) < source.nbytes:
        fact, fix = "out overlaps array.", "pass the array itself, or separate memory."
    if fact:
        raise InvalidRequestError(message(fact, **speaker, fix=fix))


# -- A world of one -----------------------------------------------------------------------------------------------

_executors: dict[int, Executor] = {}  # by device
_lock = threading.Lock()


def _run_alone(collective: str, operation: DeviceOperation, device: int) -> None:
    """Copy and scale on the device, for the bits that several workers get; the program's current device stays."""
    with _lock, active(device):
        if device not in _executors:
            _executors[device] = create_executor(None, process.current().topology, device)
        executor = _executors[device]
        completion = executor.start(collective, [operation])
        while not completion.done():
            time.sleep(_LOOK_S)

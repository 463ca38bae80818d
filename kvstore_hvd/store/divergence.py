"""Whether the workers still train the same model: their parameters, compared bit by bit through hashes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import DivergedError, HorovodInternalError, InvalidTypeError, message
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member

__all__ = ["verify"]

# Values in place of a hash. An array has one of them as its hash by a chance of 2^-63.
_NO_DATA, _UNREADABLE = 0, -1
_SHOWN = {_NO_DATA: "not initialised", _UNREADABLE: "could not be read"}

_LABEL = "of the parameters' hashes"

Array = Any  # numpy.ndarray


def verify(params: Any) -> None:
    """Check that parameters have equal bits on all workers. Every worker must call it; waits for all.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple
        Parameters of Gluon (of those on several devices, the first one's copy) or arrays of MXNet, in the same order
        on all workers. Parameters that are not differentiable are left out: the running statistics of BatchNorm belong
        to each worker's own data.

    Raises
    ------
    DivergedError
        They differ; on every worker, with the first one that differs and its hashes by rank. The world stays usable.
    MismatchError
        The workers passed different numbers of parameters.
    InvalidTypeError
        Something else was passed; nothing was communicated.
    HorovodInternalError
        The world is lost.
    """
    compare(_labelled(params), "", "")


def compare(parameters: Sequence[tuple[str, Any]], namespace: str, when: str, world: Member | None = None) -> None:
    """Do what `verify` does for (label, parameter or array) pairs, such as ``('dense0_weight' (key 3), p)``."""
    # Calls of one namespace are matched across workers, in their order. `when`, for the message: 'after 100 updates'.
    world = world or process.current().member
    if world.is_alone:
        return
    parameters = [(label, param) for label, param in parameters if getattr(param, "_differentiable", True)]
    hashes = np.empty(len(parameters), np.int64)
    failure: Exception | None = None
    for place, (_, parameter) in enumerate(parameters):
        try:
            hashes[place] = _hash(parameter)
        except Exception as error:  # noqa: BLE001 - any operator may have failed, and the other workers wait
            hashes[place] = _UNREADABLE
            failure = failure or error
    # The greatest of x, and the greatest of ~x, which is ~ of the least. Outside of `submitting`: unread errors of
    # earlier operations are raised by other calls, and every worker has to submit this one.
    extremes = np.concatenate([hashes, ~hashes])
    world.allreduce(f"verify/{namespace}", _LABEL, extremes, "max")
    greatest, least = np.split(extremes, 2)
    differing = np.flatnonzero(greatest != ~least)
    if differing.size:
        first = int(differing[0])
        by_rank = np.zeros(world.topology.size, np.int64)
        by_rank[world.topology.rank] = hashes[first]
        world.allreduce(f"verify/{namespace}/by-rank", _LABEL, by_rank)
        # A worker that ends with the error ends the world. All workers have the table before the first one raises, or
        # another one would report a lost worker instead.
        with contextlib.suppress(HorovodInternalError):
            world.allreduce(f"verify/{namespace}/all-know", _LABEL, np.zeros(1, np.int64))
        failure = failure or _diverged(world, parameters[first][0], by_rank, differing.size, len(parameters), when)
    if failure is not None:
        raise failure


def _diverged(world: Member, label: str, by_rank: Array, differing: int, total: int, when: str) -> DivergedError:
    topology = world.topology
    details = topology.listed(_SHOWN.get(value, f"{value % 2**64:016x}") for value in by_rank.tolist())
    if total > 1:
        details.append(f"{differing} of {total} parameters differ; this is the first one.")
    fact = f"the workers' parameters differ{' ' if when else ''}{when}. Hashes of their bytes:"
    fix = "restore a checkpoint on every worker, and find what only some of them do: set_data(), a skipped step, an "
    fix += "update outside the Trainer, other optimizer settings."
    return DivergedError(message(fact, **topology.prefix, operation=f"verify {label}", details=details, fix=fix))


def _hash(parameter: Any) -> int:
    """64 bits of dtype, shape and bytes."""
    array = parameter
    if mxnet_compat.is_parameter(parameter):
        if not parameter._data:
            return _NO_DATA
        array = parameter._data[0]
    digest = hashlib.blake2b(f"{mxnet_compat.dtype_name(array)} {array.shape}".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(array.asnumpy()).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _labelled(params: Any) -> list[tuple[str, Any]]:
    if hasattr(params, "items"):
        named = [(f"'{name}'", each) for name, each in params.items()]
    elif isinstance(params, (list, tuple)):
        # In MXNet 2 many parameters have the same name.
        named = [(f"'{getattr(each, 'name', 'array')}' (index {place})", each) for place, each in enumerate(params)]
    else:
        raise InvalidTypeError(_wrong(f"params is a {type(params).__name__}."))
    for label, each in named:
        if not mxnet_compat.is_parameter(each) and not mxnet_compat.is_ndarray(each):
            raise InvalidTypeError(_wrong(f"{label} is a {type(each).__name__}."))
    return named


def _wrong(fact: str) -> str:
    topology = process.current().topology
    fix = "pass net.collect_params(), or a dict or list of parameters or arrays of MXNet."
    return message(fact, rank=topology.rank, size=topology.size, operation="verify", fix=fix)

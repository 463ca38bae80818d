"""Python objects, parameters and the states of Trainers, sent to other workers."""

from __future__ import annotations

import os
import pickle
import tempfile
import zlib
from typing import Any, Optional

import numpy as np

from kvstore_hvd import log, mxnet_compat, native
from kvstore_hvd.mxnet.calls import NAMESPACE, Collective
from kvstore_hvd.mxnet.gathers import gather_bytes
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.store.arrays import buffer_like, copy
from kvstore_hvd.store.compression import arrays_from
from kvstore_hvd.store.keys import Group, check_group, unique, wire_name
from kvstore_hvd.store.operations import Operations
from kvstore_hvd.world.member import Member


def broadcast_object(
    obj: Any, root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every worker the root's object; waits for it.

    Parameters
    ----------
    obj : object
        Anything that cloudpickle can write; matters on the root only.
    root_rank : int
        The root's rank among all workers.
    name : str, optional
        Matches the call with those of the other workers. By default the n-th call without a name is matched with the
        n-th such call of the others.
    process_set : ProcessSet
        Who takes part.

    Returns
    -------
    object
        On the root the object itself, elsewhere a copy.

    Raises
    ------
    InvalidRequestError, TypeError, NotInitializedError
        An argument is wrong, or this worker is not a member of the set.
    MismatchError
        The workers name different roots; on all of them.
    Exception
        On the root, what writing the object raised; the others raise InvalidRequestError.
    HorovodInternalError
        The world is lost.
    """
    one = Collective("broadcast_object", process_set, name)
    root = one.root(root_rank)
    is_root = one.world.topology.rank == root
    data, refusal = _written(obj) if is_root and not one.world.is_alone else (b"", None)
    with one.world.submitting():
        received = _broadcast_bytes(one, data, root, refusal)
    return obj if is_root else pickle.loads(received)


def allgather_object(obj: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Give every worker a list of the objects of all workers, in the order of ranks; waits for them.

    They are copies, also of this worker's own. Parameters and exceptions as `broadcast_object`.
    """
    one = Collective("allgather_object", process_set, name)
    data, refusal = _written(obj)
    with one.world.submitting():
        mxnet_compat.collectives.counts.reductions += 1
        return list(map(pickle.loads, gather_bytes(one, one.names()[0], data, refusal)))


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with the root's, on all devices. Asynchronous.

    If the root has made other numbers of updates than another worker, or has states of the optimizer for others of them
    (it has loaded them), `broadcast_trainer_states` follows. So where a Trainer updates them this waits for the others.

    A parameter whose shape is not known yet is broadcast as soon as it is initialised, which must happen on all
    workers, in any order. A copy of it that was made before (``copy.deepcopy(net)``) is not broadcast.

    Parameters
    ----------
    params : dict of str to Parameter or NDArray, ParameterDict, or list of Parameter or NDArray
        Of the same names, or in the same order, on all workers.
    root_rank : int
        The root's rank among all workers.
    prefix : str, optional
        Put before the names in messages.
    process_set : ProcessSet
        Who takes part.

    Raises
    ------
    InvalidRequestError, TypeError, UnsupportedDtypeError, NotInitializedError, RuntimeError
        An argument is wrong, or a parameter has not been initialised; nothing was submitted.
    MismatchError
        When a parameter is read, or by the next call: the workers disagree, and it was left as it was.
    HorovodInternalError
        The world is lost.
    """
    one = Collective("broadcast_parameters", process_set, prefix)
    root = one.root(root_rank)
    groups, deferred = [], []
    named = _named(one, params)
    for key, parameter in named:
        shown = f"{prefix or ''}{key}"
        one.check_name(shown)
        arrays = [parameter] if mxnet_compat.is_ndarray(parameter) else mxnet_compat.arrays_of(parameter)
        if arrays is None:
            deferred.append((shown, parameter))
        else:
            groups.append(Group(shown, [arrays[0]], unique(arrays)))
            check_group(one.call, groups[-1])
    with one.world.submitting():
        # Two networks may have parameters of the same names.
        namespace = f"{NAMESPACE}/{one.unnamed('broadcast_parameters')}"
        if groups:
            Operations(one.world, namespace).broadcast(one.call, groups, 0, root)
        for shown, parameter in deferred:
            _follow(one, process_set, namespace, shown, parameter, root)
        trainers = mxnet_compat.trainers_of(parameter for _, parameter in named)
        states_differ = not one.world.is_alone and _states_differ(one.world, namespace, trainers)
    if states_differ:
        text = "the workers' Trainers differ: the states of their optimizers become those of rank %d, too."
        log.logger.warning(text, root_rank)
        for trainer in trainers:
            broadcast_trainer_states(trainer, root_rank, process_set)


def broadcast_trainer_states(trainer: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite the states of a Gluon Trainer's optimizer with the root's, bit by bit; waits for them.

    As if the root had called ``trainer.save_states`` and the others ``trainer.load_states``: with the optimizer itself,
    its counts of updates and its learning rate, and its momenta on all devices. The Trainer has the same parameters on
    all workers; the other parameters and exceptions are as those of `broadcast_object`.
    """
    one = Collective("broadcast_trainer_states", process_set)
    root = one.root(root_rank)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "states")
        data, refusal = b"", None
        try:
            trainer.save_states(path)  # on all: it may have to make its store first, which is collective
            with open(path, "rb") as file:
                data = file.read()
        except Exception as error:  # noqa: BLE001 - it may raise anything, and the other workers wait
            refusal = error
        with one.world.submitting():
            states = _broadcast_bytes(one, data, root, refusal)
        if one.world.topology.rank != root:
            with open(path, "wb") as file:
                file.write(states)
            trainer.load_states(path)
        mxnet_compat.count_on_own_devices(trainer)


def _written(obj: Any) -> tuple[bytes, Optional[Exception]]:
    """An object as bytes, or why it cannot be written."""
    import cloudpickle

    try:
        return cloudpickle.dumps(obj, protocol=5), None
    except Exception as error:  # noqa: BLE001 - objects may raise anything, and the other workers wait
        return b"", error


def _broadcast_bytes(one: Collective, data: bytes, root: int, refusal: Optional[Exception]) -> memoryview | bytes:
    """The root's bytes; waits for them, inside ``world.submitting()``. A `refusal` of any worker fails on all."""
    mxnet_compat.collectives.counts.broadcasts += 1
    call, world = one.call, one.world
    if world.is_alone:
        if refusal is not None:
            raise refusal
        return data
    (name,) = one.names()
    row = np.array([root, len(data), refusal is not None], np.int64)
    table = world.all_rows(call.operation, wire_name(NAMESPACE, name), f"'{name}'", row)
    if refusal is not None:
        raise refusal
    roots = [f"root {call.topology.all_ranks[rank]}" for rank in table[:, 0].tolist()]
    call.compare(name, "the root", roots, "name the same root everywhere.")
    refusing = np.flatnonzero(table[:, 2])
    if refusing.size:
        fact = f"{call.topology.rank_list(refusing.tolist())} could not write what was to be sent."
        one.refuse(fact, "see the error there.", name)
    buffer = np.frombuffer(data, np.uint8) if world.topology.rank == root else np.empty(table[root, 1], np.uint8)
    place = [buffer.ctypes.data]
    request = native.Request(
        "broadcast", wire_name(NAMESPACE, f"{name}/bytes"), f"'{name}'", place, place, buffer.shape, "uint8", root=root
    )
    world.engine().run(request)
    return buffer.data


def _named(one: Collective, params: Any) -> list[tuple[str, Any]]:
    """Names and parameters, in a fixed order."""
    if hasattr(params, "items"):
        named = sorted((str(key), value) for key, value in params.items()) if params else []
    elif isinstance(params, (list, tuple)):
        named = [(f"{index}.{getattr(each, 'name', 'array')}", each) for index, each in enumerate(params)]
    else:
        fix = "pass net.collect_params(), a dict or a list of parameters or arrays."
        one.refuse(f"params is a {type(params).__name__}.", fix)
    for key, value in named:
        if not mxnet_compat.is_ndarray(value) and not mxnet_compat.is_parameter(value):
            fact = f"it is a {type(value).__name__}, neither a parameter nor an array of MXNet."
            one.refuse(fact, "pass net.collect_params().", key)
    return named


def _states_differ(world: Member, namespace: str, trainers: list[Any]) -> bool:
    """Whether the workers have as many Trainers, which differ; waits for them if this one has any."""
    states = [
        (each._optimizer.num_update, [mxnet_compat.states_of(one) for one in each._updaters[:1]]) for each in trainers
    ]
    rows = np.zeros((world.topology.size, 2), np.int64)
    rows[world.topology.rank] = len(trainers), zlib.crc32(repr(states).encode())
    table = arrays_from({"states": rows})["states"]
    handles = [mxnet_compat.handle_of(table)]
    name = wire_name(namespace, "states")
    world.mxnet_adapter().pushpull(name, "the states of the optimizer", handles, handles)
    if not trainers:
        return False
    numbers, digests = table.asnumpy().T
    return len(set(numbers)) == 1 < len(set(digests))


def _follow(one: Collective, process_set: ProcessSet, namespace: str, shown: str, parameter: Any, root: int) -> None:
    """Broadcast a parameter once it is initialised. Nothing waits, and names match: the order may be any."""

    def broadcast(parameter: Any) -> None:
        world = process_set._world(one.call.operation)
        with world.submitting():
            arrays = mxnet_compat.arrays_of(parameter) or []
            check_group(one.call, Group(shown, arrays[:1], arrays))
            # A copy takes part in the operation. Operators of MXNet share memory for intermediate results: one that
            # waits for this parameter would keep another parameter from being initialised.
            wire = buffer_like(arrays[0])
            if world.topology.rank == root:
                copy(arrays[0], wire)
            Operations(world, namespace).broadcast(one.call, [Group(shown, [wire], [wire])], 0, root)
            if world.topology.rank != root:
                for each in unique(arrays):
                    copy(wire, each)

    mxnet_compat.after_initialization(parameter, wire_name(namespace, shown), broadcast)

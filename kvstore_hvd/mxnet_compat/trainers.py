"""What Gluon's Trainers call their parameters, and what takes part for them in a Join."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

__all__ = [
    "count_on_own_devices",
    "devices_of",
    "is_trainer",
    "joinable_of",
    "key_of",
    "labels_of",
    "note_joinable",
    "states_in",
    "states_of",
    "trainers_of",
]

_JOINABLE = "_kvstore_hvd_joinable"


def is_trainer(thing: Any) -> bool:
    """Whether it is a Trainer of Gluon. Does not import MXNet."""
    mxnet = sys.modules.get("mxnet")
    return mxnet is not None and isinstance(thing, mxnet.gluon.Trainer)


def devices_of(trainer: Any) -> list[Any]:
    """The contexts of MXNet that its parameters live on."""
    devices: list[Any] = trainer._devices if hasattr(trainer, "_devices") else trainer._contexts  # MXNet 2, MXNet 1
    return devices


def trainers_of(parameters: Iterable[Any]) -> list[Any]:
    """The Trainers that update these parameters, in their order; of what is no parameter there is none."""
    found = [getattr(each, "_trainer", None) for each in parameters]
    trainers = [each() if isinstance(each, weakref.ref) else each for each in found]  # MXNet 2, MXNet 1
    return list({id(each): each for each in trainers if each is not None}.values())


def states_in(trainer: Any) -> list[int]:
    """For which parameters its optimizer has states, as numbers in order."""
    return states_of(trainer._updaters[0]) if trainer._updaters else []


def states_of(updater: Any) -> list[int]:
    """For which parameters MXNet's Updater has states, as numbers in order."""
    return sorted(index for index, state in updater.states.items() if state is not None)


def count_on_own_devices(trainer: Any) -> None:
    """Have the optimizer go on counting updates on the Trainer's devices, whatever devices it has counted on."""
    # MXNet counts for each device: on another one a correction of bias, or a schedule, would begin anew.
    counts: dict[int, dict[Any, int]] = trainer._optimizer._all_index_update_counts
    present: dict[Any, int] = {}
    for table in counts.values():
        present.update((index, max(count, present.get(index, 0))) for index, count in table.items())
    for device in devices_of(trainer):
        counts.setdefault(device.device_id, {})
    for table in counts.values():
        table.update(present)


def key_of(trainer: Any, param: Any) -> int:
    """What a Trainer calls a parameter on its store."""
    identity = param._uuid if hasattr(param, "_uuid") else param.name  # MXNet 2, MXNet 1
    key: int = trainer._param2idx[identity]
    return key


def labels_of(trainer: Any) -> dict[int, str]:
    """Names of a Trainer's parameters by the keys that it uses for them on the store."""
    names: dict[int, str] = getattr(trainer, "_kvstore_hvd_names", {})
    return {key_of(trainer, param): names.get(id(param), param.name) for param in trainer._params}


def note_joinable(trainer: Any, joinable: Any) -> None:
    """Have the Trainer's steps go through ``joinable.step``, see `join.trainers`."""
    setattr(trainer, _JOINABLE, joinable)


def joinable_of(trainer: Any) -> Any:
    """What `note_joinable` was told, or None."""
    return vars(trainer).get(_JOINABLE)

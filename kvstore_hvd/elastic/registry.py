"""Which handler takes which values of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.elastic.copies import is_sampler
from kvstore_hvd.elastic.handlers import StateHandler
from kvstore_hvd.elastic.parameters import ParametersHandler
from kvstore_hvd.elastic.sampler_handler import SamplerHandler
from kvstore_hvd.elastic.trainers import TrainerHandler

Maker = Callable[[Any], StateHandler]
Registry = list[tuple[type, Maker]]


class _Asked(type):
    """A class whose instances are those for which ``asks`` says so. For those of MXNet, which is not imported here."""

    asks: Callable[[Any], bool]

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.asks(instance)


def _kind(name: str, asks: Callable[[Any], bool]) -> type:
    return _Asked(name, (), {"asks": staticmethod(asks)})


_registry: Registry = [
    (_kind("Block", mxnet_compat.is_block), ParametersHandler),
    (_kind("Parameters", mxnet_compat.is_parameters), ParametersHandler),
    (_kind("Trainer", mxnet_compat.is_trainer), TrainerHandler),
    (_kind("ElasticSampler", is_sampler), SamplerHandler),
]


def get_handler_registry() -> Registry:
    """Which handlers there are.

    Returns
    -------
    list of (type, callable)
        The first entry whose type a value is an instance of makes its `StateHandler`. This is the list itself: entries
        added to it apply to states made later.
    """
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers for the states that are made from now on; see `get_handler_registry`."""
    global _registry
    _registry = registry


def maker_for(value: Any) -> Maker | None:
    """What makes the handler of the value; None if it is to be saved as an object."""
    return next((make for kind, make in _registry if isinstance(value, kind)), None)


def handler_for(value: Any) -> StateHandler | None:
    """A handler of the value, which has saved it; None if it is to be saved as an object."""
    make = maker_for(value)
    return None if make is None else make(value)

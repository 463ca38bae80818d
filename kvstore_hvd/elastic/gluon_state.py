"""The state of a training with Gluon, and which handler takes which of its values."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.elastic.checkpoint import Stored
from kvstore_hvd.elastic.handlers import RandomHandler, SamplerHandler, StagedHandler, StateHandler
from kvstore_hvd.elastic.parameters import ParametersHandler, drain
from kvstore_hvd.elastic.state import ObjectState, is_sampler
from kvstore_hvd.elastic.trainers import TrainerHandler
from kvstore_hvd.errors import InvalidRequestError, message

Maker = Callable[[Any], StateHandler]
Registry = list[tuple[type, Maker]]


# The handler of the seed; no attribute can have this name.
_NUMBERS = "random.numbers"


class _Kind(type):
    """A class whose instances are the values for which ``asks`` returns True; it does not import MXNet."""

    asks: Callable[[Any], bool]

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.asks(instance)


_registry: Registry = [
    (_Kind("Block", (), {"asks": mxnet_compat.is_block}), ParametersHandler),
    (_Kind("Parameters", (), {"asks": mxnet_compat.is_parameters}), ParametersHandler),
    (_Kind("Trainer", (), {"asks": mxnet_compat.is_trainer}), TrainerHandler),
    (_Kind("Sampler", (), {"asks": is_sampler}), SamplerHandler),
]


def get_handler_registry() -> Registry:
    """The registered handlers, as a list of (type, callable): entries added to it apply to states made later.

    The first entry whose type a value is an instance of makes the value's `StateHandler`.
    """
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers for the states that are made from now on; see `get_handler_registry`."""
    global _registry
    _registry = registry


def _maker_for(value: Any) -> Maker | None:
    """The function that makes the value's handler; None for a value that is saved as an object."""
    return next((make for kind, make in _registry if isinstance(value, kind)), None)


class GluonState(ObjectState):
    """The state from which Gluon training continues: networks, Trainers, samplers, and Python objects.

    Handlers save and restore the first three in place: of networks the values of all parameters and auxiliary states;
    of Trainers the optimizers' states, counts, learning rates and schedulers, and the loss scale, on every device; of
    samplers the samples processed. The parameters of a Trainer that are in no network of the state are saved with it.
    Other values are attributes as in `ObjectState`. Assigning to an attribute with a handler gives the handler the new
    value, and saves it.

    `save` waits for the arrays, and copies them into memory that is allocated once, in turn into one of two copies; a
    file has no residuals of gradient compression. `sync` gives all workers rank 0's present networks, Trainers and
    samplers, and the other attributes that rank 0 has saved.

    Parameters
    ----------
    net : Block, ParameterDict or dict of Parameter, optional
        Parameters have been initialised; their shapes need not be known yet.
    trainer : mxnet.gluon.Trainer, optional
    seed : int, optional
        Makes random numbers repeatable: those of MXNet, ``numpy.random`` and ``random`` begin anew with each commit or
        save, from the seed, the number of these and the rank. A training that went on after a fault draws what it would
        have drawn without, if it has as many workers as before. Equal on all workers.
    **kwargs
        Further ones of these, an `ElasticSampler`, values with a registered handler (see `get_handler_registry`), and
        any other attributes.

    Raises
    ------
    InvalidRequestError
        A value cannot be saved, or an attribute's name is already used by the class.
    UnsupportedDtypeError
        An array is sparse.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, net: Any = None, trainer: Any = None, seed: int | None = None, **kwargs: Any) -> None:
        self._handlers = {}
        values = {"net": net, "trainer": trainer, **kwargs}
        makers = {name: _maker_for(value) for name, value in values.items()}
        handlers = {name: make(values[name]) for name, make in makers.items() if make is not None}
        super().__init__(**{name: value for name, value in values.items() if name not in handlers})
        for name, handler in handlers.items():
            self._add(name, handler.value)
        self._handlers.update(handlers)
        if seed is not None:
            self._handlers[_NUMBERS] = RandomHandler(operator.index(seed))
        self._add_left_out()

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """As of any `ObjectState`; and random numbers begin anew, see `seed`."""
        if _NUMBERS in self._handlers:
            self._handlers[_NUMBERS].advance()  # type: ignore[attr-defined]
        super().save(path)

    def _save(self) -> None:
        staged, others = self._by_name()
        for handler in staged:
            handler.stage()
        copies = self._present()
        for other in others:
            other.save()
        self._adopt(staged, copies)

    def restore(self) -> None:
        """Go back to the saved state, in place."""
        drain()
        for handler in self._handlers.values():
            handler.restore()
        if _NUMBERS in self._handlers:  # again: a parameter may have been initialised
            self._handlers[_NUMBERS].restore()
        super().restore()

    def sync(self) -> None:
        """Give all workers rank 0's state, and save it. Every worker calls it.

        Raises
        ------
        MismatchError
            On all workers: a worker does not have the same networks, Trainers, samplers and attributes as rank 0.
            Nothing was changed.
        HorovodInternalError
            The world is lost; the last copies stay.
        """
        names, objects = self._bcast_object((self._names(), self._saved_state))
        self._check_same(self._names(), names)
        staged, others = self._by_name()
        for handler in staged:
            handler.receive()
        for other in others:
            other.sync()
        self._adopt(staged, objects)
        for handler in staged:
            handler.settle()
        super().restore()

    def _content(self) -> dict[str, Any]:
        contents = {name: each.content() for name, each in self._handlers.items()}
        for name, content in contents.items():
            for part in content if isinstance(content, tuple) else ():
                if isinstance(part, Stored):
                    part.name = name
        return {**super()._content(), "handlers": contents}

    def _fault(self, content: dict[str, Any]) -> str:
        fault = super()._fault(content)
        for name, each in self._handlers.items():
            fault = fault or each.misfit(content["handlers"][name])
        return fault

    def _take(self, content: dict[str, Any]) -> None:
        for name, each in self._handlers.items():
            each.take(content["handlers"][name])
        self._adopt(self._by_name()[0], content["objects"])

    def _adopt(self, staged: list[StagedHandler], objects: dict[str, Any]) -> None:
        for handler in staged:
            handler.adopt()
        self._saved_state = objects

    def _names(self) -> list[str]:
        return [*(f"{name} (with a handler)" for name in sorted(self._handlers)), *super()._names()]

    def reset(self) -> None:
        """Adapt samplers to the new world."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = vars(self).get("_handlers", {})
        make = _maker_for(value)
        if name in handlers:
            before = handlers[name].value
            if make is not _maker_for(before):
                fact = f"{type(value).__name__} cannot take the place of {type(before).__name__}."
                fix = "assign something of the same kind, or make another state."
                raise InvalidRequestError(message(fact, operation="state", name=name, fix=fix))
            handlers[name].set_value(value)
            self._add_left_out()
        elif make is not None and name in vars(self).get("_saved_state", {}):
            handlers[name] = make(value)
            del self._saved_state[name]
            self._add_left_out()
        super().__setattr__(name, value)

    def _by_name(self) -> tuple[list[StagedHandler], list[StateHandler]]:
        """Staged and other handlers in the order of their names; workers may assign in other orders."""
        handlers = [each for _, each in sorted(self._handlers.items())]
        staged = [each for each in handlers if isinstance(each, StagedHandler)]
        return staged, [each for each in handlers if not isinstance(each, StagedHandler)]

    def _add_left_out(self) -> None:
        """Handle the parameters of Trainers that are in no other handler, under names that no attribute can have."""
        for name in [name for name in self._handlers if name.endswith(".params")]:
            del self._handlers[name]
        known = set()
        for handler in self._handlers.values():
            if isinstance(handler, ParametersHandler):
                known |= {id(each) for each in mxnet_compat.named_parameters(handler.value).values()}
        for name, handler in list(self._handlers.items()):
            if isinstance(handler, TrainerHandler):
                left = {f"{at}": each for at, each in enumerate(handler.value._params) if id(each) not in known}
                if left:
                    self._handlers[f"{name}.params"] = ParametersHandler(left)

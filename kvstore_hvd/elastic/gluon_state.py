"""The state of a training with Gluon."""

from __future__ import annotations

import os
from typing import Any

from kvstore_hvd.elastic.array_handlers import drain
from kvstore_hvd.elastic.handlers import StagedHandler, StateHandler
from kvstore_hvd.elastic.parameters import ParametersHandler
from kvstore_hvd.elastic.registry import handler_for, maker_for
from kvstore_hvd.elastic.state import ObjectState
from kvstore_hvd.elastic.trainers import TrainerHandler
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.mxnet_compat import named_parameters


class GluonState(ObjectState):
    """The state from which Gluon training continues: networks, Trainers, samplers, and Python objects.

    Handlers save and restore the first three in place: of networks the values of all parameters and auxiliary states;
    of Trainers the optimizers' states, counts, learning rates and schedulers, and the loss scale, on every device; of
    samplers the samples processed. The parameters of a Trainer that are in no network of the state are saved with it.
    Other values are attributes as in `ObjectState`. Assigning to an attribute with a handler gives the handler the new
    value, and saves it.

    `save` copies arrays into memory that is allocated once; it holds two copies of them. A save that fails leaves the
    last one whole. `sync` gives all workers rank 0's present networks, Trainers and samplers, and the other attributes
    as rank 0 saved them last.

    Parameters
    ----------
    net : Block, ParameterDict or dict of Parameter, optional
        Parameters have been initialised; their shapes need not be known yet.
    trainer : mxnet.gluon.Trainer, optional
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

    def __init__(self, net: Any = None, trainer: Any = None, **kwargs: Any) -> None:
        self._handlers = {}
        handlers: dict[str, StateHandler] = {}
        objects: dict[str, Any] = {}
        for name, value in {"net": net, "trainer": trainer, **kwargs}.items():
            handler = handler_for(value)
            if handler is None:
                objects[name] = value
            else:
                handlers[name] = handler
        super().__init__(**objects)
        for name, handler in handlers.items():
            self._add(name, handler.value)
        self._handlers.update(handlers)
        self._add_left_out()

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Save everything; waits for the arrays.

        Parameters
        ----------
        path : path-like, optional
            As `ObjectState.save`. Residuals of gradient compression are not written.

        Raises
        ------
        MXNetError, HorovodInternalError
            The computation of an array failed, or the world is lost; what was saved last is still there.
        InvalidRequestError
            A value cannot be copied, likewise; or it cannot be pickled, or its handler has no ``content``.
        OSError
            As `ObjectState.save`.
        """
        super().save(path)

    def _save(self) -> None:
        staged = self._staged()
        for handler in staged:
            handler.stage()
        copies = self._present()
        for other in self._others():
            other.save()
        self._adopt(staged, copies)

    def restore(self) -> None:
        """Go back to what was saved last, in place."""
        drain()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all workers rank 0's state, and save it. Every worker calls it.

        Raises
        ------
        MismatchError
            On all workers: a worker does not have the same networks, Trainers, samplers and attributes as rank 0.
            Nothing was changed.
        HorovodInternalError
            The world is lost; what was saved last is still there.
        """
        self._check_same(self._names(), self._bcast_object(self._names()))
        staged = self._staged()
        for handler in staged:
            handler.receive()
        for other in self._others():
            other.sync()
        self._adopt(staged, self._bcast_object(self._saved_state))
        for handler in staged:
            handler.settle()
        super().restore()

    def _content(self) -> dict[str, Any]:
        return {**super()._content(), "handlers": {name: each.content() for name, each in self._handlers.items()}}

    def _fault(self, content: dict[str, Any]) -> str:
        fault = super()._fault(content)
        for name, each in self._handlers.items():
            fault = fault or each.misfit(content["handlers"][name])
        return fault

    def _take(self, content: dict[str, Any]) -> None:
        staged = self._staged()
        for name, each in self._handlers.items():
            each.take(content["handlers"][name])
        self._adopt(staged, content["objects"])

    def _names(self) -> list[str]:
        return [*(f"{name} (with a handler)" for name in sorted(self._handlers)), *super()._names()]

    def reset(self) -> None:
        """Adapt samplers to the new world."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = vars(self).get("_handlers", {})
        if name in handlers:
            before = handlers[name].value
            if maker_for(value) is not maker_for(before):
                fact = f"{type(value).__name__} cannot take the place of {type(before).__name__}."
                fix = "assign something of the same kind, or make another state."
                raise InvalidRequestError(message(fact, operation="state", name=name, fix=fix))
            handlers[name].set_value(value)
            self._add_left_out()
        elif name in vars(self).get("_saved_state", {}):
            handler = handler_for(value)
            if handler is not None:
                del self._saved_state[name]
                handlers[name] = handler
                self._add_left_out()
        super().__setattr__(name, value)

    # In the order of their names: that in which they were assigned may differ between workers.

    def _staged(self) -> list[StagedHandler]:
        return [each for _, each in sorted(self._handlers.items()) if isinstance(each, StagedHandler)]

    def _others(self) -> list[StateHandler]:
        return [each for _, each in sorted(self._handlers.items()) if not isinstance(each, StagedHandler)]

    def _adopt(self, staged: list[StagedHandler], copies: dict[str, Any]) -> None:
        for handler in staged:
            handler.adopt()
        self._saved_state = copies

    def _add_left_out(self) -> None:
        """Handle the parameters of Trainers that no other handler has."""
        for name in [name for name in self._handlers if _is_left_out(name)]:
            del self._handlers[name]
        known = set()
        for handler in self._handlers.values():
            if isinstance(handler, ParametersHandler):
                known |= {id(each) for each in named_parameters(handler.value).values()}
        for name, handler in list(self._handlers.items()):
            if isinstance(handler, TrainerHandler):
                left = {f"{at}": each for at, each in enumerate(handler.value._params) if id(each) not in known}
                if left:
                    self._handlers[_left_out(name)] = ParametersHandler(left)


# No name that an attribute can have.
def _left_out(name: str) -> str:
    return f"{name}.params"


def _is_left_out(name: str) -> bool:
    return name.endswith(".params")

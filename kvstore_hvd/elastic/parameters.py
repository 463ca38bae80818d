"""The handler of parameters: of a Block, a ``ParameterDict`` or a dict of them, on all devices."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.elastic.array_handlers import Arrays, ArraysHandler, Details
from kvstore_hvd.elastic.images import Image, Spec, spec_of
from kvstore_hvd.errors import InvalidRequestError, message


class ParametersHandler(ArraysHandler):
    """Handler of parameters with their auxiliary states."""

    # A parameter that waits for its shape is saved as it is when it gets it. Gradients are no part of the state; those
    # that add up (``grad_req='add'``) are zero after a restore.

    def __init__(self, value: Any) -> None:
        self._first: dict[str, Image] = {}  # initial values of those that got their shapes after they were saved
        self._awaited: set[int] = set()
        self._named: dict[str, Any] = {}
        self._found: list[Any] = []  # in the value, when `_named` was made of it
        super().__init__(value)

    def set_value(self, value: Any) -> None:
        """See `StateHandler.set_value`."""
        self._first, self._awaited = {}, set()
        super().set_value(value)

    def describe(self) -> tuple[Details, Arrays]:
        """See `ArraysHandler.describe`."""
        devices: dict[str, int | None] = {}
        found: Arrays = []
        for name, parameter in self._parameters().items():
            arrays = self._arrays_of(name, parameter)
            devices[name] = None if arrays is None else len(arrays)
            if arrays is None:
                self._await(name, parameter)
            else:
                found += [(name, array) for array in arrays]
        return {"devices": devices}, found

    def adopt(self) -> None:
        """See `StagedHandler.adopt`."""
        super().adopt()
        devices = self._saved.details["devices"]
        self._first = {name: image for name, image in self._first.items() if devices.get(name) is None}

    def fault(self, details: Details, specs: Sequence[Spec]) -> str:
        """See `ArraysHandler.fault`."""
        parameters = self._parameters()
        here, there = set(parameters), set(details["devices"])
        for names, where in ((here - there, "here only"), (there - here, "there only")):
            if names:
                return f"there are {len(here)} parameters here and {len(there)} there; '{min(names)}' is {where}."
        for name, number in _first_numbers(details).items():
            wrong = mxnet_compat.misfit(parameters[name], specs[number].shape, specs[number].dtype)
            if wrong:
                return f"parameter '{name}' has {wrong}."
        return ""

    def conform(self, details: Details, specs: Sequence[Spec]) -> Sequence[tuple[Any, int]]:
        """See `ArraysHandler.conform`."""
        numbers = _first_numbers(details)
        targets = []
        for name, parameter in self._parameters().items():
            number = numbers.get(name)
            if number is not None and mxnet_compat.is_deferred(parameter):
                mxnet_compat.initialize(parameter, specs[number].shape)
            arrays = self._arrays_of(name, parameter) or []
            if number is not None:
                # On more devices than rank 0 has, the others take the first one's values.
                count = details["devices"][name]
                targets += [(array, number + (at if at < count else 0)) for at, array in enumerate(arrays)]
            elif name in self._first:
                self._first[name].write(zip(arrays, range(len(arrays))))
            mxnet_compat.zero_added_gradients(parameter)
        return targets

    def _parameters(self) -> dict[str, Any]:
        """The parameters by their names, which take longer to find than whether there are other ones."""
        found = mxnet_compat.parameters_in(self.value)
        if found != self._found:
            self._named, self._found = mxnet_compat.named_parameters(self.value), found
        return self._named

    def _await(self, name: str, parameter: Any) -> None:
        """Keep the first values of a parameter when it gets its shape."""
        if id(parameter) in self._awaited:
            return
        self._awaited.add(id(parameter))
        handler = weakref.ref(self)  # which holds the parameter

        def keep_first(made: Any) -> None:
            alive = handler()
            if alive is not None:
                alive._keep_first(name, made)

        mxnet_compat.after_initialization(parameter, "", keep_first)

    def _keep_first(self, name: str, parameter: Any) -> None:
        if id(parameter) not in self._awaited:
            return  # of an earlier value
        self._awaited.discard(id(parameter))
        arrays = self._arrays_of(name, parameter) or []
        image = self._first[name] = Image()
        image.fit([spec_of(name, array) for array in arrays])
        image.read(arrays)

    @staticmethod
    def _arrays_of(name: str, parameter: Any) -> list[Any] | None:
        try:
            return mxnet_compat.arrays_of(parameter)
        except RuntimeError as error:
            fix = "call initialize() before the state is made; sparse parameters cannot be saved."
            text = message("it has no values that could be saved.", operation="state", name=name, fix=fix)
            raise InvalidRequestError(text) from error


def _first_numbers(details: Details) -> dict[str, int]:
    """The number of each parameter's array on the first device; not of those that wait for their shapes."""
    numbers: dict[str, int] = {}
    number = 0
    for name, count in details["devices"].items():
        if count is not None:
            numbers[name] = number
            number += count
    return numbers

"""Parts of a state that consist of many arrays: the base class, and parameters.

The values of all arrays of a handler lie side by side in memory of this process, an `Image`, which is allocated once
and broadcast as a single operation. A handler has two images: one is saved, the other is the next save's.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore_hvd import log, mxnet_compat, native
from kvstore_hvd.elastic.checkpoint import Stored
from kvstore_hvd.elastic.handlers import StagedHandler
from kvstore_hvd.elastic.state import deep_copy, raise_on_all
from kvstore_hvd.errors import InvalidRequestError, UnsupportedDtypeError, message
from kvstore_hvd.mxnet.functions import broadcast_object
from kvstore_hvd.world import process

#: All of a value but the values of its arrays; can be pickled.
Details = dict[str, Any]
#: Arrays with their names, for errors.
Arrays = list[tuple[object, Any]]

# Boundaries in bytes of the arrays (cache lines) and of the image (pages): copies are fastest there.
_ALIGNMENT = 64
_PAGE = 4096


class Spec(NamedTuple):
    """Shape and dtype of an array, and its class: ``mx.np`` or ``mx.nd``."""

    shape: tuple[int, ...]
    dtype: str
    is_np: bool

    @property
    def bytes(self) -> int:
        size = native.ITEM_BYTES.get(self.dtype) or np.dtype(self.dtype).itemsize  # MXNet has more dtypes than travel
        return math.prod(self.shape) * size


class Image:
    """Values of arrays in memory of this process."""

    def __init__(self) -> None:
        self.details: Details = {}
        self.own: dict[str, Any] = {}  # as `ArraysHandler.own`
        self.specs: tuple[Spec, ...] = ()
        self.memory = np.empty(0, np.uint8)  # all values
        self._allocated = self.memory
        self._places: list[tuple[Any, Any]] = []  # address and count of elements, as MXNet's C API takes them

    def fit(self, specs: Sequence[Spec]) -> None:
        """Make room for arrays of these specs; the values are lost."""
        specs = tuple(specs)
        if specs == self.specs:
            return
        *offsets, size = itertools.accumulate((-(-spec.bytes // _ALIGNMENT) * _ALIGNMENT for spec in specs), initial=0)
        if not size <= self._allocated.size <= 2 * size + _PAGE:
            raw = np.empty(size + _PAGE, np.uint8)
            start = -raw.ctypes.data % _PAGE
            self._allocated = raw[start : start + size]
            self._allocated[:] = 0  # the first read of values does not wait for page faults
        self.specs, self.memory = specs, self._allocated[:size]
        start = self._allocated.ctypes.data
        self._places = [
            (ctypes.c_void_p(start + offset), ctypes.c_size_t(math.prod(spec.shape)))
            for spec, offset in zip(specs, offsets)
        ]

    def read(self, arrays: Iterable[Any]) -> None:
        """Copy the values of arrays, one for each spec; waits for them."""
        mxnet_compat.read_into(arrays, self._places)

    def values(self, number: int) -> Any:
        """The bytes of an array, as a part of the memory."""
        begin = self._places[number][0].value - self.memory.ctypes.data
        return self.memory[begin : begin + self.specs[number].bytes]

    def write(self, arrays: Iterable[tuple[Any, int]]) -> None:
        """Overwrite arrays, each with the values of the given number."""
        for array, number in arrays:
            mxnet_compat.write_from(array, self._places[number][0].value, self.specs[number].bytes)


class ArraysHandler(StagedHandler):
    """Saves a value in two images in turn, and sends it as a single operation. Base class.

    The ``content`` of a value has its details, its specs and its memory; `misfit` needs the first two.
    """

    def __init__(self, value: Any) -> None:
        self._saved, self._spare = Image(), Image()
        self._specs: dict[int, tuple[Any, Spec]] = {}  # by the identity of an array, whose spec never changes
        super().__init__(value)

    def describe(self) -> tuple[Details, Arrays]:
        """The value's details, which share nothing with the value, and its arrays."""
        raise NotImplementedError

    def conform(self, details: Details, specs: Sequence[Spec]) -> Iterable[tuple[Any, int]]:
        """Give the value these details; returns its arrays, each with the number of its spec."""
        raise NotImplementedError

    def own(self) -> dict[str, Any]:
        """Copies of the arrays that belong to this worker alone, which a sync does not replace; waits for them."""
        return {}

    def restore_own(self, saved: dict[str, Any]) -> None:
        pass

    def spec_of(self, name: object, array: Any) -> Spec:
        """The spec of an array of MXNet; `name` is for errors."""
        if id(array) in self._specs:
            return self._specs[id(array)][1]
        if array.stype != "default":
            fact, fix = f"cannot save {array.stype} arrays.", "in Gluon, create the layer with sparse_grad=False."
            raise UnsupportedDtypeError(message(fact, operation="state", name=str(name), fix=fix))
        shape = tuple(map(int, array.shape))
        return Spec(shape, mxnet_compat.dtype_name(array), mxnet_compat.is_np_ndarray(array))

    def stage(self) -> None:
        details, arrays = self.describe()
        specs = [self.spec_of(name, array) for name, array in arrays]
        self._specs = {id(array): (array, spec) for (_, array), spec in zip(arrays, specs)}
        self._spare.fit(specs)
        self._spare.read([array for _, array in arrays])
        self._spare.details, self._spare.own = details, self.own()

    def receive(self) -> None:
        world = process.current().member
        is_root = world.topology.rank == 0
        spare = self._spare
        if is_root:
            self.stage()
        else:
            spare.own = self.own()
        if world.is_alone:
            return
        content = broadcast_object((spare.details, spare.specs))
        with world.submitting():
            raise_on_all(world, "" if is_root else self.misfit(content))
            spare.details = content[0]
            spare.fit(content[1])
            if spare.memory.size:
                place, shape = [spare.memory.ctypes.data], spare.memory.shape
                name = "elastic/values", "values of arrays"
                world.engine().run(native.Request("broadcast", *name, place, place, shape, "uint8"))

    def content(self) -> Any:
        return self._saved.details, self._saved.specs, self._stored(self._saved)

    def take(self, content: Any) -> None:
        spare = self._spare
        spare.details, specs, stored = content
        spare.fit(specs)
        self._unstore(stored.parts()[0], spare)
        spare.own = self.own()

    def _stored(self, image: Image) -> Stored:
        """The values of an image as a file of MXNet."""
        raise NotImplementedError

    def _unstore(self, data: bytes, image: Image) -> None:
        """Fill an image, which has its details and specs, from such a file."""
        raise NotImplementedError

    def adopt(self) -> None:
        self._saved, self._spare = self._spare, self._saved

    def settle(self) -> None:
        if process.current().topology.rank != 0:  # rank 0's value is the one that was sent
            self.restore()

    def restore(self) -> None:
        drain()
        saved = self._saved
        saved.write(self.conform(deep_copy(saved.details), saved.specs))
        self.restore_own(saved.own)


def drain() -> None:
    """Wait for all computations of MXNet. Their errors concern values that are restored, and are forgotten."""
    try:
        mxnet_compat.waitall()
    except Exception as error:  # noqa: BLE001 - an operation may raise anything
        log.logger.debug("forgotten, since the state is restored: %s", error)


class ParametersHandler(ArraysHandler):
    """Handler of a Block, a ``ParameterDict`` or a dict of parameters, with auxiliary states, on all devices."""

    # A parameter that waits for its shape is saved with its initial values once it has them. Gradients are no part of
    # the state; those that add up (``grad_req='add'``) are zero after a restore.

    def __init__(self, value: Any) -> None:
        self._first: dict[str, Image] = {}  # initial values of parameters that got their shapes after the save
        self._awaited: set[int] = set()
        self._named: dict[str, Any] = {}
        self._found: list[Any] = []  # the parameters from which `_named` was made
        super().__init__(value)

    def set_value(self, value: Any) -> None:
        self._first, self._awaited = {}, set()
        super().set_value(value)

    def describe(self) -> tuple[Details, Arrays]:
        devices: dict[str, int | None] = {}
        found: Arrays = []
        for name, parameter in self._parameters().items():
            arrays = _arrays_of(name, parameter)
            devices[name] = None if arrays is None else len(arrays)
            if arrays is None:
                self._await(name, parameter)
            else:
                found += [(name, array) for array in arrays]
        return {"devices": devices}, found

    def adopt(self) -> None:
        super().adopt()
        devices = self._saved.details["devices"]
        self._first = {name: image for name, image in self._first.items() if devices.get(name) is None}

    def misfit(self, content: Any) -> str:
        details, specs = content[:2]
        parameters = self._parameters()
        here, there = set(parameters), set(details["devices"])
        if here != there:
            name = min(here ^ there)
            where = "here" if name in here else "there"
            return f"there are {len(here)} parameters here and {len(there)} there; '{name}' is {where} only."
        for name, number in _first_numbers(details).items():
            wrong = mxnet_compat.misfit(parameters[name], specs[number].shape, specs[number].dtype)
            if wrong:
                return f"parameter '{name}' has {wrong}."
        return ""

    def conform(self, details: Details, specs: Sequence[Spec]) -> Iterable[tuple[Any, int]]:
        numbers = _first_numbers(details)
        targets = []
        for name, parameter in self._parameters().items():
            number = numbers.get(name)
            if number is not None and mxnet_compat.is_deferred(parameter):
                mxnet_compat.initialize(parameter, specs[number].shape)
            arrays = _arrays_of(name, parameter) or []
            if number is not None:
                # Devices beyond rank 0's take the values of the first one.
                count = details["devices"][name]
                targets += [(array, number + (at if at < count else 0)) for at, array in enumerate(arrays)]
            elif name in self._first:
                self._first[name].write(zip(arrays, range(len(arrays))))
            mxnet_compat.zero_added_gradients(parameter)
        return targets

    def _stored(self, image: Image) -> Stored:
        names = _array_names(image.details)
        arrays = {name: (*image.specs[at], image.values(at)) for at, name in enumerate(names)}
        return Stored(".params", lambda: mxnet_compat.parts_of_file(arrays))

    def _unstore(self, data: bytes, image: Image) -> None:
        arrays = mxnet_compat.arrays_of_file(data)
        for at, name in enumerate(_array_names(image.details)):
            image.values(at)[:] = arrays[name]

    def _parameters(self) -> dict[str, Any]:
        """The parameters by their names; to find the names takes longer than to find the parameters."""
        found = mxnet_compat.parameters_in(self.value)
        if found != self._found:
            self._named, self._found = mxnet_compat.named_parameters(self.value), found
        return self._named

    def _await(self, name: str, parameter: Any) -> None:
        """Save the initial values of a parameter when it gets its shape."""
        if id(parameter) in self._awaited:
            return
        self._awaited.add(id(parameter))
        handler = weakref.ref(self)  # the handler holds the parameter, and the parameter the function

        def keep_first(made: Any) -> None:
            alive = handler()
            if alive is not None and id(made) in alive._awaited:  # else a parameter of an earlier value
                alive._awaited.discard(id(made))
                arrays = _arrays_of(name, made) or []
                image = alive._first[name] = Image()
                image.fit([alive.spec_of(name, array) for array in arrays])
                image.read(arrays)

        mxnet_compat.after_initialization(parameter, "", keep_first)


def _arrays_of(name: str, parameter: Any) -> list[Any] | None:
    try:
        return mxnet_compat.arrays_of(parameter)
    except RuntimeError as error:
        fix = "call initialize() before the state is made; sparse parameters cannot be saved."
        text = message("it has no values that could be saved.", operation="state", name=name, fix=fix)
        raise InvalidRequestError(text) from error


def _array_names(details: Details) -> list[str]:
    """The names of arrays in a file: those of parameters on the first device, and of others with a number."""
    counts = details["devices"].items()
    return [f"{name}@{device}" if device else name for name, count in counts for device in range(count or 0)]


def _first_numbers(details: Details) -> dict[str, int]:
    """The number of each parameter's array on the first device; not of parameters that wait for their shapes."""
    counts = {name: count for name, count in details["devices"].items() if count is not None}
    return dict(zip(counts, itertools.accumulate(counts.values(), initial=0)))

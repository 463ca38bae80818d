"""The values of many arrays, side by side in memory of this process: to be kept, or sent as one piece."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import UnsupportedDtypeError, message

# Arrays begin where cache lines do, and the first one where a page does: copies are fastest then.
_ALIGNMENT = 64
_PAGE = 4096


class Spec(NamedTuple):
    """What an array looks like; `is_np` tells the two classes of MXNet's arrays apart."""

    shape: tuple[int, ...]
    dtype: str
    is_np: bool

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """How many bytes the elements take."""
        return self.elements * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)


def spec_of(name: object, array: Any) -> Spec:
    """What an array of MXNet looks like; `name` is how an error calls it."""
    stype = mxnet_compat.stype_of(array)
    if stype != "default":
        fact, fix = f"cannot save {stype} arrays.", "in Gluon, create the layer with sparse_grad=False."
        raise UnsupportedDtypeError(message(fact, operation="state", name=str(name), fix=fix))
    shape = tuple(map(int, array.shape))
    return Spec(shape, mxnet_compat.dtype_name(array), mxnet_compat.is_np_ndarray(array))


class Specs:
    """Remembers what arrays look like: an array of MXNet does not change that, and the question takes its time."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Spec]] = {}

    def of(self, arrays: Iterable[tuple[object, Any]]) -> list[Spec]:
        """What they look like, given with names. Arrays that are not asked about any more are forgotten."""
        before, now, specs = self._known, {}, []
        for name, array in arrays:
            known = before.get(id(array))
            if known is None or known[0] is not array:
                known = (array, spec_of(name, array))
            now[id(array)] = known
            specs.append(known[1])
        self._known = now
        return specs


class Image:
    """Values of arrays. Its memory is allocated once for arrays of the same sizes."""

    def __init__(self) -> None:
        self.specs: tuple[Spec, ...] = ()
        self._offsets: list[int] = []
        self._places: list[tuple[Any, Any]] = []  # address and count of elements, as the library takes them
        self._size = 0
        self._memory = np.empty(0, np.uint8)

    def fit(self, specs: Sequence[Spec]) -> None:
        """Make room for arrays that look like this. What it holds is lost."""
        specs = tuple(specs)
        if specs == self.specs:
            return
        offsets, size = [], 0
        for spec in specs:
            offsets.append(size)
            size += -(-spec.bytes // _ALIGNMENT) * _ALIGNMENT
        if not size <= self._memory.size <= 2 * size + _PAGE:
            raw = np.empty(size + _PAGE, np.uint8)
            start = -raw.ctypes.data % _PAGE
            self._memory = raw[start : start + size]
            self._memory[:] = 0  # whoever reads values first should not wait for the pages, too
        self.specs, self._offsets, self._size = specs, offsets, size
        start = self._memory.ctypes.data
        self._places = [
            (ctypes.c_void_p(start + offset), ctypes.c_size_t(spec.elements)) for spec, offset in zip(specs, offsets)
        ]

    @property
    def memory(self) -> Any:
        """All values, as a NumPy array of uint8."""
        return self._memory[: self._size]

    def read(self, arrays: Iterable[Any]) -> None:
        """Take over the values of arrays, one for each that it fits; waits for them."""
        mxnet_compat.read_into(arrays, self._places)

    def write(self, arrays: Iterable[tuple[Any, int]]) -> None:
        """Overwrite arrays, each given with the number of the one whose values it receives."""
        start = self._memory.ctypes.data
        for array, number in arrays:
            mxnet_compat.write_from(array, start + self._offsets[number], self.specs[number].bytes)

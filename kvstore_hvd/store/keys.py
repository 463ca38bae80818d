"""The arguments of a store's call, brought into one form and checked: a group of arrays for each key.

A call may name one key or a list of them, and give each key one array or a list (one for each device).
"""

from __future__ import annotations

import functools
import hashlib
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Union

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, MismatchError, UnsupportedDtypeError, message
from kvstore_hvd.world.topology import Place

Key = Union[int, str]

#: Most keys that a store keeps records of: bounds the memory of programs that never use a key twice.
MAX_KEYS = 10_000

# Longest name in bytes: longer ones become a prefix and a digest. The native table holds 240 bytes.
_MAX_NAME_BYTES = 200
#: As kTwoBit and kStates in mismatch.cpp.
_TWO_BIT, STATES = 0x32626974, 0x73746174
STATES_FIX = "call hvd.broadcast_trainer_states(trainer) after load_states on one rank, or load_states on every rank."
# The verb of an operation in messages.
_VERBS = {"pushpull": "sum", "push": "sum", "init": "broadcast", "allreduce": "reduce", "grouped_allreduce": "reduce"}


@dataclass
class Group:
    """The arrays of one key in one call."""

    key: Key
    values: list[Any] = field(default_factory=list)  # contributions, one for each device
    outs: list[Any] = field(default_factory=list)  # arrays that receive the result
    is_row_sparse: bool = False  # all arrays, as `check_group` finds
    then: Callable[[], None] | None = None  # called once the outs are written; asynchronous like copies

    @functools.cached_property
    def facts(self) -> dict[int, mxnet_compat.Facts]:
        """Of each different array, by its id; values and outs change no more."""
        found = {}
        for array in (*self.values, *self.outs):
            if id(array) not in found:
                found[id(array)] = mxnet_compat.facts_of(array)
        return found


@dataclass(frozen=True)
class Reduction:
    """How the values of one key are combined."""

    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    as_half: bool = False
    weight: float = 1.0
    group: int = 0
    threshold: float = 0.0  # of 2bit compression; 0 is none

    @functools.cached_property
    def is_scaled(self) -> bool:
        """Whether the result differs from the value of a single worker."""
        return self.prescale != 1.0 or self.postscale != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether it is a sum, of whatever precision, and nothing else."""
        return self.op == "sum" and not (self.is_scaled or self.threshold or self.group)

    @property
    def of_signs(self) -> Reduction:
        """The sum of the signs of 2bit compression; the workers compare their thresholds as a group."""
        return Reduction(group=_TWO_BIT << 32 | int(np.float32(self.threshold).view(np.uint32)))


SUM = Reduction()


def group_of_states(states: Sequence[int]) -> int:
    """The group in which workers compare a number of updates, and which parameters have states; 0 without any."""
    digest = zlib.crc32(repr(states).encode()) & 0xFFFF
    return STATES << 32 | digest << 16 | min(len(states) - 1, 0xFFFF) if states else 0


@dataclass(frozen=True)
class Call:
    """The caller and its operation, for messages."""

    operation: str
    topology: Place
    names: Mapping[str, str] = field(default_factory=dict)  # of parameters, by str(key)

    def label(self, key: Key) -> str:
        """How messages name the key: ``'dense0_weight' (key 3)``, ``'loss'`` or ``(key 3)``."""
        name = self.names.get(str(key))
        if name:
            return f"'{name}' (key {key})"
        if isinstance(key, str):
            return f"'{key}'" if key else ""
        return f"(key {key})"

    def message(self, key: Key | None, fact: str, fix: str = "", details: tuple[str, ...] = ()) -> str:
        """The text of an error of this call about `key` (None: about the call as a whole)."""
        name = "" if key is None else self.names.get(str(key), "")
        if not name and isinstance(key, str):
            name, key = key, None
        subject: dict[str, Any] = {"operation": self.operation, "name": name, "key": key}
        return message(fact, **self.topology.prefix, **subject, details=details, fix=fix)

    def compare(
        self, key: Key | None, what: str, values: Sequence[Any], fix: str, shown: Sequence[Any] | None = None
    ) -> None:
        """Raise MismatchError unless the values of all ranks are equal; lists `shown`, by default the values."""
        if any(each != values[0] for each in values):
            details = tuple(self.topology.listed(values if shown is None else shown))
            raise MismatchError(self.message(key, f"ranks disagree on {what}.", fix, details))


def unique(arrays: list[Any]) -> list[Any]:
    """The different objects among `arrays`, in order."""
    return arrays if len(arrays) < 2 else list({id(array): array for array in arrays}.values())


def wire_name(namespace: str, key: Key) -> str:
    """The name under which the workers match an operation: ``'s0/3'``. The keys 3 and '3' are the same key."""
    name = f"{namespace}/{key}"
    encoded = name.encode()
    return name if len(encoded) <= _MAX_NAME_BYTES else f"{name[:32]}#{hashlib.sha256(encoded).hexdigest()}"


def priority_of(call: Call, priority: Any) -> int:
    """The priority as an int."""
    fix = "pass an int, such as -index; higher ones run first."
    try:
        number = operator.index(priority)
    except TypeError:
        fact = f"priority is {priority!r} ({_type_name(priority)})."
        raise InvalidTypeError(call.message(None, fact, fix)) from None
    if not -(2**31) <= number < 2**31:
        raise InvalidRequestError(call.message(None, f"priority {number} does not fit into 32 bits.", fix))
    return number


def group_arguments(call: Call, key: Any, value: Any, out: Any = None, role: str = "value") -> list[Group]:
    """Group the arguments of a call by key."""
    keys, values, outs = list(key) if isinstance(key, (list, tuple)) else [key], [value], [out]
    for one_key in keys:
        _check_key(call, one_key)
    if isinstance(key, (list, tuple)):
        if len({isinstance(one_key, str) for one_key in keys}) > 1:
            raise InvalidTypeError(call.message(None, f"int and str keys are mixed: {keys!r}.", "use one kind of key."))
        values = _list_for_keys(call, keys, value, role)
        outs = [None] * len(keys) if out is None else _list_for_keys(call, keys, out, "out")
    groups: dict[str, Group] = {}
    for one_key, one_value, one_out in zip(keys, values, outs):
        group = groups.setdefault(str(one_key), Group(one_key))
        arrays = _arrays(call, one_key, one_value, role)
        group.values += arrays
        group.outs += arrays if one_out is None else _arrays(call, one_key, one_out, "out")
    return list(groups.values())


def check_group(call: Call, group: Group, allow_rows: bool = False) -> None:
    """Check the arrays of one key, before anything is submitted; sets `is_row_sparse`."""
    for each in group.facts.values():
        if each.stype != "default":
            _check_sparse(call, group, allow_rows)
            break
    dtypes = []
    for array in group.values:
        dtype = group.facts[id(array)].dtype
        if dtype not in native.DTYPES:
            fact, or_else = f"cannot {_verb(call)} dtype {dtype}.", ", or set grad_req='null'"
            fix = f"cast with .astype('int32'){or_else if _verb(call) == 'sum' else ''}."
            supported = f"Supported: {' '.join(native.DTYPES)}"
            raise UnsupportedDtypeError(call.message(group.key, fact, fix, (supported,)))
        if dtype not in dtypes:
            dtypes.append(dtype)
    if len(dtypes) > 1:
        fact = f"the values differ in dtype: {', '.join(dtypes)}."
        raise InvalidTypeError(call.message(group.key, fact, "cast them to one dtype."))
    shape = group.values[0].shape
    for role, arrays in (("value", group.values), ("out", group.outs)):
        for array in arrays:
            if array.shape != shape:
                fact = f"{role} has shape {array.shape}, but the first value has shape {shape}."
                fix = "pass arrays of one shape for each key."
                raise InvalidRequestError(call.message(group.key, fact, fix))


def _check_sparse(call: Call, group: Group, allow_rows: bool) -> None:
    stypes = list(dict.fromkeys(each.stype for each in group.facts.values()))
    stype = next(each for each in stypes if each != "default")
    fix = "convert with .tostype('default'); in Gluon, create the layer with sparse_grad=False."
    if not allow_rows or "csr" in stypes:
        raise UnsupportedDtypeError(call.message(group.key, f"cannot {_verb(call)} {stype} arrays.", fix))
    if len(stypes) > 1:
        fact = f"cannot {_verb(call)} {stype} arrays into dense ones, or dense ones into them."
        raise UnsupportedDtypeError(call.message(group.key, fact, "pass arrays of one storage type: .tostype(...)."))
    if group.facts[id(group.values[0])].dtype == "bfloat16":
        fact = f"cannot {_verb(call)} row_sparse arrays of dtype bfloat16."
        raise UnsupportedDtypeError(call.message(group.key, fact, "cast with .astype('float32'), or " + fix))
    group.is_row_sparse = True


def _verb(call: Call) -> str:
    return _VERBS.get(call.operation, call.operation)


def _check_key(call: Call, key: Any) -> None:
    # bool is an int in Python, but True as a key is certainly a slip.
    if isinstance(key, (int, str)) and not isinstance(key, bool):
        try:
            str(key).encode()
        except ValueError as error:  # a lone surrogate, or an int of thousands of digits
            fix = "use a key that can be written as UTF-8 text."
            raise InvalidRequestError(call.message(None, f"a key cannot be written down: {error}.", fix)) from None
        return
    fix = "use an int or a str, such as a parameter's index or name."
    if isinstance(key, float) and key.is_integer():
        fix = f"use {int(key)} or '{int(key)}'."
    elif type(key).__module__ == "numpy":
        fix = "use int(key)."
    raise InvalidTypeError(call.message(None, f"{key!r} ({_type_name(key)}) is no key: keys are int or str.", fix))


def _list_for_keys(call: Call, keys: Any, given: Any, role: str) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        fact = f"there is a list of {len(keys)} keys, but {role} is a {_type_name(given)}."
        fix = f"pass a list with one {role} (or one list of them) for each key."
        raise InvalidTypeError(call.message(None, fact, fix))
    if len(given) != len(keys):
        fact = f"there are {len(keys)} keys, but {role} has {len(given)} entries."
        raise InvalidRequestError(call.message(None, fact, f"pass one {role} (or one list of them) for each key."))
    return list(given)


def _arrays(call: Call, key: Key, given: Any, role: str) -> list[Any]:
    arrays = list(given) if isinstance(given, (list, tuple)) else [given]
    if not arrays:
        raise InvalidRequestError(call.message(key, f"{role} is empty.", "pass at least one array for each key."))
    for array in arrays:
        if not mxnet_compat.is_ndarray(array):
            reject_array(call, key, array, role)
    return arrays


def reject_array(call: Call, key: Key | None, given: Any, role: str) -> NoReturn:
    """Raise InvalidTypeError: `given` is not an array, and what to do about it."""
    if isinstance(given, (bool, int, float, complex)):
        fix = "put the number into an array: mx.nd.array([x])."
    elif type(given).__module__.partition(".")[0] == "numpy":
        fix = "convert it with mx.nd.array(x), or reduce it as it is with kvstore_hvd.allreduce(x, name=...)."
    elif isinstance(given, (list, tuple)) and key is None:
        fix = "convert it with mx.nd.array(x); several arrays at once: hvd.grouped_allreduce."
    elif isinstance(given, (list, tuple)):
        fix = "nest lists at most once for each key."
    else:
        fix = "pass an mx.nd.NDArray or mx.np.ndarray."
    fact = f"{role} is a {_type_name(given)}, which is not an array of MXNet."
    raise InvalidTypeError(call.message(key, fact, fix))


def _type_name(thing: object) -> str:
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

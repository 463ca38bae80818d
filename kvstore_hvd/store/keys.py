"""Bring the many forms of a store's arguments into one: a list of groups, one for each key.

A call may name one key or a list of them, and give each key one array or a list (one for each device). Everything here
is plain Python and knows no MXNet: what an array is, the caller says.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Union

from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, MismatchError, message
from kvstore_hvd.world.topology import Topology

Key = Union[int, str]

#: For how many keys a store remembers something of its own accord: bounds the memory of programs that never use a key
#: twice.
MAX_KEYS = 10_000

# Names longer than this are shortened to a prefix and a digest; the native table holds 240 bytes.
_MAX_NAME_BYTES = 200


@dataclass
class Group:
    """What one call says about one key."""

    key: Key
    values: list[Any] = field(default_factory=list)  # contributions, one for each device
    outs: list[Any] = field(default_factory=list)  # arrays that receive the result
    is_row_sparse: bool = False  # all of its arrays are


@dataclass(frozen=True)
class Call:
    """Who calls what: enough to say in an error message where it happened."""

    operation: str
    topology: Topology
    names: Mapping[str, str]
    is_array: Callable[[Any], bool]

    def label(self, key: Key) -> str:
        """How messages name the key: ``'dense0_weight' (key 3)``, ``'loss'`` or ``(key 3)``."""
        name, shown = self._name_and_key(key)
        return " ".join(
            part for part in (f"'{name}'" if name else "", "" if shown is None else f"(key {shown})") if part
        )

    def message(self, key: Key | None, fact: str, fix: str = "", details: tuple[str, ...] = ()) -> str:
        """The text of an error of this call about `key` (None: about the call as a whole)."""
        name, shown = ("", None) if key is None else self._name_and_key(key)
        return message(
            fact,
            **self.topology.speaker,
            operation=self.operation,
            name=name,
            key=shown,
            details=details,
            fix=fix,
        )

    def compare(self, key: Key, what: str, told: Sequence[Any], fix: str, shown: Sequence[Any] | None = None) -> None:
        """Raise MismatchError unless all workers told the same; list what is shown of each, by default that."""
        if any(each != told[0] for each in told):
            details = tuple(self.topology.listed(told if shown is None else shown))
            raise MismatchError(self.message(key, f"ranks disagree on {what}.", fix, details))

    def _name_and_key(self, key: Key) -> tuple[str, Key | None]:
        name = self.names.get(str(key), "")
        if name:
            return name, key
        return (key, None) if isinstance(key, str) else ("", key)


def wire_name(namespace: str, key: Key) -> str:
    """The name under which the workers match an operation: ``'s0/3'``. The keys 3 and '3' are the same key."""
    name = f"{namespace}/{key}"
    encoded = name.encode()
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    return f"{name[:32]}#{hashlib.sha256(encoded).hexdigest()}"


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
    groups: dict[str, Group] = {}
    for one_key, one_value, one_out in _per_key(call, key, value, out, role):
        group = groups.setdefault(str(one_key), Group(one_key))
        values = _arrays(call, one_key, one_value, role)
        group.values += values
        group.outs += values if one_out is None else _arrays(call, one_key, one_out, "out")
    return list(groups.values())


def _per_key(call: Call, key: Any, value: Any, out: Any, role: str) -> list[tuple[Key, Any, Any]]:
    if not isinstance(key, (list, tuple)):
        _check_key(call, key)
        return [(key, value, out)]
    for one_key in key:
        _check_key(call, one_key)
    kinds = {isinstance(one_key, str) for one_key in key}
    if len(kinds) > 1:
        raise InvalidTypeError(
            call.message(None, f"int and str keys are mixed: {list(key)!r}.", "use one kind of key.")
        )
    values = _list_for_keys(call, key, value, role)
    outs = [None] * len(key) if out is None else _list_for_keys(call, key, out, "out")
    return list(zip(key, values, outs))


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
        raise InvalidTypeError(
            call.message(
                None,
                f"there is a list of {len(keys)} keys, but {role} is a {_type_name(given)}.",
                f"pass a list with one {role} (or one list of them) for each key.",
            )
        )
    if len(given) != len(keys):
        raise InvalidRequestError(
            call.message(
                None,
                f"there are {len(keys)} keys, but {role} has {len(given)} entries.",
                f"pass one {role} (or one list of them) for each key.",
            )
        )
    return list(given)


def _arrays(call: Call, key: Key, given: Any, role: str) -> list[Any]:
    arrays = list(given) if isinstance(given, (list, tuple)) else [given]
    if not arrays:
        raise InvalidRequestError(call.message(key, f"{role} is empty.", "pass at least one array for each key."))
    for array in arrays:
        if not call.is_array(array):
            reject_array(call, key, array, role)
    return arrays


def reject_array(call: Call, key: Key | None, given: Any, role: str) -> NoReturn:
    """Raise InvalidTypeError: `given` is not an array, and what to do about it."""
    if isinstance(given, (bool, int, float, complex)):
        fix = "put the number into an array: mx.nd.array([x])."
    elif type(given).__module__.partition(".")[0] == "numpy":
        fix = "convert it with mx.nd.array(x), or reduce it as it is with kvstore_hvd.allreduce(x, name=...)."
    elif isinstance(given, (list, tuple)):
        fix = "nest lists at most once for each key."
    else:
        fix = "pass an mx.nd.NDArray or mx.np.ndarray."
    raise InvalidTypeError(
        call.message(key, f"{role} is a {_type_name(given)}, which is not an array of MXNet.", fix),
    )


def _type_name(thing: object) -> str:
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

"""Arguments of the store are brought into one form, and wrong ones are named. No MXNet is needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvstore_hvd.errors import InvalidRequestError
from kvstore_hvd.store.keys import Call, group_arguments, priority_of, wire_name
from kvstore_hvd.worlds.topology import Host, Topology


@dataclass(eq=False)
class Array:
    """Stands for an array of MXNet."""

    name: str


A, B, C, D = (Array(name) for name in "abcd")


def call(names: dict[str, str] | None = None, operation: str = "pushpull") -> Call:
    return Call(
        operation,
        Topology.of(1, [Host.here()] * 4, source="launcher"),
        names or {},
        lambda thing: isinstance(thing, Array),
    )


def groups(*args, **kwargs):
    return [(g.key, g.values, g.outs) for g in group_arguments(call(), *args, **kwargs)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((3, A), [(3, [A], [A])]),
        ((3, [A, B]), [(3, [A, B], [A, B])]),
        ((3, [A, B], (C, D)), [(3, [A, B], [C, D])]),
        ((("v", "w"), (A, [B, C])), [("v", [A], [A]), ("w", [B, C], [B, C])]),
        (([3, 4], [A, B], [[C, D], C]), [(3, [A], [C, D]), (4, [B], [C])]),
        (([3, 4, 3], [A, B, C]), [(3, [A, C], [A, C]), (4, [B], [B])]),
        (([], []), []),
    ],
)
def test_forms(given, expected):
    assert groups(*given) == expected


@pytest.mark.parametrize(
    ("key", "fact", "fix"),
    [
        (3.0, "3.0 (float) is no key: keys are int or str.", "use 3 or '3'."),
        (None, "None (NoneType) is no key: keys are int or str.", "use an int or a str"),
        (True, "True (bool) is no key: keys are int or str.", "use an int or a str"),
        (np.int64(3), "(numpy.int64) is no key: keys are int or str.", "use int(key)."),
        ([3, "w"], "int and str keys are mixed: [3, 'w'].", "use one kind of key."),
    ],
)
def test_wrong_keys(key, fact, fix):
    with pytest.raises(TypeError) as caught:
        groups(key, [A, B] if isinstance(key, list) else A)
    text = str(caught.value)
    assert text.startswith("[rank 1/4] pushpull: ")
    assert fact in text
    assert f"\n  Fix: {fix}" in text


@pytest.mark.parametrize(
    ("value", "fact", "fix"),
    [
        (np.ones(2), "value is a numpy.ndarray, which is not an array of MXNet.", "kvstore_hvd.allreduce(x, name=...)"),
        (1.5, "value is a float, which is not an array of MXNet.", "mx.nd.array([x])"),
        (None, "value is a NoneType, which is not an array of MXNet.", "pass an mx.nd.NDArray"),
        ([[A]], "value is a list, which is not an array of MXNet.", "nest lists at most once"),
    ],
)
def test_wrong_values(value, fact, fix):
    with pytest.raises(TypeError) as caught:
        groups("w", value)
    assert str(caught.value).startswith(f"[rank 1/4] pushpull 'w': {fact}\n  Fix: ")
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("args", "fact"),
    [
        ((["v", "w"], [A]), "pushpull: there are 2 keys, but value has 1 entries."),
        (("w", []), "pushpull 'w': value is empty."),
        ((3, A, []), "pushpull (key 3): out is empty."),
    ],
)
def test_wrong_lengths(args, fact):
    with pytest.raises(InvalidRequestError) as caught:
        groups(*args)
    assert str(caught.value).startswith(f"[rank 1/4] {fact}\n  Fix: pass ")


def test_labels():
    named = call({"3": "dense0_weight"})
    assert named.label(3) == "'dense0_weight' (key 3)"
    assert named.label(4) == "(key 4)"
    assert named.label("loss") == "'loss'"
    assert named.message(3, "no.").startswith("[rank 1/4] pushpull 'dense0_weight' (key 3): no.")


def test_wire_names():
    assert wire_name("s0", 3) == wire_name("s0", "3") == "s0/3"
    assert wire_name("s0", 3) != wire_name("s1", 3)
    long, other = wire_name("s0", "x" * 5000), wire_name("s0", "x" * 4999 + "y")
    assert long != other
    assert max(len(name.encode()) for name in (long, other, wire_name("s0", "ü" * 199))) <= 240


@pytest.mark.parametrize("key", ["\ud800", 10**5000], ids=["surrogate", "too many digits"])
def test_keys_that_cannot_be_written_down_are_refused_before_anything_is_submitted(key: object) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be written down"):
        group_arguments(call(), ["a", key] if isinstance(key, str) else [1, key], [[1], [2]])


@pytest.mark.parametrize("priority", [0, -5, 2**31 - 1, -(2**31), True])
def test_priorities(priority: int) -> None:
    assert priority_of(call(), priority) == int(priority)


@pytest.mark.parametrize(
    ("priority", "error"), [(2**31, InvalidRequestError), (None, TypeError), ("1", TypeError), (0.5, TypeError)]
)
def test_wrong_priorities(priority: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="Fix: pass an int"):
        priority_of(call(), priority)

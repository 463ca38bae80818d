"""Arguments of the store are brought into one form; wrong ones are named, and nothing is submitted then."""

import sys

import numpy as np
import pytest

from kvstore_hvd.errors import InputFailedError, InvalidRequestError, UnsupportedDtypeError
from kvstore_hvd.store import operations
from kvstore_hvd.store.compression import signs_of
from kvstore_hvd.store.keys import Call, Group, group_arguments, priority_of, wire_name
from kvstore_hvd.world.topology import Host, Place
from support.fake_native import fake_world

mx = pytest.importorskip("mxnet")


A, B, C, D = (mx.nd.zeros(1) for _ in range(4))


def call(names=None, operation="pushpull"):
    return Call(operation, Place.of(1, [Host.here()] * 4, source="launcher"), names or {})


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
    ("args", "error", "text"),
    [
        ((True, A), TypeError, r": True \(bool\) is no key: keys are int or str\.\n  Fix: use an int or a str"),
        ((np.int64(3), A), TypeError, r": .*\(numpy\.int64\) is no key: keys are int or str\.\n  Fix: use int\(key\)"),
        (([3, "w"], [A, B]), TypeError, r": int and str keys are mixed: \[3, 'w'\]\.\n  Fix: use one kind of key\."),
        ((3.0, A), TypeError, r": 3\.0 \(float\) is no key: keys are int or str\.\n  Fix: use 3 or '3'\."),
        (
            ("w", [[A]]),
            TypeError,
            r" 'w': value is a list, which is not an array of MXNet\.\n  Fix: nest lists at most",
        ),
        ((3, A, 1.5), TypeError, r" \(key 3\): out is a float, .*\n  Fix: put the number into an array: mx"),
        ((["v", "w"], [A]), InvalidRequestError, r": there are 2 keys, but value has 1 entries\.\n  Fix: "),
        ((["v", "w"], [A, B, C]), InvalidRequestError, r": there are 2 keys, but value has 3 entries\.\n  Fix: "),
        ((["a", "\ud800"], [A, B]), InvalidRequestError, r".*: .* cannot be written down"),
        pytest.param(
            ([1, 10**5000], [A, B]),
            InvalidRequestError,
            r".*: .* cannot be written down",
            marks=pytest.mark.skipif(not hasattr(sys, "get_int_max_str_digits"), reason="a Python without that limit"),
        ),
        ((3, A, []), InvalidRequestError, r" \(key 3\): out is empty\.\n  Fix: pass at least one array"),
    ],
)
def test_wrong_keys_and_values(args, error, text):
    with pytest.raises(error, match=rf"^\[rank 1/4\] pushpull{text}"):
        groups(*args)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda kv, x: kv.pushpull([1, 2], [x, x.asnumpy()]), TypeError),
        (lambda kv, x: kv.pushpull([1, 2], [x, x], out=[x, mx.nd.ones((7,))]), InvalidRequestError),
        (lambda kv, x: kv.pushpull([1, 2], [x, x.astype(bool)]), UnsupportedDtypeError),
        (lambda kv, x: kv.broadcast([1, 2], [x, [x, x]]), InvalidRequestError),
    ],
)
def test_everything_is_checked_before_anything_is_submitted(call, error):
    with fake_world(rank=0, size=3) as fake:
        kv = mx.kv.create("horovod")
        kv._set_key_labels({2: "mask"})
        with pytest.raises(error) as caught:
            call(kv, mx.nd.array([1, 2]))
        assert fake.adapter.operations == []
        kv.pushpull([1, 2], [mx.nd.array([1]), mx.nd.array([1])])
        assert [name.rpartition("/")[2] for name in fake.adapter.operations] == ["1", "2"]
    if error is UnsupportedDtypeError:
        assert str(caught.value) == (
            "[rank 0/3] pushpull 'mask' (key 2): cannot sum dtype bool.\n"
            "  Supported: float16 bfloat16 float32 float64 int8 uint8 int32 int64\n"
            "  Fix: cast with .astype('int32'), or set grad_req='null'."
        )


def test_the_other_keys_of_a_call_are_submitted_where_one_is_refused(monkeypatch):
    """And their results are copied to outs of another dtype; the error is raised."""
    with fake_world() as fake:
        kv, submit = mx.kv.create("horovod"), fake.adapter.pushpull

        def refuse(name, *arguments):
            submit(name)
            if name.endswith("/b"):
                raise InputFailedError("MXNet refused it.")

        copied = []
        monkeypatch.setattr(fake.adapter, "pushpull", refuse)
        monkeypatch.setattr(operations, "copy", lambda source, target: copied.append(target))
        outs = [mx.nd.zeros(1, dtype="float64") for _ in "abc"]
        with pytest.raises(InputFailedError, match="refused it"):
            kv.pushpull(list("abc"), [mx.nd.ones(1) for _ in "abc"], out=outs)
        assert [name[-1] for name in fake.adapter.operations] == ["a", "b", "c"]
        assert [any(out is each for each in copied) for out in outs] == [True, False, True]


def test_signs_of_many_workers_do_not_overflow():
    signs = [signs_of(Group("w", [A]), {}, 0.5, 1.0, size).values[0] for size in (127, 128)]
    assert [each.dtype for each in signs] == [np.int8, np.int32]


def test_names():
    named = call({"3": "dense0_weight"})
    assert [named.label(key) for key in (3, 4, "loss")] == ["'dense0_weight' (key 3)", "(key 4)", "'loss'"]
    assert wire_name("s0", 3) == wire_name("s0", "3") == "s0/3"
    long, other = wire_name("s0", "x" * 5000), wire_name("s0", "x" * 4999 + "y")
    assert long != other
    assert max(len(name.encode()) for name in (long, other, wire_name("s0", "ü" * 150))) <= 240


def test_priorities():
    for priority in (0, 2**31 - 1, -(2**31), True):
        assert priority_of(call(), priority) == int(priority)
    wrong = [(2**31, InvalidRequestError), (None, TypeError), (0.5, TypeError)]
    for given, error in wrong:
        with pytest.raises(error, match="Fix: pass an int"):
            priority_of(call(), given)

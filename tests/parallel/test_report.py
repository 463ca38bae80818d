"""What `report` says after a training: calls, bytes, algorithms, times, and why something is staged."""

import logging
import time

import numpy as np
import pytest

import kvstore_hvd
from support.gluon import backward, batch_of, mlp, names_of, network, parameters, train
from support.networks import trainer_of

mx = pytest.importorskip("mxnet")

STEPS = 3
TIMES = ("queued", "reducing", "exposed")


def test_gradients_of_a_training(rank, size):
    """Every gradient has a label, its calls and bytes, its algorithm, and times that fit together."""
    net = mlp()
    empty = mx.kv.create("horovod").report()
    assert (empty["operations"], empty["bytes"], empty["keys"]) == ({}, 0, {})
    assert str(empty).startswith(f"{size} workers; nothing; 0.0 MiB; ")
    before = empty["rounds"]
    begin = time.monotonic()
    trainer = trainer_of(net)
    train(net, trainer, *[batch_of(1)] * STEPS)
    mx.nd.waitall()
    report = trainer._kvstore.report()
    elapsed = time.monotonic() - begin
    assert report["workers"] == size
    assert sorted(report["keys"]) == sorted(names_of(net))
    rounds = {what: number - before[what] for what, number in report["rounds"].items()}
    assert (rounds["count"] >= STEPS) == (size > 1)
    assert 0 <= rounds["reducing_ms"] <= rounds["exposed_ms"] * (1 + 1e-9) + 1e-6
    assert rounds["exposed_ms"] <= elapsed * 1e3
    for param, name in zip(parameters(net), names_of(net)):
        entry = report["keys"][name]
        assert entry["operations"]["pushpull"] == STEPS
        assert entry["bytes"] == (STEPS + entry["operations"].get("broadcast", 0)) * 4 * int(np.prod(param.shape))
        assert (entry["algorithm"], entry["staged"]) == ("direct" if size > 1 else "", "")
        for times in entry["ms"].values():
            assert times["last"] <= times["mean"] * sum(entry["operations"].values()) * (1 + 1e-9)
        for which in ("mean", "last"):
            queued, reducing, exposed = (entry["ms"][what][which] for what in TIMES)
            assert queued >= 0 and reducing >= 0
            assert 0 <= exposed <= (queued + reducing) * (1 + 1e-9)
            # Whoever comes last with a small one has not waited, and the others do not see the reduction.
            assert (kvstore_hvd.allreduce(np.array([queued + reducing]), f"{name}/{which}")[0] > 0) == (size > 1)
    # The arena has the gradients; with one worker there is none.
    needed = sum(4 * int(np.prod(param.shape)) for param in parameters(net))
    arena = report["arena"]
    assert needed <= arena["used"] <= arena["capacity"] if size > 1 else arena == {"used": 0, "capacity": 0}


def test_bytes_are_those_of_the_dtype(kv):
    sizes = {"int64": 8, "float64": 8, "float32": 4, "float16": 2, "uint8": 1}
    for dtype in sizes:
        x = mx.nd.ones(5, dtype=dtype)
        kv.pushpull(dtype, x)
        kv.pushpull(dtype, x, out=x)
    assert {dtype: entry["bytes"] / 10 for dtype, entry in kv.report()["keys"].items()} == sizes


@pytest.mark.parametrize(("devices", "why"), [((0, 1), "2 devices"), ((1,), "cpu(1)")])
def test_why_gradients_are_staged(kv, rank, size, caplog, devices, why):
    """Gradients that no arena can have, and what no Trainer owns; the log says why once for each gradient."""
    contexts = list(map(mx.cpu, devices))
    net = network(mx.gluon.nn.Dense(3, in_units=8), contexts=contexts)
    trainer = trainer_of(net, kv)
    with caplog.at_level(logging.DEBUG, "kvstore_hvd"):
        for _ in range(STEPS):
            backward(net, [batch_of(1, ctx=where) for where in contexts])
            trainer.step(8)
    kv.pushpull("mine", mx.nd.ones((5000,)))
    mx.nd.waitall()
    entries = kv.report()["keys"]
    if size == 1:
        return
    algorithm = "two-shot" if kv.local_size == size else "link-sum"
    assert (entries["mine"]["algorithm"], entries.pop("mine")["staged"]) == (algorithm, "not a Trainer's gradient")
    assert {name: entry["staged"] for name, entry in entries.items()} == dict.fromkeys(names_of(net), why)
    told = [text for record in caplog.records if "staging memory" in (text := record.getMessage())]
    text = "the gradient of {!r} (key {}) goes through staging memory: {}"
    expected = [text.format(name, key, why) for key, name in enumerate(sorted(names_of(net)))]  # as a Trainer does
    assert sorted(set(told)) == sorted(expected)
    assert len(told) <= 2 * len(expected)  # a logger may hand a record to several handlers

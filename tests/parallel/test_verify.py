"""Whether parameters that differ between workers are found, and named on every one of them."""

import re

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from support.gluon import array, backward, batch_of, is_mxnet_2, mlp, names_of, network, parameters
from support.networks import trainer_of
from support.zero_copy import meet_again, settings

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.needs(2)  # one worker agrees with itself


def change(param, rank, on):
    if rank == on:
        values = param.data().asnumpy()
        values.reshape(-1).view(np.uint8)[0] ^= 1
        param.set_data(array(values))


def diverged(call):
    with pytest.raises(kvstore_hvd.DivergedError) as caught:
        call()
    return str(caught.value)


def test_equal_parameters_pass(rank, size):
    params = mlp().collect_params()
    arrays = tuple(param.data() for param in params.values())
    for each in (params, dict(params.items()), list(params.values()), arrays, []):
        kvstore_hvd.verify(each)


def test_one_bit_of_one_worker_is_found_by_all(rank, size):
    """The text is the same on every worker, up to who speaks: the first parameter, the hashes and whose they are."""
    net, culprit = mlp(), size - 1
    change(parameters(net)[2], rank, culprit)
    change(parameters(net)[4], rank, culprit)
    lines = diverged(lambda: kvstore_hvd.verify(net.collect_params())).splitlines()
    assert lines[0] == (
        f"[rank {rank}/{size}] verify '{names_of(net)[2]}': the workers' parameters differ. Hashes of their bytes:"
    )
    others = kvstore_hvd.errors.rank_list(range(culprit))
    assert sorted(line.split(": ")[1] for line in lines[1:3]) == sorted([f"rank {culprit}", others])
    assert all(re.match("  [0-9a-f]{16}: ", line) for line in lines[1:3])
    assert lines[3] == "  2 of 6 parameters differ; this is the first one."
    assert lines[4].startswith("  Fix: ")
    assert len(set(hvd.allgather_object("".join(sorted(lines[1:3]))))) == 1
    kvstore_hvd.verify(parameters(net)[:2])  # the world is fine, and so are these


def test_shapes_and_dtypes_count(rank, size, kind):
    equal = kind.array(np.arange(6), dtype="int64")
    for other in (equal.reshape((2, 3) if rank else (3, 2)), equal.astype("int32" if rank else "int64")):
        assert "verify 'other'" in diverged(lambda other=other: kvstore_hvd.verify({"equal": equal, "other": other}))


def test_running_statistics_may_differ_and_frozen_weights_may_not(rank, size):
    net = network(mx.gluon.nn.BatchNorm(in_channels=4), mx.gluon.nn.Dense(2, in_units=4))
    for param in parameters(net):
        if "running" in param.name:
            param.set_data(array(np.full(4, rank, "float32")))
    kvstore_hvd.verify(net.collect_params())
    frozen = net[1].weight
    frozen.grad_req = "null"
    change(frozen, rank, 1)
    assert "weight" in diverged(lambda: kvstore_hvd.verify(net.collect_params())).splitlines()[0]


def test_parameters_that_only_some_workers_have_initialised(rank, size):
    net = mx.gluon.nn.Dense(2)
    net.initialize()
    kvstore_hvd.verify(net.collect_params())
    if rank == 0:
        net(array(np.ones((1, 3), "float32")))
    text = diverged(lambda: kvstore_hvd.verify(net.collect_params()))
    assert f"  not initialised: {kvstore_hvd.errors.rank_list(range(1, size))}" in text.splitlines()


def test_an_array_that_cannot_be_read_is_an_error_everywhere(rank, size):
    """The worker whose computation failed raises that error; the others do not wait for it."""
    good = mx.nd.ones(3)
    for failing in ([1], range(size)):
        if rank in failing:
            # Sampling with a negative scale fails when it is executed.
            bad = mx.nd.random.normal(0, -1, shape=(3,)) if not is_mxnet_2() else mx.np.random.normal(0, -1, size=(3,))
            with pytest.raises(Exception, match=r"(?i)scale|positive"):
                kvstore_hvd.verify([good, bad])
        else:
            text = diverged(lambda: kvstore_hvd.verify([good, good]))
            assert text.startswith(f"[rank {rank}/{size}] verify 'array' (index 1): the workers' parameters differ. H")
            assert "  could not be read: rank 1" in text.splitlines()


def test_different_numbers_of_parameters_are_a_mismatch(rank, size):
    with pytest.raises(kvstore_hvd.MismatchError, match="of the parameters' hashes: ranks disagree on shape"):
        kvstore_hvd.verify([mx.nd.ones(2)] * (2 if rank else 1))


def test_something_else_is_refused_before_anything_is_sent(world):
    for wrong in (5, [1.0], {"w": np.ones(3)}):
        with pytest.raises(TypeError, match=r"verify: .* is a \w+\.\n  Fix: pass net.collect_params"):
            kvstore_hvd.verify(wrong)


def step(net, trainer, updates_only=False):
    backward(net, [batch_of(1)])
    if updates_only:
        trainer.allreduce_grads()
        trainer.update(4)
    else:
        trainer.step(4)


@pytest.fixture
def every_second(world):
    """Have Trainers that start from now on verify every second update."""
    with settings(KVHVD_VERIFY_EVERY="2"):
        yield


@pytest.mark.parametrize("updates_only", [False, True])
def test_a_trainer_verifies_every_second_update(rank, size, kv, every_second, updates_only):
    net = mlp()
    trainer = trainer_of(net, kv)
    for _ in range(4):
        step(net, trainer, updates_only)
    if rank == 1:  # by so much that no rounding of an update makes it equal again
        parameters(net)[1].set_data(array(parameters(net)[1].data().asnumpy() + 1))
    step(net, trainer, updates_only)
    text = diverged(lambda: step(net, trainer, updates_only))
    key = trainer._params.index(parameters(net)[1])
    assert text.startswith(
        f"[rank {rank}/{size}] verify '{names_of(net)[1]}' (key {key}): the workers' parameters differ after 6 updates."
    )
    step(net, trainer, updates_only)
    diverged(lambda: step(net, trainer, updates_only))


def test_updates_are_counted_from_the_beginning_of_a_world(rank, size, kv, every_second, monkeypatch):
    """Workers that are new to it have made none before. A Trainer that starts again verifies once."""
    calls = []
    monkeypatch.setattr(type(kv), "_verify", lambda self, parameters, when: calls.append((len(parameters), when)))
    net = mlp()
    trainer = trainer_of(net, kv)
    step(net, trainer)
    meet_again()
    step(net, trainer)
    assert calls == []
    step(net, trainer)
    trainer._reset_kvstore()
    for _ in range(2):
        step(net, trainer)
    assert calls == [(6, "after 2 updates"), (6, "after 4 updates")]

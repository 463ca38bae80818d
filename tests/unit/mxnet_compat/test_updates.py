"""The operators of ours that MXNet's optimizers call: the bits of MXNet's own, and whom they leave to MXNet."""

import contextlib
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.mxnet_compat import hooks, updates
from support.fake_store import V2, mx

SHAPES = [(1,), (3, 5), (257, 33), (71, 1001)]  # threads share the last
OWNERS = [getattr(mx.optimizer, name) for name in updates._MODULES if hasattr(mx.optimizer, name)]
ONLY_MXNET = {"multi_mp_lamb_update"} if not V2 else set()  # its norms are sums of halves

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere all is left to MXNet")
updates.patch(mx)


class Calls:
    """The operators that were called, and those that ours carried out."""

    def __init__(self):
        self.seen, self.ours = set(), set()
        self.real = mxnet_compat.local_operations()

    def update(self, name, *arguments):
        done = self.real.update(name, *arguments)
        self.ours |= {name} if done else set()
        return done


@pytest.fixture
def calls(monkeypatch):
    counted = Calls()
    monkeypatch.setattr(hooks, "local_operations", lambda: counted)
    return counted


@contextlib.contextmanager
def only_mxnets(monkeypatch, calls):
    with monkeypatch.context() as patch:
        for owner in OWNERS:
            for name in updates._OPERATORS:
                if hasattr(owner, name):
                    original = getattr(owner, name).__wrapped__

                    def noted(*arrays, _name=name, _original=original, **parameters):
                        calls.seen.add(_name)
                        return _original(*arrays, **parameters)

                    patch.setattr(owner, name, noted)
        yield


def train(kind, arguments, dtype, aggregated, steps=3):
    random = np.random.RandomState(4)
    optimizer = mx.optimizer.create(
        kind,
        learning_rate=0.0287,
        rescale_grad=1 / 37,
        multi_precision=dtype == "float16",
        lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.9),
        param_idx2name={index: f"{index}_{'weight' if index else 'bias'}" for index in range(4)},
        **arguments,
    )
    optimizer.set_lr_mult({1: 0.3})
    if V2:
        optimizer.aggregate_num = 4 if aggregated else 1
    updater = mx.optimizer.get_updater(optimizer)
    weights = [mx.nd.array(random.standard_normal(shape), dtype=dtype) for shape in SHAPES]
    for _ in range(steps):
        gradients = [mx.nd.array(random.standard_normal(shape) * 3, dtype=dtype) for shape in SHAPES]
        if aggregated and getattr(optimizer, "aggregate_num", 0) > 1:
            updater([0, 1, 2, 3], gradients, weights)
        else:
            for index in range(4):
                updater(index, gradients[index], weights[index])

    def flat(state):
        if isinstance(state, (tuple, list)):
            return b"".join(map(flat, state))
        return b"" if state is None else state.asnumpy().tobytes()

    return [weight.asnumpy().tobytes() for weight in weights] + [flat(updater.states[index]) for index in range(4)]


OPTIMIZERS = [
    ("sgd", {"wd": 0.0123}),
    ("sgd", {"momentum": 0.9137, "clip_gradient": 0.05}),
    ("nag", {}),
    ("nag", {"momentum": 0.9137, "wd": 1e-4}),
    ("adam", {"wd": 0.0123, "clip_gradient": 0.05}),
    ("lamb", {"wd": 0.0123}),
    ("lamb", {"bias_correction": False, "lower_bound": 10.0, "clip_gradient": 0.05}),
    *([("adamw", {"wd": 0.0123})] if V2 else []),
]


@pytest.mark.parametrize("aggregated", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS)
def test_optimizers_give_the_bits_of_mxnets_operators(monkeypatch, calls, kind, arguments, dtype, aggregated):
    with only_mxnets(monkeypatch, calls):
        expected = train(kind, arguments, dtype, aggregated)
    try:
        for target in ("scalar", "avx2", "avx512"):
            if native.set_simd_target(target):
                assert train(kind, arguments, dtype, aggregated) == expected, target
    finally:
        native.set_simd_target("auto")
    assert calls.ours >= calls.seen - ONLY_MXNET


def test_threads_share_a_large_parameter():
    test = f"{__file__}::{test_optimizers_give_the_bits_of_mxnets_operators.__name__}[adam-arguments4-float16-False]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "3"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_forked_child_updates_a_large_parameter():
    """It has none of the threads that its parent has used."""
    program = (
        "import os, kvstore_hvd, mxnet as mx\n"
        "def first():\n"
        "    weight = mx.nd.ones(200000)\n"
        "    mx.optimizer.get_updater(mx.optimizer.create('sgd', learning_rate=0.5))(0, mx.nd.ones(200000), weight)\n"
        "    return weight.asnumpy()[0]\n"
        "assert first() == 0.5\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if first() == 0.5 else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    variables = {"MXNET_ENGINE_TYPE": "NaiveEngine", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **variables}, timeout=60, check=True)


def ones(*shape, **how):
    return mx.nd.ones(shape, **how)


def test_what_only_mxnet_understands_is_left_to_it(calls):
    update = OWNERS[1 if V2 else 0].sgd_update
    usual = ones(3)
    update(usual, ones(3), out=usual, lr=0.5)
    assert calls.ours == {"sgd_update"}
    calls.ours.clear()
    for weight, gradient, given in [
        (ones(3, dtype="float64"), ones(3, dtype="float64"), {"lr": 0.5}),
        (ones(3, 2), mx.nd.sparse.row_sparse_array(([[1, 1]], [1]), shape=(3, 2)), {"lr": 0.5}),
        (ones(3), ones(3), {"lr": float("inf")}),
        (ones(3), ones(3), {"lr": "5e-1"}),
        (ones(2), ones(2), {"lr": 0.5, "name": "x"}),
    ]:
        expected = weight.copy()
        update.__wrapped__(expected, gradient, out=expected, **given)
        update(weight, gradient, out=weight, **given)
        np.testing.assert_array_equal(weight.asnumpy(), expected.asnumpy())
    weight, other = ones(3), ones(3)
    assert update(weight, ones(3), lr=0.5).asnumpy().tolist() == [0.5] * 3  # a new array
    update(weight, ones(3), out=other, lr=0.5)
    assert (weight.asnumpy().tolist(), other.asnumpy().tolist()) == ([1.0] * 3, [0.5] * 3)
    with pytest.raises(mx.base.MXNetError, match="Incompatible attr"):
        update(weight, ones(1, 3), out=weight, lr=0.5)
    with pytest.raises(mx.base.MXNetError, match="lr"):
        update(weight, ones(3), out=weight)
    with pytest.raises(mx.base.MXNetError):  # of one weight
        both = ones(3), ones(3)
        OWNERS[1 if V2 else 0].multi_sgd_update(*both, *both, out=list(both), lrs=(0.5, 0.5), wds=(0, 0))
    calls.ours.clear()
    update(usual, ones(3), out=usual, lr=0.5, clip_gradient=1)
    with pytest.raises(mx.base.MXNetError, match="clip_gradient"):
        update(weight, ones(3), out=weight, lr=0.5, clip_gradient=True)
    assert calls.ours == {"sgd_update"}
    calls.ours.clear()
    with mx.autograd.record():
        update(weight, ones(3), out=weight, lr=0.5)
    assert weight.asnumpy().tolist() == [0.5] * 3
    assert not calls.ours


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 3.5e38, True, None])
@pytest.mark.parametrize("which", ["lrs", "wds"])
def test_lists_that_mxnet_refuses(calls, which, rate):
    update = OWNERS[1 if V2 else 0].multi_sgd_update
    weights = [ones(3), ones(3)]
    given = {"lrs": [0.5, 0.5], "wds": [0.0, 0.0], "num_weights": 2, which: [0.5, rate]}
    try:
        update.__wrapped__(
            weights[0].copy(), ones(3), weights[1].copy(), ones(3), out=[each.copy() for each in weights], **given
        )
    except mx.base.MXNetError:
        with pytest.raises(mx.base.MXNetError):
            update(weights[0], ones(3), weights[1], ones(3), out=weights, **given)
        assert weights[0].asnumpy().tolist() == [1.0] * 3
    assert not calls.ours


def test_the_sign_of_zero(monkeypatch, calls):
    """-0.0 is another number than 0.0, which was given before."""
    found = []
    for shown in (only_mxnets(monkeypatch, calls), contextlib.nullcontext()):
        with shown:
            for momentum in (0.0, -0.0):
                update = OWNERS[1 if V2 else 0].sgd_mom_update
                weight, state = ones(3), -ones(3)
                update(weight, mx.nd.zeros(3), state, out=weight, lr=0.5, momentum=momentum)
                found.append((weight.asnumpy().tobytes(), state.asnumpy().tobytes()))
    assert found[:2] == found[2:]


def test_a_failed_gradient_fails_its_weight(calls):
    square = ones(3, 3)
    weight = ones(3, 3)
    updater = mx.optimizer.get_updater(mx.optimizer.create("sgd", learning_rate=1.0))
    updater(0, ones(3, 3), weight)
    assert weight.asnumpy().tolist() == [[0.0] * 3] * 3
    mx.nd.linalg.potrf(mx.nd.zeros((3, 3)) - 1, out=square)  # not positive definite
    updater(0, square, weight)
    with pytest.raises(mx.base.MXNetError, match="potrf"):
        weight.asnumpy()
    assert calls.ours


def test_a_scale_that_is_not_finite_changes_nothing(calls):
    name = "multi_adamw_update"
    for scale in (mx.nd.array([float("nan")]), mx.nd.array([0.0])):
        arrays = [[ones(3)] for _ in range(4)]
        call = updates._read_call(
            name, arrays, arrays[0], lrs=[1.0], wds=[0.1], etas=[0.5], beta1=0.9, beta2=0.99, epsilon=1e-6,
            rescale_grad=scale,
        )  # fmt: skip
        assert mxnet_compat.local_operations().update(name, updates._ADAMW, *call)
        assert [each.asnumpy().tolist() for (each,) in arrays] == [[1.0] * 3] * 4


def test_mxnets_operator_stays_where_none_of_ours_has_its_bits(setting):
    def other(weight, gradient, out, **given):
        out[:] = weight - 2 * gradient

    assert updates._rule_of("sgd_update", other) is None
    weight = ones(3)
    updates._standing_in("sgd_update", other)(weight, ones(3), out=weight, lr=0.5)
    assert weight.asnumpy().tolist() == [-1.0] * 3
    setting(KVHVD_FUSED_UPDATE="0")
    assert updates._rule_of("sgd_update", OWNERS[1 if V2 else 0].sgd_update.__wrapped__) is None


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_numbers_are_read_as_mxnet_reads_them(scale):
    random, weight = np.random.RandomState(7), mx.nd.zeros((1,))
    for number in (random.uniform(0, 1, 150) ** 4 * scale).tolist():
        momentum = mx.nd.zeros((1,))
        mx.nd.sgd_mom_update(weight, ones(1), momentum, out=weight.copy(), lr=1.0, rescale_grad=number)
        assert -momentum.asnumpy()[0] == np.float32(updates._as_mxnet_reads(number))

"""A Trainer's step as one call of the store: the same bits, calls and errors as a loop of `pushpull`."""

from __future__ import annotations

import operator
import time

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.errors import HorovodInternalError, MismatchError, UnsupportedDtypeError
from kvstore_hvd.mxnet_compat import engine_is_naive
from kvstore_hvd.process import process
from kvstore_hvd.store.kvstore import StoreMethods
from support.arrays import assert_same_bits, contribution, expected_sum, ordered_sum
from support.gluon import array, is_mxnet_2
from support.patience import patient
from support.steps import SHAPES, assert_summed, check_step, fill, make_parameters, make_trainer
from support.zero_copy import zero_copy

mx = pytest.importorskip("mxnet")

not_naive = pytest.mark.skipif(engine_is_naive(), reason="NaiveEngine raises inside of the Trainer")


@pytest.fixture
def calls(monkeypatch):
    """What was asked of stores: 'step' for all gradients at once, or the keys of `pushpull`."""
    asked = []
    exchange = StoreMethods._exchange

    def spy(self, step):
        done = exchange(self, step)
        asked.append("step" if done else "no step")
        return done

    monkeypatch.setattr(StoreMethods, "_exchange", spy)
    return asked


def pushpulls(trainer):
    """How often each parameter was summed, by its name in the report."""
    mx.nd.waitall()
    keys = trainer._kvstore.report()["keys"]
    return [keys[param.name]["operations"].get("pushpull", 0) for param in trainer._params]


def one_by_one(trainer):
    """What MXNet's own loop does."""
    for place, param in enumerate(trainer._params):
        trainer._kvstore.pushpull(place, param.list_grad(), priority=-place)


def test_the_same_bits_and_counts_as_pushpull(rank, size, calls):
    """The step gives the bits that `pushpull` gives, and counts as much."""
    trainers = [make_trainer(make_parameters()) for _ in range(2)]
    for step in range(3):
        for trainer, exchange in zip(trainers, (mx.gluon.Trainer.allreduce_grads, one_by_one)):
            fill(trainer, rank, step)
            exchange(trainer)
            assert_summed(trainer, size, step)
    assert calls == (["no step"] * 3 if engine_is_naive() and size > 1 else ["step"] * 3)
    mx.nd.waitall()
    reports = [trainer._kvstore.report() for trainer in trainers]
    for what in ("operations", "bytes"):
        assert reports[0][what] == reports[1][what]
        for one, other in zip(reports[0]["keys"].values(), reports[1]["keys"].values()):
            assert one[what] == other[what]
    assert list(reports[0]["keys"]) == list(reports[1]["keys"])
    assert reports[0]["operations"]["pushpull"] == 3 * len(SHAPES)


def cast(trainer):
    for param in trainer._params:
        param.cast("float64")


def cast_one(trainer):
    trainer._params[1].cast("float16")


def reset_context(trainer):
    for param in trainer._params:
        (param.reset_device if is_mxnet_2() else param.reset_ctx)(mx.cpu(1))


def add_to_gradients(trainer):
    for param in trainer._params:
        param.grad_req = "add"


def freeze_some(trainer):
    for param in trainer._params[1:4]:
        param.grad_req = "null"


def thaw_them(trainer):
    for param in trainer._params[1:4]:
        param.grad_req = "write"


def initialise_again(trainer):
    for param in trainer._params:
        param.initialize(force_reinit=True)


def replace_an_array(trainer):
    """Not what MXNet does, but what somebody might do to a list that MXNet hands out."""
    gradients = trainer._params[2].list_grad()
    gradients[0] = gradients[0].copy()


def add_parameters(trainer):
    for param in make_parameters([(4,), (70, 90)], prefix="more").values():
        trainer._param2idx[param._uuid if is_mxnet_2() else param.name] = len(trainer._params)
        trainer._params.append(param)


def reset_the_world(trainer):
    mx.nd.waitall()
    kvstore_hvd.barrier()
    kvstore_hvd.reset()


def rename(trainer):
    trainer._kvstore._set_key_labels({0: "another"})


CHANGES = [
    cast,
    cast_one,
    reset_context,
    add_to_gradients,
    freeze_some,
    initialise_again,
    replace_an_array,
    add_parameters,
    reset_the_world,
    rename,
]


@pytest.mark.parametrize("change", CHANGES, ids=operator.attrgetter("__name__"))
def test_changes_between_steps(rank, size, change):
    """Whatever happens to the parameters or the world, the next step exchanges the gradients that there are then."""
    trainer = make_trainer(make_parameters())
    for step in range(2):
        check_step(trainer, rank, size, step)
    change(trainer)
    for step in range(2, 4):
        check_step(trainer, rank, size, step)
    if change is freeze_some:
        thaw_them(trainer)
        for step in range(4, 6):
            check_step(trainer, rank, size, step)


def test_compression_from_one_step_to_the_next(rank, size):
    """`set_gradient_compression` holds from the next step on."""
    trainer = make_trainer(make_parameters())
    for step, kind in enumerate(("none", "fp16", "none")):
        trainer._kvstore.set_gradient_compression({"type": kind})
        fill(trainer, rank, step)
        trainer.allreduce_grads()
        if kind == "none" or size == 1:
            assert_summed(trainer, size, step)
            continue
        for number, param in enumerate(trainer._params):
            parts = [contribution(r, param.shape, "float32", (step, number)).astype("float16") for r in range(size)]
            assert_same_bits(param.grad().asnumpy(), ordered_sum(parts).astype("float32"))


@pytest.mark.parametrize("same_store", [False, True])
def test_two_trainers(rank, size, same_store):
    """Two Trainers, on one store or two, of which the second is made when the first is under way."""
    store = mx.kv.create("horovod")
    trainers = [make_trainer(make_parameters(), store)]
    check_step(trainers[0], rank, size, "first")
    trainers.append(make_trainer(make_parameters(SHAPES[::-1], prefix="q"), store if same_store else None))
    for step in range(3):
        for number, trainer in enumerate(trainers):
            fill(trainer, rank, (step, number))
        for trainer in trainers:
            trainer.allreduce_grads()
        for number, trainer in enumerate(trainers):
            assert_summed(trainer, size, (step, number))


def test_two_trainers_of_the_same_parameters(rank, size):
    """Gradients that two Trainers exchange in turn are summed twice."""
    params = make_parameters([(5,), (6,)])
    trainers = [make_trainer(params) for _ in range(2)]
    for step in range(2):
        fill(trainers[0], rank, step)
        for trainer in trainers:
            trainer.allreduce_grads()
        for number, param in enumerate(trainers[0]._params):
            once = expected_sum(size, param.shape, "float32", (step, number))
            assert_same_bits(param.grad().asnumpy(), ordered_sum([once] * size))


def test_one_gradient_of_several_parameters(rank, size):
    """A gradient of two parameters, and one that is a view of it: one sum after the other, as MXNet orders them."""
    with zero_copy(False):  # which would give each of them memory of its own
        trainer = make_trainer(make_parameters([(6,), (4,), (6,), (2, 3), (4,)]))
        first, _, same, view, _ = trainer._params
        (shared,) = first.list_grad()
        same._grad, view._grad = [shared], [shared.as_nd_ndarray().reshape((2, 3))]
        for step in range(2):
            shared[:] = array(contribution(rank, (6,), "float32", step))
            trainer.allreduce_grads()
            expected = expected_sum(size, (6,), "float32", step)
            for _ in (same, view):
                expected = ordered_sum([expected] * size)
            assert_same_bits(shared.asnumpy(), expected)


def test_a_sparse_gradient_among_others(rank, size):
    """A csr gradient is refused as it was without steps: those before it are exchanged, it is named."""
    trainer = make_trainer(make_parameters([(3,), (4, 2), (5,)]))
    check_step(trainer, rank, size, 0)
    dense = trainer._params[1]._grad
    trainer._params[1]._grad = [mx.nd.sparse.zeros("csr", (4, 2))]
    first = trainer._params[0].list_grad()[0]
    first[:] = array(contribution(rank, (3,), "float32", 1))
    with pytest.raises(UnsupportedDtypeError, match=r"\(key 1\).*csr"):
        trainer.allreduce_grads()
    assert_same_bits(first.asnumpy(), expected_sum(size, (3,), "float32", 1))
    trainer._params[1]._grad = dense
    check_step(trainer, rank, size, 2)


@pytest.mark.parametrize("where", ["instance", "class", "subclass"])
def test_a_replaced_pushpull_is_called(rank, size, monkeypatch, where):
    """Whoever replaces `pushpull` sees every gradient, from the next step on."""
    store = mx.kv.create("horovod")
    seen = []
    plain = type(store).pushpull

    def spy(self, key, value, out=None, priority=0):
        seen.append((key, priority))
        plain(self, key, value, out, priority)

    if where == "subclass":
        store = type("Mine", (type(store),), {"pushpull": spy})()
    trainer = make_trainer(make_parameters(), store)
    if where != "subclass":
        check_step(trainer, rank, size, 0)
        assert not seen
    if where == "instance":
        store.pushpull = spy.__get__(store)
    elif where == "class":
        monkeypatch.setattr(StoreMethods, "pushpull", spy)
    for step in range(1, 3):
        check_step(trainer, rank, size, step)
    assert seen == [(place, -place) for place in range(len(SHAPES))] * 2


def test_a_parameter_that_says_itself_what_its_gradients_are(rank, size):
    """A class with a `list_grad` of its own: it is asked in every step, as MXNet does."""
    trainer = make_trainer(make_parameters([(3,), (4,)]))
    param = trainer._params[1]
    param.__class__ = type("Own", (type(param),), {"list_grad": lambda self: [named]})
    for step in range(2):
        named = array(np.zeros(4, "float32"))
        check_step(trainer, rank, size, step)


def test_a_parameter_that_was_never_initialised(rank, size):
    """MXNet's own error for a parameter without a gradient."""
    trainer = make_trainer(make_parameters([(3,), (4,)]))
    check_step(trainer, rank, size, 0)
    param = trainer._params[1]
    kept, param._grad = param._grad, None
    with pytest.raises(RuntimeError, match="Cannot get gradient array"):
        trainer.allreduce_grads()
    param._grad = kept
    check_step(trainer, rank, size, 1)


def disagree(trainer, rank, size, place):
    """Give the last rank a gradient of another shape; returns a function that undoes it."""
    param = trainer._params[place]
    kept = param._grad
    if rank == size - 1:
        param._grad = [array(np.ones((11,), "float32"))]

    def undo():
        param._grad = kept

    return undo


@not_naive
@pytest.mark.parametrize("place", [1, 3])
def test_an_error_names_its_key_and_the_world_goes_on(rank, size, place):
    """Mismatching shapes: whoever reads the gradient gets an error that names it, and so the next step works."""
    if size == 1:
        pytest.skip("one rank cannot disagree")
    trainer = make_trainer(make_parameters())
    check_step(trainer, rank, size, 0)
    undo = disagree(trainer, rank, size, place)
    trainer.allreduce_grads()
    with pytest.raises(MismatchError, match=rf"allreduce 'p0{place}' \(key {place}\): ranks disagree on shape"):
        trainer._params[place].list_grad()[0].wait_to_read()
    undo()
    for step in range(1, 3):
        check_step(trainer, rank, size, step)
    assert pushpulls(trainer) == [4] * len(SHAPES)


@not_naive
def test_an_unread_error_is_raised_by_the_next_step(rank, size):
    """The step that raises it has submitted all its gradients nevertheless."""
    if size == 1:
        pytest.skip("one rank cannot disagree")
    trainer = make_trainer(make_parameters())
    undo = disagree(trainer, rank, size, 1)
    trainer.allreduce_grads()
    process.current().member.drain()  # as before a fork: it is over on this rank, and the program has not heard of it
    undo()
    fill(trainer, rank, 1)
    with pytest.raises(MismatchError, match=r"'p01' \(key 1\)"):
        trainer.allreduce_grads()
    assert_summed(trainer, size, 1)
    check_step(trainer, rank, size, 2)
    assert pushpulls(trainer) == [3] * len(SHAPES)


@not_naive
def test_a_failed_input(rank, size):
    """An operation of one rank that should have produced a gradient fails: all ranks hear of it, and go on."""
    if size == 1:
        pytest.skip("nothing is exchanged")
    trainer = make_trainer(make_parameters([(3, 3), (128, 64)]))
    check_step(trainer, rank, size, 0)
    small = trainer._params[0].list_grad()[0]
    if rank == 0:
        # Not positive definite: this fails where it is computed.
        mx.nd.linalg.potrf(mx.nd.zeros((3, 3)) - 1, out=small.as_nd_ndarray())
    trainer.allreduce_grads()
    with pytest.raises(Exception, match=r"potrf|input") as caught:
        small.wait_to_read()
    assert isinstance(caught.value, mx.base.MXNetError)
    process.current().member.drain()
    process.current().member._take_unread()
    for step in range(1, 3):
        check_step(trainer, rank, size, step)


@not_naive
def test_a_lost_world_raises_before_anything_is_submitted(rank, size):
    """The same error in every step until the world is made anew; nothing is counted."""
    if size == 1:
        pytest.skip("there is no world to lose")
    trainer = make_trainer(make_parameters())
    check_step(trainer, rank, size, 0)
    kvstore_hvd.barrier()
    if rank == 0:
        process.current().abort("this is a test")
    end = time.monotonic() + patient(60)
    while process.current().member.communicator().health() is None:
        assert time.monotonic() < end, "the abort never arrived"
        time.sleep(0.01)
    before = pushpulls(trainer)
    for _ in range(2):
        with pytest.raises(HorovodInternalError, match="this is a test"):
            trainer.allreduce_grads()
    assert pushpulls(trainer) == before
    kvstore_hvd.reset()
    for step in range(1, 3):
        check_step(trainer, rank, size, step)

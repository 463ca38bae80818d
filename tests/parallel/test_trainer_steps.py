"""A Trainer's step as one call of the store: the same bits and errors as with `pushpull` for each gradient."""

import threading

import numpy as np
import pytest

from kvstore_hvd.errors import HorovodInternalError, MismatchError, UnsupportedDtypeError
from kvstore_hvd.mxnet_compat import dtype_name
from kvstore_hvd.world import process
from support import gluon
from support.arrays import assert_same_bits, contribution, expected_sum, sum_of_ranks
from support.gluon import array, assert_trained, is_mxnet_2, mlp, network, parameters
from support.patience import until
from support.zero_copy import meet_again, zero_copy

mx = pytest.importorskip("mxnet")


# Small ones that are neighbours share an operation of MXNet; the large ones between them do not.
SHAPES = ((3, 4), (5,), (1,), (128, 64), (7,), (2, 2), (300, 70), (9,))


def make_parameters(shapes=SHAPES, prefix="p"):
    params = {}
    for number, shape in enumerate(shapes):
        name = f"{prefix}{number:02}"
        params[name] = mx.gluon.Parameter(name, shape=shape)
        params[name].initialize()
    return params


def make_trainer(params, store=None):
    trainer = mx.gluon.Trainer(params, "sgd", {"learning_rate": 0.1}, kvstore=store or mx.kv.create("horovod"))
    trainer._init_kvstore()
    trainer._init_params()
    return trainer


def fill(trainer, rank, seed):
    for number, param in enumerate(trainer._params):
        if param.grad_req != "null":
            (gradient,) = param.list_grad()
            gradient[:] = array(contribution(rank, gradient.shape, dtype_name(gradient), (seed, number)))


def assert_summed(trainer, size, seed):
    for number, param in enumerate(trainer._params):
        if param.grad_req != "null":
            (gradient,) = param.list_grad()
            expected = expected_sum(size, gradient.shape, dtype_name(gradient), (seed, number))
            assert_same_bits(gradient.asnumpy(), expected)


def check_step(trainer, rank, size, seed):
    fill(trainer, rank, seed)
    trainer.allreduce_grads()
    assert_summed(trainer, size, seed)


def set_all(grad_req):
    return lambda trainer: [setattr(param, "grad_req", grad_req) for param in trainer._params[1:4]]


def replace_an_array(trainer):
    """Not what MXNet does, but what somebody might do to a list that MXNet hands out."""
    gradients = trainer._params[2].list_grad()
    gradients[0] = gradients[0].copy()


def add_parameters(trainer):
    for param in make_parameters([(4,), (70, 90)], prefix="more").values():
        trainer._param2idx[param._uuid if is_mxnet_2() else param.name] = len(trainer._params)
        trainer._params.append(param)


CHANGES = {
    "freeze": set_all("null"),
    "thaw": set_all("write"),
    "rename": lambda trainer: trainer._kvstore._set_key_labels({0: "another"}),
    "array": replace_an_array,
    "reset": lambda trainer: meet_again(),
    "cast one": lambda trainer: trainer._params[1].cast("float16"),
    "whole numbers": lambda trainer: trainer._params[2].cast("int64"),
    "more": add_parameters,
    "context": lambda trainer: [
        (param.reset_device if is_mxnet_2() else param.reset_ctx)(mx.cpu(1)) for param in trainer._params
    ],
    "cast": lambda trainer: [param.cast("float64") for param in trainer._params],
}


def test_changes_between_steps(rank, size):
    """Whatever happens to the parameters or the world, the next step exchanges the gradients that there are then."""
    trainer = make_trainer(make_parameters())
    for change in ("", *CHANGES):
        if change:
            CHANGES[change](trainer)
        for step in range(2):
            check_step(trainer, rank, size, (change, step))


def test_parameters_start_from_rank_0(rank, size):
    """Parameters are broadcast before the first update; BatchNorm's running statistics too, and never reduced."""
    nn = mx.gluon.nn
    net, of_rank_0 = (
        network(nn.Dense(16, in_units=8), nn.BatchNorm(in_channels=16), nn.Dense(3, in_units=16), seed=seed)
        for seed in (rank, 0)
    )
    for param in parameters(net):
        if param.grad_req == "null":
            param.set_data(array(np.full(param.shape, rank + 1, "float32")))
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="horovod")
    trainer.allreduce_grads()
    for param, mine, theirs in zip(parameters(net), gluon.weights(net), gluon.weights(of_rank_0)):
        assert_same_bits(mine, np.ones_like(theirs) if param.grad_req == "null" else theirs)
    reduced = {name for name, use in trainer._kvstore.report()["keys"].items() if "pushpull" in use["operations"]}
    assert reduced and not any("running" in name for name in reduced)


def test_compression_from_one_step_to_the_next(rank, size):
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
            assert_same_bits(param.grad().asnumpy(), sum_of_ranks(parts).astype("float32"))


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
                expected = sum_of_ranks([expected] * size)
            assert_same_bits(shared.asnumpy(), expected)


def test_a_gradient_that_is_refused(rank, size):
    """A csr gradient, and one that is not there: those before it are exchanged, and the error is as without steps."""
    trainer = make_trainer(make_parameters([(3,), (4, 2), (5,)]))
    check_step(trainer, rank, size, 0)
    param, dense = trainer._params[1], trainer._params[1]._grad
    first = trainer._params[0].list_grad()[0]
    first[:] = array(contribution(rank, (3,), "float32", 1))
    param._grad = [mx.nd.sparse.zeros("csr", (4, 2))]
    with pytest.raises(UnsupportedDtypeError, match=r"\(key 1\).*csr"):
        trainer.allreduce_grads()
    assert_same_bits(first.asnumpy(), expected_sum(size, (3,), "float32", 1))
    param._grad = None
    with pytest.raises(RuntimeError, match="Cannot get gradient array"):  # MXNet's own error
        trainer.allreduce_grads()
    param._grad = dense
    check_step(trainer, rank, size, 2)


def test_a_parameter_that_says_itself_what_its_gradients_are(rank, size):
    trainer = make_trainer(make_parameters([(3,), (4,)]))
    param = trainer._params[1]
    param.__class__ = type("Own", (type(param),), {"list_grad": lambda self: [named]})
    for step in range(2):
        named = array(np.zeros(4, "float32"))
        check_step(trainer, rank, size, step)


@pytest.mark.parametrize("where", ["instance", "subclass"])
def test_a_replaced_pushpull_is_called(rank, size, where):
    store = mx.kv.create("horovod")
    seen = []
    plain = type(store).pushpull

    def spy(self, key, value, out=None, priority=0):
        seen.append((key, priority))
        plain(self, key, value, out, priority)

    if where == "subclass":
        store = type("Mine", (type(store),), {"pushpull": spy})()
    trainer = make_trainer(make_parameters(), store)
    if where == "instance":
        check_step(trainer, rank, size, 0)
        assert not seen
        store.pushpull = spy.__get__(store)
    for step in range(1, 3):
        check_step(trainer, rank, size, step)
    assert seen == [(place, -place) for place in range(len(SHAPES))] * 2


@pytest.mark.needs(2)
def test_an_unread_error_is_raised_by_the_next_step(rank, size):
    """The step that raises it has submitted all its gradients nevertheless."""
    trainer = make_trainer(make_parameters())
    param = trainer._params[1]
    kept = param._grad
    if rank == size - 1:
        param._grad = [array(np.ones((11,), "float32"))]
    trainer.allreduce_grads()
    process.current().member.drain()  # as before a fork: it is over on this rank, and the program has not heard of it
    param._grad = kept
    fill(trainer, rank, 1)
    with pytest.raises(MismatchError, match=r"allreduce 'p01' \(key 1\): ranks disagree on shape"):
        trainer.allreduce_grads()
    assert_summed(trainer, size, 1)
    check_step(trainer, rank, size, 2)
    mx.nd.waitall()
    keys = trainer._kvstore.report()["keys"].values()
    assert [key["operations"].get("pushpull", 0) for key in keys] == [3] * len(SHAPES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("who", "how"), [("optimizer", "net"), ("compressed", "batch"), ("apart", "net")])
def test_gradients_that_are_stale_on_some_workers(rank, size, who, how):
    """With ignore_stale_grad: workers without a batch, or with parts of the network each, train as one worker does."""
    nets, models = ([mlp(seed=3), mlp(seed=4)] for _ in range(2))
    trained, expected = ([each for net in of for each in parameters(net)] for of in (nets, models))

    def loss_of(nets, step, worker):
        data = array(gluon.samples(4, seed=10 * step + worker)[0])
        if how == "net":
            return (nets[(step + worker) % 2](data) ** 2).mean()
        return ((nets[0](data) + nets[1](data)) ** 2).mean()

    def takes_part(step, worker):
        return step != 3 and not (how == "batch" and step % 2 and worker == size - 1)

    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
    kind = "DistributedOptimizer" if who == "optimizer" else "DistributedTrainer"
    how_sent = {"compression": gluon.OwnCompression} if who == "compressed" else {}
    trainer = gluon.distributed(kind, trained, "sgd", options, **how_sent)
    alone = mx.gluon.Trainer(expected, "sgd", options, kvstore=None)
    for step in range(6):
        if takes_part(step, rank):
            with mx.autograd.record():
                loss_of(nets, step, rank).backward()
        before = [each.grad().asnumpy() for each in trained]
        if who == "apart":
            trainer.allreduce_grads()
            trainer.update(1, ignore_stale_grad=True)
        else:
            trainer.step(1, ignore_stale_grad=True)
        if step == 3:  # nobody takes part
            assert all((each.grad().asnumpy() == was).all() for each, was in zip(trained, before))
        with mx.autograd.record():
            losses = [loss_of(models, step, worker) for worker in range(size) if takes_part(step, worker)]
        if losses:
            mx.autograd.backward(losses)
        alone.step(size, ignore_stale_grad=True)
    for net, model in zip(nets, models):
        assert_trained(net, gluon.weights(model), rtol=1e-3)


def single(**options):
    return mx.gluon.nn.Dense(1, in_units=1, use_bias=False, **options)


@pytest.mark.parametrize("kind", ["DistributedTrainer", "DistributedOptimizer"])
def test_gradients_that_are_stale_on_one_device(rank, size, kind):
    """A worker's devices get the same update, whichever of them have a batch."""
    net = network(single(), contexts=[mx.cpu(0), mx.cpu(1)])
    trainer = gluon.distributed(kind, parameters(net), "sgd", {"learning_rate": 1.0}, kvstore="device")
    (before,) = gluon.weights(net)
    for step in range(3):
        for device, weight in enumerate(parameters(net)[0].list_data()):
            if step == 0 or (rank, device) == (0, 0):
                with mx.autograd.record():
                    weight.sum().backward()
        trainer.step(1, ignore_stale_grad=True)
    for weight in parameters(net)[0].list_data():
        np.testing.assert_allclose(before - weight.asnumpy(), 2.0 + 2.0 / size, rtol=1e-6)


@pytest.mark.skipif(is_mxnet_2(), reason="there all parameters have few names")
def test_stale_gradients_of_parameters_of_one_name(rank, size):
    """Only the one that is stale on all workers is left out."""
    nets = [single(prefix="same_") for _ in range(2)]
    for net in nets:
        net.initialize(mx.init.One())
    trained = [each for net in nets for each in parameters(net)]
    trainer = mx.gluon.Trainer(trained, "sgd", {"learning_rate": 1.0}, kvstore=mx.kv.create("horovod"))
    for net in (nets[1], nets[0], nets[1]):
        with mx.autograd.record():
            net(array(np.full((1, 1), rank + 1, np.float32))).sum().backward()
        trainer.step(1, ignore_stale_grad=True)
    total = size * (size + 1) / 2
    assert [each.data().asscalar() for each in trained] == [1.0 - total, 1.0 - 2 * total]


@pytest.mark.parametrize("how", ["split", "skipped", "overflow"])
def test_stale_gradients_after_other_updates(rank, how):
    """After an update that did not ignore stale gradients, or one that was skipped, by the program or by AMP."""
    net = single()
    net.initialize(mx.init.One())
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25}, kvstore=mx.kv.create("horovod"))
    if how == "overflow":
        gluon.scaler_of(trainer)

    def step(takes_part, slope=1.0, updates=True, ignore=True):
        if takes_part:
            with mx.autograd.record():
                (net(array(np.ones((1, 1), np.float32))) * slope).sum().backward()
        if how == "overflow":
            trainer.step(1, ignore_stale_grad=True)
        else:
            trainer.allreduce_grads()
            if updates:
                trainer.update(1, ignore_stale_grad=ignore)

    step(True)
    if how == "split":
        step(True, ignore=False)
    else:
        step(rank == 0, slope=np.inf if how == "overflow" else 1.0, updates=False)
    before = float(net.weight.data().asnumpy().item())
    step(rank == 0)
    assert before - float(net.weight.data().asnumpy().item()) == 0.25


@pytest.mark.needs(2)
def test_ignore_stale_grad_on_one_worker(rank, size):
    trainer = make_trainer(mlp(seed=3).collect_params())
    mx.nd.waitall()
    engine = process.current().member.engine()

    def abort():
        until(lambda: engine.waiting(0.0))
        process.current().abort("the test says so")

    if rank == 0:
        ends = threading.Thread(target=abort)
        ends.start()
        with pytest.raises(HorovodInternalError, match=r"allreduce 'fresh gradients \(ignore_stale_grad=True\)'"):
            trainer.step(1, ignore_stale_grad=True)
        ends.join()
    until(engine.health)
    process.current().reset()

"""The Module interface (MXNet 1): on the store, and with a `DistributedOptimizer`."""

import contextlib
import warnings

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import Join
from kvstore_hvd.errors import InvalidTypeError, MismatchError
from kvstore_hvd.world import process
from support.arrays import assert_equal_on_all_ranks
from support.gluon import assert_alike, is_mxnet_2, samples
from support.zero_copy import bytes_in_place, lies_in_arena

mx = pytest.importorskip("mxnet")

BATCH = 4
pytestmark = pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")


def regression():
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.sym.LinearRegressionOutput(symbol, mx.sym.Variable("label"), name="out")


def first_weights(seed):
    generator = np.random.RandomState(seed)
    return {"fc_weight": mx.nd.array(generator.uniform(-1, 1, (3, 8))), "fc_bias": mx.nd.zeros(3)}


def assert_regressed(module, size, batch):
    """The weights after three steps on the batches of all workers, from those of the first one."""
    weight, bias = first_weights(0)["fc_weight"].asnumpy(), np.zeros(3, "float32")
    data, labels = (np.concatenate(each) for each in zip(*(samples(batch, seed=rank) for rank in range(size))))
    for _ in range(3):
        error = (data @ weight.T + bias - labels) / 3  # divided by the number of outputs
        weight, bias = weight - 0.1 * error.T @ data / len(data), bias - 0.1 * error.sum(0) / len(data)
    ours = module.get_params()[0]["fc_weight"].asnumpy()
    assert_alike(ours)
    np.testing.assert_allclose(ours, weight, rtol=1e-3, atol=1e-5)


def bound(rank, batch=BATCH, devices=1):
    batches = mx.io.NDArrayIter(*samples(batch, seed=rank), batch_size=batch, label_name="label")
    module = mx.mod.Module(regression(), label_names=["label"], context=[mx.cpu(d) for d in range(devices)])
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params(arg_params=first_weights(rank))
    return module, batches


def gradients_in_arena(module):
    return [lies_in_arena(gradient) for gradients in module._exec_group.grad_arrays for gradient in gradients]


def update(module, batches):
    batches.reset()
    module.forward_backward(batches.next())
    module.update()


@pytest.mark.parametrize(
    ("store", "devices", "wraps"),
    [("instance", 2, False), ("horovod", 1, False), ("instance", 1, True), ("horovod", 2, True), (None, 1, True)],
)
def test_module(rank, size, fresh_log, caplog, store, devices, wraps):
    """Its gradients are summed once: by the store or, which is said once, by a `DistributedOptimizer`."""
    batch = BATCH * devices
    module, _ = bound(rank if store else 0, batch, devices)
    batches = mx.io.NDArrayIter(*samples(batch, seed=rank), batch_size=batch, label_name="label")
    optimizer = mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1.0 / batch / (1 if wraps else size))
    optimizer = hvd.DistributedOptimizer(optimizer) if wraps else optimizer
    kvstore = mx.kv.create("horovod") if store == "instance" else store
    module.fit(batches, eval_metric="mse", num_epoch=3, kvstore=kvstore, optimizer=optimizer)
    assert getattr(module._kvstore, "type", None) == ("horovod" if not wraps else "device" if devices > 1 else None)
    assert not module._update_on_kvstore
    assert caplog.text.count("exchanges no gradients here: the optimizer, a D") == (wraps and store is not None)
    assert_regressed(module, size, batch)


def test_bucketing_module(rank, size):
    module = mx.mod.BucketingModule(lambda key: (regression(), ["data"], ["label"]), default_bucket_key=1)
    data, labels = samples(BATCH, seed=rank)
    shapes = [("data", (BATCH, 8))], [("label", (BATCH, 3))]
    module.bind(*shapes)
    module.init_params(arg_params=first_weights(rank))
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1.0 / BATCH))
    module.init_optimizer(kvstore="horovod", optimizer=optimizer)
    for name, values in sorted(module.get_params()[0].items()):
        assert_equal_on_all_ranks(values.asnumpy(), name)
    for key in (1, 2, 1):
        batch = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(labels)], 0, None, key, *shapes)
        module.forward_backward(batch)
        module.update()
        assert gradients_in_arena(module._curr_module) == [size > 1] * 2
    assert_regressed(module, size, BATCH)


def test_gradients_in_shared_memory(rank, size):
    """They are summed where they lie, also after the batch size has changed; those of inputs are the executor's."""
    module = mx.mod.Module(regression(), label_names=["label"])
    data, labels = samples(BATCH, seed=rank)
    module.bind([("data", data.shape)], [("label", labels.shape)], inputs_need_grad=True, grad_req="add")
    module.init_params(arg_params=first_weights(0))
    module.init_optimizer(kvstore="horovod", optimizer_params={"learning_rate": 0.1, "rescale_grad": 1 / BATCH / size})
    before = bytes_in_place()
    for rows in (BATCH, BATCH // 2, BATCH // 2):  # the three add up to two batches
        batch = mx.io.DataBatch([mx.nd.array(data[-rows:])], [mx.nd.array(labels[-rows:])])
        module.reshape([("data", (rows, 8))], [("label", (rows, 3))])
        module.forward_backward(batch)
    weight = first_weights(0)["fc_weight"].asnumpy()
    parts = [(data, labels), *[(data[-rows:], labels[-rows:])] * 2]
    own = sum((part @ weight.T - wanted).T @ part for part, wanted in parts) / 3
    np.testing.assert_allclose(module._exec_group.grad_arrays[0][0].asnumpy(), own, rtol=1e-4, atol=1e-5)
    assert gradients_in_arena(module) == [size > 1] * 2
    assert not lies_in_arena(module.get_input_grads()[0])
    module.update()
    assert bytes_in_place() - before == (4 * (3 * 8 + 3) if size > 1 else 0)
    assert_alike(module.get_params()[0]["fc_weight"].asnumpy())


@pytest.mark.parametrize("exchanges", ["store", "optimizer"])
def test_states_that_one_module_has_loaded(rank, size, exchanges, tmp_path):
    """The first step of all says so."""
    path, member = str(tmp_path / "states"), process.current().member
    for resumes in (False, True):
        module, batches = bound(rank)
        optimizer = mx.optimizer.SGD(momentum=0.9, rescale_grad=1 / (BATCH * size))
        given = ("horovod", optimizer) if exchanges == "store" else (None, hvd.DistributedOptimizer(optimizer))
        module.init_optimizer(*given)
        if not resumes:
            update(module, batches)
            module.save_optimizer_states(path)
            continue
        if rank == size - 1:
            module.load_optimizer_states(path)
        with pytest.raises(MismatchError, match="states of the optimizer") if size > 1 else contextlib.nullcontext():
            update(module, batches)
            member.drain()
            member.check()
    member.drain()  # what the other parameters say would be raised by the next test
    member.forget_unread(lambda error: isinstance(error, MismatchError))


def test_rescale_grad(rank, size, monkeypatch):
    """As with MXNet's 'dist_sync'; of the workers that there are in an update. What the program sets stays."""
    module, batches = bound(rank)
    module.init_optimizer(kvstore="horovod")
    optimizer = module._optimizer
    assert optimizer.rescale_grad == 1 / (BATCH * size)
    module.init_optimizer(kvstore="horovod", optimizer_params={"rescale_grad": 0.5})  # there is one already
    of_its_own, _ = bound(rank)
    of_its_own.init_optimizer(kvstore="horovod", optimizer_params={"rescale_grad": 0.5})
    assert of_its_own._optimizer.rescale_grad == 0.5
    assert module._optimizer is optimizer
    for workers in (size + 1, size):  # as after a change of an elastic job
        monkeypatch.setattr(type(module._kvstore), "num_workers", workers)
        update(module, batches)
        assert optimizer.rescale_grad == 1 / (BATCH * workers)
    optimizer.rescale_grad = 0.5
    monkeypatch.setattr(type(module._kvstore), "num_workers", size + 1)
    update(module, batches)
    assert optimizer.rescale_grad == 0.5


def test_rescale_grad_of_an_optimizer(rank, size):
    """One that the program has made keeps its own; a warning says when it is not that of all workers."""
    for factor in (1 / (BATCH * size), 0.3):
        module, _ = bound(rank)
        optimizer = mx.optimizer.SGD(rescale_grad=factor)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.init_optimizer(kvstore="horovod", optimizer=optimizer)
        found = [str(each.message) for each in caught if "rescale_grad" in str(each.message)]
        assert len(found) == (factor == 0.3)
        assert all(f"1/batch_size/num_workers is {1 / (BATCH * size)}" in each for each in found)
        assert optimizer.rescale_grad == factor


def test_running_statistics_are_averaged(rank, size):
    batches = mx.io.NDArrayIter(*samples(BATCH, seed=rank), batch_size=BATCH, label_name="label")
    symbol = mx.sym.BatchNorm(mx.sym.Variable("data"), name="norm", fix_gamma=False)
    module = mx.mod.Module(mx.sym.LinearRegressionOutput(symbol, mx.sym.Variable("label")), label_names=["label"])
    module.bind(batches.provide_data, [("label", batches.provide_data[0].shape)])
    module.init_params(aux_params={"norm_moving_mean": mx.nd.ones(8) * rank, "norm_moving_var": mx.nd.ones(8)})
    hvd.average_running_statistics(module)
    assert module.get_params()[1]["norm_moving_mean"].asnumpy().tolist() == [(size - 1) / 2] * 8


def test_a_join_takes_no_module(rank):
    with pytest.raises(InvalidTypeError, match=r"not a Module(.|\n)*last_batch_handle='discard'"):
        Join([bound(rank)[0]])

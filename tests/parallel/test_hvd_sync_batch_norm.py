"""`hvd.SyncBatchNorm` against ``nn.BatchNorm`` in one process that has all the data."""

import copy
import gc

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.join import Join
from support.gluon import array, assert_alike, is_mxnet_2, weights
from support.joinables import Nothing

mx = pytest.importorskip("mxnet")
nn = mx.gluon.nn

STATIC = {"static_alloc": True, "static_shape": True}
each_way = pytest.mark.parametrize("hybridize", [None, STATIC], ids=["eager", "static"])


def batches(size, shape, dtype="float32", uneven=False, offset=0.0, seed=0):
    generator = np.random.default_rng(seed)
    rows = [shape[0] + (rank if uneven else 0) for rank in range(size)]
    return [(generator.standard_normal((count, *shape[1:])) * 2 + offset).astype(dtype) for count in rows]


def layer(kind, dtype="float32", hybridize=None, **options):
    block = kind(
        gamma_initializer=mx.init.Constant(1.5),
        beta_initializer=mx.init.Constant(-0.5),
        running_variance_initializer=mx.init.Constant(2.0),
        **options,
    )
    block.initialize()
    block.cast(dtype)
    if hybridize is not None:
        block.hybridize(**hybridize)
    return block


def train(block, values, factors, passes=1):
    """Forward and backward passes: the output, and the gradient of the input, which adds up over several."""
    x = array(values)
    x.attach_grad("write" if passes == 1 else "add")
    for _ in range(passes):
        with mx.autograd.record():
            y = block(x)
            total = (y * y * array(factors)).sum()
        total.backward()
    return y.asnumpy(), x.grad.asnumpy()


def compare(rank, size, data, hybridize=None, dtype="float32", tolerance=1e-5, steps=2, **options):
    """Train a layer on this rank's batch and another one on all of them, and compare everything."""
    own, alone = layer(hvd.SyncBatchNorm, dtype, hybridize, **options), layer(nn.BatchNorm, dtype, **options)
    starts = np.cumsum([0, *(len(each) for each in data)])
    whole = np.concatenate(data)
    factors = np.random.default_rng(1).standard_normal(whole.shape).astype(dtype)
    mine = slice(starts[rank], starts[rank + 1])
    close = {"rtol": tolerance, "atol": tolerance}
    for _ in range(steps):
        y, dx = train(own, whole[mine], factors[mine])
        expected_y, expected_dx = train(alone, whole, factors)
        assert y.dtype == expected_y.dtype
        # An element is the difference of terms as large as the largest ones, which are rounded.
        for ours, theirs in ((y, expected_y), (dx, expected_dx)):
            scale = max(1.0, np.abs(theirs).max())
            np.testing.assert_allclose(ours / scale, theirs[mine] / scale, **close)
    for name in ("running_mean", "running_var"):
        ours, theirs = (getattr(block, name).data().asnumpy() for block in (own, alone))
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, **close)
        assert_alike(ours)
    for name in ("gamma", "beta"):
        parameter = getattr(own, name)
        if parameter.grad_req != "null":
            total = hvd.allreduce(parameter.grad(), op=hvd.Sum).asnumpy()
            scale = max(1.0, np.abs(total).max())
            np.testing.assert_allclose(total / scale, getattr(alone, name).grad().asnumpy() / scale, **close)
    # Inference uses the running statistics.
    x = array(whole[mine])
    np.testing.assert_allclose(own(x).asnumpy(), alone(x).asnumpy(), **close)


@pytest.mark.parametrize(
    ("shape", "hybridize", "options"),
    [
        ((4, 3), None, {}),
        ((3, 2, 5), {}, {"center": False}),
        ((2, 3, 4, 5), STATIC, {"momentum": 0.5, "epsilon": 0.1}),
        ((3, 4, 5, 2), {}, {"axis": -1, "scale": False}),
        ((3, 4, 5), None, {"use_global_stats": True}),
        ((3, 4, 5), {}, {"dtype": "float64", "tolerance": 1e-7}),
        ((8, 4, 3, 3), {}, {"dtype": "float16", "tolerance": 1e-2}),
    ],
    ids=str,
)
def test_as_one_batch(rank, size, shape, hybridize, options):
    """Outputs, gradients and running statistics, with the options of nn.BatchNorm. Every element counts the same."""
    compare(rank, size, batches(size, shape, options.get("dtype", "float32"), uneven=True), hybridize, **options)


@pytest.mark.needs(2)
@each_way
def test_workers_without_samples(rank, size, hybridize):
    """Those of the others count alone; where nobody has any, nothing becomes NaN."""
    with mx.util.np_shape(True):
        data = batches(size, (4, 3))
        compare(rank, size, [data[0][:0], *data[1:]], hybridize)
        nobody = layer(hvd.SyncBatchNorm, hybridize=hybridize, in_channels=3)
        nothing = np.zeros((0, 3), "float32")
        y, dx = train(nobody, nothing, nothing)
        assert y.shape == dx.shape == (0, 3)
        for parameter in (nobody.running_mean, nobody.running_var):
            assert np.isfinite(parameter.data().asnumpy()).all()


@pytest.mark.needs(2)
@pytest.mark.parametrize(("dtype", "hybridize"), [("float16", None), ("float32", STATIC)], ids=str)
def test_statistics_are_exact(rank, size, hybridize, dtype):
    """They are float32 also where data are float16, and keep their digits where the mean is far larger."""
    offset, within = (0.0, 1e-2) if dtype == "float16" else (1e4, 2e-3)  # float32 holds 1e4 to 1e-3
    data = batches(size, (64, 3, 8), dtype, offset=offset)
    block = layer(hvd.SyncBatchNorm, dtype, hybridize)
    y, _ = train(block, data[rank], np.ones_like(data[rank]))
    exact = np.concatenate(data).astype("float64")
    variance = block.running_var.data().asnumpy()
    assert variance.dtype == np.float32
    np.testing.assert_allclose((variance - 2 * 0.9) / 0.1, exact.var((0, 2)), rtol=1e-4 if offset else 1e-3)
    deviation = np.sqrt(exact.var((0, 2), keepdims=True) + 1e-5)
    expected = (data[rank] - exact.mean((0, 2), keepdims=True)) / deviation * 1.5 - 0.5
    np.testing.assert_allclose(y, expected, atol=within)


@each_way
def test_gradients_that_add_up(rank, size, hybridize):
    data = batches(size, (4, 3))[rank]
    block = layer(hvd.SyncBatchNorm, hybridize=hybridize)
    block(array(data))
    _, once = train(block, data, data)
    gamma_once = block.gamma.grad().asnumpy()
    block.gamma.grad_req = "add"  # with a fresh gradient
    _, twice = train(block, data, data, passes=2)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(block.gamma.grad().asnumpy(), 2 * gamma_once, rtol=1e-4, atol=1e-5)


def convolutions(kind, hybridize=None):
    """A small network with parameters that depend on their order only."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3), kind(), nn.Activation("relu"), nn.Conv2D(8, 3, padding=1), kind())
    net.add(nn.GlobalAvgPool2D(), nn.Dense(4))
    net.initialize()
    if hybridize is not None:
        net.hybridize(**hybridize)
    with mx.autograd.pause():
        net(array(np.zeros((1, 3, 10, 10), "float32")))
    generator = np.random.default_rng(3)
    for parameter in net.collect_params().values():
        parameter.set_data(array((generator.random(parameter.shape) * 0.4 + 0.1).astype("float32")))
    return net


@each_way
def test_after_convolutions(rank, size, hybridize):
    """Losses, running statistics and inference of a network are those of one process with all data. Convolutions write
    arrays in layouts that operators written in Python misread."""
    starts = np.cumsum([0] + [3 + each for each in range(size)])  # uneven
    own, alone = convolutions(hvd.SyncBatchNorm, hybridize), convolutions(nn.BatchNorm)
    trainer = hvd.DistributedTrainer(own.collect_params(), "sgd", {"learning_rate": 0.01})
    single = mx.gluon.Trainer(alone.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=None)
    mine = slice(starts[rank], starts[rank + 1])
    for step in range(2):
        generator = np.random.default_rng(step)
        x, wanted = (generator.standard_normal((starts[-1], *shape)).astype("float32") for shape in ((3, 10, 10), (4,)))
        losses = []
        for net, rows in ((own, mine), (alone, slice(None))):
            with mx.autograd.record():
                loss = ((net(array(x[rows])) - array(wanted[rows])) ** 2).sum()
            loss.backward()
            losses.append(loss)
        trainer.step(starts[-1] / size)  # averages
        single.step(starts[-1])
        total = hvd.allreduce(losses[0], op=hvd.Sum).asnumpy()
        np.testing.assert_allclose(total, losses[1].asnumpy(), rtol=2e-4, err_msg=str(step))
    for parameters in zip(own.collect_params().values(), alone.collect_params().values()):
        ours, theirs = (parameter.data().asnumpy() for parameter in parameters)
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4)
    assert_alike(own)
    np.testing.assert_allclose(own(array(x)).asnumpy(), alone(array(x)).asnumpy(), rtol=2e-3, atol=2e-4)


def test_exported(rank, size, tmp_path):
    """Files of a network are those of one with nn.BatchNorm: they need neither this package nor other workers."""
    net = convolutions(hvd.SyncBatchNorm, {})
    x = array(np.random.default_rng(rank).standard_normal((2, 3, 10, 10)).astype("float32"))
    with mx.autograd.record():
        net(x).backward()
    net.export(str(tmp_path / "net"))
    assert "Custom" not in (tmp_path / "net-symbol.json").read_text()
    files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    loaded = mx.gluon.SymbolBlock.imports(*files)
    np.testing.assert_allclose(loaded(x).asnumpy(), net(x).asnumpy(), rtol=1e-4, atol=1e-5)
    path = str(tmp_path / f"parameters{rank}")
    net.save_parameters(path)
    theirs = convolutions(nn.BatchNorm)
    theirs.load_parameters(path)
    np.testing.assert_allclose(theirs(x).asnumpy(), net(x).asnumpy(), rtol=1e-4, atol=1e-5)
    for block in (loaded, theirs):
        with mx.autograd.record():
            block(x).backward()
    np.testing.assert_allclose(theirs(x).asnumpy(), loaded(x).asnumpy(), rtol=1e-4, atol=1e-5)
    theirs.save_parameters(path)
    net.load_parameters(path)


def test_inference_has_no_operators_of_ours(rank, size):
    """Nor does a pass that is recorded in prediction mode; training with the same layer does."""
    net = convolutions(hvd.SyncBatchNorm, {})
    x = array(np.random.default_rng(rank).standard_normal((2, 3, 10, 10)).astype("float32"))

    def changes(pass_through):
        before = [value.tobytes() for value in weights(net)]
        pass_through()
        return before != [value.tobytes() for value in weights(net)]

    def train_once():
        with mx.autograd.record():
            net(x).backward()

    def infer():
        with mx.autograd.record(train_mode=False):
            y = net(x)
        y.backward(train_mode=False)
        np.testing.assert_allclose(y.asnumpy(), net(x).asnumpy(), rtol=1e-4, atol=1e-5)

    for _ in range(2):  # with other statistics
        assert changes(train_once)
        assert rank > 0 or not changes(infer)  # alone: others would be waited for
    assert changes(train_once)


@pytest.mark.needs(3)
def test_process_set(rank, size, dynamic):
    members = [0, size - 1]
    chosen = hvd.add_process_set(members)
    data, name = batches(size, (4, 3)), {} if is_mxnet_2() else {"prefix": "alone_"}  # others are named as elsewhere
    if rank in members:
        block = layer(hvd.SyncBatchNorm, process_set=chosen, **name)
        with mx.autograd.record():
            block(array(data[rank]))
        expected = np.concatenate([data[each] for each in members]).mean(0) * 0.1
        np.testing.assert_allclose(block.running_mean.data().asnumpy(), expected, rtol=1e-4, atol=1e-6)
    block = layer(hvd.SyncBatchNorm)
    train(block, data[rank], data[rank])
    expected = np.concatenate(data).mean(0) * 0.1
    np.testing.assert_allclose(block.running_mean.data().asnumpy(), expected, rtol=1e-4, atol=1e-6)


@each_way
def test_copy(rank, size, hybridize):
    first = layer(hvd.SyncBatchNorm, in_channels=3, hybridize=hybridize)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    del first
    gc.collect()
    data = batches(size, (4, 3))
    for block in (second, third):
        train(block, data[rank], data[rank])
        mean = np.concatenate(data).mean(0) * 0.1
        np.testing.assert_allclose(block.running_mean.data().asnumpy(), mean, rtol=1e-4, atol=1e-6)


@pytest.mark.needs(2)
def test_different_channels(rank, size):
    block = layer(hvd.SyncBatchNorm)
    with mx.autograd.record():
        y = block(array(np.ones((2, 3 + rank), "float32")))
    with pytest.raises(kvstore_hvd.MismatchError, match=r"gamma' \(key SyncBatchNorm.*disagree on shape"):
        y.wait_to_read()
    mx.nd.waitall()
    assert (block.running_mean.data().asnumpy() == 0).all()
    assert hvd.allreduce(array(np.ones(1, "float32")), op=hvd.Sum).asnumpy()[0] == size


def test_what_cannot_work(rank, size):
    several = hvd.SyncBatchNorm(in_channels=3)
    several.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    with mx.autograd.record(), pytest.raises(kvstore_hvd.InvalidRequestError, match="on several devices"):
        several(array(np.ones((2, 3), "float32")))
    assert is_mxnet_2() or several.gamma.name.startswith("batchnorm")
    block = layer(hvd.SyncBatchNorm, axis=3, in_channels=2)
    with mx.autograd.record(), pytest.raises((kvstore_hvd.InvalidRequestError, IndexError)):  # MXNet 2 looks first
        block(array(np.ones((2, 3), "float32")))


def test_within_join(rank, size):
    """Refused where a worker may run out of batches; not where that ends all."""
    block = layer(hvd.SyncBatchNorm)
    data = batches(size, (4, 3))[rank]
    with Join([Nothing()]):
        if size > 1:
            with pytest.raises(kvstore_hvd.InvalidRequestError, match="cannot be used within Join"):
                train(block, data, data)
        block(array(data))
    with Join([Nothing()], throw_on_early_termination=True, enable=size == 1):
        train(block, data, data)
    train(block, data, data)


@each_way
def test_layers_that_do_not_depend_on_each_other(rank, size, hybridize):
    """Applied in one order, they are ready in another one on each worker: none waits for good. Two of them are one
    layer, whose passes meet in the order of the calls. Who leaves the world waits for all passes."""
    nets = [nn.HybridSequential() for _ in range(4)]
    for net in nets:
        # Operators that read the inputs of a graph or write its outputs are not prepared as the others are.
        net.add(nn.Activation("relu"), layer(hvd.SyncBatchNorm, in_channels=3), nn.Flatten())
        if hybridize is not None:
            net.hybridize(**hybridize)
    nets += [nets[0]]
    zeros = mx.nd.zeros((500, 500))
    means = []
    for step in range(3):
        data = [array(batches(size, (4, 3), seed=seed, offset=10 * seed)[rank]) for seed in range(len(nets))]
        for place in np.random.default_rng((step, rank)).permutation(len(nets))[:3]:
            slow = mx.nd.dot(zeros, zeros)[:4, :3]
            data[place] = data[place] + (slow.as_np_ndarray() if is_mxnet_2() else slow)
        outputs = {}
        with mx.autograd.record():
            for place in np.random.default_rng(step).permutation(len(nets)):
                outputs[place] = nets[place](data[place])
            total = sum((y * y).sum() for y in outputs.values())
        total.backward()
        means += [outputs[place].mean() for place in range(len(nets))]
    hvd.shutdown()
    hvd.init()
    for place, mean in enumerate(means):
        np.testing.assert_allclose(hvd.allreduce(mean).asnumpy(), -0.5, atol=1e-5, err_msg=str(place))
    mx.nd.waitall()

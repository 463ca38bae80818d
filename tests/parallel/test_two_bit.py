"""`set_gradient_compression({'type': '2bit'})` against a model of the residuals of all ranks."""

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.elastic import GluonState
from kvstore_hvd.errors import UnsupportedDtypeError
from kvstore_hvd.join import Join
from support import gluon
from support.arrays import assert_same_bits, contribution, make
from support.gluon import array, assert_alike, batch_of, mlp, network, parameters, weights

mx = pytest.importorskip("mxnet")

SHAPE = (40, 25)


class Model:
    """What every rank has not sent yet, and what the sum of a step is."""

    def __init__(self, size, threshold):
        self.residuals = [np.zeros(SHAPE, "float32") for _ in range(size)]
        self.threshold = np.float32(threshold)

    def step(self, gradients):
        count = np.zeros(SHAPE, "int64")
        for rank, gradient in enumerate(gradients):
            residual = self.residuals[rank] + gradient
            sign = (residual >= self.threshold).astype("int64") - (residual <= -self.threshold)
            self.residuals[rank] = residual - sign.astype("float32") * self.threshold
            count += sign
        return count.astype("float32") * self.threshold


def gradients_of(rank, step, threshold):
    """Of two devices; some values are exactly the threshold, and 2.5 and 3 times that."""
    values = contribution(rank, (2, *SHAPE), "float32", step)
    values[:, 0, :6] = 0
    values[0, 0, :6] = np.float32(threshold) * np.array([1, -1, 2.5, -2.5, 3, -3], "float32")
    return values


def test_an_array_of_another_shape_begins_anew(kv, kind, size):
    """Under the same key: what was left of the one before is gone."""
    kv.set_gradient_compression({"type": "2bit"})
    for shape in ((3,), (2, 2), (3,)):
        x = make(kind, np.full(shape, 0.4, "float32"))
        kv.pushpull("x", x)
        assert not x.asnumpy().any()


@pytest.mark.parametrize(("kind", "threshold"), [("nd", None), ("np", np.float32(0.1))], indirect=["kind"])
def test_sums(kv, kind, rank, size, threshold):
    """`pushpull` (in place, with outs of other dtypes and devices, of several keys) and `push`: the model's bits."""
    params = {"type": "2bit"} if threshold is None else {"type": "2bit", "threshold": threshold}
    threshold = 0.5 if threshold is None else threshold
    kv.set_gradient_compression(params)
    one, two = Model(size, threshold), Model(size, threshold)
    for step in range(6):
        parts = [gradients_of(each, step, threshold) for each in range(size)]
        expected = one.step([each[0] for each in parts])
        summed = two.step([each[0] + each[1] for each in parts])
        devices = [make(kind, parts[rank][at], mx.cpu(at)) for at in range(2)]
        x, half = make(kind, parts[rank][0]), make(kind, np.zeros(SHAPE, "float16"), mx.cpu(1))
        whole, byte = make(kind, np.zeros(SHAPE, "float32")), make(kind, np.zeros(SHAPE, "int8"))
        if step == 0:
            kv.pushpull(1, x, priority=-1)
            kv.pushpull("two", devices)
        elif step % 2:
            kv.pushpull([1, 2], [x, x], out=[x, half])
            kv.pushpull("two", devices, out=[half, *devices])
        else:
            kv.pushpull("1", x, out=byte)
            assert_same_bits(byte.asnumpy(), expected.astype("int8"))
            kv.push(1, make(kind, np.zeros(SHAPE, "float32")))
            expected = one.step([np.zeros(SHAPE, "float32")] * size)
            kv.pull(1, x)
            kv.push("two", devices)
            kv.pull("two", out=[whole, *devices])
        kv.set_gradient_compression(params)  # the same: nothing changes
        assert_same_bits(x.asnumpy(), expected)
        for each in devices:
            assert_same_bits(each.asnumpy(), summed)
        if step % 2:
            assert_same_bits(half.asnumpy(), summed.astype("float16"))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.25})
    parts = [contribution(each, SHAPE, "float32", "after") for each in range(size)]
    x = make(kind, parts[rank])
    kv.pushpull(1, x)
    assert_same_bits(x.asnumpy(), Model(size, 0.25).step(parts))
    kv.init(1, x)
    kv.broadcast(3, x)
    assert_same_bits(x.asnumpy(), Model(size, 0.25).step(parts))
    empty, scalar = make(kind, np.zeros((0, 3), "float32")), mx.np.array(0.75)
    with mx.util.np_shape(True):
        kv.pushpull("empty", empty)
        kv.pushpull("scalar", scalar)
        assert (empty.shape, scalar.item()) == ((0, 3), 0.25 * size)
        kv._set_residuals(kv._residuals())
        kv.pushpull("scalar", scalar)
        assert scalar.item() == 0.25 * size


def test_other_arrays_are_refused(kv, rank, size):
    kv.set_gradient_compression({"type": "2bit"})
    x = mx.nd.ones(3)
    for wrong in (mx.nd.ones(3, dtype="float16"), mx.nd.ones(3, dtype="int32"), x.tostype("row_sparse")):
        with pytest.raises(UnsupportedDtypeError, match=r"Fix: .*'none'"):
            kv.pushpull(["x", "wrong"], [x, wrong])
        with pytest.raises(UnsupportedDtypeError, match=r"Fix: .*'none'"):
            kv.push("wrong", wrong)
    kv.pushpull("x", x)
    assert x.asnumpy().tolist() == [0.5 * size] * 3


def test_residuals_are_saved(rank, size, tmp_path, monkeypatch):
    """`GluonState.restore` and `sync`, and a worker's own file: the next steps have the bits that they had before."""

    def make_trainer(net):
        compression = {"type": "2bit", "threshold": 0.8}
        return mx.gluon.Trainer(parameters(net), "adam", {}, kvstore="horovod", compression_params=compression)

    def train(net, trainer, first):
        gluon.train(net, trainer, *(batch_of(rank, first + step) for step in range(3)), size=4 * size)
        return b"".join(each.tobytes() for each in weights(net))

    net = mlp()
    trainer = make_trainer(net)
    state = GluonState(net, trainer)
    state.sync()
    begin = train(net, trainer, 0)
    state.commit()
    assert state.trainer is trainer
    net.save_parameters(str(tmp_path / "net"))
    trainer.save_states(str(tmp_path / "states"))
    end = train(net, trainer, 3)
    assert_alike(net)
    state.restore()
    assert train(net, trainer, 3) == end
    state.restore()
    state.sync()
    assert train(net, trainer, 3) == end

    again = mlp(seed=1)
    again.load_parameters(str(tmp_path / "net"))
    other = make_trainer(again)
    other.load_states(str(tmp_path / "states"))
    assert b"".join(each.tobytes() for each in weights(again)) == begin
    assert train(again, other, 3) == end
    # Residuals of another worker, or of another world, are not taken, and MXNet's own Trainers read the rest.
    for what, value in (("num_workers", size + 1), ("rank", rank + 1)):
        with monkeypatch.context() as patch:
            patch.setattr(kvstore_hvd.Horovod, what, value)
            other.load_states(str(tmp_path / "states"))
        assert not other._kvstore._residuals()
    mx.gluon.Trainer(again.collect_params(), "adam", {}, kvstore=None).load_states(str(tmp_path / "states"))


def test_in_a_join(rank, size):
    """Workers without input send what is left of their residuals, and all make the same updates."""
    net = network(mx.gluon.nn.Dense(1, in_units=1, use_bias=False))
    net.initialize(mx.init.Zero(), force_reinit=True)
    options = {"kvstore": "horovod", "compression_params": {"type": "2bit", "threshold": 0.5}}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, **options)
    with Join([trainer]):
        for _ in range(1 + rank):
            with mx.autograd.record():
                net(array(np.full((1, 1), 0.75 + rank, "float32"))).sum().backward()
            trainer.step(size)
    residuals, total = [0.0] * size, 0.0
    for step in range(size):
        for each in range(size):
            residuals[each] += 0.75 + each if step <= each else 0
            if residuals[each] >= 0.5:
                residuals[each] -= 0.5
                total += 0.5
    (weight,) = weights(net)
    np.testing.assert_allclose(weight, -total / size, rtol=1e-6)
    assert_alike(weight)

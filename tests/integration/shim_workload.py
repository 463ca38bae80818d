"""A tour through MXNet that touches what a newer NumPy or Python breaks.

``python shim_workload.py`` prints one line and ends with 0 when all parts pass. Serves MXNet 1.9.1 and 2.0.0b1.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

import kvstore_hvd  # noqa: E402, F401 - before MXNet

V2 = mx.__version__.startswith("2")
nd = mx.nd
PARTS: list[Callable[[Path], None]] = []


def part(function: Callable[[Path], None]) -> Callable[[Path], None]:
    PARTS.append(function)
    return function


def array(values: Any) -> Any:
    return mx.np.array(values) if V2 else nd.array(values)


@part
def arrays(folder: Path) -> None:
    a, b = nd.array([[1, 2], [3, 4]]), nd.ones((2, 2))
    assert ((a + b * 2).asnumpy() == [[3, 4], [5, 6]]).all()
    a[0, 1] = 7
    a[:, 0] = nd.array([9, 9])
    assert float(a[0, 1].asscalar()) == 7
    assert "9." in str(a)
    assert repr(a)
    assert nd.dot(a, b).shape == (2, 2)
    assert nd.concat(a, b, dim=0).shape == (4, 2)
    assert nd.moveaxis(nd.ones((2, 3)), 0, 1).shape == (3, 2)
    assert a.astype("float16").astype(np.float64).dtype == np.float64
    assert nd.zeros((2,), dtype=np.int32).dtype == np.int32
    assert nd.array([True, False], dtype="bool").dtype == np.bool_
    for index in (nd.array([0, 1], dtype="int32"), np.array([0, 1]), [0, 1], slice(1, 2), np.int64(1)):
        assert a[index].size >= 2
    assert (np.float32(2) * a + np.float64(1.5)).shape == (2, 2)
    assert nd.random.uniform(shape=(2, 2)).shape == (2, 2)
    assert nd.sparse.zeros("row_sparse", (3, 4)).asnumpy().sum() == 0
    assert nd.sparse.csr_matrix((np.array([1.0, 2.0]), np.array([0, 1]), np.array([0, 1, 2])), shape=(2, 2)).shape
    assert nd.from_numpy(np.ones((3, 3), "float32")).shape == (3, 3)
    assert nd.contrib.boolean_mask(a, nd.array([1, 0])).shape == (1, 2)
    nd.save(str(folder / "arrays"), {"a": a, "b": b})
    assert (nd.load(str(folder / "arrays"))["a"].asnumpy() == a.asnumpy()).all()
    nd.waitall()


@part
def to_numpy(folder: Path) -> None:
    for made in (nd.array([[1, 2], [3, 4]]), mx.np.array([[1.0, 2.0], [3.0, 4.0]])):
        for function in (np.array, np.asarray, np.ascontiguousarray):
            result = function(made)
            assert type(result) is np.ndarray
            assert result.dtype == np.float32
            assert (result == [[1, 2], [3, 4]]).all()
        assert np.asarray(made, dtype="int64").dtype == np.int64
    assert np.array([nd.ones((2,)), nd.zeros((2,))]).shape == (2, 2)
    assert np.array(mx.np.array(3.0)).shape == ()


@part
def numpy_interface(folder: Path) -> None:
    if not V2:  # version 2 starts in this mode
        mx.npx.set_np()
    try:
        a, b = mx.np.array([[1, 2], [3, 4.0]]), mx.np.ones((2, 2))
        assert (mx.np.dot(a, b) + 1).shape == (2, 2)
        assert a[a > 2].shape == (2,)
        assert a[np.array([True, False])].shape == (1, 2)
        assert a.sum().item() == 10
        assert mx.np.zeros((2,), dtype=bool).dtype == np.bool_
        assert mx.np.zeros((2,), dtype=np.int64).dtype == np.int64
        assert mx.np.pad(a, ((1, 1), (0, 0)), mode="constant").shape == (4, 2)
        assert mx.np.random.uniform(size=(2, 3)).shape == (2, 3)
        assert mx.np.einsum("ij,jk", a, b).shape == (2, 2)
        assert mx.np.allclose(a, a)
        assert float(np.mean(a)) == 2.5
        assert np.concatenate([a, b]).shape == (4, 2)
        assert np.add(a, b).shape == (2, 2)
        assert (a + np.float32(2)).shape == (np.float64(2) * a).shape
        assert mx.np.in1d(np.array([1]), np.array([1])).all()
        assert float(mx.np.trapz(np.array([1.0, 2.0]))) == 1.5
        mx.npx.waitall()
    finally:
        if not V2:
            mx.npx.reset_np()


@part
def gradients(folder: Path) -> None:
    x = nd.array([1.0, 2.0, 3.0])
    x.attach_grad()
    with autograd.record():
        y = (x * x).sum()
    y.backward()
    assert (x.grad.asnumpy() == [2, 4, 6]).all()

    class Double(autograd.Function):
        def forward(self, x: Any) -> Any:
            return x * 2

        def backward(self, dy: Any) -> Any:
            return dy * 2

    function = Double()
    with autograd.record():
        y = function(x)
    y.backward()
    assert (x.grad.asnumpy() == 2).all()


@part
def training(folder: Path) -> None:
    mx.random.seed(0)
    generator = np.random.RandomState(0)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, 3, activation="relu"),
        gluon.nn.MaxPool2D(2, 2),
        gluon.nn.BatchNorm(),
        gluon.nn.Flatten(),
        gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    accuracy = (gluon.metric if V2 else mx.metric).Accuracy()
    x, y = array(generator.rand(16, 1, 12, 12).astype("float32")), array(generator.randint(0, 10, 16).astype("float32"))
    losses = []
    for _ in range(3):
        with autograd.record():
            out = net(x)
            loss = loss_of(out, y)
        loss.backward()
        trainer.step(16)
        accuracy.update([y], [out])
        losses.append(float(loss.asnumpy().mean()))
    assert losses[2] < losses[0], losses
    assert 0 <= accuracy.get()[1] <= 1
    net.save_parameters(str(folder / "net"))
    net.load_parameters(str(folder / "net"))
    trainer.save_states(str(folder / "states"))
    trainer.load_states(str(folder / "states"))
    net.export(str(folder / "exported"))


@part
def data_loader(folder: Path) -> None:
    data = gluon.data.ArrayDataset(np.arange(64, dtype="float32").reshape(16, 4), np.arange(16, dtype="float32"))
    for workers in (0, 2):
        seen = [float(v) for _, y in gluon.data.DataLoader(data, 4, num_workers=workers) for v in y.asnumpy()]
        assert seen == list(range(16))


@part
def scalars_as_parameters(folder: Path) -> None:
    two, real, a = np.int64(2), np.float64(2), nd.ones((4, 2))
    assert nd.reshape(a, shape=(two, 4)).shape == (2, 4)
    assert nd.zeros((two, 4)).shape == (2, 4)
    assert nd.slice(a, begin=(np.int64(0), 0), end=(two, two)).shape == (2, 2)
    assert float(nd.sum(a, axis=(np.int64(0), np.int64(1))).asscalar()) == 8
    nd.multi_sgd_update(a, nd.ones((4, 2)), lrs=[real], wds=[real], num_weights=1, out=[a])
    assert "(2, 4)" in mx.sym.reshape(mx.sym.var("x"), shape=(two, 4)).tojson()
    assert nd.random.uniform(real, real + 1, shape=(two, two)).shape == (2, 2)
    nd.waitall()


@part
def optimizers(folder: Path) -> None:
    for name in ("sgd", "adam", "nag", "rmsprop", "adagrad", "adadelta", "lamb", "ftrl", "lars", "signum"):
        updater = mx.optimizer.get_updater(mx.optimizer.create(name))
        weight, gradient = nd.ones((4,)), nd.ones((4,))
        updater([0], [gradient], [weight])
        weight.wait_to_read()
        updater.set_states(updater.get_states())


@part
def symbols_and_module(folder: Path) -> None:
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    assert symbol.infer_shape(data=(1, 2))[1] == [(1, 2)]
    if V2:
        return  # Module is gone
    batches = mx.io.NDArrayIter(np.random.rand(32, 4).astype("f"), np.random.randint(0, 2, 32).astype("f"), 8)
    mx.mod.Module(mx.sym.SoftmaxOutput(symbol, name="softmax")).fit(batches, num_epoch=1)


@part
def stores_and_files(folder: Path) -> None:
    store = mx.kv.create("device")
    store.init(0, nd.ones((3,)))
    store.push(0, [nd.ones((3,), ctx=mx.cpu(0)), nd.ones((3,), ctx=mx.cpu(1))])
    out = nd.zeros((3,))
    store.pull(0, out)
    assert (out.asnumpy() == 2).all()
    record = mx.recordio.MXRecordIO(str(folder / "records"), "w")
    record.write(mx.recordio.pack(mx.recordio.IRHeader(0, 1.0, 2, 0), b"xx"))
    record.close()
    record = mx.recordio.MXRecordIO(str(folder / "records"), "r")
    assert mx.recordio.unpack(record.read())[1] == b"xx"


@part
def late_imports(folder: Path) -> None:
    import mxnet.gluon.contrib.estimator
    import mxnet.test_utils as utils

    assert mxnet.gluon.contrib.estimator.Estimator
    utils.assert_almost_equal(nd.ones((3,)), np.ones(3))
    assert utils.rand_ndarray((3, 4)).shape == (3, 4)


def main() -> int:
    """Run all parts; return the number of those that failed."""
    failed = []
    with tempfile.TemporaryDirectory() as name:
        for function in PARTS:
            try:
                function(Path(name))
            except Exception as error:
                at = traceback.extract_tb(error.__traceback__)
                mine = [frame.lineno for frame in at if frame.filename == __file__][-1]
                failed.append(f"  {function.__name__}:{mine} {type(error).__name__}: {str(error)[:200]}")
    ours = [module for module in sys.modules if module.split(".")[0] == "kvstore_hvd"]
    if ours:
        failed.append(f"  plain MXNet has imported {ours}")
    if sys.version_info >= (3, 12) and getattr(sys.modules.get("distutils"), "__file__", "") is None:
        failed.append("  a distutils that is not one was left behind")
    verdict = f"{len(failed)} of {len(PARTS)} parts FAILED" if failed else f"all {len(PARTS)} parts passed"
    print(f"Python {sys.version.split()[0]}  NumPy {np.__version__}  MXNet {mx.__version__}: {verdict}")
    print("\n".join(failed), end="\n" if failed else "")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

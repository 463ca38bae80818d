"""MXNet after `import kvstore_hvd` on every pair of Python and NumPy that docs/numpy-shim.md names; both MXNets.

By hand: it makes an environment for each Python and MXNet (250 MB each) and needs pip's index. Pythons are looked for
on the path and in pyenv's folder; ``python .ci/shim_matrix.py [3.12 ...]`` tries these only.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = {
    "3.9": ("==1.23.5", "==1.26.4", "==2.0.2"),
    "3.10": ("==2.2.6",),
    "3.11": ("==1.26.4", "==2.4.*"),
    "3.12": ("==1.26.4", ">=2.5"),
    "3.13": ("==2.1.3", ">=2.5"),
    "3.14": (">=2.5",),
}


def workload(folder):
    """What a newer NumPy or Python breaks in MXNet."""
    import kvstore_hvd  # noqa: F401

    # isort: split
    import mxnet as mx
    import numpy as np
    from mxnet import autograd, gluon, nd

    two = np.int64(2)
    # Scalars of NumPy as parameters, which MXNet turns into text; indexing; sparse arrays; files.
    a = nd.ones((4, 2))
    assert nd.reshape(a, shape=(two, 4)).shape == (2, 4)
    assert nd.slice(a, begin=(np.int64(0), 0), end=(two, two)).shape == (2, 2)
    assert "(2, 4)" in mx.sym.reshape(mx.sym.var("x"), shape=(two, 4)).tojson()
    nd.multi_sgd_update(a, nd.ones((4, 2)), lrs=[np.float64(2)], wds=[np.float64(2)], num_weights=1, out=[a])
    assert all(a[i].size >= 2 for i in (nd.array([0, 1], dtype="int32"), np.array([0, 1]), [0, 1], slice(1, 2), two))
    assert nd.array([True, False], dtype="bool").dtype == np.bool_
    assert nd.sparse.csr_matrix((np.array([1.0, 2.0]), np.array([0, 1]), np.array([0, 1, 2])), shape=(2, 2)).shape
    nd.save(f"{folder}/arrays", {"a": a})
    assert (nd.load(f"{folder}/arrays")["a"].asnumpy() == a.asnumpy()).all()
    # Arrays of NumPy from arrays of MXNet.
    for made in (nd.array([[1, 2], [3, 4]]), mx.np.array([[1.0, 2.0], [3.0, 4.0]])):
        for function in (np.array, np.asarray, np.ascontiguousarray):
            result = function(made)
            assert type(result) is np.ndarray and result.dtype == np.float32 and (result == [[1, 2], [3, 4]]).all()
    assert np.array([nd.ones(2), nd.zeros(2)]).shape == (2, 2)
    # The NumPy interface, which is the default of MXNet 2.
    is_v2 = mx.__version__.startswith("2")
    with mx.util.np_shape(True), mx.util.np_array(True):
        b = mx.np.array([[1, 2], [3, 4.0]])
        assert (b[b > 2].shape, b.sum().item(), mx.np.zeros(2, dtype=bool).dtype) == ((2,), 10, np.bool_)
        assert mx.np.einsum("ij,jk", b, b).shape == np.concatenate([b, b])[:2].shape == (2, 2)
        assert float(np.mean(b)) == 2.5 and float(mx.np.trapz(np.array([1.0, 2.0]))) == 1.5
    # Optimizers, data loaders with processes, and a training with a symbolic network.
    for name in ("sgd", "adam", "nag", "rmsprop", "adagrad", "adadelta", "lamb", "ftrl", "lars", "signum"):
        updater = mx.optimizer.get_updater(mx.optimizer.create(name))
        updater([0], [nd.ones(4)], [nd.ones(4)])
        updater.set_states(updater.get_states())
    data = gluon.data.ArrayDataset(np.arange(64, dtype="f").reshape(16, 4), np.arange(16, dtype="f"))
    assert [float(v) for _, y in gluon.data.DataLoader(data, 4, num_workers=2) for v in y.asnumpy()] == [*range(16)]
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(8, 3), gluon.nn.MaxPool2D(2, 2), gluon.nn.BatchNorm(), gluon.nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore="horovod")
    array, metrics = (mx.np.array, gluon.metric) if is_v2 else (nd.array, mx.metric)
    x, y = array(np.random.rand(16, 1, 12, 12).astype("f")), array(np.random.randint(0, 10, 16).astype("f"))
    losses, accuracy = [], metrics.Accuracy()
    for _ in range(3):
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
        loss.backward()
        trainer.step(16)
        accuracy.update([y], [net(x)])
        losses.append(float(loss.asnumpy().mean()))
    assert losses[2] < losses[0] and 0 <= accuracy.get()[1] <= 1
    net.save_parameters(f"{folder}/net")
    trainer.save_states(f"{folder}/states")
    net.export(f"{folder}/exported")
    if not is_v2:
        symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), name="softmax")
        batches = mx.io.NDArrayIter(np.random.rand(32, 4).astype("f"), np.random.randint(0, 2, 32).astype("f"), 8)
        mx.mod.Module(symbol).fit(batches, num_epoch=1)
    import mxnet.gluon.contrib.estimator
    import mxnet.test_utils

    mxnet.test_utils.assert_almost_equal(nd.ones(3), np.ones(3))
    assert getattr(sys.modules.get("distutils"), "__file__", "") is not None, "a distutils that is not one is left"


def call(*words, **more):
    """Run a command; its output is in `stdout`."""
    return subprocess.run(  # noqa: PLW1510 - whoever wants it checked says so
        list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, **more
    )


def environment(minor, mxnet):
    """The Python of an environment with this MXNet and this checkout; made unless it is there."""
    folder = ROOT / "build" / "shim" / f"{minor}-{mxnet}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/python"))
        call(pyenv[-1] if pyenv else f"python{minor}", "-m", "venv", folder, check=True)
        # Without dependencies: MXNet declares numpy<2, which is what the shim is about.
        call(python, "-m", "pip", "install", "-q", "--no-deps", f"mxnet=={mxnet}", "graphviz<0.9", check=True)
        call(python, "-m", "pip", "install", "-q", "requests", "numpy", "setuptools", "pybind11", "wheel", check=True)
        install = call(
            python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-t", folder / "own", ROOT
        )
        assert install.returncode == 0, install.stdout
        call(python, "-m", "pip", "uninstall", "-q", "-y", "setuptools", check=True)
        (folder / "complete").touch()
    return python


def main():
    """Try all; the number of those that fail."""
    failed = 0
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVHVD_"))}
    for minor in sys.argv[1:] or ROWS:
        for mxnet in ("1.9.1", "2.0.0b1"):
            python = environment(minor, mxnet)
            for numpy in ROWS[minor]:
                call(python, "-m", "pip", "install", "-q", "--no-deps", f"numpy{numpy}", check=True)
                variables = {**clean, "PYTHONPATH": str(python.parents[1] / "own")}
                outcomes = []
                with tempfile.TemporaryDirectory() as folder:
                    for shim in "1", "0":
                        program = [python, "-W", "ignore", __file__, "--workload", folder]
                        outcomes.append(call(*program, cwd=folder, env={**variables, "KVHVD_NUMPY_SHIM": shim}))
                # Without the shim it fails: with an old NumPy, at numpy.array(nd).
                good = outcomes[0].returncode == 0 and outcomes[1].returncode != 0
                failed += not good
                told = "passed" if good else f"FAILED\n{outcomes[0].stdout}\nwithout the shim:\n{outcomes[1].stdout}"
                print(f"Python {minor} NumPy {numpy} MXNet {mxnet}: {told}", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--workload"]:
        workload(sys.argv[2])
    else:
        sys.exit(main())

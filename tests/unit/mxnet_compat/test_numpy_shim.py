"""The NumPy and Python shim: it adds what is missing, replaces nothing, and is there before MXNet is."""

import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvstore_hvd import _ImportHook, _Loader, mxnet_compat
from kvstore_hvd.mxnet_compat import numpy_shim
from support.patience import patient

ROOT = Path(mxnet_compat.__file__).parents[2]
NAMES = {*numpy_shim._NAMES, *numpy_shim._FINANCIAL}
HAS_MXNET = importlib.util.find_spec("mxnet") is not None


def python(script, cwd=ROOT, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVHVD_")}
    command, how = [sys.executable, "-W", "ignore", "-c", script], {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=cwd, env={**clean, **variables}, timeout=patient(100), **how)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_missing_names_are_added_and_those_that_exist_left_alone(monkeypatch):
    bare = types.ModuleType("numpy")
    bare.__version__ = "2.9.9"
    for name in ("bool_", "inf", "nan", "all", "any", "prod", "round", "isin", "sort"):
        setattr(bare, name, getattr(np, name))
    bare.trapezoid = getattr(np, "trapezoid", None) or np.trapz
    mine = types.ModuleType("numpy")
    own = {name: object() for name in NAMES}
    vars(mine).update(vars(bare), **own)
    for numpy in (bare, mine):
        with monkeypatch.context() as patch:  # NumPy itself would not work meanwhile
            patch.setitem(sys.modules, "numpy", numpy)
            numpy_shim._add_numpy_names()
    assert {name: getattr(mine, name) for name in NAMES} == own
    assert set(vars(bare)) >= NAMES
    assert (bare.bool, bare.PINF, bare.NINF, bare.Inf) == (np.bool_, np.inf, -np.inf, np.inf)
    assert np.isnan([bare.NAN, bare.NaN]).all()
    assert (bare.PZERO, np.signbit(bare.PZERO), np.signbit(bare.NZERO)) == (0, False, True)
    assert bare.compat.basestring is str
    values = np.array([[3, 1], [2, 4]])
    assert bare.in1d(values, [1, 2]).tolist() == [False, True, True, False]
    assert bare.in1d(values, [1, 2], invert=True).tolist() == [True, False, False, True]
    assert bare.msort(values).tolist() == [[2, 1], [3, 4]]
    assert (bare.product(values), bare.round_(1.26, 1), bare.trapz(np.array([1.0, 2.0]))) == (24, 1.3, 1.5)
    assert bare.alltrue(values)
    assert bare.sometrue(values)
    with pytest.raises(NotImplementedError, match=r"^numpy\.npv was removed from NumPy; numpy_financial has it\.$"):
        bare.npv(0.1, [1])


def test_texts_and_arrays():
    assert numpy_shim._plain([np.float64(1.0), np.float32(0.5)]) == "[1.0, 0.5]"
    assert numpy_shim._plain(((np.int64(1), 2), (3,), [np.bool_(True)])) == "((1, 2), (3,), [True])"

    class Fake:
        def asnumpy(self):
            return np.ones(2, "float32")

        __array__ = numpy_shim._array

    assert np.array(Fake()).dtype == np.float32
    assert np.asarray(Fake(), dtype="int8").tolist() == [1, 1]
    with pytest.raises(ValueError, match="a copy is needed"):
        Fake().__array__(copy=False)


@pytest.mark.parametrize("numpy", ["1.26.4", "2.1.0"])
def test_what_new_versions_of_python_and_numpy_took_from_mxnet(monkeypatch, numpy):
    monkeypatch.setattr(sys, "version_info", (3, 12, 0, "final", 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    io, ndarray = types.SimpleNamespace(), types.SimpleNamespace(NDArray=type("NDArray", (), {}))
    fakes = {"numpy": types.SimpleNamespace(__version__=numpy), "mxnet.io.io": io, "mxnet.ndarray.ndarray": ndarray}
    for name, module in {**fakes, "distutils": None, "distutils.version": None}.items():
        monkeypatch.setitem(sys.modules, name, module)
    numpy_shim._add_distutils()
    of = sys.modules["distutils.version"].LooseVersion
    assert of("1.6.0") < of("1.15") < of("1.17.0rc1") < of("1.17.2.9+mkl") == of("1.17.2")
    assert of("1.26") != of("1.17")
    assert of("2.0.0") != "2.0.0"
    numpy_shim.finish()
    assert "distutils" not in sys.modules
    assert vars(io) == ({"str": numpy_shim._plain} if numpy >= "2" else {})
    assert ndarray.NDArray.__array__ is numpy_shim._array


def test_hook_surrounds_the_first_import_that_succeeds(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr("builtins.kvhvd_events", events, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hook = _ImportHook("kvhvd_probe", lambda: events.append("before"), lambda: events.append("after"))
    sys.meta_path.insert(0, hook)
    path = tmp_path / "kvhvd_probe.py"
    path.write_text("raise RuntimeError('broken')\n")
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module("kvhvd_probe")
    assert hook in sys.meta_path
    path.write_text("import builtins\nbuiltins.kvhvd_events.append('run')\n")
    importlib.invalidate_caches()
    probe = importlib.import_module("kvhvd_probe")
    assert events == ["before", "before", "run", "after"]
    assert hook not in sys.meta_path
    assert type(probe.__loader__).__name__ == "SourceFileLoader"
    assert probe.__spec__.loader is probe.__loader__
    importlib.reload(probe)
    assert events[4:] == ["run"]
    del sys.modules["kvhvd_probe"]


THREADS = """
import faulthandler, importlib, importlib.util, sys, threading, warnings
warnings.filterwarnings("error", "overriding existing kvstore")
faulthandler.dump_traceback_later(60, exit=True)
import kvstore_hvd
assert 'mxnet' not in sys.modules and importlib.util.find_spec('mxnet')
names = ["mxnet", "kvstore_hvd.mxnet", "kvstore_hvd", "horovod.mxnet", "kvstore_hvd.elastic"]
gate, done = threading.Barrier(len(names)), []
def load(name):
    gate.wait()
    importlib.import_module(name)
    if name == "kvstore_hvd": sys.modules[name].Horovod
    done.append(name)
for name in names: threading.Thread(target=load, args=(name,)).start()
while threading.active_count() > 1: threading.enumerate()[-1].join()
assert sorted(done) == sorted(names), done
import kvstore_hvd, mxnet
assert type(mxnet.kv.create("horovod")) is kvstore_hvd.Horovod
assert mxnet.kv.create("dist_horovod").type == "horovod"
assert not [finder for finder in sys.meta_path if isinstance(finder, kvstore_hvd._ImportHook)]
"""


@pytest.mark.skipif(not HAS_MXNET, reason="MXNet is not installed")
def test_threads_may_import_at_once(tmp_path):
    path = os.pathsep.join(map(str, (ROOT / "kvstore_hvd" / "mxnet_compat" / "site", ROOT)))
    python(THREADS, cwd=tmp_path, KVHVD_AS_HOROVOD="1", PYTHONPATH=path)
    python("import horovod; horovod.run", cwd=tmp_path, KVHVD_AS_HOROVOD="True", PYTHONPATH=path)


@pytest.mark.skipif(not HAS_MXNET, reason="MXNet is not installed")
def test_kvhvdrun_imports_the_package_before_mxnet(tmp_path):
    """The folder that kvhvdrun puts on PYTHONPATH; an environment's own sitecustomize runs as well. Programs see the
    loader: a lazy import, data of the package, and a folder that is no package."""
    site, other = ROOT / "kvstore_hvd" / "mxnet_compat" / "site", tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("own = True\n")
    check = (
        "import sys, sitecustomize; assert sitecustomize.own and 'kvstore_hvd' not in sys.modules\n"
        f"assert {str(site)!r} not in sys.path\n"
        "import importlib.util; spec = importlib.util.find_spec('mxnet')\n"
        "assert spec.loader.get_data(spec.origin)\n"
        "spec.loader = lazy = importlib.util.LazyLoader(spec.loader)\n"
        "sys.modules['mxnet'] = module = importlib.util.module_from_spec(spec)\n"
        "lazy.exec_module(module); assert module.nd\n"
        "assert module.kv.KVStoreBase.kv_registry['horovod'].__module__ == 'kvstore_hvd.store.kvstore'\n"
    )
    folder = "try: import horovod.mxnet\nexcept ImportError: pass\nelse: assert 0"
    (tmp_path / "horovod").mkdir()
    for script in (check + folder, folder):
        python(script, cwd=tmp_path, PYTHONPATH=os.pathsep.join(map(str, (site, other, ROOT))))
    # Another environment's interpreter, which has no kvstore_hvd, finds MXNet as ever.
    bare = "import sys, importlib.util; sys.modules['kvstore_hvd'] = None; assert importlib.util.find_spec('mxnet')"
    python(bare, cwd=tmp_path, PYTHONPATH=os.pathsep.join(map(str, (site, other))))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("numpy.no_such_name", "AttributeError: module 'numpy' has no attribute 'no_such_name'."),
        ("import graphviz_", "ModuleNotFoundError: No module named 'graphviz_'."),
    ],
)
def test_require_mxnet_passes_on_why_it_fails(tmp_path, line, why):
    (tmp_path / "mxnet.py").write_text(f"import numpy; {line}")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(1, {str(ROOT)!r})\n"
        "from kvstore_hvd import mxnet_compat\n"
        "try: mxnet_compat.require_mxnet()\n"
        "except mxnet_compat.MXNetUnavailableError as error: print(error)"
    )
    told = python(script, cwd=tmp_path)
    assert told.startswith(f"MXNet cannot be imported: {why}")
    assert f"  Fix: {mxnet_compat.pip_command()} (and leave KVHVD_NUMPY_SHIM unset)" in told


def test_pip_command(monkeypatch):
    for version, command in [
        ((3, 9), "pip install mxnet==1.9.1 'numpy<1.24'"),
        ((3, 12), "pip install mxnet==1.9.1 'numpy<2'"),
        ((3, 13), "pip install --no-deps mxnet==1.9.1 && pip install numpy 'graphviz<0.9' requests"),
    ]:
        monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))
        assert mxnet_compat.pip_command() == command
    monkeypatch.setitem(sys.modules, "mxnet", None)
    with pytest.raises(mxnet_compat.MXNetUnavailableError, match=r"^MXNet is not installed\.\n  Fix: pip install"):
        mxnet_compat.require_mxnet()


@pytest.mark.parametrize("chosen", [None, "spawn"])
def test_workers_of_loaders_are_forked_unless_the_program_chose(chosen):
    module = types.SimpleNamespace(
        get_context=lambda method: types.SimpleNamespace(Pool=lambda count: (method, count)),
        get_start_method=lambda allow_none: chosen,
    )
    assert numpy_shim._forking(module).Pool(3) == (chosen or "fork", 3)


def test_a_library_that_images_of_containers_lack():
    lacks = Mock(exec_module=Mock(side_effect=OSError("libgomp.so.1: cannot open shared object file")))
    with pytest.raises(ImportError, match=r"libgomp\.so\.1: cannot open.*\n  Fix: apt-get install libgomp1"):
        _Loader(lacks, Mock()).exec_module(types.ModuleType("mxnet"))

